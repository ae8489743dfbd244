"""An optimizer's exchanges with its store: pushes and the following pulls, in order.

An optimizer may make local steps between its pulls. A local step is ``p -= rate * gradient``, in parameters
with the rule `Sgd`. Pulled values replace the local steps; the steps of pushes in flight are repeated. A push
names the versions of the values from which its gradients were computed, and how many of this client's pushes
local steps had put into these values.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adam_async.errors import AdamError, ConfigError, StoreError
from adam_async.model.rules import AnyRule, Sgd
from adam_async.run.arrays import Factors
from adam_async.runtime.loop_thread import Call
from adam_async.store import store as face
from adam_async.store.arrays import Gradient
from adam_async.store.sync import ParameterStore
from adam_async.store.values import Rate, ReadVersions, Values
from adam_async.torch.devices import Staging
from adam_async.torch.gradients import Found, Slot, fault_of


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange:
    """One push, and the following pull if one is due."""

    gradients: Mapping[str, Gradient]
    rate: Rate
    read: ReadVersions | None
    names: tuple[str, ...] | None = None
    """Arrays to pull; None for no pull."""
    out: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Memory for pulled values, by array name; values of arrays without such memory come in `values`."""
    ends_step: bool = True
    """Whether the push is the last of its step."""
    staging: Staging | None = None
    """Memory of the gradients and values on the CPU; None if the tensors' own memory is used."""
    buffers: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Values of the module's buffers at the push, by name."""
    values: Values | None = None
    """Pulled values; None before the exchange has ended, and for an exchange without a pull."""
    call: "Call[None]" = field(init=False)

    async def run(self, store: face.ParameterStore) -> None:
        """Push, end the step in a store with clocks, and pull."""
        if self.names is None:
            await store.push(self.gradients, read=self.read, rate=self.rate)
            if self.ends_step:
                await store.tick()
            return
        # If the pull is for the pushed arrays alone, the push's answer has them: one message each way.
        names = None if tuple(self.gradients) == self.names else self.names
        self.values = await store.push_pull(
            self.gradients, names, out=self.out, read=self.read, rate=self.rate
        )
        if self.staging is not None:
            self.staging.values.upload()

    def install(self, slots: Mapping[str, Slot], pulled: Mapping[str, nn.Parameter]) -> None:
        """Copy pulled values into the parameters that the store did not fill directly."""
        assert self.values is not None
        if self.staging is not None:
            self.staging.values.copy_into(pulled)
            return
        for name in pulled:
            view = slots[name].view
            if name not in self.out and view is not None:
                np.copyto(view, self.values[name])
        # Autograd then refuses a backward pass over values that are no longer there.
        torch.autograd.graph.increment_version(list(pulled.values()))

    def leave_memory(self, slots: Mapping[str, Slot]) -> list[str]:
        """Give parameters and gradients new memory, because the store may still use theirs.

        Returns the names of the parameters that have new memory.
        """
        found = []
        for name in {*self.out, *self.gradients} & slots.keys():
            slot = slots[name]
            if name in self.out:
                slot.parameter.data = slot.parameter.detach().clone()
                slot.look()
                found.append(name)
            if slot.parameter.grad is not None:
                slot.parameter.grad = slot.parameter.grad.clone()
        return found


class Exchanges:
    """The exchanges in flight of one optimizer.

    Args:
        store: The store.
        on_end: Called with each exchange that has ended, in order, by the thread that calls `settle`.
        on_failure: Called with each exchange that has failed, unless a gradient was not finite or the wait
            was interrupted. The store may still read its gradients and fill `Exchange.out`.
    """

    def __init__(
        self,
        store: ParameterStore,
        on_end: Callable[[Exchange], None],
        on_failure: Callable[[Exchange], None],
    ) -> None:
        self._store = store
        self._on_end = on_end
        self._on_failure = on_failure
        self._open: deque[Exchange] = deque()

    def __iter__(self) -> Iterator[Exchange]:
        """Iterate over the exchanges in flight, the oldest first."""
        return iter(self._open)

    def begin(self, exchange: Exchange) -> None:
        """Begin an exchange after the earlier ones."""
        exchange.call = self._store.begin(exchange.run)
        self._open.append(exchange)

    def raise_failure(self) -> None:
        """Remove the first exchange that has failed, and raise its error; do nothing if none has."""
        for exchange in self._open:
            if exchange.call.done() and exchange.call.exception() is not None:
                self._open.remove(exchange)
                self._wait(exchange)

    def settle(self, most: int) -> None:
        """Wait until at most `most` exchanges are in flight; except in bsp, also end those that are answered.

        Raises:
            AdamError: The error of the first exchange that failed.
        """
        # In bsp all clients take an answer after the same step, so no result depends on when it arrives.
        takes_early = self._store.consistency != "bsp"
        while self._open and (len(self._open) > most or (takes_early and self._open[0].call.done())):
            exchange = self._open.popleft()
            self._wait(exchange)
            self._on_end(exchange)

    def abandon(self, *, wait: bool) -> None:
        """Forget the exchanges of a failed step, and ignore their errors.

        Args:
            wait: Whether to wait for their ends; if not, the store's thread ends them without the caller.
        """
        while self._open:
            if not wait:
                self._on_failure(self._open.popleft())
                continue
            try:
                self.settle(0)
            except AdamError:
                continue

    def _wait(self, exchange: Exchange) -> None:
        try:
            exchange.call.wait()
        except BaseException as error:
            if isinstance(error, StoreError) and (fault := fault_of(exchange.gradients)):
                raise StoreError(fault) from error  # nothing was sent
            self._on_failure(exchange)
            raise


