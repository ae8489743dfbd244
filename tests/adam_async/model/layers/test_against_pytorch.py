"""Every layer has PyTorch's results: those in golden files, and PyTorch's own if it is installed."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adam_async.model import BUILTIN_LAYERS, LayerSpec, SpecError
from adam_async.model.gradcheck import lone_slots
from adam_async.model.layer import Loss
from tests.adam_async.model.layer_cases import kinds_of

ROOT = Path(__file__).resolve().parents[4]
GOLDEN = sorted((ROOT / "tests" / "golden").glob("*.npz"))
LIMIT_BYTES = 300_000
CLOSE = {np.float64: {"rtol": 1e-10, "atol": 1e-12}, np.float32: {"rtol": 2e-5, "atol": 2e-5}}


def batch_last(value, dtype):
    return np.ascontiguousarray(np.moveaxis(value, 0, -1), dtype)


def computed(kind, options, arrays, dtype, kinds=BUILTIN_LAYERS):
    """Output and gradients of our layer, with the names and shapes of the golden files."""
    inputs = [
        batch_last(arrays[f"input{i}"], dtype) for i in range(sum(f"input{i}" in arrays for i in range(9)))
    ]
    spec = LayerSpec.from_dict({"name": "it", "kind": kind, **options})
    layer = kinds[kind](spec, tuple(value.shape[:-1] for value in inputs))
    slots = lone_slots(layer, inputs)
    weights = {p.name: arrays[p.kind].astype(dtype) for p in layer.parameters}
    if isinstance(layer, Loss):
        layer.load_targets(slots, arrays["labels"])
    else:
        slots.error[...] = batch_last(arrays["error"], dtype)
    if kind == "dropout":
        slots.scratch["factors"][...] = batch_last(arrays["kept"], dtype) / (1 - options["rate"])
    layer.forward(weights, slots)
    found = {"output": np.moveaxis(slots.output, -1, 0).copy()}
    layer.backward(weights, slots)
    for number, error in enumerate(slots.input_errors):
        found[f"input_error{number}"] = np.moveaxis(error, -1, 0)
    for parameter in layer.parameters:
        out = np.empty(parameter.shape, dtype)
        layer.delta(slots, parameter.kind, out)
        found[f"{parameter.kind}_gradient"] = out
    return found


def assert_equal_to(expected, found, dtype):
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        np.testing.assert_allclose(value, expected[name], **CLOSE[dtype], err_msg=name)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_layer_gives_what_pytorch_gave(path, dtype, kernels):
    kinds = kinds_of(kernels)
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    kind, options = str(arrays["kind"]), json.loads(str(arrays["options"]))

    found = computed(kind, options, arrays, dtype, kinds)

    gradients = {name for name in arrays if name.startswith("input_error") or name.endswith("_gradient")}
    assert set(found) == {"output"} | gradients
    assert_equal_to(arrays, found, dtype)


def test_every_built_in_layer_has_a_golden_file_and_all_are_small():
    kinds = set()
    for path in GOLDEN:
        with np.load(path, allow_pickle=False) as file:
            kinds.add(str(file["kind"]))

    assert kinds == set(BUILTIN_LAYERS)
    assert sum(path.stat().st_size for path in GOLDEN) < LIMIT_BYTES


IMAGE_SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
WINDOWS = st.fixed_dictionaries(
    {"filters": st.integers(1, 4), "kernel": st.integers(1, 4)},
    optional={"stride": st.integers(1, 4), "padding": st.integers(0, 3)},
)
SQUARES = st.fixed_dictionaries({"kernel": st.integers(1, 4)}, optional={"stride": st.integers(0, 4)})
NORMS = st.fixed_dictionaries(
    {"size": st.integers(1, 7), "alpha": st.floats(0, 2), "beta": st.floats(0, 2), "k": st.floats(0.5, 2)}
)
OPTIONS = {
    "conv2d": WINDOWS,
    "locally_connected": WINDOWS,
    "max_pool": SQUARES,
    "average_pool": SQUARES,
    "local_response_norm": NORMS,
}


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("kind", sorted(OPTIONS))
def test_a_layer_of_any_shape_gives_what_pytorch_gives(kind, kernels, data):
    pytest.importorskip("torch")
    kinds = kinds_of(kernels)
    from tests.golden.make_golden import drawn_case, reference

    options, shape = data.draw(OPTIONS[kind]), data.draw(IMAGE_SHAPES)
    try:
        BUILTIN_LAYERS[kind](LayerSpec.of("it", kind, **options), (shape,))
    except SpecError:
        assume(False)
    dice = np.random.default_rng(data.draw(st.integers(0, 1000)))
    arrays = drawn_case(kind, options, [shape], dice, images=data.draw(st.integers(1, 4)))

    expected = reference(kind, options, arrays)

    assert_equal_to(expected, computed(kind, options, arrays, np.float64, kinds), np.float64)
