"""One client's view of a store's vectors: names become numbers, and a step goes to all servers at once.

A step is one message to each server, of about 100 bytes for any number of arrays. A step takes its turn among
the client's pushes, and has the next number on every shard that is pushed to.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import RunFailed, StoreError
from adam_async.messages import MOST_TERMS, REFUSED, Command, Commands, DotProduct, Pushed
from adam_async.messages.body import MOST_IN_A_META
from adam_async.model.vectors import rounded_sum
from adam_async.run.store_record import MOST_VECTORS, PARAMETERS, VectorRecord
from adam_async.store.calls import Call, Calls
from transport import RemoteProtocolError

MOST_APART = 1024
"""Maximum number of a server's shards with different push numbers, which a step then has to name."""

MOST_COMMAND_BYTES = 6 << 10
"""Maximum size of a step's commands, in bytes of MessagePack. A frame's meta (16 KiB) has the numbers of
`MOST_APART` shards besides."""


class StepRefused(StoreError):
    """A shard refused a step: a result is not finite, or another client deleted a vector."""


class Combine(NamedTuple):
    """A sum of scaled vectors that replaces a vector: copy, zero, scale and sum are cases of it.

    Attributes:
        into: Name of a vector or of an array, or `PARAMETERS`.
        terms: Coefficient and name of each term, in the order of the sum; none for zeros.
    """

    into: str
    terms: Sequence[tuple[float, str]]


class _Operand(NamedTuple):
    number: int
    array: str
    """Name of an array if it is the operand, else empty."""
    arrays: frozenset[str]
    """Arrays that the operand has values for."""


class StepCall(Call, kw_only=True, eq=False):
    """One step on vectors, from its place in the queue to its last answer."""

    commands: Commands
    shards: Mapping[str, tuple[Any, ...]]
    """Shards that are pushed to, by server."""
    _parts: list[tuple[tuple[float, ...], ...]] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = len(self.shards)

    def send(self) -> None:
        """See `Call`."""
        calls = self.calls
        if calls.is_summed:
            calls.note_pushed(self.shards.values(), assign=True)
        for server, shards in self.shards.items():
            last = calls.connections[server].numbers.last(shards)
            if not isinstance(last, int) and len(last) > MOST_APART:
                raise StoreError(
                    f"this client has pushed to the {len(last)} shards on {server} at different times, and a "
                    f"step names at most {MOST_APART} of them: make the steps by another client"
                )
        for number, (server, shards) in enumerate(self.shards.items()):
            calls.connections[server].push(
                *((), self, number),
                parts=(),
                shards=shards,
                versions=0,
                own_applied=0,
                clock=0,
                weight=1,
                rate=0.0,
                assign=True,
                commands=self.commands,
            )
        if not self.shards:
            self.freed()

    def pushed(self, number: int, answer: Pushed, values: NDArray[Any] | None) -> None:
        """See `Call`. Raises RemoteProtocolError: the answer has other shards or dot products."""
        shards = [*self.shards.values()][number]
        for problem in answer.problems:
            if problem.index >= len(shards):
                raise RemoteProtocolError("problems", f"shard {problem.index} of {len(shards)}")
            if problem.status == REFUSED:
                self.refuse_shard(shards[problem.index])
        if answer.epoch is not msgspec.UNSET:
            self.calls.groups_epoch = max(self.calls.groups_epoch, answer.epoch)
        if len(answer.dots) == len(self.commands.dots):
            self._parts.append(answer.dots)
        elif answer.dots:
            raise RemoteProtocolError("dots", f"{len(answer.dots)} for {len(self.commands.dots)}")

    def results(self) -> list[float]:
        """Return the dot products; call it when `done` has ended.

        Raises:
            StepRefused: Some shards refused the step.
            StoreError: Some shards keep its dot products no longer.
        """
        if refused := self.outcome().refused:
            first = refused[0]
            raise StepRefused(
                f"a shard refused the step: a result is not finite in {first.name!r} between flat indices "
                f"{first.start} and {first.stop}, or another client deleted a vector; the shard is "
                "unchanged, others may have taken the step"
            )
        if len(self._parts) < len(self.shards):
            raise StoreError(
                "the servers have forgotten the dot products, or they take too many bits for one answer: "
                "make fewer steps at a time, with fewer dot products each"
            )
        return [rounded_sum([dots[at] for dots in self._parts]) for at in range(len(self.commands.dots))]


