"""Pure: checks that the answers to the clients of a map agree with one order of all operations.

Each key of the map is a register: a version and a value; version 0 means absent. A compare-and-set that
expects the present version gives the key a new, higher version. The service chooses the version and never
gives it twice. Any other compare-and-set is a conflict and changes nothing. A history is *linearizable* if
each operation can take effect at one moment between its start and its end, so that all answers are those of
such a register.

    history = History(clock=loop.time)
    handle = history.begin("client-3", "nodes/a", CompareAndSet(expected=4, value=digest))
    ...                                            # send the question; then one of
    history.end(handle, Done(version=9))
    history.unknown(handle)                        # may take effect at any later time, or never
    history.refused(handle)                        # certainly had no effect
    check(history.operations())                    # raises NotLinearizable

A change by the service itself is recorded as a compare-and-set with an unknown outcome. A value is the part
that clients set, without additions of the service.

Theory of operation
-------------------
Keys are independent, so each key has a separate search. The search follows Wing and Gong. The search places
operations one after the other, each only if no unplaced operation must precede it, and goes back if it can
place none. As Lowe proposed, the search visits no set of placed operations twice with the same state.
Versions leave few choices:

- A key has each version only once, so the search places every operation that saw a version while the key has
  it. An operation that fits and changes nothing is placed at once, because it blocks no other.
- So the search leaves a version only after it has placed all such operations. If an operation is known to
  have replaced the version, the search places it next. An operation that saw the version and is unplaced at
  this point can never be placed.
- Otherwise an operation with an unknown outcome replaced the version. Among the possible operations, the
  first to begin is the best choice; the others can never take effect. The new version is the next version in
  any answer; the search has a choice only if other unknown operations expect versions in between.

An operation that ends at the moment at which another begins does not precede it. `History` never records one
moment twice, so it keeps one process's order even with a coarse clock.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

EXCERPT = 3
"""Maximum number of operations with an unknown outcome that an error names."""

MOST_STEPS = 1_000_000
"""Maximum number of search steps for one history, over all its keys; with more, the history is undecided."""


class NotLinearizable(Exception):
    """No order of the operations explains all answers.

    Args:
        operations: The contradicting operations, and the operations before them.
    """

    def __init__(self, key: str, why: str, operations: Sequence["Operation"]) -> None:
        super().__init__("\n  ".join([f"key {key}: {why}", *map(str, operations)]))
        self.key = key
        self.why = why
        self.operations = tuple(operations)


class Undecided(Exception):
    """The search took too long. The history may be linearizable or not."""


class WatchBroken(Exception):
    """A watcher missed, repeated or reordered a version, or two watchers saw different content."""


# --- operations of clients -----------------------------------------------------------------------


class Get(msgspec.Struct, frozen=True):
    """Read a key."""


class CompareAndSet(msgspec.Struct, frozen=True):
    """Set a key if it has this version."""

    expected: int
    """Version that the key must have; 0: the key must be absent."""
    value: str
    """The value, or a digest of it."""


class Read(msgspec.Struct, frozen=True):
    """Answer to a `Get`."""

    version: int
    """Version; 0 if absent."""
    value: str | None
    """Value; None if absent."""


class Done(msgspec.Struct, frozen=True):
    """A `CompareAndSet` took effect, and gave the key this version."""

    version: int


class Conflict(msgspec.Struct, frozen=True):
    """A `CompareAndSet` found another version than it expected."""

    version: int | None = None
    """The version found; None if the answer does not contain it."""


class Refused(msgspec.Struct, frozen=True):
    """The operation certainly had no effect."""


Question = Get | CompareAndSet
Answer = Read | Done | Conflict | Refused

_FITTING: dict[type, tuple[type, ...]] = {Get: (Read, Refused), CompareAndSet: (Done, Conflict, Refused)}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of a client on a key. Times are seconds of one clock for all clients."""

    client: str
    number: int
    """Number among the operations of the client's process."""
    key: str
    begun: float
    """Time before the question was sent."""
    asked: Question
    ended: float | None = None
    """Time after the answer; None without an answer: the operation may take effect at any later time, or
    never."""
    answer: Answer | None = None

    def __post_init__(self) -> None:
        if (self.ended is None) != (self.answer is None):
            raise ValueError(f"an operation has an end and an answer, or neither: {self}")
        if self.ended is not None and not self.begun <= self.ended:
            raise ValueError(f"an operation ends after it begins: {self}")
        if self.answer is not None and not isinstance(self.answer, _FITTING[type(self.asked)]):
            raise ValueError(f"the answer does not belong to the question: {self}")
        if isinstance(self.answer, Read) and (self.answer.version == 0) != (self.answer.value is None):
            raise ValueError(f"a value is None if and only if the version is 0: {self}")

    def __str__(self) -> str:
        match self.asked:
            case Get():
                asked = "get"
            case CompareAndSet(expected, value):
                asked = f"compare-and-set {expected} to {value!r}"
        match self.answer:
            case Read(version, found):
                answer = f"version {version}, {found!r}" if version else "absent"
            case Done(version):
                answer = f"done, version {version}"
            case Conflict(seen):
                answer = "conflict" if seen is None else f"conflict, version {seen}"
            case Refused():
                answer = "refused"
            case None:
                answer = "unknown"
        ended = "..." if self.ended is None else f"{self.ended:.6f}"
        return f"[{self.begun:.6f}, {ended}] {self.client}: {asked}: {answer}"


