"""A module's buffers, such as BatchNorm statistics, and their policies.

- ``local``: each client keeps its own buffers.
- ``averaged``: all clients push the changes of their buffers, and the store adds the mean change.
- ``push``: the store has the buffers of this client.
- ``pull``: this client takes the buffers of the store.

Buffers in a store are arrays with the rule `Sgd(rate=1)`. As a gradient, a client pushes the values that it
last pulled minus its current ones. So the push adds the client's changes to the array: divided by the number
of clients for ``averaged`` (in bsp the servers take the mean), and undivided for ``push``. The servers apply
these pushes exactly once, like all others. Only buffers of float32 and float64 that `state_dict` has are in a
store. Other buffers, such as `num_batches_tracked`, stay local.

With several pushes in flight, each has the changes since the push before it. Pulled values replace the values
that the buffers had at the push before the pull. The module's later changes stay, in the buffers and in the
snapshots of later pushes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adam_async.errors import ConfigError, StoreError
from adam_async.model.rules import Sgd
from adam_async.store.arrays import StoreRule, fault_of_values
from adam_async.store.sync import ParameterStore
from adam_async.torch.parameters import DTYPES, parameter_arrays

Policy = Literal["local", "averaged", "push", "pull"]
"""Treatment of a module's buffers; see the head of this file."""

POLICIES: tuple[Policy, ...] = ("local", "averaged", "push", "pull")

NOT_FINITE = "an input of its layer was not finite; skip such batches before the forward pass"
"""Cause and remedy of a buffer's value that is not finite."""

RULE = Sgd(rate=1.0)
"""Rule of buffers in a store: a push subtracts its gradient from the array."""


def shared_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the buffers that a store can hold, by name: each with its submodule, and its name there."""
    saved = module.state_dict(keep_vars=True)
    found = {}
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            full = f"{prefix}.{name}" if prefix else name
            if buffer is not None and full in saved and buffer.dtype in DTYPES:
                found[full] = (part, name)
    return found


def arrays_with_buffers(
    module: nn.Module, rule: StoreRule | Mapping[str, StoreRule]
) -> tuple[dict[str, NDArray[Any]], dict[str, StoreRule]]:
    """For `ParameterStore.open`, return the arrays of a module's parameters and buffers, and their rules.

    Args:
        module: The module.
        rule: Rule of all parameters, or of each by name.

    Raises:
        ConfigError: `rule` has no rule for a parameter; or see `ModuleParameters`.
    """
    arrays = parameter_arrays(module)
    rules: dict[str, StoreRule] = {}
    for name in arrays:
        mine = rule.get(name) if isinstance(rule, Mapping) else rule
        if mine is None:
            raise ConfigError(f"rule names no rule for parameter {name!r}: add one")
        rules[name] = mine
    for name, (part, attribute) in shared_buffers(module).items():
        arrays[name] = _array(part._buffers[attribute])
        rules[name] = RULE
    return arrays, rules


class Buffers:
    """The buffers of a module that take part in a store.

    Args:
        module: The module.
        store: The store.
        policy: See the head of this file.

    Attributes:
        names: Names of the buffers; empty with ``local``.

    Raises:
        ConfigError: The policy is unknown.
        StoreError: A buffer is absent from the store, or has another shape, type or rule there.
    """

    def __init__(self, module: nn.Module, store: ParameterStore, policy: Policy) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"buffers is one of {', '.join(POLICIES)}, not {policy!r:.80}")
        self._owners = shared_buffers(module) if policy != "local" else {}
        self._store = store
        self._policy = policy
        self._base: dict[str, NDArray[Any]] = {}
        """Values that this client last pulled."""
        self.names = tuple(self._owners)
        for name in self.names:
            self._check(name)

    def _check(self, name: str) -> None:
        array, spec = _array(self._buffer(name)), self._store.arrays.get(name)
        remedy = (
            "open the store with arrays, rules = arrays_with_buffers(module, rule), or use buffers='local'"
        )
        if spec is None:
            raise StoreError(f"store {self._store.name!r} has no array for buffer {name!r}: {remedy}")
        if (spec.shape, spec.dtype) != (array.shape, array.dtype.name):
            raise StoreError(
                f"buffer {name!r} is {array.dtype}{list(array.shape)}, and its array in store "
                f"{self._store.name!r} is {spec.dtype}{list(spec.shape)}: build the same module as the "
                "creator of the store, or give the store another name"
            )
        if (rule := self._store.rules[name]) != RULE:
            raise StoreError(f"buffer {name!r} has the rule {rule} in the store, not {RULE}: {remedy}")

    def _buffer(self, name: str) -> Tensor:
        part, attribute = self._owners[name]
        buffer = part._buffers[attribute]
        if buffer is None:
            raise StoreError(f"buffer {name!r} was removed from the module: make a new optimizer")
        return buffer

    def load(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Copy values of the store into the buffers."""
        for name in self.names:
            self._base[name] = np.array(values[name])
            self._buffer(name).copy_(torch.from_numpy(self._base[name]))

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return copies of the buffers' values, for a push.

        Raises:
            StoreError: A value is not finite.
        """
        found = {name: _array(self._buffer(name)) for name in self.names}
        for name, array in found.items():
            if fault := fault_of_values(array.reshape(-1), f"buffer {name!r}", NOT_FINITE):
                raise StoreError(fault)
        return found

    def gradients(
        self, snapshot: Mapping[str, NDArray[Any]], last: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return the gradients that add this client's changes to the store's buffers; none with ``pull``.

        Args:
            snapshot: Values of the buffers at this push.
            last: Values of the buffers at the newest push in flight that has buffers; None without one.
        """
        if self._policy == "pull":
            return {}
        base = last or self._base
        return {name: base[name] - array for name, array in snapshot.items()}

    @property
    def rate(self) -> float:
        """Rate of the push of buffers: the share of this client's changes that the store takes."""
        if self._policy == "averaged" and self._store.consistency != "bsp":
            return 1.0 / self._store.clients
        return 1.0

    def install(
        self,
        values: Mapping[str, NDArray[Any]],
        snapshot: Mapping[str, NDArray[Any]],
        later: Iterable[Mapping[str, NDArray[Any]]] = (),
    ) -> None:
        """Copy pulled values into the buffers, and, except with ``pull``, keep changes since the snapshot.

        Args:
            values: The store's values after the push of the snapshot.
            snapshot: Values of the buffers at that push.
            later: Snapshots of later pushes in flight; the call adds `values` minus `snapshot` to them.
        """
        for name, array in snapshot.items():
            buffer, new = self._buffer(name), np.array(values[name])
            if self._policy == "pull":
                buffer.copy_(torch.from_numpy(new))
            else:
                buffer.copy_(torch.from_numpy(_array(buffer) + (new - array)))
                for each in later:
                    if name in each:
                        each[name][...] += new - array
            self._base[name] = new


def _array(buffer: Tensor | None) -> NDArray[Any]:
    assert buffer is not None
    return np.array(buffer.detach().cpu().numpy(), order="C")
