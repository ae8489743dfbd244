"""Pure: the controllers' replicated state machine: the cluster map, and its clients' sessions.

The log has commands as bytes; `apply` takes them in log order and returns each outcome. Equal commands give
equal states, byte for byte, and `snapshot` encodes the whole state. The map's own rules are in `state`.

*Sessions.* A client without an answer repeats its request, perhaps to another controller. The client numbers
the requests of its session and sends them one at a time. The state keeps a session's last number and outcome.
A repeated number gets the same outcome. A request with a lower number is late: the client needs no answer,
and the state does not apply it. A command opens a session, and its index in the log names the session. So a
delayed request never creates a session again: its session exists, or has ended. Beyond `MAX_SESSIONS`, or the
group's own limit, the role with the most sessions loses its least recently used one.

*Room.* The state counts the bytes of the map's records, and refuses a record for which the map has no room.
The size is a function of the map, so all controllers refuse the same records, also after a restart. Each
change updates the size, because an encoding of the whole map is slow.

*Checks.* Commands and states come from other controllers, or in a file from an earlier process. Unreadable
bytes would end this controller when it applies them, and again at every start. So the controller checks
commands and states before they enter the log, and when it reads a file (`CONTENTS`, `log_problem`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, assert_never

import msgspec

from adam_async.controller.consensus import Contents, Saved
from adam_async.controller.records import MAX_DEPTH, nests_too_deep, value_too_large
from adam_async.controller.state import CompareAndSet, Conflict, ControllerState, Event, Invalid, NodeLost
from adam_async.errors import AdamError
from adam_async.messages import SESSION_OVER, USERS
from adam_async.messages.body import MOST_MAP_BYTES, MOST_VALUE_BYTES
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.map_changes import Change, History, changed_records, difference

GROWTH_BYTES = 1 << 20
"""Number of bytes by which existing records may still grow in a full map, so that members can continue; no
node can join then."""

STORES_BYTES = MOST_MAP_BYTES // 2
"""Maximum total size in bytes of all stores' records, array lists and bundles at which a client may add a
store. The rest of the map is room for programs, and for joining nodes."""

NODES_BYTES: Mapping[str, int] = {
    "ps": 2 << 20,
    "data": 2 << 20,
    "worker": 1 << 20,
    "driver": 1 << 19,
    "client": 1 << 19,
    "reader": 1 << 19,
}
"""Maximum total size in bytes of the node records of each role, so that no role fills the map."""

MARKS_BYTES = 16
"""Maximum size in bytes of the quotes, colons and commas that the map's JSON text adds per record and key."""

OUTLINE_BYTES = 1024
"""Maximum size in bytes of the JSON text of a map without records, with the commas between epoch results."""

_ENCODE = msgspec.json.Encoder().encode


class Share(NamedTuple):
    """Part of the map for some records."""

    group: str
    """Role of the nodes, or `STORES`; empty for records without a separate limit."""
    most: int = MOST_MAP_BYTES
    """Maximum number of bytes of all records in the group."""
    grows: int = 0
    """Number of bytes by which existing records of the group may exceed `most`."""


STORES = "stores"
"""Group that has the records of all stores, array lists and bundles."""


def share_of(key: str, value: Mapping[str, Any], cluster: ClusterMap) -> Share:
    """Return the share of a new record, whose fields are still unchecked."""
    kind = key.partition("/")[0]
    if kind == "nodes" and (role := str(value.get("role"))) in NODES_BYTES:
        # A full share must not keep members of the cluster from their work.
        return Share(role, NODES_BYTES[role], 0 if role in USERS else GROWTH_BYTES)
    is_program = value.get("program") or cluster.is_of_program(str(value.get("store", "")))
    if kind == "stores" and not is_program and value.get("phase") != "deleted":
        return Share(STORES, STORES_BYTES)
    return Share("")


class MapSize:
    """Bytes of the JSON text of a map's records."""

    def __init__(self, cluster: ClusterMap | None = None) -> None:
        self._of: dict[str, tuple[str, int]] = {}
        """Group and size of each record, by key."""
        self.total = 0
        self.by_group: Counter[str] = Counter()
        """Parts of `total`: the nodes of each role, and stores with their array lists and bundles."""
        if cluster is not None:
            self.take(difference(ClusterMap(), cluster))

    def take(self, change: Change) -> None:
        """Update the size for a changed map."""
        for key, record in changed_records(change):
            group, size = self._of.pop(key, ("", 0))
            self.by_group[group] -= size
            self.total -= size
            if record is None:
                continue
            size = len(key) + len(_ENCODE(record))
            group = STORES if key.startswith(("stores/", "bundles/")) else ""
            if isinstance(record, NodeRecord):
                group = record.role
            self._of[key] = group, size
            self.by_group[group] += size
            self.total += size

    @property
    def most_text(self) -> int:
        """Upper bound in bytes on the whole map's JSON text, including names and marks."""
        return self.total + MARKS_BYTES * len(self._of) + OUTLINE_BYTES

    def refusal(self, key: str, size: int, share: Share) -> str:
        """Return why the map has no room for a record; empty if it has room.

        Args:
            key: Key of the record; a record whose key has no slash always has room.
        """
        group, held = self._of.get(key, ("", 0))
        most = MOST_MAP_BYTES + (GROWTH_BYTES if held else 0)
        if "/" not in key or size <= held:
            return ""
        of_group, own = self.by_group[share.group], held if group == share.group else 0
        if share.group and of_group + size - own > share.most + (share.grows if own else 0):
            what, cure = f"{share.group} nodes", f"end a {share.group} that is not needed"
            if share.group == STORES:
                what, cure = STORES, "delete a store"
            return (
                f"the map holds {of_group} bytes of {what}; a record of {size} more would exceed "
                f"{share.most / (1 << 20):g} MiB: {cure}"
            )
        if self.total + size - held <= most:
            return ""
        return (
            f"the map holds {self.total} bytes; a record of {size} more would exceed {most >> 20} MiB: "
            "end what is not needed, or start the cluster again"
        )

    def __repr__(self) -> str:
        return f"<MapSize {self.total}>"