class History:
    """Records the operations of one process's clients.

    Args:
        clock: Time in seconds; the same clock in all processes whose histories are checked together.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = -math.inf
        self._operations: list[Operation] = []

    def begin(self, client: str, key: str, asked: Question) -> int:
        """Record an operation's start before its request is sent; return the handle for its end."""
        handle = len(self._operations)
        begun = self._moment()
        self._operations.append(Operation(client=client, number=handle, key=key, begun=begun, asked=asked))
        return handle

    def end(self, handle: int, answer: Answer) -> None:
        """Record the answer to an operation."""
        operation = self._operations[handle]
        if operation.ended is not None:
            raise ValueError(f"this operation has ended already: {operation}")
        self._operations[handle] = msgspec.structs.replace(operation, ended=self._moment(), answer=answer)

    def unknown(self, handle: int) -> None:
        """Leave an operation's outcome unknown, as it is without a call of `end`."""
        if self._operations[handle].ended is not None:
            raise ValueError(f"the outcome of this operation is known: {self._operations[handle]}")

    def refused(self, handle: int) -> None:
        """Record that an operation certainly has no effect, now or later."""
        self.end(handle, Refused())

    def operations(self) -> tuple[Operation, ...]:
        """Return all operations in start order; unfinished ones have an unknown outcome."""
        return tuple(self._operations)

    def _moment(self) -> float:
        self._last = max(self._clock(), math.nextafter(self._last, math.inf))
        return self._last


# --- the search ----------------------------------------------------------------------------------


def check(operations: Iterable[Operation], *, most_steps: int = MOST_STEPS) -> int:
    """Check that a history is linearizable, key by key, in at most `most_steps` steps of the search.

    Returns:
        Number of search steps; about two per operation.

    Raises:
        NotLinearizable: The history is not linearizable. The error names the key and the operations.
        Undecided: The search took more steps.
    """
    known = [operation for operation in operations if not isinstance(operation.answer, Refused)]
    _refuse_shared_versions(known)
    budget = _Budget(most_steps)
    keys: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in known:
        keys[operation.key].append(operation)
    for key in sorted(keys):
        _Register(key, keys[key], budget).search()
    return budget.steps


def _refuse_shared_versions(operations: Iterable[Operation]) -> None:
    makers: dict[int, Operation] = {}
    for operation in operations:
        if isinstance(operation.answer, Done):
            version = operation.answer.version
            if version in makers:
                other = makers[version]
                why = f"version {version} was given twice, the other time to key {other.key}"
                raise NotLinearizable(operation.key, why, [other, operation])
            makers[version] = operation


class _Budget:
    """Counts the steps of a search."""

    def __init__(self, most_steps: int) -> None:
        self.steps = 0
        self._most_steps = most_steps

    def step(self) -> None:
        """Count a step. Raises Undecided beyond the limit."""
        self.steps += 1
        if self.steps > self._most_steps:
            raise Undecided(f"not decided after {self._most_steps} steps; check a shorter history")


@dataclass(frozen=True, slots=True)
class _Position:
    """A position of the search: the placed operations, and the register's content after them."""

    low: int
    """Index of the first unplaced operation."""
    put: int
    """Bit mask of the placed operations; bit 0 is the operation at `low`."""
    version: int
    maker: Operation | None
    """Operation that made the version; for errors only."""

    @property
    def count(self) -> int:
        """Number of placed operations."""
        return self.low + self.put.bit_count()

    def has(self, index: int) -> bool:
        """Return whether an operation is placed."""
        return index < self.low or bool(self.put >> (index - self.low) & 1)

    def with_put(self, indices: Iterable[int]) -> "_Position":
        """Return the position with these operations placed, too."""
        put = self.put
        for index in indices:
            put |= 1 << (index - self.low)
        ones = (~put & (put + 1)).bit_length() - 1
        return _Position(self.low + ones, put >> ones, self.version, self.maker)


