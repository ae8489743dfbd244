"""Pure: shrinks a failing plan while it still fails.

The first steps leave out faults: all of them, then half, then smaller parts (delta debugging: Zeller,
Hildebrandt, 2002), until every fault is necessary. Further steps make the remaining faults shorter and
earlier, remove their amounts, and make the conditions mild. `shrink` keeps a step only if the plan still
fails, so the result fails, too.
"""

import math
from collections.abc import Callable, Iterator

import msgspec

from adam_async.simulation.plan import Fault, Plan, in_order
from adam_async.simulation.wire import Conditions

MOST_TRIES = 200
"""Maximum number of runs to shrink one plan."""

LEAST_S = 0.05
"""Minimum start and duration of a shrunk fault, in seconds."""

Fails = Callable[[Plan], bool]


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest failing plan, and the number of runs to find it."""

    plan: Plan
    tries: int


class _Tries:
    """Counts runs up to a limit; beyond it, no plan counts as failing."""

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
        fails: Whether a plan still fails, in the same way.
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
    for change in ({"unkind": False}, {"shuffled": False}, {"network": Conditions()}):
        options = msgspec.structs.replace(plan.options, **change)
        kinder = msgspec.structs.replace(plan, options=options)
        if kinder != plan and tries.fails(kinder):
            plan = kinder
    return plan