def check_cadence(
    push_every: int, pull_every: int, most: int, consistency: str, *, overlap: bool, factors: bool
) -> None:
    """Check how often an optimizer pushes and pulls, and how many exchanges may be in flight.

    Raises:
        ConfigError: A number is out of range, or does not fit the consistency, `overlap` or `factors`.
    """
    for name, value, least in (
        ("push_every", push_every, 1),
        ("pull_every", pull_every, 1),
        ("max_staleness", most, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is a whole number of at least {least}, not {value!r}")
    if consistency == "bsp" and pull_every > 1:
        raise ConfigError(
            f"pull_every={pull_every} does not fit a store with consistency bsp, in which each step reads "
            "the values of the step before: use pull_every=1, and push_every=N for fewer exchanges"
        )
    if consistency == "bsp" and most > 1:
        raise ConfigError(
            f"max_staleness={most} does not fit a store with consistency bsp, whose clients may be at most "
            "one step ahead: use 0 or 1"
        )
    if overlap and (push_every > 1 or most > 0):
        raise ConfigError(
            f"overlap=True needs push_every=1 and max_staleness=0, not push_every={push_every} and "
            f"max_staleness={most}: it pushes each gradient during its backward pass"
        )
    if factors and (push_every > 1 or overlap):
        raise ConfigError(
            f"factors=True needs push_every=1 and overlap=False, not push_every={push_every} and "
            f"overlap={overlap}: sums of gradients, and gradients pushed ahead, are dense"
        )


class LocalSteps:
    """Local steps, and the pushes whose effect the module's values have or lack.

    Args:
        rules: Rule of each array.
        are_taken: Whether the optimizer takes local steps.

    Attributes:
        plain: Names of the arrays whose parameters take local steps.
        behind: Names of the arrays with pushes whose effect the module's values lack.
    """

    def __init__(self, rules: Mapping[str, AnyRule], *, are_taken: bool) -> None:
        self.are_taken = are_taken
        self.plain = frozenset(name for name, rule in rules.items() if isinstance(rule, Sgd))
        self.behind: set[str] = set()
        self._exact = frozenset(
            name for name in self.plain if are_taken and rules[name] == Sgd(rate=rules[name].rate)
        )
        """Names of the arrays whose local steps equal those of the servers."""
        self._read: ReadVersions | None = None
        self._own: dict[str, int] = {}

    @property
    def store(self) -> str:
        """Id of the store whose values were read; empty before the first pull."""
        return "" if self._read is None else self._read.store

    @property
    def read(self) -> ReadVersions | None:
        """Versions of the module's values, for a push."""
        if self._read is None or not self._own:
            return self._read
        return replace(self._read, own=dict(self._own))

    def begun(self, exchange: Exchange) -> None:
        """Note a push in flight, which the module's values may lack."""
        self.behind.update(exchange.gradients.keys() - self._exact)

    def count(self, names: Iterable[str]) -> None:
        """Count a push that the module's values have by a local step."""
        self.count_all(name for name in names if name in self.plain)

    def count_all(self, names: Iterable[str]) -> None:
        """Count a push, or an assignment, that the module's values have."""
        for name in names:
            self._own[name] = self._own.get(name, 0) + 1

    def take(self, slots: Mapping[str, Slot], gradients: Mapping[str, Found], rates: Sequence[float]) -> None:
        """Subtract rate * gradient from the parameters with the rule `Sgd`."""
        for name in self.plain.intersection(gradients):
            slot, gradient = slots[name], gradients[name]
            dense = gradient if isinstance(gradient, Tensor) else gradient.dense()
            slot.parameter.sub_(dense, alpha=rates[slot.group])

    def pulled(
        self,
        slots: Mapping[str, Slot],
        names: Collection[str],
        installed: Iterable[str],
        later: Iterable[Exchange],
    ) -> None:
        """Take note of pulled values, and repeat the local steps of pushes in flight, which the values lack.

        Other parameters, such as those that were frozen at the pull, still have their local step.

        Args:
            names: The pulled parameters.
            installed: Parameters that got pulled values; others keep values that have the local steps.
            later: Exchanges in flight.
        """
        installed = frozenset(installed)
        for name in names:
            self._own.pop(name, None)
        self.behind.difference_update(installed)
        for exchange in later:
            self.begun(exchange)
            if not self.are_taken:
                continue
            assert exchange.staging is not None
            again = self.plain.intersection(names).intersection(exchange.gradients)
            rate = exchange.rate
            for name in again & installed:
                parameter, gradient = slots[name].parameter, exchange.gradients[name]
                if isinstance(gradient, Factors):
                    product = torch.from_numpy(gradient.errors.T @ gradient.activations)
                    dense = product.to(parameter.device)
                else:
                    dense = exchange.staging.gradients.views[name]
                parameter.sub_(dense, alpha=rate[name] if isinstance(rate, dict) else rate)
            self.count_all(again)

    def note_read(self, read: ReadVersions) -> None:
        """Note the versions of pulled values; parameters that were not pulled keep theirs."""
        if self._read is not None:
            known = np.where(read.of_shards < 0, self._read.of_shards, read.of_shards)
            read = replace(read, of_shards=known)
        self._read = read

    def restart(self, read: ReadVersions) -> None:
        """Begin anew at values of all parameters."""
        self._read = read
        self._own.clear()
        self.behind.clear()