class _Register:
    """The operations on one key, indexed for the search.

    Attributes:
        answered: Operations with an answer, in start order. Indices refer to this list.
        ends: End of each operation in `answered`, in seconds.
        seen: For each version, the indices of operations that found it and changed nothing.
        replaced: For each version, the index of the operation that is known to have replaced it.
        unknown: For each version, the operations with unknown outcome that expect it, in start order.
        witnesses: For each version that the key certainly had, an operation that proves it.
        versions: Versions that the key certainly had, in order.
        guessed: Versions that unknown operations expect, in order.
        unnamed: A version above all seen and expected versions: the version that an unseen last change may
            have made.
        values: For each version with a known value, the value and an operation that proves it.
    """

    def __init__(self, key: str, operations: Sequence[Operation], budget: _Budget) -> None:
        self.key = key
        self.budget = budget
        self.answered: list[Operation] = []
        self.seen: defaultdict[int, list[int]] = defaultdict(list)
        self.replaced: dict[int, int] = {}
        self.unknown: defaultdict[int, list[Operation]] = defaultdict(list)
        self.witnesses: dict[int, Operation] = {}
        self.values: dict[int, tuple[str | None, Operation]] = {}
        for operation in sorted(operations, key=lambda operation: operation.begun):
            if operation.answer is not None:
                self._take(len(self.answered), operation)
                self.answered.append(operation)
            elif isinstance(operation.asked, CompareAndSet):
                self.unknown[operation.asked.expected].append(operation)
        self.ends = [math.inf if operation.ended is None else operation.ended for operation in self.answered]
        self.versions = sorted({0, *self.witnesses})
        self.guessed = sorted(self.unknown)
        expected = [each.asked.expected for each in operations if isinstance(each.asked, CompareAndSet)]
        self.unnamed = max(self.versions[-1], *expected, 0) + 1
        self._refuse_skipped_versions()

    def _take(self, index: int, operation: Operation) -> None:
        """Index an answered operation.

        Raises NotLinearizable if the answer contradicts itself or an earlier one.
        """
        match operation.asked, operation.answer:
            case Get(), Read(version, value):
                self.seen[version].append(index)
                self._witness(version, operation)
                self._value(version, value, operation)
            case CompareAndSet(expected, value), Done(version):
                if version <= expected:
                    raise self._refuse(f"version {version} does not come after version {expected}", operation)
                if expected in self.replaced:
                    other = self.answered[self.replaced[expected]]
                    raise self._refuse(f"version {expected} was replaced twice", other, operation)
                self.replaced[expected] = index
                self._witness(expected, operation)
                self._witness(version, operation)
                self._value(version, value, operation)
            case CompareAndSet(expected, _), Conflict(int(version)):
                if version == expected:
                    raise self._refuse("the expected version is no conflict", operation)
                self.seen[version].append(index)
                self._witness(version, operation)

    def _witness(self, version: int, operation: Operation) -> None:
        self.witnesses.setdefault(version, operation)

    def _value(self, version: int, value: str | None, operation: Operation) -> None:
        known, other = self.values.setdefault(version, (value, operation))
        if known != value:
            raise self._refuse(f"version {version} has two values", other, operation)

    def _refuse_skipped_versions(self) -> None:
        for expected, index in self.replaced.items():
            after = self.versions[bisect_right(self.versions, expected)]
            operation = self.answered[index]
            if isinstance(operation.answer, Done) and after < operation.answer.version:
                why = f"version {after} lies between the one that was expected and the one that replaced it"
                raise self._refuse(why, operation, self.witnesses[after])

    def _refuse(self, why: str, *operations: Operation) -> NotLinearizable:
        return NotLinearizable(self.key, why, operations)

    def search(self) -> None:
        """Find an order of all operations. Raises NotLinearizable if none exists."""
        furthest = place = _Position(0, 0, 0, None)
        waiting = [place]
        visited = set()
        while waiting:
            place = self._place_readers(waiting.pop())
            if place.low == len(self.answered):
                return
            if place.count >= furthest.count:
                furthest = place
            identity = place.low, place.put, place.version
            if identity not in visited:
                visited.add(identity)
                waiting.extend(self._nexts(place))
        raise self._explain(furthest)

    def _place_readers(self, place: _Position) -> _Position:
        """Place all operations that fit the present version and change nothing."""
        while True:
            self.budget.step()
            fitting = [index for index in self._ready(place) if self._fits(index, place.version)]
            if not fitting:
                return place
            place = place.with_put(fitting)

    def _ready(self, place: _Position) -> list[int]:
        """Return the operations that no unplaced operation must precede."""
        found: list[int] = []
        first_end = math.inf
        index, left = place.low, ~place.put  # all bits beyond those of `put` are 1
        while True:
            skipped = (left & -left).bit_length() - 1
            index += skipped
            if index >= len(self.answered) or self.answered[index].begun > first_end:
                return found
            found.append(index)
            first_end = min(first_end, self.ends[index])
            index += 1
            left >>= skipped + 1

    def _fits(self, index: int, version: int) -> bool:
        operation = self.answered[index]
        match operation.asked, operation.answer:
            case CompareAndSet(expected, _), Conflict(None):
                return version != expected
            case _, Read(seen) | Conflict(seen):
                return seen == version
        return False

    def _nexts(self, place: _Position) -> list[_Position]:
        """Return the positions after a replacement of the present version, the likeliest last."""
        version = place.version
        if any(not place.has(index) for index in self.seen.get(version, ())):
            return []
        ready = self._ready(place)
        maker = self.replaced.get(version)
        if maker is not None:
            if maker not in ready:
                return []
            operation = self.answered[maker]
            assert isinstance(operation.answer, Done)
            after = place.with_put([maker])
            return [_Position(after.low, after.put, operation.answer.version, operation)]
        first_end = min(self.ends[index] for index in ready)
        able = [each for each in self.unknown.get(version, ()) if each.begun <= first_end]
        found = []
        for new in self._successors(version) if able else ():
            first = next((each for each in able if self._may_make(each, new)), None)
            if first is not None:
                found.append(_Position(place.low, place.put, new, first))
        return found

    def _successors(self, version: int) -> list[int]:
        """Return the versions that may follow this one by an unknown operation, the likeliest last."""
        position = bisect_right(self.versions, version)
        certain = self.versions[position] if position < len(self.versions) else self.unnamed
        first, stop = bisect_right(self.guessed, version), bisect_left(self.guessed, certain)
        return [*reversed(self.guessed[first:stop]), certain]

    def _may_make(self, operation: Operation, version: int) -> bool:
        assert isinstance(operation.asked, CompareAndSet)
        return version not in self.values or self.values[version][0] == operation.asked.value

    def _explain(self, place: _Position) -> NotLinearizable:
        """Return the contradiction at which the search ended, with its operations."""
        version = place.version
        ready = self._ready(place)
        first = self.answered[min(ready, key=self.ends.__getitem__)]
        led = [place.maker] if place.maker is not None else []
        behind = [self.answered[index] for index in self.seen.get(version, ()) if not place.has(index)]
        if behind:
            why = (
                f"version {version} was over by {first.ended:.6f}, but was seen from {behind[0].begun:.6f} on"
            )
            return self._refuse(why, *led, first, behind[0])
        if first.answer == Conflict(None):
            why = f"the key had version {version} all the time until {first.ended:.6f}: that was no conflict"
        else:
            why = (
                f"version {version} was over by {first.ended:.6f}, but nothing had begun that can replace it"
            )
        maker = self.replaced.get(version)
        late = [self.answered[maker]] if maker is not None else self.unknown.get(version, [])[:EXCERPT]
        return self._refuse(why, *led, first, *late)


