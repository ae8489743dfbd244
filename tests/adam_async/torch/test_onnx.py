"""ONNX files compute the scores of their networks, in another runtime."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from adam_async.checkpoint.trained_model import Model
from adam_async.cli.predict import NO_TELEMETRY
from adam_async.errors import ConfigError, ModelError
from adam_async.model import Network, mlp, named_model
from adam_async.torch import onnx as exporter
from adam_async.torch.onnx import GROUPS, OPSET, check_onnx, make_onnx
from tests.adam_async.model.parts import weights_of
from tests.adam_async.torch.test_convert import ALL_KINDS, images_of

SMALL = mlp((4, 3), input_shape=(1, 2, 2), name="quarters")


def model_of(spec, dtype=np.float32, class_names=()):
    network = Network(spec, dtype)
    return Model(network, weights_of(network), class_names)


@pytest.fixture
def runtime(monkeypatch):
    """The runtime, if all packages of the extra are installed; without its reports to Microsoft."""
    monkeypatch.setenv(NO_TELEMETRY, "1")
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="the extra onnx is not installed")
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra onnx)")


def session_of(runtime, data):
    return runtime.InferenceSession(data, providers=["CPUExecutionProvider"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("spec", [ALL_KINDS, named_model("digits"), SMALL], ids=lambda spec: spec.name)
def test_a_file_has_the_scores_of_its_network_for_any_number_of_images(runtime, spec, dtype):
    model = model_of(spec, dtype)
    session = session_of(runtime, make_onnx(model))
    for count in (1, 2, 7):
        images = images_of(model, count)
        (found,) = session.run(["scores"], {"images": images.astype(np.float32)})
        expected = model.network.scores(model.weights, images)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.slow
def test_a_file_has_names_a_free_batch_axis_and_the_opset(runtime):
    import onnx

    proto = onnx.load_model_from_string(make_onnx(model_of(SMALL, class_names=("north", "east", "süd"))))
    onnx.checker.check_model(proto, full_check=True)
    (images,), (scores,) = proto.graph.input, proto.graph.output
    assert (images.name, scores.name, proto.graph.name) == ("images", "scores", "quarters")
    sizes = [size.dim_param or size.dim_value for size in images.type.tensor_type.shape.dim]
    assert sizes == ["N", 1, 2, 2]
    assert [entry.version for entry in proto.opset_import if entry.domain == ""] == [OPSET]
    (entry,) = proto.metadata_props
    assert (entry.key, json.loads(entry.value)) == ("class_names", ["north", "east", "süd"])


@pytest.mark.slow
def test_equal_models_give_equal_bytes_without_paths_of_the_machine(runtime):
    first, second = (make_onnx(model_of(SMALL)) for _ in range(2))
    assert first == second
    assert b".py" not in first


@pytest.mark.slow
def test_the_check_refuses_the_file_of_another_network(runtime):
    model = model_of(SMALL)
    data = make_onnx(model)
    difference = check_onnx(data, model)
    assert difference is not None
    assert 0 <= difference < 1e-5
    other = Model(model.network, {**model.weights, "fc1.bias": model.weights["fc1.bias"] + 1e-3})
    with pytest.raises(ModelError, match=r"differ from the network's by up to 0\.001; no file is written"):
        check_onnx(data, other)


@pytest.mark.slow
def test_the_check_refuses_scores_that_are_no_numbers(runtime):
    model = model_of(SMALL, np.float64)
    model.weights["fc1.weight"].fill(1e200)  # more than a float32 can hold
    with pytest.raises(ModelError, match="differ from the network's by up to"):
        check_onnx(make_onnx(model), model)


def test_the_check_has_groups_of_one_and_of_several():
    assert min(GROUPS) == 1 < max(GROUPS)


def test_without_the_runtime_a_file_is_not_checked(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert check_onnx(b"", model_of(SMALL)) is None


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package):
    pytest.importorskip("onnx", reason="the extra onnx is not installed")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {package}, .*.*pip install .*\[onnx\]"):
        make_onnx(model_of(SMALL))


def test_a_network_beyond_the_format_is_refused_before_the_work(monkeypatch, runtime):
    monkeypatch.setattr(exporter, "MAX_PARAMETERS", 14)
    with pytest.raises(ConfigError, match=r"has 15 parameters, but an ONNX file holds at most 14; .*--torch"):
        make_onnx(model_of(SMALL))


def test_weights_that_are_not_finite_are_refused(runtime):
    model = model_of(replace(SMALL, name="diverged"))
    model.weights["fc1.bias"][0] = np.nan
    with pytest.raises(ConfigError, match=r"'fc1.bias' are not finite"):
        make_onnx(model)