MAX_SESSIONS = 4096
"""Default maximum number of sessions."""

MOST_TEXT = 1000
"""Maximum length of a refusal, in characters; the state keeps it as long as its session."""

UNWORKABLE = (AdamError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that the map's rules raise on an unexpected record. The command is in the log, so the error would
return at every restart; the state refuses the command instead."""


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Begin a session."""

    role: str = ""
    """Role of the client."""


class Set(msgspec.Struct, frozen=True, tag="set"):
    """Set a key of the map; see `state.CompareAndSet`."""

    session: int
    number: int
    key: str
    expected: int
    value: bytes
    """New value of the key, as JSON text."""


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """An incarnation of a node is lost."""

    node: str
    incarnation: int
    at: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)] = 0.0
    """Time of the loss, in seconds since 1970; 0 if unknown."""


Command = Open | Set | Lost

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a command."""

    done: bool = True
    at: int = 0
    """Version of the record, or number of the session."""
    problem: str = ""
    """Code of a refusal: `invalid`, `session-over`, `late`; else empty."""
    text: str = ""


DONE = Outcome()


class _Session(msgspec.Struct, array_like=True):
    """The last request of a session, and its outcome."""

    number: int = 0
    done: bool = True
    at: int = 0
    problem: str = ""
    text: str = ""
    role: str = ""


class _State(msgspec.Struct, frozen=True, array_like=True):
    """The whole state in its encoded form."""

    group: str
    map: ClusterMap
    sessions: list[tuple[int, _Session]]
    """Sessions in the order of their last use."""


_STATES = msgspec.msgpack.Decoder(_State)


def command_bytes(command: Command) -> bytes:
    """Encode a command for the log."""
    return _ENCODER.encode(command)


def read_command(command: bytes) -> Command:
    """Read a command of the log.

    Raises:
        DecodeError: This release cannot read the command.
    """
    return _DECODER.decode(command)


def read_state(state: bytes) -> _State:
    """Read a whole state, as written by `ReplicatedState.snapshot`.

    Raises:
        DecodeError: This release cannot read the state.
    """
    return _STATES.decode(state)


def first_state(group: str, cluster: ClusterMap | None = None) -> bytes:
    """Return the encoded state with which a group begins: its first map, by default an empty one."""
    return _ENCODER.encode(_State(group, cluster or ClusterMap(), []))


class ReplicatedState:
    """One controller's copy of the state, as far as it has applied the log.

    Args:
        most_sessions: Maximum number of sessions; the same throughout a group.

    Attributes:
        group: Group that this state belongs to; empty before there is one.
        state: The map and its rules.
        history: The last changes of the map.
        size: Bytes of the map's records.
    """

    def __init__(self, *, most_sessions: int = MAX_SESSIONS) -> None:
        self._most_sessions = most_sessions
        self.group = ""
        self.state = ControllerState()
        self.history = History()
        self.size = MapSize()
        self._sessions: dict[int, _Session] = {}

    @property
    def map(self) -> ClusterMap:
        """The map of this copy."""
        return self.state.map

    def apply(self, index: int, command: bytes) -> Outcome:
        """Apply the command at an index of the log. Equal commands give equal states."""
        match read_command(command):
            case Open(role):
                self._open(index, role)
                return Outcome(at=index)
            case Lost(node, incarnation, at):
                self._change(NodeLost(node, incarnation, at))
                return Outcome()
            case Set() as request:
                return self._set(request)
            case unknown:
                assert_never(unknown)

    def _open(self, index: int, role: str) -> None:
        """Open a session. Beyond the limit the role with most sessions loses its least recently used."""
        self._sessions[index] = _Session(role=role)
        while len(self._sessions) > self._most_sessions:
            counts = Counter(session.role for session in self._sessions.values())
            most = max(counts, key=lambda role: (counts[role], role))
            del self._sessions[next(at for at, session in self._sessions.items() if session.role == most)]

    def _set(self, request: Set) -> Outcome:
        session = self._sessions.pop(request.session, None)
        if session is None:
            return Outcome(done=False, problem=SESSION_OVER, text=f"there is no session {request.session}")
        self._sessions[request.session] = session  # as the most recently used one
        if request.number < max(1, session.number):
            return Outcome(done=False, problem="late", text=f"request {session.number} came before it")
        if request.number > session.number:
            outcome = self._compare_and_set(request)
            session = _Session(
                request.number, outcome.done, outcome.at, outcome.problem, outcome.text, session.role
            )
            self._sessions[request.session] = session
        return Outcome(done=session.done, at=session.at, problem=session.problem, text=session.text)

    def _compare_and_set(self, request: Set) -> Outcome:
        if len(request.value) > MOST_VALUE_BYTES:
            text = value_too_large(request.key, len(request.value))
            return Outcome(done=False, problem="invalid", text=text)
        try:
            value: dict[str, Any] = msgspec.json.decode(request.value, type=dict[str, Any])
            _ENCODER.encode(value)  # snapshots encode the map, and some JSON values have no encoding
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            return Outcome(done=False, problem="invalid", text=f"{request.key}: {error}"[:MOST_TEXT])
        share = share_of(request.key, value, self.map)
        if refusal := self.size.refusal(request.key, len(request.value), share):
            return Outcome(done=False, problem="invalid", text=refusal)
        event = self._change(CompareAndSet(key=request.key, expected=request.expected, value=value))
        match event:
            case Invalid(reason):
                return Outcome(done=False, problem="invalid", text=reason[:MOST_TEXT])
            case Conflict(version=version):
                return Outcome(done=False, at=version)
            case _:
                return Outcome(at=self.map.version)

    def _change(self, command: CompareAndSet | NodeLost) -> Event | None:
        before = self.map
        try:
            events: Sequence[Event] = self.state.apply(command)
        except UNWORKABLE as error:
            self.state.map = before
            events = [Invalid(f"the map's rules cannot work with it: {type(error).__name__}")]
        if self.map is not before:
            change = difference(before, self.map)
            self.history.add(change)
            self.size.take(change)
        return events[0] if events else None

    def since(self, version: int, group: str) -> list[Change] | None:
        """Return the changes after a version of a group's map; None if the watcher needs the whole map."""
        if group != self.group or version < 0:
            return None
        changes = self.history.since(version)
        return None if changes is None else list(changes)

    # --- snapshots -------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Encode the whole state. Equal states give equal bytes."""
        return _ENCODER.encode(_State(self.group, self.map, list(self._sessions.items())))

    def restore(self, state: bytes) -> None:
        """Replace the state by one that another controller or this one's earlier process encoded."""
        saved = read_state(state)
        self.group = saved.group
        self.state.map = saved.map
        self._sessions = dict(saved.sessions)
        self.size = MapSize(saved.map)
        self.history = History(saved.map.version)


