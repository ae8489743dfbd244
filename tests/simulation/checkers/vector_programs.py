"""Random programs of vectors, each beside the same program in NumPy: both have the same bits after each call.

The values are float64, and each rule is plain SGD of rate 1, whose rounding NumPy repeats. So a step that was
applied twice, in part, or behind a later push shows as another bit.

A program that lost its store opens it again. Then each shard is as it was after one of the last calls, its
parameters and all vectors together: a shard takes a step whole or not at all.
"""

import asyncio
import math
from collections.abc import Awaitable, Mapping

import numpy as np
from numpy.typing import NDArray

from adam_async.run.store_record import PARAMETERS
from adam_async.store.store import ParameterStore
from adam_async.store.vectors import Combine
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Violation

ARRAYS: dict[str, tuple[int, ...]] = {"w": (37, 9), "b": (11,)}
SHARD_BYTES = 1024
"""Several shards of `w`, and one of `b`."""

NAMES = ("x", "y", "z")
"""Names of vectors; `z` is like `w` alone."""

MOST_AT_ONCE = 3
"""Maximum number of calls whose answers a program awaits at a time."""

HEARD_S = 1.0
"""Time after which all servers have heard of a new or a deleted vector, in seconds."""

Values = NDArray[np.float64]
State = Mapping[int, Mapping[str, Values]]
"""Values of each array, by vector number; the parameters have number 0."""


def first_values() -> dict[str, Values]:
    """Return the values of a new store."""
    dice = RandomStream("first values")
    return {name: drawn(dice, name) for name in ARRAYS}


def drawn(dice: RandomStream, name: str) -> Values:
    """Return random values of an array."""
    values = [dice.between(-1.0, 1.0) for _ in range(math.prod(ARRAYS[name]))]
    return np.array(values).reshape(ARRAYS[name])


def combined(terms: list[tuple[float, Values]], like: Values) -> Values:
    """Return a sum of scaled arrays, with the rounding of the servers."""
    total = np.zeros_like(like)
    for at, (coefficient, array) in enumerate(terms):
        total = array * coefficient if at == 0 else total + array * coefficient
    return total


def dot_of(store: ParameterStore, pairs: Mapping[str, tuple[Values, Values]]) -> float:
    """Return the dot product of arrays, which are rounded once for each shard, and then once in all."""
    shards = store.link.calls.layout.table.by_tensor
    return math.fsum(
        math.fsum((x.reshape(-1)[s.start : s.stop] * y.reshape(-1)[s.start : s.stop]).tolist())
        for name, (x, y) in pairs.items()
        for s in shards[name]
    )


