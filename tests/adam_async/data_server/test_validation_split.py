"""The validation split: the same images at every server, of each class its share."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.data_server.dataset import ValidationSplit, check_validation, sample_of
from adam_async.data_server.questions import ImageQuestions
from adam_async.errors import ConfigError
from adam_async.run.config import Config
from tests.adam_async.runs import NETWORKS, cluster_of, tiny_dataset


@given(
    labels=st.lists(st.integers(0, 5), min_size=2, max_size=80),
    part=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 9),
)
def test_every_image_is_trained_on_or_held_back_and_each_class_gives_its_share(labels, part, seed):
    labels, count = np.array(labels), int(part * len(labels))
    split = ValidationSplit.of(labels, count=count, seed=seed)
    assert len(split.held_back) == count
    assert sorted([*split.trained, *split.held_back]) == list(range(len(labels)))
    for label in set(labels.tolist()):
        fair = count * np.count_nonzero(labels == label) / len(labels)
        assert abs(np.count_nonzero(labels[split.held_back] == label) - fair) < 1 + 1e-9


def test_the_split_depends_on_the_seed():
    labels = np.arange(1000) % 10
    first, again, other = (ValidationSplit.of(labels, count=100, seed=seed).held_back for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)


def test_a_sample_has_different_images_to_train_on_and_depends_on_the_seed():
    trained = np.arange(0, 1000, 3)
    first, again, other = (sample_of(trained, 50, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)
    assert set(first) <= set(trained)
    assert len(set(first)) == 50
    assert (np.diff(first) > 0).all()
    np.testing.assert_array_equal(sample_of(trained, 10_000, seed=1), trained)


def test_a_split_that_leaves_nothing_to_train_on_is_refused():
    with pytest.raises(ConfigError, match="validation=60 leaves nothing of the 60 training images of tiny"):
        check_validation(60, tiny_dataset().info())


@pytest.mark.parametrize("option", [{"patience": 2}, {"keep_best": True}])
def test_choices_without_validation_images_are_refused(option):
    with pytest.raises(ConfigError, match="without validation images, because test images must not decide"):
        Config(**option)


@pytest.mark.parametrize("network", NETWORKS)
async def test_images_held_back_are_never_trained_on_and_their_accuracy_is_measured(network, monkeypatch):
    handed_out = set()
    send = ImageQuestions._send

    def watch(questions, request, body):
        order = questions._producer._group_cache._order
        for number in questions._producer.ready(body.numbers):
            handed_out.update(order.group(number).tolist())
        send(questions, request, body)

    monkeypatch.setattr(ImageQuestions, "_send", watch)
    data = tiny_dataset()
    config = Config(epochs=2, threads=1, replicas=2, images_per_group=4, validation=20, seed=3)
    async with cluster_of(config, NETWORKS[network](), dataset=data) as cluster:
        result = await cluster.train()
    split = ValidationSplit.of(data.train_labels, count=20, seed=3)
    assert handed_out == set(split.trained.tolist())
    assert [epoch.images for epoch in result.epochs] == [40, 40]
    named = result.model.predict(result.weights, data.train_images[split.held_back])
    assert result.epochs[-1].validation_accuracy == np.mean(named == data.train_labels[split.held_back])


async def test_a_run_refuses_a_split_that_takes_all_images():
    with pytest.raises(ConfigError, match="validation=60 leaves nothing"):
        async with cluster_of(Config(validation=60)) as cluster:
            await cluster.train()
