"""Pure: requests of any role that read and change the cluster map; and messages between controllers.

The leading controller answers a request about the map. Other controllers answer with the leader's address, or
with an empty one if they know no leader.
"""

from typing import Annotated

import msgspec

from adam_async.messages.body import (
    ROLES,
    Addresses,
    After,
    Body,
    Count,
    DrawnId,
    Name,
    Names,
    Packed,
    Rows,
    Seconds,
    Version,
)

NOT_LEADER = "not-leader"
"""Refusal code of a controller that does not lead; the text is the leader's address, or empty if the
controller knows no leader."""

SESSION_OVER = "session-over"
"""Refusal code for an unknown session; the client must open another session. The last request of the unknown
session may have taken effect."""

LEARNING = "learning"
"""Code of a refusal by a restarted single controller, to a server that has not reported its stores."""

UNKNOWN = "unknown"
"""Code of a refusal after a lost leadership: the request may have taken effect, or take effect later. The
client repeats the request with the same number."""


class GetMap(Body, frozen=True, kw_only=True):
    """Request for the cluster map, with all changes that were acknowledged before the request."""


class OpenSession(Body, frozen=True, kw_only=True):
    """Request for a session. Numbered requests take effect at most once, even if repeated."""


class SessionOpened(Body, frozen=True, kw_only=True):
    """A new session. The numbers of its requests begin with 1, and its client sends one request at a time."""

    session: DrawnId


class CompareAndSet(Body, frozen=True, kw_only=True):
    """Request to set `key` if its record still has version `expected` (0: if the key has no record).

    The answer is a `MapChanges` or `MapState` as for `WatchMap`, but without a wait.
    Tensor: the new value as JSON text, which may exceed a frame's meta.
    """

    key: Name
    expected: Version
    session: DrawnId
    number: Count
    after: After
    group: Name


class WatchMap(Body, frozen=True, kw_only=True):
    """Request for the map's changes after version `after`; the answer waits for the first change.

    After `wait_s` the answer comes without changes, which shows that this controller still leads.
    """

    after: After
    """Version that the client has; -1 requests the whole map."""
    group: Name
    """Group of controllers that has version `after`; other groups' controllers send their whole map."""
    wait_s: Seconds


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """How far a member's log of a bundle reaches; all zeros for a bundle without a log."""

    generation: Version = 0
    """Generation of the bundle's record that the member follows."""
    last: Version = 0
    """Position of the last entry."""
    start: Version = 0
    """Position of the last entry that the log has dropped."""
    committed: Version = 0
    """Position of the last committed entry."""


class ReportStores(Body, frozen=True, kw_only=True):
    """Report of a server to a restarted single controller, which asks for it by `LEARNING`.

    The controller belongs to no group yet, so its answer is the refusal `NOT_LEADER`.
    Tensor: the report (`controller.learned_map.StoresReport`) as JSON text.
    """


class MapState(Body, frozen=True, kw_only=True):
    """The whole cluster map. Tensor: the map as JSON text.

    A `MapState` also answers a request for changes that the controller has dropped, or for another group's
    changes.
    """

    version: Version
    group: Name
    """Group of the controllers; a newly founded group has another name, and counts versions anew."""
    done: bool = True
    """Whether the `CompareAndSet` that the message answers took effect."""
    at: Version = 0
    """Current version of the key's record, in an answer to `CompareAndSet`."""
    controllers: Annotated[tuple[Addresses, ...], msgspec.Meta(max_length=64)] = ()
    """Addresses of all controllers in the group, sorted by name; empty for a group of one."""


class MapChanges(Body, frozen=True, kw_only=True):
    """The changes of the map since the requested version, version by version without a gap.

    Tensor: the changes (`run.map_changes.Change`) as JSON text.
    """

    version: Version
    """Version after the last change."""
    group: Name
    done: bool = True
    at: Version = 0


class Introduce(Body, frozen=True, kw_only=True):
    """Request for another controller's identity, with the sender's identity; see `controller.bootstrap`."""

    identity: Name
    """The sender's identity: its name, and the number of its disk."""


class Introduced(Body, frozen=True, kw_only=True):
    """A controller's identity, and the members of its group."""

    identity: Name
    members: Names
    """Identities of the members of the sender's group; empty without a group."""


class Agree(Body, frozen=True, kw_only=True):
    """A message between the consensus cores of two controllers; it may be lost.

    Tensor: the message (`consensus.Message`) as MessagePack, if it is too large for `packed`.
    """

    group: Name
    """Group of the sender; empty without a group. Another group ignores the message."""
    packed: Packed = b""
    """The message as MessagePack, if it is small."""


ROWS: Rows = {
    GetMap: frozenset((role, "controller") for role in ROLES),
    CompareAndSet: frozenset((role, "controller") for role in ROLES),
    WatchMap: frozenset((role, "controller") for role in ROLES),
    ReportStores: frozenset({("ps", "controller")}),
    OpenSession: frozenset((role, "controller") for role in ROLES),
    SessionOpened: frozenset(("controller", role) for role in ROLES),
    MapState: frozenset(("controller", role) for role in ROLES),
    MapChanges: frozenset(("controller", role) for role in ROLES),
    Introduce: frozenset({("controller", "controller")}),
    Introduced: frozenset({("controller", "controller")}),
    Agree: frozenset({("controller", "controller")}),
}
