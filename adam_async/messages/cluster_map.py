"""Pure: anyone and the controllers: what the cluster map is, and what it shall be.

A question is answered by the controller that leads; the others say who that is, or that nobody is known to.
"""

from typing import Annotated

import msgspec

from adam_async.messages.body import ROLES, Body, Rows
from adam_async.messages.bounds import (
    Addresses,
    After,
    Count,
    DrawnId,
    Name,
    Seconds,
    Version,
)

NOT_LEADER = "not-leader"
"""A controller that does not lead answers every question about the map with this; the text is the address
of the one that does, or empty where nobody is known to."""

SESSION_OVER = "session-over"
"""The controllers know nothing of this session any more: open another one. What it asked may be done."""

UNKNOWN = "unknown"
"""Leadership was lost with the question under way: it may be done, or may yet be. Ask again, under the same
number."""


class GetMap(Body, frozen=True, kw_only=True):
    """Ask for the cluster map, with all that was answered to anybody before this was asked."""


class OpenSession(Body, frozen=True, kw_only=True):
    """Ask for a session: numbered questions, each of which is done once however often it is asked."""


class SessionOpened(Body, frozen=True, kw_only=True):
    """The session. Its numbers begin with 1, and one question is asked at a time."""

    session: DrawnId


class CompareAndSet(Body, frozen=True, kw_only=True):
    """Set `key` if its record still has version `expected` (0: it must not exist).

    The answer is a `MapChanges` or `MapState` as for `WatchMap`, at once.
    Tensor: the new value as JSON text (it may be larger than a frame's meta may be).
    """

    key: Name
    expected: Version
    session: DrawnId
    number: Count
    after: After
    group: Name


class WatchMap(Body, frozen=True, kw_only=True):
    """Ask for the changes of the map beyond version `after`; the answer waits for the first of them.

    It waits for `wait_s` at most and is then without any, so that who asks knows that this one still leads.
    """

    after: After
    """-1: for the whole map."""
    group: Name
    """Of whose map that is a version; another group's map begins anew."""
    wait_s: Seconds


class MapState(Body, frozen=True, kw_only=True):
    """The whole cluster map. Tensor: the map as JSON text.

    Also where changes were asked for that are no longer kept, or of another group.
    """

    version: Version
    group: Name
    """Which group of controllers this is; one founded anew is another one, and counts versions anew."""
    done: bool = True
    """For an answer to `CompareAndSet`: whether it took effect."""
    at: Version = 0
    """For an answer to `CompareAndSet`: version that the key's record got, or has."""
    controllers: Annotated[tuple[Addresses, ...], msgspec.Meta(max_length=64)] = ()
    """Where all controllers of the group listen, in the order of their names; empty for one alone."""


class MapChanges(Body, frozen=True, kw_only=True):
    """What became of the map since the version that was named, version by version without a gap.

    Tensor: the changes (`controller.changes.Change`) as JSON text.
    """

    version: Version
    """After the last of them."""
    group: Name
    done: bool = True
    at: Version = 0


ROWS: Rows = {
    GetMap: frozenset((role, "controller") for role in ROLES),
    CompareAndSet: frozenset((role, "controller") for role in ROLES),
    WatchMap: frozenset((role, "controller") for role in ROLES),
    OpenSession: frozenset((role, "controller") for role in ROLES),
    SessionOpened: frozenset(("controller", role) for role in ROLES),
    MapState: frozenset(("controller", role) for role in ROLES),
    MapChanges: frozenset(("controller", role) for role in ROLES),
}
