"""Groups trained in one call are groups trained one by one: weights, losses, refusals, and steps counted."""

import threading
from importlib.util import find_spec

import numpy as np
import pytest

from adam_async.model import (
    InPlaceStep,
    LayerSpec,
    ModelError,
    ModelSpec,
    Network,
    Sgd,
    in_place,
    mlp,
    named_model,
    new_rule_state,
)
from adam_async.model.context import BEGUN, JobNotes, StepInput
from adam_async.model.keyed_random import Dice

KERNELS = [
    "numpy",
    pytest.param("numba", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")),
]


def pixels(network, images, number, *, dtype=np.uint8):
    shape = (images, *network.spec.input_shape)
    drawn = Dice(2).normal("x", keys=(number,), count=int(np.prod(shape)), dtype=float).reshape(shape)
    x = np.clip(drawn * 60 + 128, 0, 255).astype(np.uint8) if dtype == np.uint8 else drawn.astype(dtype)
    return x, Dice(2).permutation("labels", 10, keys=(number,))[:images] % 10


def inputs(network, sizes, **options):
    made = []
    for number, images in enumerate(sizes):
        x, labels = pixels(network, images, number, **options)
        made.append(StepInput(images=x, labels=labels, keys=(1, number), rate=0.02 / (number + 1)))
    return made


class Place:
    """Weights and state of one network, with a thread's context and buffers."""

    def __init__(self, network, rule, *, images=6):
        self.weights, self.state = network.initial_weights(Dice(1)), new_rule_state(network, rule)
        self.step, self.context = InPlaceStep(network, rule), network.context(images)
        self.scratch, self.steps = self.step.new_scratch(), np.zeros(1, np.int64)

    def train_groups(self, groups):
        where = (self.weights, self.state, self.context, self.scratch)
        calls = self.step.train_groups(*where, groups, steps=self.steps, dice=Dice(3))
        return [outcome for outcomes in calls for outcome in outcomes]

    def train_one(self, group):
        self.context.load(group.images, group.labels, dice=Dice(3), keys=group.keys)
        return self.step.train(self.weights, self.state, self.context, self.scratch, rate=group.rate)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("network_dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("rule", [Sgd(), Sgd(momentum=0.9, weight_decay=0.01)], ids=repr)
def test_groups_in_one_call_are_the_same_steps_as_one_by_one(rule, network_dtype, dtype, kernels):
    if (network_dtype, dtype) == (np.float32, np.float64):
        pytest.skip("images are never more precise than the network: a context refuses them")
    network = Network(named_model("digits"), network_dtype, kernels=kernels)
    one, together = Place(network, rule), Place(network, rule)
    groups = inputs(network, (6, 6, 2, 6, 1, 1), dtype=dtype)
    outcomes = together.train_groups(groups)
    assert outcomes == [one.train_one(group) for group in groups]
    assert together.steps[0] == len(groups)
    for name, values in one.weights.items():
        np.testing.assert_array_equal(together.weights[name], values)
        for key, kept in one.state[name].items():
            np.testing.assert_array_equal(together.state[name][key], kept)


@pytest.mark.parametrize("kernels", KERNELS)
def test_each_group_names_what_it_refused_and_the_next_is_trained(kernels):
    network = Network(mlp((8, 6, 10), input_shape=(8,)), kernels=kernels)
    place = Place(network, Sgd())
    groups = inputs(network, (4, 4, 4), dtype=np.float32)
    groups[1].images[0, 3] = np.inf
    with np.errstate(all="ignore"):
        outcomes = place.train_groups(groups)
    assert [len(outcome.refused) for outcome in outcomes] == [0, 4, 0]
    assert [bool(np.isfinite(outcome.loss)) for outcome in outcomes] == [True, False, True]
    assert all(np.isfinite(values).all() for values in place.weights.values())
    assert place.steps[0] == 3


@pytest.mark.parametrize(("work", "groups_of_calls"), [(1, [1] * 5), (1000, [2, 2, 1]), (10**9, [5])])
def test_a_call_takes_as_many_groups_as_their_work_permits(work, groups_of_calls, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(in_place, "CALL_WORK", work)
    network = Network(mlp((8, 6, 10), input_shape=(8,)), kernels="numba")
    place = Place(network, Sgd())
    where = (place.weights, place.state, place.context, place.scratch)
    groups = inputs(network, (4,) * 5, dtype=np.float32)
    calls = place.step.train_groups(*where, groups, steps=place.steps, dice=Dice(3))
    assert [len(outcomes) for outcomes in calls] == groups_of_calls


@pytest.mark.parametrize("kernels", KERNELS)
def test_steps_of_all_threads_are_counted_once_each(kernels):
    network = Network(mlp((8, 16, 10), input_shape=(8,)), kernels=kernels)
    shared = Place(network, Sgd())
    groups = inputs(network, (4,) * 50, dtype=np.float32)
    stale = []

    def train():
        mine = Place(network, Sgd())
        mine.weights, mine.state, mine.steps = shared.weights, shared.state, shared.steps
        for _ in range(4):
            stale.extend(outcome.staleness for outcome in mine.train_groups(groups))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.steps[0] == len(stale) == 2 * 4 * 50
    assert min(stale) == 0
    assert all(staleness < 400 for staleness in stale)


@pytest.mark.parametrize("kernels", KERNELS)
def test_layers_that_draw_draw_for_each_group(kernels):
    of = LayerSpec.of
    layers = (
        of("fc1", "dense", outputs=16),
        of("relu1", "relu"),
        of("drop", "dropout", rate=0.5),
        of("fc2", "dense", outputs=10),
        of("loss", "softmax_cross_entropy"),
    )
    network = Network(ModelSpec(name="dropping", input_shape=(8,), layers=layers), kernels=kernels)
    one, together = Place(network, Sgd()), Place(network, Sgd())
    groups = inputs(network, (4, 4, 4), dtype=np.float32)
    assert together.train_groups(groups) == [one.train_one(group) for group in groups]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"labels": np.full(4, 10)}, "has 10 classes, but labels go from 10 to 10"),
        ({"images": np.zeros((4, 9), np.float32)}, r"images must have shape \[8\], not \[9\]"),
        (
            {"images": np.zeros((7, 8), np.float32), "labels": np.zeros(7, np.int64)},
            "holds 1 to 6 images, not 7",
        ),
        ({"images": np.zeros((4, 8), np.int64)}, "must be uint8 or floating point, not int64"),
    ],
)
def test_groups_that_do_not_fit_are_refused(change, why, kernels):
    network = Network(mlp((8, 6, 10), input_shape=(8,)), kernels=kernels)
    place = Place(network, Sgd())
    (group,) = inputs(network, (4,), dtype=np.float32)
    given = {"images": group.images, "labels": group.labels, "keys": group.keys, "rate": 0.1}
    with pytest.raises(ModelError, match=why):
        place.train_groups([StepInput(**{**given, **change})])


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_notes_of_a_job_have_loss_and_staleness_of_each_trained_group(kernels):
    network = Network(mlp((8, 6, 10), input_shape=(8,)), kernels=kernels)
    place, notes = Place(network, Sgd(momentum=0.5)), JobNotes.new(4)
    where = (place.weights, place.state, place.context, place.scratch)
    calls = place.step.train_groups(
        *where, inputs(network, [3, 3, 6], dtype=np.float32), steps=place.steps, dice=Dice(3), notes=notes
    )
    outcomes = [outcome for some in calls for outcome in some]
    assert notes.losses[:3].tolist() == [outcome.loss for outcome in outcomes]
    assert notes.done.tolist() == [1, 1, 1, 0]


def test_a_step_is_noted_as_begun_before_it_changes_a_weight(monkeypatch):
    network, seen = Network(mlp((8, 6, 10), input_shape=(8,))), []
    place, notes = Place(network, Sgd()), JobNotes.new(2)
    apply = Sgd.apply

    def note(rule, *args, **options):
        seen.append(notes.done.tolist())
        apply(rule, *args, **options)

    monkeypatch.setattr(Sgd, "apply", note)
    where = (place.weights, place.state, place.context, place.scratch)
    for _ in place.step.train_groups(
        *where, inputs(network, [3, 3], dtype=np.float32), steps=place.steps, dice=Dice(3), notes=notes
    ):
        pass
    parameters = len(network.parameters)
    assert seen == [[BEGUN, 0]] * parameters + [[1, BEGUN]] * parameters
