"""Random programs of vectors, each beside the same program in NumPy: both have the same bits after each call.

The values are float64, and each rule is plain SGD of rate 1, whose rounding NumPy repeats. So a step that was
applied twice, or in part, or behind a later push, shows as another bit.
"""

import math

import numpy as np

from adam_async.store.vectors import Combine

ARRAYS = {"w": (37, 9), "b": (11,)}
SHARD_BYTES = 1024
"""Several shards of `w`, and one of `b`."""

NAMES = ("x", "y", "z")
"""Names of vectors; `z` is like `w` alone."""


def first_values():
    rng = np.random.default_rng(7)
    return {name: rng.normal(size=shape) for name, shape in ARRAYS.items()}


def combined(terms, like):
    """Return a sum of scaled arrays, with the rounding of the servers."""
    total = np.zeros_like(like)
    for at, (coefficient, array) in enumerate(terms):
        total = array * coefficient if at == 0 else total + array * coefficient
    return total


def dot_of(store, pairs):
    """Return the dot product of arrays, which are rounded once for each shard, and then once in all."""
    shards = store._calls.layout.table.by_tensor
    return math.fsum(
        math.fsum((x.reshape(-1)[s.start : s.stop] * y.reshape(-1)[s.start : s.stop]).tolist())
        for name, (x, y) in pairs.items()
        for s in shards[name]
    )


class Program:
    """A random program of one client.

    Attributes:
        values: The values by operand (`*` or a vector) and array, as NumPy has them.
    """

    def __init__(self, dice):
        self.dice = dice
        self.values = {"*": first_values()}
        self.results = []

    async def run(self, store, calls):
        """Make random calls, and compare each result."""
        for vector in store.vectors:
            self.values.setdefault(vector, {})
        for _ in range(calls):
            await self._call(store)
        await self.check(store)

    async def _call(self, store):
        ways = [self._add, self._push, self._step, self._step, self._step, self._pull]
        vectors = [name for name in self.values if name != "*"]
        if not vectors:
            await self._add(store)
        elif len(vectors) == 3 and self.dice.random() < 0.1:
            name = self.dice.choice(vectors)
            await store.delete_vector(name)
            del self.values[name]
        else:
            await self.dice.choice(ways)(store)

    async def _add(self, store):
        absent = [name for name in NAMES if name not in self.values]
        if absent:
            name = self.dice.choice(absent)
            arrays = ("w",) if name == "z" else tuple(ARRAYS)
            await store.add_vector(name, like="w" if name == "z" else None, temporary=name == "y")
            self.values[name] = {array: np.zeros(ARRAYS[array]) for array in arrays}

    def _some(self):
        rng = np.random.default_rng(self.dice.randrange(1 << 30))
        return rng, rng.normal(size=1)[0] * 10.0 ** self.dice.randint(-3, 3)

    async def _push(self, store):
        target = self.dice.choice([*self.values])
        rng, scale = self._some()
        arrays = [name for name in self.values[target] if self.dice.random() < 0.7]
        given = {name: rng.normal(size=ARRAYS[name]) * scale for name in arrays}
        vector = "" if target == "*" else target
        if self.dice.random() < 0.3:
            await store.assign(given, vector=vector)
            self.values[target] |= given
            return
        await store.push(given, vector=vector)
        for name, gradient in given.items():
            # Plain SGD subtracts; a vector adds.
            self.values[target][name] = self.values[target][name] + (gradient if vector else -gradient)

    async def _pull(self, store):
        target = self.dice.choice([*self.values])
        found = await store.pull(vector="" if target == "*" else target)
        assert {*found} == {*self.values[target]}
        for name, array in found.items():
            assert array.tobytes() == self.values[target][name].tobytes(), (target, name)

    async def _step(self, store):
        values = {operand: dict(arrays) for operand, arrays in self.values.items()}
        commands, dots, wanted = [], [], []
        for _ in range(self.dice.randint(0, 4)):
            into = self.dice.choice([*values, "w"])
            arrays = {"w": 0} if into == "w" else values[into]
            sources = [name for name in values if arrays.keys() <= values[name].keys()]
            picked = [self.dice.choice(sources) for _ in range(self.dice.randint(0, 4))]
            terms = [(self.dice.choice((1.0, -1.0, self.dice.uniform(-1, 1))), name) for name in picked]
            commands.append(Combine(into, terms))
            target = values["*" if into == "w" else into]
            target |= {
                name: combined([(c, values[each][name]) for c, each in terms], target[name])
                for name in arrays
            }
        for _ in range(self.dice.randint(0, 3)):
            one, other = self.dice.choice([*values]), self.dice.choice([*values])
            dots.append((one, other))
            both = values[one].keys() & values[other].keys()
            wanted.append(dot_of(store, {name: (values[one][name], values[other][name]) for name in both}))
        found = await store.step(commands, dots)
        assert found == wanted, (commands, dots)
        self.values = values
        self.results += found

    async def check(self, store):
        """Compare all values."""
        for target, arrays in self.values.items():
            found = await store.pull(vector="" if target == "*" else target)
            for name, array in arrays.items():
                assert found[name].tobytes() == array.tobytes(), (target, name)