# --- watches -------------------------------------------------------------------------------------


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a watcher received."""

    watcher: str
    version: int
    digest: str
    """Digest of the watcher's copy of the whole map at this version."""
    whole: bool = False
    """Whether the watcher received the whole map instead of the changes since the version before."""


def check_watch(seen: Iterable[Sight]) -> None:
    """Check that each watcher received each version once and in order, and all watchers the same content.

    A watcher begins with version 1, or with a whole map. A later whole map may have the watcher's version or
    a newer one, from which the watch continues. All observations are of one group's map.

    Args:
        seen: Sights of all watchers; each watcher's are in order.

    Raises:
        WatchBroken: The watches break one of these rules. The error names watcher and version.
    """
    last: dict[str, int] = {}
    first: dict[int, Sight] = {}
    for sight in seen:
        before = last.get(sight.watcher, 0)
        if sight.whole:
            fits, wanted = sight.version >= before, f"{before} or later"
        else:
            fits, wanted = sight.version == before + 1, f"{before + 1}"
        if not fits:
            raise WatchBroken(f"{sight.watcher} received version {sight.version} instead of {wanted}")
        last[sight.watcher] = sight.version
        other = first.setdefault(sight.version, sight)
        if other.digest != sight.digest:
            raise WatchBroken(
                f"version {sight.version} is {sight.digest} for {sight.watcher}, "
                f"but {other.digest} for {other.watcher}"
            )
