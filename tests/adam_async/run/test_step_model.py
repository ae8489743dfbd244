"""A step in the place of a network: its arrays are checked, and its weight counts."""

import msgspec
import numpy as np
import pytest

from adam_async.errors import ConfigError, StepFailed
from adam_async.run.arrays import ArraySpec
from adam_async.run.partition import arrays_of
from adam_async.run.step_model import StepModel, arrays_of_step
from adam_async.run.store_record import ArrayRecord
from adam_async.run.train_step import StepOutcome, StepSpec
from adam_async.run.user_code import NamedStep
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
        ({"w": ArraySpec((0, 3))}, r"array 'w' has shape \(0, 3\), so it is empty"),
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
    for rows in (0, 1.5, True):
        with pytest.raises(ConfigError, match=f"factors has {rows} rows for each example of 'w': give"):
            StepModel(Softmax({"w": rows}), SPEC)


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


class Deriving(Softmax):
    """Derives the mean image of its sample, and needs it in evaluations."""

    sample = 20
    constants = {"scale of pixels": (255.0, 255.0)}

    def prepare(self, shape, classes):
        if shape[0] != 1:
            raise ConfigError("give grey images")

    def derived(self, values, batches):
        self.sizes = [len(batch) for batch in batches]
        images = np.concatenate([batch.images for batch in batches] or [np.zeros((1, 1, 8, 8))])
        return {"mean": images.mean(axis=0)}

    def evaluate(self, values, batch):
        return {"accuracy": float(values["mean"].mean() == 3)}


DERIVING = NamedStep(Deriving(), "mine").spec({"shape": [1, 8, 8], "classes": 10})


def test_derived_tensors_are_those_of_the_sample_and_reach_the_evaluation():
    step = Deriving()
    model = StepModel(step, DERIVING)
    assert model.lacks_sample
    model.take_sample(np.full((513, 1, 8, 8), 3, np.uint8), np.zeros(513, np.int64))
    assert not model.lacks_sample
    tensors = model.tensors(model.initial(0))
    assert step.sizes == [171, 171, 171]  # no batch of one image is left over
    assert list(tensors) == ["w", "b", "scale", "mean"]
    assert model.count_right(tensors, np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4, np.int64)) == 4
    with pytest.raises(ValueError, match="read-only"):
        tensors["mean"][0] = 1


def test_a_derived_tensor_with_the_name_of_an_array_is_an_error():
    step = Deriving()
    step.derived = lambda values, batches: {"w": values["w"]}
    model = StepModel(step, DERIVING)
    with pytest.raises(StepFailed, match="derived: tensor 'w' is a ndarray, or has the name of an array"):
        model.tensors(model.initial(0))


def test_a_step_refuses_data_that_it_cannot_train_on():
    with pytest.raises(ConfigError, match="step mine: give grey images"):
        StepModel(Deriving(), StepSpec(name="mine", shape=(3, 8, 8), classes=10))


@pytest.mark.parametrize("other", [{}, {"scale of pixels": (255.0, 250.0)}, {"other": (1.0, 1.0)}])
def test_a_step_with_other_constants_than_its_driver_is_refused(other):
    with pytest.raises(ConfigError, match=r"tensor '(other|scale of pixels)' differs from that of the run's"):
        StepModel(Deriving(), msgspec.structs.replace(DERIVING, constants=other))
    near = {"scale of pixels": (255.1, 254.9)}
    StepModel(Deriving(), msgspec.structs.replace(DERIVING, constants=near))


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ([ArrayRecord("w", (10, 65), "float64")], r"'w' is float64\[10, 64\] here, and float64\[10, 65\] in"),
        ([ArrayRecord("w", (10, 64), "float32")], r"'w' is float64\[10, 64\] here, and float32\[10, 64\] in"),
        ([ArrayRecord("w", (10, 64), "float64")], r"'b' is float64\[10\] here, and absent in the store"),
        (
            [*arrays_of(StepModel(Softmax(), SPEC), None), ArrayRecord("c", (2,), "float64")],
            r"'c' is absent here, and float64\[2\] in the store of the run: start this worker with the code",
        ),
    ],
)
def test_a_step_with_other_arrays_than_the_store_is_refused(arrays, text):
    model = StepModel(Softmax(), SPEC)
    with pytest.raises(ConfigError, match=text):
        model.check_store(arrays)
    model.check_store(arrays_of(model, None))


@pytest.mark.parametrize(
    ("sample", "shape", "said"),
    [
        (-1, [1, 8, 8], "sample"),
        (2.5, [1, 8, 8], "expected a number of images"),
        (True, [1, 8, 8], "expected a number of images"),
        (1 << 17, [1, 8, 8], "a sample of 131072 images, 65536 are the most: take a smaller sample"),
        (
            1 << 16,
            [3, 128, 128],
            r"images of \[3, 128, 128\] has 3221225472 bytes, .*: take a sample of 21845$",
        ),
        (2, [1 << 20, 1 << 20, 1], "has 2199023255552 bytes, .*: take a sample of 0$"),
    ],
)
def test_the_size_of_a_sample_is_bounded_in_images_and_bytes(sample, shape, said):
    step = Softmax()
    step.sample = sample
    with pytest.raises(ConfigError, match=f"step mine: .*{said}"):
        NamedStep(step, "mine").spec({"shape": shape, "classes": 10})
    if type(sample) is int:
        record = {"step": {"name": "mine", "shape": shape, "classes": 10, "sample": sample}}
        with pytest.raises(ConfigError, match=f"the record of step 'mine' is invalid: .*{said}"):
            StepSpec.from_dict(record)


@pytest.mark.parametrize(
    ("constants", "said"),
    [
        ({f"{n}": (1.0, 1.0) for n in range(8193)}, "fingerprints of 8193 tensors, 8192 are the most: join"),
        ({"n" * 1025: (1.0, 1.0)}, "has a name of over 1024 bytes: give it a shorter one"),
        ({"n": (1.0, float("inf"))}, "the fingerprint of 'n' is .*, expected finite numbers"),
    ],
    ids=["many", "a long name", "infinite"],
)
def test_the_fingerprints_of_a_step_are_bounded(constants, said):
    step = Softmax()
    step.constants = constants
    with pytest.raises(ConfigError, match=f"step mine: .*{said}"):
        NamedStep(step, "mine").spec({"shape": [1, 8, 8], "classes": 10})
    record = {"step": {"name": "mine", "shape": [1, 8, 8], "classes": 10, "constants": constants}}
    with pytest.raises(ConfigError, match=f"the record of step 'mine' is invalid: .*{said}"):
        StepSpec.from_dict(record)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_fingerprint_that_is_not_finite_is_refused_by_its_name(bad):
    record = {"name": "mine", "shape": [1, 8, 8], "classes": 10, "constants": {"mask": [1.0, bad]}}
    with pytest.raises(ConfigError, match=r"the fingerprint of 'mask' is .*expected finite numbers"):
        StepSpec.from_dict({"step": record})
