"""Pure: the plan of a simulated run as data: its options, and its faults.

A plan and a seed determine a run. So a plan can be printed, saved, shrunk while it still fails, and run again
after a code change. The seed alone may then draw another plan.

    at 3.250 s crash worker-2 for 5.500 s
    at 9.125 s cut worker-1 controller for 0.750 s, amount 1

`shrink` makes a failing plan smaller while it still fails. The first steps leave out faults: all of them,
then half, then smaller parts (delta debugging: Zeller, Hildebrandt, 2002), until every fault is necessary.
Further steps make the remaining faults shorter and earlier, remove their amounts, and make the conditions
mild. Shrinking keeps a step only if the plan still fails, so the result fails, too.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

from adam_async.errors import ConfigError
from tests.simulation.random_streams import RandomStream
from tests.simulation.wire import Conditions

Setting = bool | int | float | str


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planned fault."""

    at_s: float
    """Earliest start in seconds of the run; the fault waits for an earlier fault with the same targets."""
    kind: str
    """Kind of the fault: one in `faults.KINDS`, or a kind of the scenario."""
    targets: tuple[str, ...] = ()
    """Machines of the fault; for a fault of one network direction, its source and its target."""
    lasts_s: float = 0.0
    """Duration in seconds, after which the fault is undone; 0 if it cannot be undone."""
    amount: float = 0.0
    """Degree of the fault, in its kind's unit; 0 for a kind without degrees."""

    def __post_init__(self) -> None:
        for name in ("at_s", "lasts_s", "amount"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} of a fault must be a number from 0 on, not {value}")

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.3f} s" if self.lasts_s else ""
        amount = f", amount {self.amount:g}" if self.amount else ""
        return f"at {self.at_s:.3f} s {' '.join((self.kind, *self.targets))}{lasts}{amount}"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions of a run."""

    shuffled: bool = False
    """Whether ready steps run in any order; otherwise they run first in, first out."""
    unkind: bool = False
    """Whether the fault points of product code are on; see `fault_points`."""
    network: Conditions = Conditions()
    """Behaviour of each direction between two machines."""
    together: str = "none"
    """Machines that are processes of one host, with links in shared memory: none, some or all."""
    settings: dict[str, Setting] = {}
    """Options of the scenario, such as the number of machines."""

    def __str__(self) -> str:
        network = {name: getattr(self.network, name) for name in self.network.__dataclass_fields__}
        own = {name: getattr(self, name) for name in ("shuffled", "unkind", "together")}
        pairs = {**own, **network, **self.settings}
        return ", ".join(f"{name} {value}" for name, value in pairs.items())


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All inputs that determine a run, except its seed."""

    options: Options
    faults: tuple[Fault, ...]


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One repeatable run: the content of FILE in `simulate --plan FILE`."""

    scenario: str
    seed: int
    plan: Plan


def draw_options(dice: RandomStream, settings: dict[str, Setting], *, may_share: bool = False) -> Options:
    """Draw the conditions of a run, mild for half of the runs and rough for the others.

    Args:
        dice: A random stream only for this call.
        may_share: Whether machines may be processes of one host.
    """
    rough = dice.chance(0.5)
    network = Conditions(
        delay_s=dice.choose([0.0001, 0.001, 0.005]),
        jitter_s=dice.choose([0.0005, 0.005, 0.02]),
        ragged=rough and dice.chance(0.7),
        duplicate=0.05 if rough and dice.chance(0.5) else 0.0,
        refuse=0.05 if rough and dice.chance(0.3) else 0.0,
    )
    return Options(
        shuffled=dice.chance(0.5),
        unkind=dice.chance(0.5),
        network=network,
        together=dice.choose(["none", "some", "all"]) if may_share else "none",
        settings=dict(settings),
    )


def in_order(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Return faults in the order of a plan: by their starts."""
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def read_case(data: bytes, *, origin: str) -> Case:
    """Read a saved run.

    Args:
        data: JSON of a `Case`.

    Raises:
        ConfigError: The data is no saved run.
    """
    try:
        return msgspec.json.decode(data, type=Case)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{origin} is no plan of a simulated run: {error}") from None


MOST_TRIES = 200
"""Maximum number of runs to shrink one plan."""

LEAST_S = 0.05
"""Minimum start and duration of a shrunk fault, in seconds."""

Fails = Callable[[Plan], bool]


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest failing plan, and the number of runs that found it."""

    plan: Plan
    tries: int


class _Tries:
    """Counts runs up to a limit; beyond it, every plan counts as passing."""

    def __init__(self, fails: Fails, most: int) -> None:
        self._fails = fails
        self._most = most
        self.made = 0

    def fails(self, plan: Plan) -> bool:
        """Run a plan, and return whether it fails; False without a run beyond the limit."""
        if self.made >= self._most:
            return False
        self.made += 1
        return self._fails(plan)


def shrink(plan: Plan, fails: Fails, *, most_tries: int = MOST_TRIES) -> Shrunk:
    """Shrink a plan.

    Args:
        fails: Whether a plan still fails in the same way.
        most_tries: Largest number of calls of `fails`.
    """
    tries = _Tries(fails, most_tries)
    plan = _fewer_faults(plan, tries)
    changed = True
    while changed and tries.made < most_tries:
        before = plan
        for simpler in (_simpler_faults, _kinder_options):
            plan = simpler(plan, tries)
        changed = plan != before
    return Shrunk(plan=plan, tries=tries.made)


def _fewer_faults(plan: Plan, tries: _Tries) -> Plan:
    parts = 2
    without_any = msgspec.structs.replace(plan, faults=())
    if plan.faults and tries.fails(without_any):
        return without_any
    while len(plan.faults) > 1:
        count = len(plan.faults)
        size = -(-count // parts)
        for start in range(0, count, size):
            fewer = msgspec.structs.replace(plan, faults=plan.faults[:start] + plan.faults[start + size :])
            if fewer.faults and tries.fails(fewer):
                plan, parts = fewer, max(parts - 1, 2)
                break
        else:
            if parts >= count:
                break
            parts = min(2 * parts, count)
    return plan


def _simpler_faults(plan: Plan, tries: _Tries) -> Plan:
    for fault in plan.faults:
        for name, value in _simpler(fault):
            if value >= getattr(fault, name):
                continue
            simpler = msgspec.structs.replace(fault, **{name: value})
            faults = list(plan.faults)
            faults[faults.index(fault)] = simpler
            candidate = msgspec.structs.replace(plan, faults=in_order(faults))
            if tries.fails(candidate):
                plan, fault = candidate, simpler
    return plan


def _simpler(fault: Fault) -> Iterator[tuple[str, float]]:
    """Yield changes that simplify a fault: fields with new values, the largest change first."""
    yield "amount", 0.0
    for name in ("lasts_s", "at_s"):
        value = getattr(fault, name)
        for smaller in (round(value / 4, 2), round(value / 2, 2), math.floor(10 * value) / 10):
            if smaller >= LEAST_S:
                yield name, smaller


def _kinder_options(plan: Plan, tries: _Tries) -> Plan:
    for change in ({"unkind": False}, {"shuffled": False}, {"together": "none"}, {"network": Conditions()}):
        options = msgspec.structs.replace(plan.options, **change)
        kinder = msgspec.structs.replace(plan, options=options)
        if kinder != plan and tries.fails(kinder):
            plan = kinder
    return plan
