"""A copy of a module with a run's values, for one thread at a time; random streams that it draws from.

On the CPU the parameters use the memory of the values, which is not copied. On another device they have
separate memory. Values then go through staging memory, which is pinned for CUDA, where these transfers have
their own stream.

All threads of a process share the random streams of PyTorch, Python and NumPy. So a block that seeds the
streams excludes other such blocks. The functions see no other source, such as the module's own generator
object or an accelerator's stream.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adam_async.errors import ConfigError
from adam_async.run.arrays import ArraySpec
from adam_async.torch.devices import StagingBuffers, copy_streams
from adam_async.torch.factors import LinearFactors


class ModuleCopy:
    """A copy of a module, its trained parameters, and its linear layers' captures.

    Args:
        module: The copy. This object changes its parameters.
        arrays: Names and specifications of the trained parameters.
        factors: Names of weights whose gradients are captured as factors; None for all that have factors.
        staged: Whether the parameters keep their own memory, into which `load` copies values.
    """

    def __init__(
        self,
        module: nn.Module,
        arrays: Mapping[str, ArraySpec],
        factors: Collection[str] | None,
        *,
        staged: bool,
    ) -> None:
        self.module = module.train()
        named = dict(module.named_parameters())
        self.parameters = {name: named[name] for name in arrays}
        self.buffers = dict(module.named_buffers(remove_duplicate=False))
        self.linear = LinearFactors(module, factors)
        self._arrays = arrays
        self._staging: StagingBuffers | None = None
        if staged:
            tensors = [parameter.detach() for parameter in self.parameters.values()]
            self._staging = StagingBuffers(
                dict(zip(self.parameters, tensors, strict=True)), copy_streams(tensors)
            )
        self._loaded: dict[str, int] = {}
        """PyTorch's version counter of each parameter after `load`, which counts changes in place."""

    def load(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Give the parameters their values, and copy those of the buffers that `values` has.

        Memory that the parameters share with `values` must not change, but PyTorch has no read-only tensors;
        see `check_unchanged`.
        """
        if self._staging is not None:
            self._upload(self._staging, values)
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if self._staging is None:
                parameter.data = tensor_of(values[name])
            self._loaded[name] = parameter._version
        for name, buffer in self.buffers.items():
            if name in values:
                buffer.copy_(tensor_of(values[name]))

    def _upload(self, staging: StagingBuffers, values: Mapping[str, NDArray[Any]]) -> None:
        staging.wait_free()
        for name, array in staging.arrays.items():
            np.copyto(array, values[name])
        staging.upload()
        staging.copy_into({name: parameter.data for name, parameter in self.parameters.items()})

    def check_unchanged(self) -> None:
        """Check that the forward pass changed no parameter.

        Raises:
            ConfigError: A parameter changed in place, or has another shape; the error names it.
        """
        for name, parameter in self.parameters.items():
            if tuple(parameter.shape) != self._arrays[name].shape:
                raise ConfigError(
                    f"parameter {name!r} changed its shape from {self._arrays[name].shape} to "
                    f"{tuple(parameter.shape)}: keep the shapes of parameters during a run"
                )
            if parameter._version != self._loaded[name]:
                raise ConfigError(changed_in_place(name))

    def release(self) -> None:
        """Drop the references to values and gradients."""
        self.linear.clear()
        for parameter in self.parameters.values():
            parameter.grad = None
            if self._staging is None:
                placeholder = torch.empty((), dtype=parameter.dtype, device=parameter.device)
                parameter.data = placeholder.expand(parameter.shape)


def changed_in_place(name: str) -> str:
    """Return the error text for a parameter that the module changed in place."""
    return (
        f"parameter {name!r} was changed in place by the module, but only the servers' rule may change it: "
        "use a parametrisation, or make it a buffer"
    )


class _Writable:
    """Presents a read-only array as writable, because `torch.from_numpy` warns about read-only arrays."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, array: NDArray[Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Return a tensor on an array's memory; callers must not write into it."""
    return torch.from_numpy(np.asarray(_Writable(array)))


_SEEDED = RLock()
"""Lock that a block holds while it has seeded the streams."""


def _numpy_state() -> tuple[Any, ...]:
    state = np.random.get_state(legacy=False)
    inner = state["state"]
    return (inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"])


_STATES: dict[str, Callable[[], Any]] = {
    "PyTorch": lambda: torch.get_rng_state().numpy().tobytes(),
    "Python": random.getstate,
    "NumPy": _numpy_state,
}

_SEEDS: dict[str, Callable[[int], object]] = {
    "PyTorch": torch.manual_seed,
    "Python": random.seed,
    "NumPy": lambda seed: np.random.seed(seed % (1 << 32)),
}

ALL_STREAMS = frozenset(_STATES)
"""Names of the streams."""


@contextmanager
def seeded(seed: int) -> Iterator[Callable[[], frozenset[str]]]:
    """Seed the streams for a block, and restore them at its end.

    Args:
        seed: Seed, at least 0.

    Yields a function that returns the names of the streams from which the block has drawn. Draws of other
    threads count too.
    """
    with _SEEDED, torch.random.fork_rng(devices=[]):
        python, numpy = random.getstate(), np.random.get_state()
        try:
            _seed(ALL_STREAMS, seed)
            begin = {name: state() for name, state in _STATES.items()}
            yield lambda: frozenset(name for name, state in _STATES.items() if state() != begin[name])
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def drawing(names: Collection[str], seed: int) -> Iterator[None]:
    """Seed some of the streams for a block, without restoring them.

    All threads share the streams, so other such blocks wait; a block without names waits for none.
    """
    if not names:
        yield
        return
    with _SEEDED:
        _seed(names, seed)
        yield


def _seed(names: Collection[str], seed: int) -> None:
    for name in names:
        _SEEDS[name](seed)
