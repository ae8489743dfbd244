"""Parameters of modules as arrays of a store."""

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import nn

from adam_async.errors import ConfigError, StoreError
from adam_async.run.arrays import ArraySpec
from adam_async.torch import ModuleParameters, parameter_arrays


def test_arrays_have_the_names_of_state_dict_and_the_values_of_the_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    arrays = parameter_arrays(module)
    assert list(arrays) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for name, array in arrays.items():
        assert array.dtype == np.float64
        assert np.array_equal(array, module.state_dict()[name].numpy())


def test_values_are_copies() -> None:
    module = nn.Linear(3, 2)
    arrays = parameter_arrays(module)
    before = arrays["weight"].copy()
    with torch.no_grad():
        module.weight.add_(1)
    assert np.array_equal(arrays["weight"], before)


def test_a_transposed_parameter_keeps_its_shape_and_values() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    (array,) = parameter_arrays(module).values()
    assert array.shape == (3, 2)
    assert array.flags.c_contiguous
    assert np.array_equal(array, module.weight.detach().numpy())


def test_tied_parameters_are_one_array() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    assert list(parameter_arrays(module)) == ["0.weight"]


def test_frozen_parameters_are_arrays() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    assert list(ModuleParameters(module).specs) == ["weight", "bias"]


def complex_module() -> nn.Module:
    module = nn.Module()
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return module


def of_one(values: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.scale = nn.Parameter(values)
    return module


def with_one_memory() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight.data = module[0].weight.data
    return module


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (with_one_memory(), r"'0.weight' and '1.weight' are two objects with one memory: tie .* \.clone\(\)"),
        (of_one(torch.ones(1, 2).expand(3, 2)), "'scale' is a view whose values have no memory of their own"),
        (of_one(torch.ones(2, dtype=torch.complex64).conj().imag), r"'scale' is a view .*\.resolve_neg\(\)"),
        (nn.ReLU(), "module ReLU has no parameters"),
        (complex_module(), r"'phase' has complex values \(torch.complex64\): keep torch.view_as_real"),
        (nn.Linear(2, 2).half(), "'weight' has values of type torch.float16, .* torch.autocast"),
        (nn.LazyLinear(2), "'weight' has no shape yet: run the module once"),
        (nn.Linear(2, 2, device="meta"), "'weight' is on the device 'meta'"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), "'0.weight' would get sparse gradients"),
        (object(), "module is a torch.nn.Module, not object"),
    ],
)
def test_a_module_that_a_store_cannot_hold_is_refused(module: nn.Module, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ModuleParameters(module)


def test_a_store_of_another_module_is_refused() -> None:
    parameters = ModuleParameters(nn.Linear(3, 2))
    parameters.check_store({**parameters.specs, "more": ArraySpec((1,))}, "s")
    with pytest.raises(StoreError, match=r"'weight' is float32\[2, 3\], .* store 's' is float32\[2, 4\]"):
        parameters.check_store({**parameters.specs, "weight": ArraySpec((2, 4))}, "s")
    with pytest.raises(StoreError, match=r"no array for parameter 'weight'; it has 1: 'w'"):
        parameters.check_store({"w": ArraySpec((2, 3))}, "s")


def test_a_module_that_nothing_can_train_is_refused_with_its_cure() -> None:
    with torch.inference_mode():
        frozen = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=r"parameter 'weight' was made in torch\.inference_mode\(\)"):
        parameter_arrays(frozen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 3))])
def test_a_module_of_jit_is_refused_also_inside_another(make: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"module of torch\.jit .* train the module itself"):
        parameter_arrays(nn.Sequential(make(nn.Linear(3, 2))))
