"""The parameters of a PyTorch module as arrays of a store: names, shapes, types and values, checked.

An array has the parameter's name in `named_parameters()`, which is its name in `state_dict()`. A tied
parameter is one array, with its first name. Frozen parameters are arrays too: a client pulls them and never
pushes their gradients.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parameter import UninitializedParameter

from adam_async.errors import ConfigError, StoreError
from adam_async.run.arrays import ArraySpec
from adam_async.store.arrays import fault_of_values

DTYPES = {torch.float32: "float32", torch.float64: "float64"}
"""Types of parameters that a store can hold, with their names in the store."""


class ModuleParameters:
    """The parameters of a module, by the names of their arrays.

    Args:
        module: The module. Its parameters may be on any device.

    Attributes:
        named: Parameters by name, each parameter once, in the order of `named_parameters()`.
        specs: Shape and type of each parameter, by name.

    Raises:
        ConfigError: The module has no parameter, or a parameter that a store cannot hold; the error has its
            name, the cause and the remedy.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module is a torch.nn.Module, not {type(module).__name__}")
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise ConfigError(
                "a module of torch.jit has no parameters that a program can watch: train the module itself, "
                "or torch.compile(module), and call torch.jit.script or trace after the training"
            )
        self.named: dict[str, nn.Parameter] = dict(module.named_parameters())
        if not self.named:
            raise ConfigError(f"module {type(module).__name__} has no parameters: a store needs one or more")
        for name, parameter in self.named.items():
            if problem := _problem(parameter):
                raise ConfigError(f"parameter {name!r} {problem}")
        _check_memory(self.named)
        _check_embeddings(module)
        self.specs: dict[str, ArraySpec] = {
            name: ArraySpec(tuple(parameter.shape), DTYPES[parameter.dtype])
            for name, parameter in self.named.items()
        }

    def values(self) -> dict[str, NDArray[np.floating]]:
        """Return copies of the values by name, in the memory of the CPU."""
        return {
            name: np.array(parameter.detach().cpu().numpy(), order="C")
            for name, parameter in self.named.items()
        }

    def check_store(self, arrays: Mapping[str, ArraySpec], store: str) -> None:
        """Check that a store has these parameters, with the same shapes and types. Other arrays are allowed.

        Raises:
            StoreError: A parameter is absent, or has another shape or type; the error has the remedy.
        """
        remedy = (
            "build the same module as the creator of the store; if the module has changed since, open "
            "another store, under another name, with parameter_arrays(module)"
        )
        for name, spec in self.specs.items():
            found = arrays.get(name)
            if found is None:
                some = ", ".join(map(repr, list(arrays)[:5]))
                raise StoreError(
                    f"store {store!r} has no array for parameter {name!r}; it has {len(arrays)}: {some}; "
                    f"{remedy}"
                )
            if (found.shape, found.dtype) != (spec.shape, spec.dtype):
                raise StoreError(
                    f"parameter {name!r} is {spec.dtype}{list(spec.shape)}, and its array in store {store!r} "
                    f"is {found.dtype}{list(found.shape)}: {remedy}"
                )


def parameter_arrays(module: nn.Module) -> dict[str, NDArray[np.floating]]:
    """Return the first values of a module's parameters, for `ParameterStore.open(..., arrays)`.

    Returns:
        Copies of the values by name; float32 or float64, of the parameters' shapes.

    Raises:
        ConfigError: See `ModuleParameters`.
    """
    return ModuleParameters(module).values()


def check_values(values: Mapping[str, NDArray[np.floating]], store: str) -> None:
    """Check that pulled values are finite, before the first of them reaches the module.

    Raises:
        StoreError: A value is not finite; the error has its array, its index and the remedy.
    """
    cure = (
        "the training of the store has diverged, or a server is faulty; the module keeps its values: begin a "
        "store under another name, with a lower rate"
    )
    for name, array in values.items():
        if fault := fault_of_values(array.reshape(-1), f"array {name!r} of store {store!r}", cure):
            raise StoreError(fault)


def _problem(parameter: nn.Parameter) -> str:
    """Return the cause and the remedy if a store cannot hold a parameter; otherwise an empty text."""
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet: run the module once on an example before you open the store"
    if parameter.is_meta:
        return "is on the device 'meta' and has no values: call module.to_empty and set its values first"
    if parameter.is_inference():
        return "was made in torch.inference_mode(), so nothing can train it: make the module outside of it"
    if parameter.is_complex():
        return (
            f"has complex values ({parameter.dtype}): keep torch.view_as_real of it as the parameter, and "
            "call torch.view_as_complex in forward"
        )
    if parameter.layout is not torch.strided:
        return f"has the layout {parameter.layout}: make it dense with .to_dense()"
    if parameter.is_neg() or torch._debug_has_internal_overlap(parameter) == 1:
        return (
            "is a view whose values have no memory of their own: make it of tensor.contiguous().resolve_neg()"
        )
    if parameter.dtype not in DTYPES:
        return (
            f"has values of type {parameter.dtype}, and a store holds float32 and float64: keep parameters "
            "in float32, and use torch.autocast for passes in lower precision"
        )
    return ""


def _check_memory(named: Mapping[str, nn.Parameter]) -> None:
    """Refuse two parameters with one memory: of the values of two arrays it would have the last pulled."""
    first: dict[tuple[torch.device, int], str] = {}
    for name, parameter in named.items():
        other = first.setdefault((parameter.device, parameter.data_ptr()), name)
        if other != name and parameter.numel():
            raise ConfigError(
                f"parameters {other!r} and {name!r} are two objects with one memory: tie them as one "
                "parameter (part.weight = other.weight), or give each values of its own by .clone()"
            )


def _check_embeddings(module: nn.Module) -> None:
    """Refuse modules that make sparse gradients, before the first step."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ConfigError(
                f"parameter {f'{name}.weight'.lstrip('.')!r} would get sparse gradients, which a store "
                f"cannot apply: make the {type(part).__name__} with sparse=False"
            )
