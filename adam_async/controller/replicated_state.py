"""Pure: what the controllers agree on: the cluster map, and which questions have been answered.

The replicated state machine. The log holds commands as bytes; `apply` takes them in the order of the log and
says what came of each. Whoever takes the same commands has the same state, byte for byte, and `snapshot`
writes all of it down. The map's own rules are in `state`.

*Sessions.* A question whose answer was lost is asked again, perhaps of another controller. A session's
questions are numbered, and asked one at a time: of each session the last number is kept with what came of it.
The same number again gets the same answer; a lower one is late, its answer is of no use to anybody, and it is
not done. A session begins with a command of its own, whose place in the log is its name; so none is ever made
again by a question that was long on its way: the controllers know it, or it is over. Those that were not used
for longest are forgotten beyond `MAX_SESSIONS`, or as many as the group is told to know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

from adam_async.controller.map_history import Change, History, difference
from adam_async.controller.map_size import MapSize
from adam_async.controller.records import value_too_large
from adam_async.controller.state import CompareAndSet, Conflict, ControllerState, Event, Invalid, NodeLost
from adam_async.errors import AdamError
from adam_async.messages import SESSION_OVER
from adam_async.messages.bounds import MOST_VALUE_BYTES
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.run.cluster_map import ClusterMap

MAX_SESSIONS = 4096
"""So many are known where nothing else is said."""

MOST_TEXT = 1000
"""Maximum length of a refusal, in characters; the machine keeps it as long as its session."""

UNWORKABLE = (AdamError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What the map's rules may raise at a record that they did not expect. It would be raised again at every
restart, for the command is in the log; so it is refused."""


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Begin a session."""


class Set(msgspec.Struct, frozen=True, tag="set"):
    """Set a key of the map; see `state.CompareAndSet`."""

    session: int
    number: int
    key: str
    expected: int
    value: bytes
    """JSON text."""


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """This life of a node is over."""

    node: str
    incarnation: int


Command = Open | Set | Lost

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a command."""

    done: bool = True
    at: int = 0
    """Version that the record has now, or the session's number."""
    problem: str = ""
    """Code of the refusal, where it is one: `invalid`, `session-over`, `late`."""
    text: str = ""


DONE = Outcome()


class _Session(msgspec.Struct, array_like=True):
    """The last question of a session, and what came of it."""

    number: int = 0
    done: bool = True
    at: int = 0
    problem: str = ""
    text: str = ""


class _State(msgspec.Struct, frozen=True, array_like=True):
    """All there is, as it is written down."""

    group: str
    map: ClusterMap
    sessions: list[tuple[int, _Session]]
    """In the order of their last use."""


_STATES = msgspec.msgpack.Decoder(_State)


def command_bytes(command: Command) -> bytes:
    """Write a command down for the log."""
    return _ENCODER.encode(command)


def read_command(command: bytes) -> Command:
    """Read a command of the log.

    Raises:
        DecodeError: This release does not know the command.
    """
    return _DECODER.decode(command)


def read_state(state: bytes) -> _State:
    """Read a whole state, as `Machine.snapshot` writes it.

    Raises:
        DecodeError: This release cannot read the state.
    """
    return _STATES.decode(state)


def first_state(group: str) -> bytes:
    """What the founders of a group begin with."""
    return _ENCODER.encode(_State(group, ClusterMap(), []))


class Machine:
    """The state of one controller, as far as it has applied the log.

    Args:
        layers: Kinds of layers that models may use; all controllers of a group must have the same.
        most_sessions: So many are known at once; the same in all of a group.

    Attributes:
        group: Which group's state this is; empty before there is one.
        state: The map and its rules.
        history: The last changes of the map.
        size: Bytes of the map's records.
    """

    def __init__(
        self, *, layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS, most_sessions: int = MAX_SESSIONS
    ) -> None:
        self._most_sessions = most_sessions
        self.group = ""
        self.state = ControllerState(layers=layers)
        self.history = History()
        self.size = MapSize()
        self._sessions: dict[int, _Session] = {}

    @property
    def map(self) -> ClusterMap:
        """The map as it is here."""
        return self.state.map

    def apply(self, index: int, command: bytes) -> Outcome:
        """Apply the command at one place of the log. The same commands give the same state."""
        match read_command(command):
            case Open():
                self._sessions[index] = _Session()
                while len(self._sessions) > self._most_sessions:
                    del self._sessions[next(iter(self._sessions))]
                return Outcome(at=index)
            case Lost(node, incarnation):
                self._change(NodeLost(node, incarnation))
                return Outcome()
            case Set() as question:
                return self._set(question)
            case unknown:
                assert_never(unknown)

    def _set(self, question: Set) -> Outcome:
        session = self._sessions.pop(question.session, None)
        if session is None:
            return Outcome(done=False, problem=SESSION_OVER, text=f"there is no session {question.session}")
        self._sessions[question.session] = session  # the one that was used last
        if question.number < max(1, session.number):
            return Outcome(done=False, problem="late", text=f"question {session.number} came before it")
        if question.number > session.number:
            outcome = self._compare_and_set(question)
            session = _Session(question.number, outcome.done, outcome.at, outcome.problem, outcome.text)
            self._sessions[question.session] = session
        return Outcome(done=session.done, at=session.at, problem=session.problem, text=session.text)

    def _compare_and_set(self, question: Set) -> Outcome:
        if len(question.value) > MOST_VALUE_BYTES:
            text = value_too_large(question.key, len(question.value))
            return Outcome(done=False, problem="invalid", text=text)
        refusal = self.size.refusal(question.key, len(question.value))
        if refusal:
            return Outcome(done=False, problem="invalid", text=refusal)
        try:
            value: dict[str, Any] = msgspec.json.decode(question.value, type=dict[str, Any])
            _ENCODER.encode(value)  # what the map holds is written down, and not all that JSON says can be
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            return Outcome(done=False, problem="invalid", text=f"{question.key}: {error}"[:MOST_TEXT])
        event = self._change(CompareAndSet(key=question.key, expected=question.expected, value=value))
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
        """The changes beyond a version of a group's map; None where only the whole map will do."""
        if group != self.group or version < 0:
            return None
        changes = self.history.since(version)
        return None if changes is None else list(changes)

    # --- all of it -------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Write all of it down. Equal states give equal bytes."""
        return _ENCODER.encode(_State(self.group, self.map, list(self._sessions.items())))

    def restore(self, state: bytes) -> None:
        """Take what another controller, or this one in an earlier life, wrote down."""
        saved = read_state(state)
        self.group = saved.group
        self.state.map = saved.map
        self._sessions = dict(saved.sessions)
        self.size = MapSize(saved.map)
        self.history = History(saved.map.version)
