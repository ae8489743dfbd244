"""Changes of a module's parameters that no optimizer of this package made, found before a pull undoes them.

Loading a checkpoint, `nn.Embedding(max_norm=...)`, clamping, another optimizer and much else change
parameters. After each of its writes an optimizer takes a checksum of the parameter, and compares it before
its next write. The checksum finds every change that is still there, and no other. PyTorch's version counter
and the memory address show neither. A write through `parameter.data` or a NumPy view leaves both as they are,
and changes that are undone move them, such as a swap of weights for an evaluation.

Optimizers in this process that train one module over one store share its checksums.
"""

import gc
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adam_async.errors import StoreError
from adam_async.store.sync import ParameterStore
from adam_async.torch.devices import to_host

COLUMNS = 509
"""Number of columns in a checksum, each 8 bytes; a prime, so that exchanged rows of a matrix change it."""

REPLACED_GAP = 100
"""Minimum number of pushes between two changes by the program that undo pushes to the same parameter."""


def checksum(values: NDArray[np.floating]) -> int:
    """Return a checksum of the bits of values, which depends on their order and differs after any one change.

    A CRC takes 7 times as long as a sum, so for many values it is taken over the sums of `COLUMNS` columns.
    """
    flat: NDArray[Any] = values.reshape(-1)
    row = COLUMNS * 8 // flat.itemsize
    whole = flat.size // row * row
    if whole <= 2 * row:
        return zlib.crc32(flat.data)
    sums = np.add.reduce(flat[:whole].view(np.uint64).reshape(-1, COLUMNS), axis=0)
    return zlib.crc32(flat[whole:].data, zlib.crc32(sums))


def device_checksum(tensor: Tensor) -> Tensor:
    """Return such a checksum of a tensor as a scalar on its device, without waiting for the device."""
    bits = tensor.detach().reshape(tensor.numel(), 1).view(torch.int32).reshape(-1)
    # Odd factors: no change of one value is a multiple of 2^64.
    return (bits * torch.arange(1, 2 * len(bits) + 1, 2, device=bits.device)).sum()


@dataclass(slots=True, eq=False)
class _Written:
    """The last write of an optimizer into one parameter."""

    checksum: int | Tensor | None = None
    """Checksum after the write; None if unknown, for example after an interrupted write."""
    is_shared: bool = False
    """Whether an optimizer has had another parameter in the same memory; its last writes outlive it."""


_OF_STORE: "WeakKeyDictionary[ParameterStore, WeakKeyDictionary[Changes, None]]" = WeakKeyDictionary()
"""The `Changes` of each store: one for each optimizer that has not ended."""


def _present(store: ParameterStore) -> "list[Changes]":
    """Return a store's `Changes`; other threads may make and close optimizers meanwhile."""
    refs = _OF_STORE.get(store, WeakKeyDictionary[Changes, None]()).keyrefs()
    return [changes for ref in refs if (changes := ref()) is not None]