class StoreVectors:
    """A store's vectors, for one client."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    @property
    def found(self) -> Mapping[str, VectorRecord]:
        """The vectors by name."""
        return {vector.name: vector for vector in self._calls.newest.vectors}

    async def add(self, name: str, like: str | Iterable[str] | None, *, temporary: bool) -> None:
        """See `ParameterStore.add_vector`."""
        if not isinstance(name, str):
            raise StoreError(f"the name of a vector is a text, not {name!r:.80}")
        arrays = () if like is None else (like,) if isinstance(like, str) else tuple(like)
        if unknown := [each for each in arrays if each not in self._pushed_to()]:
            raise StoreError(f"vector {name!r}: the store has no array {unknown[0]!r} that is pushed to")
        new = VectorRecord(name, arrays, bool(temporary))

        def change(vectors: tuple[VectorRecord, ...]) -> tuple[VectorRecord, ...]:
            """Return the vectors with the new one added, unless they have it."""
            there = [each for each in vectors if each.name == name]
            # A repetition after an unknown outcome finds the vector of the first attempt.
            if there and msgspec.structs.replace(there[0], number=0) == new and there[0] not in before:
                return vectors
            if len(vectors) >= MOST_VECTORS:
                raise StoreError(f"a store has at most {MOST_VECTORS} vectors: delete one")
            return (*vectors, new)

        before = self._calls.newest.vectors
        await self._change(change)

    async def delete(self, name: str) -> None:
        """See `ParameterStore.delete_vector`."""
        self._vector(name)
        await self._change(lambda vectors: tuple([each for each in vectors if each.name != name]))

    async def _change(self, change: Any) -> None:
        try:
            await self._calls.change_vectors(change)
        except RunFailed as error:
            raise StoreError(
                f"the vectors of store {self._calls.name!r} stay as they are: {error}"
            ) from error

    def _vector(self, name: str) -> VectorRecord:
        vector = self.found.get(name)
        if vector is None:
            there = ", ".join(map(repr, sorted(self.found)[:5])) or "none"
            raise StoreError(f"the store has no vector {str(name)[:80]!r}; its vectors: {there}")
        return vector

    def number_of(self, name: str, arrays: Iterable[str]) -> int:
        """Return the number of a vector that has all of these arrays; 0 for an empty name."""
        if not name:
            return 0
        operand = self._operand(self._vector(name).name)
        self._check_covered(name, operand, frozenset(arrays))
        return operand.number

    def arrays_of(self, name: str) -> tuple[str, ...]:
        """Return the arrays of a vector, in the order of the store."""
        return tuple(
            [each for each in self._pushed_to() if each in self._operand(self._vector(name).name).arrays]
        )

    def _pushed_to(self) -> tuple[str, ...]:
        return tuple([each.name for each in self._calls.layout.arrays.values() if not each.frozen])

    def _operand(self, name: str) -> _Operand:
        if not isinstance(name, str):
            raise StoreError(f"the name of an operand is a text, not {name!r:.80}")
        pushed_to = self._pushed_to()
        if name == PARAMETERS:
            return _Operand(0, "", frozenset(pushed_to))
        if name in pushed_to:
            return _Operand(0, name, frozenset((name,)))
        vector = self._vector(name)
        return _Operand(vector.number, "", frozenset(vector.arrays or pushed_to))

    def _check_covered(self, name: str, operand: _Operand, arrays: frozenset[str]) -> None:
        if missing := arrays - operand.arrays:
            raise StoreError(f"{name[:80]!r} has no values for array {min(missing)[:80]!r}")

    def _command(self, into: str, terms: Sequence[tuple[float, str]]) -> Command:
        target = self._operand(into)
        _check_length(f"the terms of {into[:80]!r}", terms)
        checked: list[tuple[float, int]] = []
        for term in terms:
            coefficient, name = _pair("a term is (coefficient, name)", term)
            operand = self._operand(name)
            if not isinstance(coefficient, int | float | np.floating) or not isfinite(coefficient):
                raise StoreError(f"the coefficient of {name[:80]!r} is a finite number, not {coefficient!r}")
            self._check_covered(name, operand, target.arrays)
            checked.append((float(coefficient), operand.number))
        return Command(target.number, tuple(checked), target.array)

    def _dot(self, first: str, second: str) -> DotProduct:
        one, other = self._operand(first), self._operand(second)
        if one.arrays <= other.arrays:
            self._check_covered(second, other, one.arrays)
        else:
            self._check_covered(first, one, other.arrays)
        return DotProduct(one.number, other.number, one.array or other.array)

    async def step(self, commands: Sequence[Combine], dots: Sequence[tuple[str, str]]) -> list[float]:
        """See `ParameterStore.step`."""
        calls = self._calls
        calls.check()
        if not calls.has_begun or calls.is_reader:
            await calls.begin_push()
        _check_length("the commands of a step", commands)
        _check_length("the dot products of a step", dots)
        shards = calls.layout.pushed_to
        if (most := max(map(len, shards.values()), default=0)) > MOST_IN_A_META:
            raise StoreError(
                f"a server has {most} shards, and steps take {MOST_IN_A_META}: raise shard_bytes"
            )
        packed = Commands(
            tuple([self._command(*_pair("a command is Combine(into, terms)", each)) for each in commands]),
            tuple([self._dot(*_pair("a dot product is of (name, name)", each)) for each in dots]),
        )
        # In the queue of the client it would be too late: the calls behind the step would wait for it.
        if (size := len(msgspec.msgpack.encode(packed))) > MOST_COMMAND_BYTES:
            raise StoreError(
                f"the commands of a step take at most {MOST_COMMAND_BYTES} bytes, about 10 for each term, "
                f"and these take {size}: make several steps"
            )
        call = StepCall(
            calls=calls, done=calls.loop.create_future(), messages=(), commands=packed, shards=shards
        )
        calls.put(call)
        await call.done
        return call.results()


def _check_length(what: str, given: Sequence[Any]) -> None:
    if len(given) > MOST_TERMS:
        raise StoreError(f"{what} are at most {MOST_TERMS}, not {len(given)}: make several steps")


def _pair(what: str, given: Any) -> Sequence[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        raise StoreError(f"{what}, not {given!r:.80}")
    return given
