"""A step in the place of a network: its arrays are checked, and its weight counts."""

import numpy as np
import pytest

from adam_async.errors import ConfigError, StepFailed
from adam_async.run.arrays import ArraySpec
from adam_async.run.partition import arrays_of
from adam_async.run.step_model import StepModel, arrays_of_step
from adam_async.run.train_step import StepOutcome, StepSpec
from tests.adam_async.steps import Softmax, Wrong

SPEC = StepSpec(name="mine", shape=(1, 8, 8), classes=10)


class Weighted(Softmax):
    """Counts the first two images of a batch only."""

    def step(self, values, batch, out):
        super().step(values, batch, out)
        return StepOutcome(np.float32(0.5), weight=np.int64(2))


def loaded(model, images=3):
    context = model.context(4)
    context.load(np.zeros((images, 1, 8, 8), np.uint8), np.zeros(images, np.int64), keys=(2, 5))
    return context


def test_the_arrays_of_a_store_are_those_of_the_step():
    model = StepModel(Softmax(), SPEC)
    records = arrays_of(model, None)
    assert [(each.name, each.shape, each.dtype, each.split) for each in records] == [
        ("w", (10, 64), "float64", True),
        ("b", (10,), "float64", False),
        ("scale", (), "float64", True),
    ]
    assert (model.num_parameters, model.dtype, model.frozen) == (651, np.float64, frozenset())


def test_the_weight_of_a_step_is_that_of_its_contribution():
    model = StepModel(Weighted(), SPEC)
    context = loaded(model)
    assert model.forward(model.initial(0), context) == 0.5
    assert context.images == 2


def test_a_step_gets_read_only_arrays_and_the_key_of_its_group():
    model = StepModel(Softmax(), SPEC)
    context = loaded(model)
    assert (context.batch.epoch, context.batch.number, len(context.batch)) == (2, 5, 3)
    for array in (context.batch.images, context.batch.labels):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def with_arrays(arrays):
    step = Wrong()
    step.arrays = arrays
    return step


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({}, r"arrays is {}, expected names with their ArraySpec"),
        (["w"], r"arrays is \['w'\]"),
        ({"w": np.zeros(3)}, r"array 'w' is a ndarray, expected an ArraySpec"),
        ({3: ArraySpec((2,))}, "array 3 is a ArraySpec"),
        ({"w": ArraySpec((0, 3))}, r"array 'w' has shape \(0, 3\), which has no value"),
        ({"x" * 2000: ArraySpec((2,))}, "its name has 2000 bytes"),
        ({"w": ArraySpec((2,)), "b": ArraySpec((2,), "float64")}, "'w' is float32 and 'b' float64"),
    ],
)
def test_arrays_that_no_store_can_hold_are_refused_by_name(arrays, said):
    with pytest.raises(ConfigError, match=f"step mine: .*{said}"):
        arrays_of_step("mine", with_arrays(arrays))


def test_factors_name_matrices_of_the_step():
    for name in ("b", "nothing", "scale"):
        with pytest.raises(ConfigError, match=f"factors names '{name}', which is no matrix"):
            StepModel(Softmax((name,)), SPEC)


def test_an_object_without_the_methods_of_a_step_is_refused():
    with pytest.raises(ConfigError, match=r"step mine \(dict\) has no method initial: define arrays"):
        arrays_of_step("mine", {})


def test_an_error_of_arrays_names_the_step():
    class Raising(Wrong):
        @property
        def arrays(self):
            raise RuntimeError("not yet")

    with pytest.raises(StepFailed, match="step mine failed in arrays: RuntimeError: not yet"):
        arrays_of_step("mine", Raising())


@pytest.mark.parametrize("accuracy", [1.5, float("nan"), "high", None])
def test_an_accuracy_that_is_no_share_is_refused(accuracy):
    class Odd(Wrong):
        def evaluate(self, values, batch):
            return {"accuracy": accuracy}

    model = StepModel(Odd(), SPEC)
    with pytest.raises(StepFailed, match="failed in evaluate: the accuracy is"):
        model.count_right(model.initial(0), np.zeros((3, 1, 8, 8), np.uint8), np.zeros(3, np.int64))
