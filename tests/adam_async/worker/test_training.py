"""Groups trained on the servers' memory: applied, refused and counted steps."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from adam_async.data_server.client import ImageGroup
from adam_async.messages import Lease
from adam_async.model import Adam, InPlaceStep, Network, Sgd, named_model, new_rule_state
from adam_async.model.keyed_random import Dice
from adam_async.parameter_server.storage import ShardStorage
from adam_async.run.config import Config
from adam_async.run.learning_rate import Schedule
from adam_async.worker.training import InPlaceTrainer
from tests.adam_async.runs import tiny_dataset

GROUP = 4
IMAGES = tiny_dataset()


def group_of(number, *, images=GROUP):
    chosen = slice(number * GROUP, number * GROUP + images)
    lease = Lease(1, number, 1, images)
    return ImageGroup(lease, IMAGES.train_images[chosen], IMAGES.train_labels[chosen])


class Place:
    """A storage with initial weights, and a trainer on it."""

    def __init__(self, rule=None, dtype=np.float64):
        self.model, self.rule = Network(named_model("digits"), dtype), rule or Sgd(momentum=0.5)
        self.storage = ShardStorage(self.model.parameters, self.rule, dtype, in_place=True)
        for name, values in self.model.initial_weights(Dice(3)).items():
            self.storage.weights[name][:] = values
        self.trainer = InPlaceTrainer(
            network=self.model,
            rule=self.rule,
            storage=self.storage,
            schedule=Schedule.of(Config(rate=0.01)),
            group_images=GROUP,
            dice=Dice(3),
        )
        self.memory = self.trainer.new_memory()

    def train(self, number=0, *, memory=None, **options):
        (trained,) = self.train_all(group_of(number, **options), memory=memory)
        return trained

    def train_all(self, *groups, memory=None):
        firings = [SimpleNamespace(scratch=memory or self.memory) for _ in groups]
        return self.trainer.train(firings, groups)

    def values(self):
        return {name: weights.copy() for name, weights in self.storage.weights.items()}


@pytest.mark.parametrize("rule", [Sgd(), Sgd(momentum=0.9, weight_decay=0.01), Adam()], ids=repr)
def test_groups_one_after_the_other_are_steps_of_the_rule_on_the_memory(rule):
    place = Place(rule)
    weights, state = place.values(), new_rule_state(place.model, rule)
    step, context = InPlaceStep(place.model, rule), place.model.context(GROUP)
    scratch = step.new_scratch()
    for number, images in enumerate((GROUP, 1, GROUP)):
        group = group_of(number, images=images)
        context.load(group.images, group.labels, dice=Dice(3), keys=(1, number))
        outcome = step.train(weights, state, context, scratch, rate=0.01)
        trained = place.train(number, images=images)
        assert trained.lease == group.lease
        assert trained.loss == pytest.approx(outcome.loss, rel=1e-12)
        assert (trained.staleness, trained.refused) == (0, ())
    for name, values in place.storage.weights.items():
        np.testing.assert_allclose(values, weights[name], rtol=1e-12, atol=1e-15)
        for key, kept in place.storage.states[name].items():
            np.testing.assert_allclose(kept, state[name][key], rtol=1e-12, atol=1e-15)
    assert place.storage.steps[0] == 3


class Interrupted(Sgd):
    """A rule during which others finish steps, once."""

    meanwhile = None

    def apply(self, values, state, gradient, *, rate, scratch):
        super().apply(values, state, gradient, rate=rate, scratch=scratch)
        meanwhile, Interrupted.meanwhile = Interrupted.meanwhile, None
        if meanwhile is not None:
            meanwhile()


def test_staleness_is_the_steps_of_others_from_the_reading_to_the_own_step(monkeypatch):
    place = Place(Interrupted())
    other = place.trainer.new_memory()
    inner = []

    def others():
        inner.extend(place.train(number, memory=other) for number in (1, 2))

    monkeypatch.setattr(Interrupted, "meanwhile", staticmethod(others))
    outer = place.train(0)
    assert [trained.staleness for trained in inner] == [0, 0]
    assert outer.staleness == 2
    assert place.train(3).staleness == 0
    assert place.storage.steps[0] == 4


def test_a_gradient_that_is_not_finite_is_named_and_the_memory_stays_as_it_was():
    place = Place()
    place.storage.weights["fc2.bias"][0] = np.inf
    before = place.values()
    trained = place.train()
    assert not np.isfinite(trained.loss)
    assert sorted(trained.refused) == sorted(before)
    for name, values in place.values().items():
        np.testing.assert_array_equal(values, before[name])
        assert not place.storage.states[name]["momentum"].any()
    assert place.storage.steps[0] == 1, "a refused step is one of the steps"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_threads_train_on_one_memory_and_every_step_is_counted(dtype):
    place, found = Place(dtype=dtype), []

    def work(memory, first):
        found.extend(place.train(number, memory=memory) for number in range(first, 14, 2))

    threads = [threading.Thread(target=work, args=(place.trainer.new_memory(), n)) for n in (0, 1)]
    before = place.values()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert place.storage.steps[0] == len(found) == 14
    assert all(0 <= trained.staleness < 14 and trained.refused == () for trained in found)
    for name, values in place.values().items():
        assert np.isfinite(values).all()
        assert not np.array_equal(values, before[name])


def test_a_job_of_several_groups_is_those_groups_one_after_the_other():
    one_by_one, at_once = Place(), Place()
    expected = [one_by_one.train(number) for number in range(3)]
    trained = at_once.train_all(*(group_of(number) for number in range(3)))
    assert [t.lease for t in trained] == [t.lease for t in expected]
    assert [t.loss for t in trained] == [t.loss for t in expected]
    for name, values in at_once.storage.weights.items():
        assert np.array_equal(values, one_by_one.storage.weights[name])


def test_with_a_clock_each_group_of_a_job_has_times_of_its_own():
    place, ticks = Place(), iter(range(100))
    trainer = InPlaceTrainer(
        network=place.model,
        rule=place.rule,
        storage=place.storage,
        schedule=Schedule.of(Config(rate=0.01)),
        group_images=GROUP,
        dice=Dice(3),
        clock=lambda: float(next(ticks)),
    )
    firings = [SimpleNamespace(scratch=place.memory) for _ in range(2)]
    trainer.train(firings, [group_of(0), group_of(1)])
    assert [(f.started, f.finished) for f in firings] == [(0.0, 1.0), (2.0, 3.0)]