class Program:
    """A random program of one client.

    Args:
        keeps_all: Whether a lost store comes back with all answered calls; otherwise each shard may be as it
            was after any call since the last return.

    Attributes:
        numbers: Numbers of the vectors by name, and 0 of the parameters.
        results: Dot products of each step, in the order of the calls, which answers need not have.
    """

    def __init__(self, dice: RandomStream, *, keeps_all: bool = True) -> None:
        self._dice = dice
        self._keeps_all = keeps_all
        self._states: list[State] = [{0: first_values()}]
        """States that a shard may have if the store is lost now; the last one comes after all calls."""
        self.numbers = {PARAMETERS: 0}
        self._changed: dict[str, float] = {}
        """By name, times at which the newest vectors were added or deleted: disks may lack these changes."""
        self.results: list[list[float]] = []

    @property
    def _values(self) -> State:
        return self._states[-1]

    async def run(self, store: ParameterStore, calls: int) -> None:
        """Make random calls, and compare each result. Raises Violation."""
        for _ in range(calls):
            await self.call(store)
        await self.check(store)

    async def call(self, store: ParameterStore) -> None:
        """Make a random call, or several at once, and compare the results. Raises Violation."""
        dice, vectors = self._dice, [name for name in self.numbers if name != PARAMETERS]
        begun_s = asyncio.get_running_loop().time()
        if not vectors or (len(vectors) < len(NAMES) and dice.chance(1 / 6)):
            await self._add(store, dice.choose([name for name in NAMES if name not in vectors]))
        elif len(vectors) == len(NAMES) and dice.chance(0.1):
            await self._delete(store, dice.choose(vectors))
        elif dice.chance(0.2):
            await self._pull(store, dice.choose([*self.numbers]))
        else:
            several = 1 + dice.below(MOST_AT_ONCE)
            # A client's first call has to join the other clients, and later calls keep their order.
            several = several if store.link.calls.has_begun else 1
            async with asyncio.TaskGroup() as group:
                for _ in range(several):
                    begun = asyncio.Event()
                    made = dice.choose((self._push, self._step, self._step))(store)
                    group.create_task(_begin(made, begun), name="program/call")
                    # The next call must have the next number.
                    await begun.wait()
        if self._keeps_all:
            del self._states[:-1]
            self._changed = {name: at for name, at in self._changed.items() if at > begun_s - HEARD_S}

    async def _add(self, store: ParameterStore, name: str) -> None:
        self._note_change(name)
        await store.add_vector(name, like="w" if name == "z" else None, temporary=name == "y")
        self._note_change(name)
        number = self.numbers[name] = store.vectors[name].number
        arrays = ("w",) if name == "z" else tuple(ARRAYS)
        self._states.append({**self._values, number: {array: np.zeros(ARRAYS[array]) for array in arrays}})

    async def _delete(self, store: ParameterStore, name: str) -> None:
        self._note_change(name)
        await store.delete_vector(name)
        self._note_change(name)
        del self.numbers[name]  # the values stay, because the store may come back from the disks

    def _note_change(self, name: str) -> None:
        self._changed[name] = asyncio.get_running_loop().time()

    def _push(self, store: ParameterStore) -> Awaitable[object]:
        dice, target = self._dice, self._dice.choose([*self.numbers])
        scale = 10.0 ** (dice.below(7) - 3)
        number, vector = self.numbers[target], "" if target == PARAMETERS else target
        old = self._values[number]
        given = {name: drawn(dice, name) * scale for name in old if dice.chance(0.7)}
        if dice.chance(0.3):
            self._states.append({**self._values, number: {**old, **given}})
            return store.assign(given, vector=vector)
        # Plain SGD subtracts; a vector adds.
        new = {name: old[name] + (each if vector else -each) for name, each in given.items()}
        self._states.append({**self._values, number: {**old, **new}})
        return store.push(given, vector=vector)

    def _step(self, store: ParameterStore) -> Awaitable[object]:
        dice, numbers = self._dice, self.numbers
        values = {name: dict(self._values[number]) for name, number in numbers.items()}
        commands, dots, wanted = [], [], []
        for _ in range(dice.below(5)):
            into = dice.choose([*values, "w"])
            target = values[PARAMETERS if into == "w" else into]
            arrays = ["w"] if into == "w" else [*target]
            sources = [name for name in values if values[name].keys() >= {*arrays}]
            terms = [
                (dice.choose((1.0, -1.0, dice.between(-1, 1))), dice.choose(sources))
                for _ in range(dice.below(5))
            ]
            commands.append(Combine(into, terms))
            target |= {
                name: combined([(c, values[each][name]) for c, each in terms], target[name])
                for name in arrays
            }
        for _ in range(dice.below(4)):
            one, other = dice.choose([*values]), dice.choose([*values])
            dots.append((one, other))
            both = values[one].keys() & values[other].keys()
            wanted.append(dot_of(store, {name: (values[one][name], values[other][name]) for name in both}))
        self._states.append({**self._values, **{number: values[name] for name, number in numbers.items()}})

        results: list[float] = []
        self.results.append(results)

        async def step() -> None:
            found = await store.step(commands, dots)
            if found != wanted:
                raise Violation("bits of vectors", f"{dots} behind {commands} are {found}, not {wanted}")
            results.extend(found)

        return step()

    async def _pull(self, store: ParameterStore, target: str) -> None:
        found, wanted = await pulled(store, target), self._values[self.numbers[target]]
        wrong = [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]
        if wrong or found.keys() != wanted.keys():
            raise Violation("bits of vectors", f"{target!r} differs in {wrong}")

    async def check(self, store: ParameterStore) -> None:
        """Compare all values. Raises Violation."""
        if store.vectors.keys() != self.numbers.keys() - {PARAMETERS}:
            raise Violation("bits of vectors", f"the store has vectors {[*store.vectors]} of {self.numbers}")
        for target in self.numbers:
            await self._pull(store, target)

    async def opened(self, store: ParameterStore) -> None:
        """Compare an opened store with what its shards may have, and continue with that.

        Raises:
            Violation: A shard has the values of no call, or the store has other vectors.
        """
        there = {name: vector.number for name, vector in store.vectors.items()}
        wanted = {name: number for name, number in self.numbers.items() if number}
        lost = [name for name in {*there, *wanted} if there.get(name) != wanted.get(name)]
        if self._keeps_all and not self._changed.keys() >= {*lost}:
            raise Violation("bits of vectors", f"the store came back with {there} of {wanted}")
        found = {0: await pulled(store, PARAMETERS)}
        for name, number in there.items():
            found[number] = await pulled(store, name)
        shards = store.link.calls.layout.table.by_tensor
        for array in ARRAYS:
            for part in [slice(shard.start, shard.stop) for shard in shards[array]]:
                mine = {n: arrays[array] for n, arrays in found.items() if array in arrays}
                if not any(_has(state, array, mine, part) for state in self._states):
                    raise Violation("bits of vectors", f"{array!r} {part} came back as after no call")
        self.numbers, self._states, self._changed = {PARAMETERS: 0, **there}, [found], {}


async def _begin(call: Awaitable[object], begun: asyncio.Event) -> None:
    """Make a call, which is in its client's queue when `begun` wakes a waiter."""
    begun.set()
    await call


async def pulled(store: ParameterStore, target: str) -> dict[str, Values]:
    """Pull the values of a vector, or the parameters."""
    return dict(await store.pull(vector="" if target == PARAMETERS else target))


def _has(state: State, array: str, found: Mapping[int, Values], part: slice) -> bool:
    """Return whether a state has these values, by number, in a part of an array; new vectors have zeros."""
    zeros = np.zeros(ARRAYS[array])
    wanted = [state.get(number, {}).get(array, zeros) for number in found]
    return all(
        each.reshape(-1)[part].tobytes() == value.reshape(-1)[part].tobytes()
        for each, value in zip(found.values(), wanted, strict=True)
    )