MAP_DEPTH = MAX_DEPTH + 4
"""Maximum nesting depth of a state, in containers: the map, its nodes, a record and its values."""

MOST_VERSION = 1 << 53
"""Largest version of a cluster map."""

UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
"""Errors that may occur when bytes from a peer or file are read, or are written again as text."""


def command_problem(command: bytes) -> str:
    """Return why the state machine cannot read a command; empty if it can."""
    try:
        read = read_command(command)
        if not isinstance(read, Set):
            return ""
        return _record_problem(read.key[:80], read.value)
    except UNREADABLE as error:
        return f"this release cannot read it: {error}"


def _record_problem(key: str, value: bytes) -> str:
    """Return why the cluster map cannot hold a record; empty if it can. Raises `UNREADABLE`."""
    if len(value) > MOST_VALUE_BYTES:
        return f"{key!r} of {len(value)} bytes is above the limit of {MOST_VALUE_BYTES}"
    msgspec.json.decode(value, type=dict[str, Any])
    return f"{key!r} nests over {MAX_DEPTH} deep" if nests_too_deep(value) else ""


def state_problem(state: bytes) -> str:
    """Return why the state machine cannot load a state or send it on; empty if it can do both."""
    try:
        cluster = read_state(state).map
        if not 0 <= cluster.version <= MOST_VERSION:
            return f"version {cluster.version} is not within 0 and {MOST_VERSION}"
        text = msgspec.json.encode(cluster)
    except UNREADABLE as error:
        return f"this release cannot read it: {error}"
    return f"it nests over {MAP_DEPTH} deep" if nests_too_deep(text, MAP_DEPTH) else ""


CONTENTS = Contents(command=command_problem, state=state_problem)
"""Checks of commands and states for the controllers' state machine."""


def log_problem(saved: Saved) -> str:
    """Name the first part of a log that the state machine cannot read; empty if it can read all."""
    problem = state_problem(saved.snapshot.state) if saved.snapshot.index else ""
    if problem:
        return f"the state at entry {saved.snapshot.index}: {problem}"
    for entry in saved.entries:
        problem = command_problem(entry.command) if entry.command is not None else ""
        if problem:
            return f"entry {entry.index} of term {entry.term}: {problem}"
    return ""
