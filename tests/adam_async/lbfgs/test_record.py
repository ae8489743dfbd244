"""The record of a coordinator: any change of it gives a state that goes on, or one error with the cure."""

import copy
import math

import msgspec
import numpy as np
import pytest

from adam_async import LBFGS
from adam_async.errors import StoreError
from adam_async.lbfgs.minimiser import POINT, Minimiser
from adam_async.lbfgs.optimizer import CoordinatorState, unwritten, written
from adam_async.store.store import ParameterStore
from tests.adam_async.lbfgs import problems
from tests.adam_async.lbfgs.test_minimiser import Vectors, iterates
from tests.simulation.random_streams import RandomStream

ANYTHING = (
    *(None, True, -1, 0, 1, 2, 11, 1 << 33, 0.0, -0.0, -1.5, 5e-324, 1e308, math.inf, math.nan),
    *("", "first", "turn", "search", "pair", "back", "done", [], [0], [0, 0], [3, 1, 2], [*range(11)], {}),
    {"g g": 0.0},
)
CHANGES = 600


def records():
    """Return the records of a short minimisation, of every phase, as plain values."""
    function, start = problems.whole(*problems.logistic())
    found = {}

    def keep(minimiser):
        state = CoordinatorState(minimiser=minimiser, store="store-1", evaluation=3, address="tcp://a:1")
        found[minimiser.phase, len(minimiser.slots)] = msgspec.to_builtins(state)
        return minimiser

    iterates(Minimiser(history=3), Vectors(function, start), most=6, between=keep)
    return [*found.values()]


RECORDS = records()


def places(value, path=()):
    """Yield the path of each field and item."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*path, key)
        yield from places(each, (*path, key))


def array_of(plain):
    packed = msgspec.msgpack.encode(plain)
    return written(msgspec.Raw(packed))


def goes_on(minimiser):
    """Make moves on vectors of any values, and check that each is one that servers take."""
    rng, names = np.random.default_rng(1), [POINT, *minimiser.vectors]
    servers = Vectors(lambda x: (float(x @ x) / 2, x.copy()), rng.normal(size=5))
    servers.vectors |= {name: rng.normal(size=5) for name in names if name != POINT}
    for _ in range(30):
        if minimiser.is_done:
            break
        move = minimiser.move
        assert all(math.isfinite(scale) for each in move.combine for scale, _ in each.terms)
        minimiser.take(*servers.make(move))


def test_a_record_with_changed_fields_goes_on_or_is_refused():
    refused = 0
    for seed in range(CHANGES):
        dice = RandomStream(f"{seed}")
        plain = copy.deepcopy(dice.choose(RECORDS))
        for _ in range(1 + dice.below(3)):
            *path, last = dice.choose([*places(plain)])
            inner = plain
            for key in path:
                inner = inner[key]
            if dice.chance(0.7):
                inner[last] = dice.choose(ANYTHING)
            else:
                del inner[last]
        refused += not goes_on_or_is_refused(array_of(plain))
    assert CHANGES / 10 < refused < CHANGES * 9 / 10


def test_a_record_with_changed_bytes_goes_on_or_is_refused():
    for seed in range(CHANGES):
        dice = RandomStream(f"{seed}")
        values = array_of(dice.choose(RECORDS))
        for _ in range(1 + dice.below(3)):
            values[dice.below(int(values[0]) // 2 + 2 if 0 < values[0] < 4000 else 9)] = dice.choose(
                (0.0, -1.0, math.nan, math.inf, 3e38, 0.5, *[dice.below(1 << 16)] * 6)
            )
        goes_on_or_is_refused(values)


def goes_on_or_is_refused(values):
    """Return whether a minimisation goes on from the record."""
    try:
        found = unwritten(values)
    except ValueError:
        return False
    if found is not None:
        with np.errstate(all="ignore"):
            goes_on(found.minimiser)
    return True


@pytest.mark.parametrize("phase", ["turn", "search", "pair", "back"])
@pytest.mark.parametrize(
    ("field", "value"), [("norm", 0.0), ("norm", 5e-324), ("first_norm", -1.0), ("norm_at_trial", 5e-324)]
)
def test_a_record_with_the_norm_of_no_gradient_is_refused(phase, field, value):
    plain = copy.deepcopy(next(each for each in RECORDS if each["minimiser"]["phase"] == "search"))
    plain["minimiser"]["phase"] = phase
    assert unwritten(array_of(plain)) is not None
    plain["minimiser"][field] = value
    with pytest.raises(ValueError, match=r"the norms .* of gradients"):
        unwritten(array_of(plain))


async def test_a_damaged_record_is_named_with_its_store_and_a_minimisation_begins_anew():
    arrays, function, batches = problems.logistic()
    plain = copy.deepcopy(RECORDS[-1])
    del plain["minimiser"]["products"]["g g"]
    async with ParameterStore.open("local", arrays, name="damaged") as store:
        record = {"record": array_of(plain)}
        async with ParameterStore.open("local", record, name="damaged.lbfgs"):
            with pytest.raises(
                StoreError, match=r"'damaged\.lbfgs' is damaged: it has no inner product 'g g'.* anew"
            ):
                await LBFGS(store, function, batches).minimise(3)
            assert (await LBFGS(store, function, batches).minimise(3, anew=True)).number == 3
