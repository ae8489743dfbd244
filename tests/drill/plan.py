"""Pure: the faults of a drill, drawn from its seed."""

import msgspec

from adam_async.errors import ConfigError
from tests.simulation.random_streams import RandomStream

KINDS = ("kill", "freeze", "cut")
"""Kinds of faults: SIGKILL; SIGSTOP, and SIGCONT once the workload continues; and no network until then."""


class PlannedFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a plan."""

    number: int
    """Place in the plan, from 1."""
    kind: str
    choice: float
    """Share in [0, 1) that selects one of the primaries at the time of the fault."""

    def victim(self, primaries: set[str]) -> str:
        """Return the server of the fault, one of the current primaries (at least one)."""
        names = sorted(primaries)
        return names[int(self.choice * len(names))]


def read_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds in a list with commas, in the order of `KINDS`.

    Raises:
        ConfigError: The list is empty, or has an unknown kind.
    """
    names = {name.strip() for name in text.split(",")} - {""}
    unknown = sorted(names - set(KINDS))
    if unknown or not names:
        given = unknown[0] if unknown else text
        raise ConfigError(f"--faults takes {', '.join(KINDS)}, with commas between them, not {given!r}")
    return tuple(kind for kind in KINDS if kind in names)


def skipped_kinds(kinds: tuple[str, ...], *, has_signals: bool, no_network: str) -> dict[str, str]:
    """Return the kinds that cannot be injected, with the reasons.

    Args:
        has_signals: Whether the system has SIGSTOP and SIGCONT.
        no_network: Why the servers have no separate network namespaces; empty if they have.
    """
    reasons = {"cut": no_network} if no_network else {}
    if not has_signals:
        reasons["freeze"] = "this system has no SIGSTOP"
    return {kind: reasons[kind] for kind in kinds if kind in reasons}


def plan_faults(kinds: tuple[str, ...], count: int, seed: int) -> tuple[PlannedFault, ...]:
    """Return `count` faults in random order, with equally many of each kind as far as `count` allows."""
    if not kinds:
        return ()
    dice = RandomStream(f"{seed}/drill")
    drawn = [kinds[number % len(kinds)] for number in range(count)]
    dice.shuffle(drawn)
    return tuple(
        PlannedFault(number=number, kind=kind, choice=dice.random()) for number, kind in enumerate(drawn, 1)
    )
