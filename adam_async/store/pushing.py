"""The messages of one push of a store, from gradients by name, and the collection of their answers."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import StoreError
from adam_async.messages import REFUSED, Pushed
from adam_async.run.arrays import Factors
from adam_async.run.store_record import ArrayRecord
from adam_async.store.arrays import Gradient, flat_factors, flat_values, names_in
from adam_async.store.layout import FactorMessage, ShardMessage, StoreLayout, StorePlan
from adam_async.store.values import PushOutcome, RefusedShard
from transport import RemoteProtocolError

MOST_RATE = 1e12
"""Largest accepted learning rate."""

MOST_WEIGHT = (1 << 32) - 1
"""Largest accepted weight of a push."""


Rate = float | Mapping[str, float] | None
"""Learning rate of a push, or the rates of its arrays by name; None for those of the rules."""

NoteVersions = Callable[["slice | NDArray[np.intp]", Sequence[int]], None]
"""Callback with an index of shards, and their versions in an answer."""


class Outgoing(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One message of a push."""

    shards: ShardMessage | FactorMessage
    """The shards, and their server."""
    tensors: Sequence[NDArray[Any]]
    rate: float


class PushMessages:
    """Makes the messages of pushes.

    Args:
        layout: Shards of the store.
        rates: Default rate of each rule.
        is_summed: Whether servers apply the mean of the gradients of a step.
    """

    def __init__(self, layout: StoreLayout, rates: tuple[float, ...], *, is_summed: bool) -> None:
        self._layout = layout
        self._rates = rates
        self._is_summed = is_summed

    def plan(self, names: Iterable[str], rate: Rate) -> StorePlan:
        """Return the messages for the shards of arrays; no message has arrays with different rates."""
        if not isinstance(rate, Mapping):
            return self._layout.plan(tuple(names))
        groups: dict[float | None, list[str]] = {}
        for name in names:
            groups.setdefault(rate.get(name), []).append(name)
        return self._layout.plan(*[tuple(group) for group in groups.values()])

    def messages(
        self, gradients: Mapping[str, Gradient], rate: Rate, weight: int, assign: bool
    ) -> list[Outgoing]:
        """Return the messages of a push, in the order of `plan` if no gradient is `Factors`.

        Args:
            gradients: Names to gradients, or to values with `assign`.
            rate: Learning rate, of all arrays or by name; None, and an absent name, for that of the rule.
            weight: Weight of the gradients in the mean of a step.
            assign: Whether the values replace the values of the store.

        Raises:
            StoreError: A name, shape, type or value does not fit.
        """
        if type(gradients) is not dict and not isinstance(gradients, Mapping):
            raise StoreError(f"a push takes a mapping of names to arrays, not {type(gradients).__name__}")
        rate = self._checked_rates(rate)
        if not isinstance(weight, int) or not 1 <= weight <= MOST_WEIGHT:
            raise StoreError(f"weight is a whole number from 1 to {MOST_WEIGHT}, not {weight!r}")
        layout = self._layout
        plan = self.plan(gradients, rate)
        what = "value" if assign else "gradient"
        scaled = weight != 1 and self._is_summed
        gathered = plan.gather(gradients)
        if gathered is not None:
            return [
                self._outgoing(message, values * message.dtype.type(weight) if scaled else values, rate)
                for message, values in zip(plan.messages, gathered, strict=True)
            ]
        flat: dict[str, NDArray[Any]] = {}
        found: list[Outgoing] = []
        for name, gradient in gradients.items():
            record = layout.arrays[name]
            if isinstance(gradient, Factors) and not assign:
                activations, errors = flat_factors(record, gradient)
                if scaled:
                    errors = errors * record_type(record)(weight)
                outgoing = self._factors_of(name, activations, errors, rate)
                sent = activations.nbytes * len(outgoing or ()) + errors.nbytes
                if outgoing is not None and sent <= record.nbytes:
                    found += outgoing
                else:  # the product has fewer bytes, or shards cut its rows
                    with np.errstate(over="ignore", invalid="ignore"):  # the server refuses the shard
                        flat[name] = (errors @ activations.T).reshape(-1)
                continue
            flat[name] = flat_values(record, gradient, what)
            if scaled:
                flat[name] = flat[name] * record_type(record)(weight)
        if len(flat) < len(gradients):
            plan = self.plan(flat, rate)
        found += [self._outgoing(message, message.gather(flat), rate) for message in plan.messages]
        return found

    def _checked_rates(self, rate: Rate) -> Rate:
        if rate is None:
            return None
        if not isinstance(rate, Mapping):
            return _checked_rate(rate)
        names_in(self._layout.arrays, tuple(rate))
        return {name: _checked_rate(each) for name, each in rate.items()}

    def _rate_of(self, name: str, rule: int, rate: Rate) -> float:
        of_array = rate.get(name) if isinstance(rate, Mapping) else rate
        return self._rates[rule] if of_array is None else of_array

    def _outgoing(self, message: ShardMessage, values: NDArray[Any], rate: Rate) -> "Outgoing":
        # The arrays of a message have one rate.
        return Outgoing(
            shards=message, tensors=(values,), rate=self._rate_of(message.names[0], message.rule, rate)
        )

    def _factors_of(
        self, name: str, activations: NDArray[Any], errors: NDArray[Any], rate: Rate
    ) -> list[Outgoing] | None:
        """Return messages of all activations and the errors of a server's rows; None if shards cut rows."""
        messages = self._layout.factor_messages(name)
        if messages is None:
            return None
        found = []
        for message in messages:
            rows = (
                errors[message.rows[0]]
                if len(message.rows) == 1
                else np.concatenate([errors[part] for part in message.rows])
            )
            found.append(
                Outgoing(
                    shards=message,
                    tensors=(activations, rows),
                    rate=self._rate_of(name, message.rule, rate),
                )
            )
        return found


