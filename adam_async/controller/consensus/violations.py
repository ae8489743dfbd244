"""Pure: detects messages that no correct node of a group sends, so that they change no node.

The core assumes that other nodes follow its rules. A faulty or malicious node may send anything. So this
module compares each message with the messages that a correct node could send to a core in this state. The
comparison changes nothing. A message that passes may still contain a false vote or term, and the group may
then fail to agree. A message that passes cannot make this node raise an error, overwrite committed entries,
or keep unreadable data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adam_async.controller.consensus.leading import Leading
from adam_async.controller.consensus.log import IncomingSnapshot, Log
from adam_async.controller.consensus.membership import Members, Settings
from adam_async.controller.consensus.messages import Append, Appended, Chunk, Entry, Message, Taken, TakeOver

LARGEST = 1 << 53
"""Largest number in a field of a message, except its term. No group of controllers counts so far."""

TERM_JUMP = 1 << 32
"""Maximum number of terms by which a message may be ahead of this node: over a century with an election every
second."""

NAME_BYTES = 128
"""Maximum length of an identity, in bytes: a node id of 80 bytes and a number."""

MOST_MEMBERS = 64
"""Maximum number of voters and learners in a group."""


class Violation(Exception):
    """A message that no correct node sends. It leaves the core unchanged.

    Attributes:
        rule: Short fixed name of the rule.
        detail: The value that breaks the rule.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


def _nothing_wrong(_: bytes) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Contents:
    """Checks bytes for the state machine: each function returns why they are unreadable, or an empty text."""

    command: Callable[[bytes], str] = _nothing_wrong
    state: Callable[[bytes], str] = _nothing_wrong


ANY_CONTENTS = Contents()
"""Checks for a state machine that can read all bytes."""


class Guard:
    """Compares each message with the messages that a correct node could send."""

    def __init__(self, me: str, settings: Settings, contents: Contents, incoming: IncomingSnapshot) -> None:
        self._me = me
        self._settings = settings
        self._contents = contents
        self._incoming = incoming

    def check(
        self, message: Message, log: Log, commit: int, leading: Leading | None, term: int, leader: str | None
    ) -> None:
        """Compare a message with the core's state, which the other arguments give.

        Raises:
            Violation: No correct node sends this message to a node in this state.
        """
        _check_shape(message, self._settings)
        if message.to != self._me:
            return  # addressed to an earlier identity: the core ignores it
        _check_term(message, term)
        _check_leader(message, self._me, term, leader)
        if message.term < term:
            return
        match message:
            case Append():
                _check_append(message, log, commit, self._contents)
            case Chunk():
                _check_snapshot(message, self._incoming.whole(message), log, commit, self._contents)
            case Appended() | Taken() if leading is not None and message.term == term:
                _check_answer(message, leading, log.last_index)


def _check_shape(message: Message, settings: Settings) -> None:
    """Refuse a message whose numbers, names or contents no correct node sends in any state of the core."""
    _check_names("sender", (message.sender, message.to))
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if type(value) is int and field != "term" and not 0 <= value <= LARGEST:
            raise Violation("number", f"{field} is {value}, not within 0 and {LARGEST}")
    if isinstance(message, Append):
        _check_entries(message, settings)
    elif isinstance(message, Chunk):
        _check_chunk(message, settings)


def _check_names(what: str, names: Sequence[str]) -> None:
    for name in names:
        if not name or len(name.encode(errors="replace")) > NAME_BYTES:
            raise Violation(what, f"{name[:32]!r} is empty, or longer than {NAME_BYTES} bytes")


def _check_entries(append: Append, settings: Settings) -> None:
    term = append.prev_term
    for index, entry in enumerate(append.entries, append.prev_index + 1):
        # Decoding checks the order of indices, but messages also reach this check without decoding.
        if entry.index != index or not term <= entry.term <= append.term:
            raise Violation("entries", f"entry {entry.index} of term {entry.term} follows one of term {term}")
        term = entry.term
        if entry.command is not None and len(entry.command) > settings.command_bytes:
            raise Violation("entries", f"the command of entry {index} has {len(entry.command)} bytes")
        if entry.members is not None:
            if entry.command is not None:
                raise Violation("entries", f"entry {index} has a command and a membership")
            _check_members(entry.members)
    if append.prev_term > append.term:
        raise Violation("entries", f"they follow one of term {append.prev_term}, after {append.term}")