class Changes:
    """Finds the changes of a module's parameters.

    Args:
        module: The module.
        named: Its parameters by name.
        store: The store of their values.
    """

    def __init__(self, module: nn.Module, named: dict[str, nn.Parameter], store: ParameterStore) -> None:
        self._named = named
        self._store = store
        shared = {
            id(parameter): other._written[name]
            for other in _present(store)
            for name, parameter in other._named.items()
        }
        self._written: dict[str, _Written] = {
            name: shared.get(id(parameter)) or _Written() for name, parameter in named.items()
        }
        places = {parameter.data_ptr(): name for name, parameter in named.items()}
        for other in [each for ref in _OF_STORE.keyrefs() if (known := ref()) for each in _present(known)]:
            for name, parameter in other._named.items():
                mine = places.get(parameter.data_ptr())
                if mine is not None and named[mine] is not parameter:
                    self._written[mine].is_shared = other._written[name].is_shared = True
        self._types = {name: (each.dtype, each.shape) for name, each in named.items()}
        self._module = module
        self._places = _places(module)
        """Parameters of the module by name, with all names of tied ones."""
        self._parts = _parts(module)
        self._replaced: dict[str, int] = {}
        """Number of pushes at the last change that replaced the effect of a push, by name."""
        _OF_STORE.setdefault(store, WeakKeyDictionary())[self] = None

    def check_parts(self, trained: Collection[str] = ()) -> None:
        """Check that the module still has its parameters; by now another module may hold them.

        Args:
            trained: Parameters that may not be removed.

        Raises:
            StoreError: A parameter was replaced by another object, or removed.
        """
        if all(members.get(key) is part for members, key, part in self._parts):
            return
        now = _places(self._module)
        kept = {id(parameter) for parameter in now.values()}
        lost = [
            name
            for name, parameter in self._places.items()
            if now.get(name, parameter) is not parameter or id(parameter) not in kept
        ]
        for name in lost:
            if name in now or name in trained:
                raise StoreError(
                    f"parameter {name!r} was replaced or removed after the optimizer was made, and trains no "
                    "more: make RemoteOptimizer anew, after store.assign(parameter_arrays(module)) to keep "
                    "the module's values, or over another store if a name or a shape has changed"
                )
        if not lost:
            self._parts = _parts(self._module)

    def forget(self, names: Iterable[str]) -> None:
        """Begin to write into parameters: their values are unknown until `note`."""
        for name in names:
            self._written[name].checksum = None

    def note(self, names: Iterable[str]) -> None:
        """End a write into parameters: their present values are the optimizer's."""
        for name in names:
            self._written[name].checksum = _checksum(self._named[name])

    def found(self, names: Iterable[str]) -> list[str]:
        """Return those parameters whose values have changed since the last write."""
        changed: list[str] = []
        on_device: dict[str, Tensor] = {}
        for name in names:
            parameter, last = self._named[name], self._written[name].checksum
            # If a parameter has another type or shape, the step that reads its gradient refuses it.
            if last is None or (parameter.dtype, parameter.shape) != self._types[name]:
                continue
            if isinstance(last, Tensor):  # also for a parameter that has moved
                on_device[name] = device_checksum(parameter).to(last.device) != last
            elif _checksum(parameter.cpu()) != last:
                changed.append(name)
        differs = to_host([*on_device.values()])
        changed += [name for name, each in zip(on_device, differs, strict=True) if each]
        return [name for name in changed if not self._is_in_shared_memory(name)]

    def _is_in_shared_memory(self, name: str) -> bool:
        """Return whether another client may write into a parameter's memory, as in Hogwild."""
        parameter = self._named[name]
        is_of_processes = not parameter.is_cuda and parameter.is_shared() and self._store.clients > 1
        return is_of_processes or self._written[name].is_shared

    def others(self, names: Iterable[str]) -> str:
        """Return a text about the other clients that train some arrays; empty if there are none."""
        if (clients := self._store.clients) > 1:
            return f"{clients} clients"
        if self._has_other(names):
            gc.collect()  # an optimizer that the program has dropped may be part of a cycle
            if self._has_other(names):
                return "another optimizer in this process (close() ends it)"
        return ""

    def _has_other(self, names: Iterable[str]) -> bool:
        """Return whether another optimizer of the store trains other parameters under some of the names."""
        present = _present(self._store)
        return any(
            other._named.get(name, mine) is not mine
            for name in names
            for mine in [self._named[name]]
            for other in present
        )

    def equal(self, values: Mapping[str, NDArray[Any]]) -> list[str]:
        """Return the names of those values that the module has, too."""
        mine = to_host([self._named[name].detach() for name in values])
        pairs = zip(values, mine, strict=True)
        return [name for name, array in pairs if np.array_equal(values[name], array, equal_nan=True)]

    def refusal(self, changed: Sequence[str], others: str) -> StoreError:
        """Return the error for changed parameters that other clients train, too."""
        first = changed[0]
        more = f" and {len(changed) - 1} more were" if len(changed) > 1 else " was"
        return StoreError(
            f"parameter {first!r}{more} changed outside the optimizer, and the next pull would undo "
            f"that: store {self._store.name!r} has {others}, so it takes no change by itself. Call "
            f"optimizer.push_values() after the change, in one client; or change the store instead, by "
            f"store.assign({{{first!r}: ...}}); or drop the change by optimizer.pull(discard=True)"
        )

    def check_bucket(self, changed: Iterable[str], pushed: Collection[str]) -> None:
        """In a step's backward pass, check that no parameter changed whose gradient is pushed.

        Raises:
            StoreError: Such a parameter has changed.
        """
        for name in changed:
            if name in pushed:
                raise StoreError(
                    f"parameter {name!r} was changed after backward() had pushed its gradient "
                    "(overlap=True): change parameters between step() and backward(), or use overlap=False"
                )

    def check_replaced(self, names: Iterable[str], pushes: int) -> None:
        """Record changes that replace effects of pushes.

        Raises:
            StoreError: A parameter has such changes too often, which would cost too many gradients.
        """
        for name in names:
            # `load_state_dict` may set the number back.
            if name in self._replaced and 0 <= pushes - self._replaced[name] < REPLACED_GAP:
                raise StoreError(
                    f"parameter {name!r} was changed outside the optimizer twice within {REPLACED_GAP} "
                    "pushes, and each change replaces pushes that the module's values lack: use "
                    "max_staleness=0 and pull_every=1 if every step has a change, or call optimizer.flush() "
                    "before a change"
                )
            self._replaced[name] = pushes

    def close(self) -> None:
        """End, so that the store's other optimizers do not count it."""
        _OF_STORE[self._store].pop(self, None)


def _places(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def _parts(module: nn.Module) -> list[tuple[dict[str, Any], str, nn.Module | nn.Parameter | None]]:
    """Return each submodule and parameter, with the dictionary and key that lead to it."""
    return [
        (members, key, part)
        for owner in module.modules()
        for members in (owner._modules, owner._parameters)
        for key, part in members.items()
    ]


def _checksum(parameter: Tensor) -> int | Tensor:
    if parameter.device.type == "cpu":
        return checksum(parameter.detach().numpy())
    return device_checksum(parameter)