class Collector:
    """Counts the messages of one call whose answers are missing.

    Args:
        messages: Number of messages.
        on_end: Called once with the collector, when all messages are answered, or were not sent.
    """

    def __init__(self, messages: int, on_end: "Callable[[Collector], None]") -> None:
        self._left = messages
        self._on_end = on_end
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that ends with the call, unless its caller was cancelled."""

    def freed(self) -> None:
        """Note that a message is answered, and that no send reads its tensors."""
        self._left -= 1
        if self._left <= 0:
            self._on_end(self)
            if not self.done.done():
                self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """End an unsent call with an error."""
        self._on_end(self)
        if not self.done.done():
            self.done.set_exception(error)


class PushCollector(Collector):
    """Collects the answers of one push.

    Args:
        layout: Shards of the store.
        note_versions: Takes the versions of each answer, with their index.
        messages: Number of messages.
        on_end: See `Collector`.
    """

    def __init__(
        self,
        layout: StoreLayout,
        note_versions: NoteVersions,
        messages: int,
        on_end: Callable[[Collector], None],
    ) -> None:
        super().__init__(messages, on_end)
        self._layout = layout
        self._note_versions = note_versions
        self._versions: dict[str, int] = {}
        self._refused: list[RefusedShard] = []

    def answered(self, message: Outgoing, answer: Pushed) -> None:
        """Take an answer.

        Raises:
            RemoteProtocolError: The answer has another number of versions, or a problem of another shard.
        """
        of = message.shards
        if len(answer.versions) != len(of.shards) or any(
            problem.index >= len(of.shards) for problem in answer.problems
        ):
            raise RemoteProtocolError(
                "versions",
                f"{len(answer.versions)} versions, and problems of shards "
                f"{[problem.index for problem in answer.problems[:8]]}, do not fit {len(of.shards)} shards",
            )
        self._note_versions(of.index, answer.versions)
        table, versions = self._layout.table.shards, self._versions
        if isinstance(of, ShardMessage) and of.whole:
            versions.update(zip(of.names, answer.versions, strict=True))
        else:
            for shard, version in zip(of.shards, answer.versions, strict=True):
                name = table[shard].tensor
                versions[name] = min(versions.get(name, version), version)
        for problem in answer.problems:
            if problem.status == REFUSED:
                spec = table[of.shards[problem.index]]
                self._refused.append(RefusedShard(name=spec.tensor, start=spec.start, stop=spec.stop))

    def outcome(self) -> PushOutcome:
        """Return the outcome; call it when `done` has ended."""
        return PushOutcome(versions=self._versions, refused=tuple(self._refused))


def record_type(record: ArrayRecord) -> Callable[[float], Any]:
    """Return the type of an array's values."""
    return np.float32 if record.dtype == "float32" else np.float64


def _checked_rate(rate: object) -> float:
    if isinstance(rate, Real) and 0 <= float(rate) <= MOST_RATE:
        return float(rate)
    raise StoreError(f"rate is a number from 0 to {MOST_RATE:g}, not {rate!r}")