def _check_members(members: Members) -> None:
    if not members.voters:
        raise Violation("members", "there is no voter")
    if len(members.all) > MOST_MEMBERS:
        raise Violation("members", f"there are {len(members.all)}, more than {MOST_MEMBERS}")
    if len(set(members.all)) < len(members.all):
        raise Violation("members", "one is named twice")
    _check_names("members", members.all)


def _check_chunk(chunk: Chunk, settings: Settings) -> None:
    if chunk.size > settings.state_bytes:
        raise Violation("chunk", f"a state of {chunk.size} bytes, above the limit of {settings.state_bytes}")
    if chunk.offset + len(chunk.data) > chunk.size:
        raise Violation(
            "chunk", f"{len(chunk.data)} bytes from {chunk.offset} on, in a state of {chunk.size}"
        )
    if not 1 <= chunk.index_term <= chunk.term:
        raise Violation("chunk", f"of term {chunk.index_term}, sent in term {chunk.term}")
    _check_members(chunk.members)


def _check_term(message: Message, term: int) -> None:
    """Refuse a term below 1, or too far ahead of this node's."""
    if not 1 <= message.term <= term + TERM_JUMP:
        raise Violation("term", f"{message.term}, and this node is in term {term}")


def _check_leader(message: Message, me: str, term: int, leader: str | None) -> None:
    """Refuse a message from a second leader of this term, and any from this node itself except `TakeOver`."""
    if message.sender == me and not isinstance(message, TakeOver):
        raise Violation("sender", f"{me} is this node")
    if isinstance(message, Append | Chunk) and message.term == term and leader not in (None, message.sender):
        raise Violation("leader", f"{message.sender} leads in term {term} as well as {leader}")


def _check_append(append: Append, log: Log, commit: int, contents: Contents) -> None:
    """Refuse entries that contradict committed ones, or that the state machine cannot read."""
    if append.prev_index <= commit:
        _check_agreement(log, append.prev_index, append.prev_term)
    for entry in append.entries:
        if entry.index <= commit:
            _check_agreement(log, entry.index, entry.term)
        elif entry.command is not None and log.term_at(entry.index) != entry.term:
            _check_content(contents.command(entry.command), entry)


def _check_agreement(log: Log, index: int, term: int) -> None:
    known = log.term_at(index)
    if known not in (None, term):
        raise Violation("committed", f"entry {index} is of term {known} and committed, not of term {term}")


def _check_content(problem: str, entry: Entry) -> None:
    if problem:
        raise Violation("command", f"that of entry {entry.index} of term {entry.term}: {problem}")


def _check_snapshot(chunk: Chunk, state: bytes | None, log: Log, commit: int, contents: Contents) -> None:
    """Refuse a snapshot that contradicts committed entries, or that the state machine cannot read."""
    if chunk.index <= commit:
        _check_agreement(log, chunk.index, chunk.index_term)
        return
    known = log.term_at(commit)
    if known is not None and chunk.index_term < known:
        raise Violation("committed", f"a snapshot of term {chunk.index_term}, after entries of term {known}")
    if state is not None:
        problem = contents.state(state)
        if problem:
            raise Violation("state", f"that of the snapshot at {chunk.index}: {problem}")


def _check_answer(answer: Appended | Taken, leading: Leading, last_index: int) -> None:
    """Refuse an answer to a message that this leader has not sent."""
    if answer.round > leading.round:
        raise Violation("answer", f"to round {answer.round}, of {leading.round} so far")
    if isinstance(answer, Appended) and max(answer.match, answer.prev_index) > last_index:
        raise Violation(
            "answer", f"about entries {answer.match} and {answer.prev_index}, and the last is {last_index}"
        )
    if isinstance(answer, Taken):
        known = leading.progress.get(answer.sender)
        if known is not None and known.snapshot is not None and known.snapshot.index == answer.index:
            if answer.offset > len(known.snapshot.state):
                raise Violation(
                    "answer", f"{answer.offset} bytes of a state of {len(known.snapshot.state)} were taken"
                )
