"""Pure: a node's roles, and the causes that change its role."""

from enum import Enum
from typing import TypeVar

_Handler = TypeVar("_Handler")


class Role(Enum):
    """Role of a node in its group."""

    FOLLOWER = "follower"
    PROBER = "prober"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Cause(Enum):
    """Cause that changes a role."""

    SILENCE = "silence: no leader for an election time-out"
    ENCOURAGED = "a majority would vote for it"
    ELECTED = "a majority voted for it"
    ASKED = "the leader hands over"
    LED = "another leads in this term"
    OUTDATED = "a newer term"
    DEAF = "no majority was heard for an election time-out"
    REMOVED = "its removal is committed"


TRANSITIONS = {
    (Role.FOLLOWER, Cause.SILENCE): Role.PROBER,
    (Role.FOLLOWER, Cause.ASKED): Role.CANDIDATE,
    (Role.FOLLOWER, Cause.OUTDATED): Role.FOLLOWER,
    (Role.PROBER, Cause.SILENCE): Role.PROBER,
    (Role.PROBER, Cause.ASKED): Role.CANDIDATE,
    (Role.PROBER, Cause.ENCOURAGED): Role.CANDIDATE,
    (Role.PROBER, Cause.LED): Role.FOLLOWER,
    (Role.PROBER, Cause.OUTDATED): Role.FOLLOWER,
    (Role.CANDIDATE, Cause.SILENCE): Role.PROBER,
    (Role.CANDIDATE, Cause.ELECTED): Role.LEADER,
    (Role.CANDIDATE, Cause.LED): Role.FOLLOWER,
    (Role.CANDIDATE, Cause.OUTDATED): Role.FOLLOWER,
    (Role.LEADER, Cause.OUTDATED): Role.FOLLOWER,
    (Role.LEADER, Cause.DEAF): Role.FOLLOWER,
    (Role.LEADER, Cause.REMOVED): Role.FOLLOWER,
}
"""All role changes; any other is a defect."""


def diagram() -> str:
    """Draw `TRANSITIONS` as a Mermaid diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {Role.FOLLOWER.value}"]
    for (role, cause), new in TRANSITIONS.items():
        lines.append(f"    {role.value} --> {new.value}: {cause.value.partition(':')[0]}")
    return "\n".join(lines)


def by_role(
    follower: _Handler, prober: _Handler, candidate: _Handler, leader: _Handler
) -> dict[Role, _Handler]:
    """Return the handlers of an event by role."""
    return dict(zip(Role, (follower, prober, candidate, leader), strict=True))


def always(handler: _Handler) -> dict[Role, _Handler]:
    """Return the same handler of an event for every role."""
    return by_role(handler, handler, handler, handler)


def if_leading(handler: _Handler, otherwise: _Handler) -> dict[Role, _Handler]:
    """Return one handler for the leader, and another for all other roles."""
    return by_role(otherwise, otherwise, otherwise, handler)
