"""A core handles any message of another node, or raises a violation and stays unchanged."""

from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.controller.consensus import (
    Contents,
    Core,
    Entry,
    Members,
    Received,
    Saved,
    Settings,
    Snapshot,
    Violation,
    bootstrapped,
)
from adam_async.controller.consensus.messages import (
    Append,
    Appended,
    AskVote,
    Chunk,
    Message,
    Taken,
    TakeOver,
    Vote,
)
from adam_async.controller.consensus.violations import LARGEST, MOST_MEMBERS, NAME_BYTES, TERM_JUMP
from tests.adam_async.controller.consensus.small_group import SmallGroup

SMALL = Settings(command_bytes=64, state_bytes=64, chunk_bytes=16)
UNREADABLE = b"unreadable"
CONTENTS = Contents(
    command=lambda command: "it is unreadable" if command == UNREADABLE else "",
    state=lambda state: "it is unreadable" if state == UNREADABLE else "",
)

NUMBERS = st.one_of(st.integers(-2, 9), st.integers(-(2**63), 2**64 - 1), st.sampled_from([LARGEST, 2**63]))
NAMES = st.sampled_from(["a", "b", "c", "d", "", "x" * (NAME_BYTES + 1)])
BYTES = st.sampled_from([b"", b"x", UNREADABLE, bytes(65)])
MEMBERS = st.builds(Members, st.lists(NAMES, max_size=4).map(tuple), st.lists(NAMES, max_size=2).map(tuple))
HEAD = {"sender": NAMES, "to": st.sampled_from(["a", "a", "a", "b"]), "term": NUMBERS}


@st.composite
def appends(draw: st.DrawFn) -> Append:
    """Consecutive entries, as decoding guarantees; all other fields are arbitrary."""
    append = {name: draw(NUMBERS) for name in ("prev_index", "prev_term", "commit", "round")}
    head = {name: draw(field) for name, field in HEAD.items()}
    entries = tuple(
        Entry(
            append["prev_index"] + 1 + position,
            min(draw(NUMBERS), head["term"]),
            draw(st.none() | BYTES),
            draw(st.none() | MEMBERS),
        )
        for position in range(draw(st.integers(0, 3)))
    )
    return Append(**head, **append, entries=entries)


MESSAGES = st.one_of(
    appends(),
    st.builds(
        AskVote, **HEAD, last_index=NUMBERS, last_term=NUMBERS, pre=st.booleans(), transfer=st.booleans()
    ),
    st.builds(Vote, **HEAD, pre=st.booleans(), granted=st.booleans()),
    st.builds(Appended, **HEAD, ok=st.booleans(), match=NUMBERS, prev_index=NUMBERS, round=NUMBERS),
    st.builds(
        Chunk,
        **HEAD,
        index=NUMBERS,
        index_term=NUMBERS,
        members=MEMBERS,
        size=NUMBERS,
        crc=st.sampled_from([0, crc32(b"x"), 2**32, -1]),
        offset=NUMBERS,
        data=BYTES,
        round=NUMBERS,
    ),
    st.builds(Taken, **HEAD, index=NUMBERS, offset=NUMBERS, round=NUMBERS),
    st.builds(TakeOver, **HEAD),
)


def group_of(kind: str) -> SmallGroup:
    """Three nodes, with `a` in the state that the kind names."""
    group = SmallGroup("abc", command_bytes=64, state_bytes=64, chunk_bytes=16)
    leader = "a" if kind == "leader" else "b"
    group.elect(leader)
    group.propose(leader)
    group.deliver()
    group.beat(leader)  # so that all nodes know the commit index
    if kind == "candidate":
        group.hand(TakeOver(sender="b", to="a", term=2))
    if kind == "blank":
        group.start("a", Saved(me="a"))
    return group


def told(core: Core) -> tuple[object, ...]:
    """State of a core that other nodes or a disk could observe."""
    return (core.saved, core.role, core.leader, core.commit, core.next_deadline(), repr(vars(core)["_votes"]))


@pytest.mark.parametrize("kind", ["follower", "candidate", "leader", "blank"])
@settings(max_examples=40, deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=6))
def test_any_message_is_handled_or_refused_and_what_is_refused_changes_nothing(
    kind: str, messages: list[Message]
) -> None:
    group = group_of(kind)
    core = group["a"]
    for message in messages:
        before = told(core)
        try:
            effects = core.handle(Received(message), now=group.now + 0.1)
        except Violation:
            assert told(core) == before
            effects = []
        core.check_invariants()
        for effect in effects:
            msgspec.msgpack.encode(effect)
        assert all(members_are_sound(entry.members) for entry in core.log.entries)


def members_are_sound(members: Members | None) -> bool:
    return members is None or (bool(members.voters) and len(set(members.all)) == len(members.all))


HEARTBEAT = Append(sender="b", to="a", term=2, prev_index=3, prev_term=2, entries=(), commit=3, round=0)
CHUNK = Chunk(
    sender="b", to="a", term=2, index=9, index_term=2, members=Members(("a", "b")), size=1, crc=0, offset=0,
    data=b"x", round=0,
)  # fmt: skip
ANSWER = Appended(sender="b", to="a", term=2, ok=True, match=3, round=0)


def put(*entries: Entry, prev: int = 3) -> Append:
    return Append(
        sender="b", to="a", term=2, prev_index=prev, prev_term=2, entries=entries, commit=3, round=0
    )


@pytest.mark.parametrize(
    ("kind", "message", "rule"),
    [
        ("follower", msgspec.structs.replace(HEARTBEAT, sender=""), "sender"),
        ("follower", msgspec.structs.replace(HEARTBEAT, sender="b" * (NAME_BYTES + 1)), "sender"),
        ("follower", msgspec.structs.replace(HEARTBEAT, sender="a"), "sender"),
        ("follower", msgspec.structs.replace(HEARTBEAT, sender="c"), "leader"),
        ("leader", HEARTBEAT, "leader"),
        ("leader", CHUNK, "leader"),
        ("follower", msgspec.structs.replace(HEARTBEAT, term=0), "entries"),
        ("follower", Vote(sender="b", to="a", term=0, pre=True, granted=True), "term"),
        ("follower", TakeOver(sender="b", to="a", term=3 + TERM_JUMP), "term"),
        ("follower", msgspec.structs.replace(HEARTBEAT, commit=-1), "number"),
        ("follower", msgspec.structs.replace(HEARTBEAT, round=LARGEST + 1), "number"),
        ("follower", msgspec.structs.replace(HEARTBEAT, prev_term=1), "committed"),
        ("follower", msgspec.structs.replace(HEARTBEAT, prev_term=3), "entries"),
        ("follower", put(Entry(3, 1, b"x"), prev=2), "entries"),
        ("follower", put(Entry(4, 2, bytes(65))), "entries"),
        ("follower", put(Entry(4, 2, b"x", Members(("a",)))), "entries"),
        ("follower", put(Entry(4, 2, None, Members(()))), "members"),
        ("follower", put(Entry(4, 2, None, Members(("a",), ("a",)))), "members"),
        ("follower", put(Entry(4, 2, None, Members(tuple(map(str, range(MOST_MEMBERS + 1)))))), "members"),
        ("follower", msgspec.structs.replace(CHUNK, size=65), "chunk"),
        ("follower", msgspec.structs.replace(CHUNK, data=b"xy"), "chunk"),
        ("follower", msgspec.structs.replace(CHUNK, index_term=3), "chunk"),
        ("follower", msgspec.structs.replace(CHUNK, index_term=1), "committed"),
        ("follower", msgspec.structs.replace(CHUNK, index=3, index_term=1), "committed"),
        ("leader", msgspec.structs.replace(ANSWER, match=4), "answer"),
        ("leader", msgspec.structs.replace(ANSWER, ok=False, match=0, prev_index=9), "answer"),
        ("leader", msgspec.structs.replace(ANSWER, round=1), "answer"),
        ("leader", Taken(sender="b", to="a", term=2, index=1, offset=0, round=7), "answer"),
    ],
)  # fmt: skip
def test_a_violation_names_its_rule(kind: str, message: Message, rule: str) -> None:
    core = group_of(kind)["a"]
    assert core.commit == 3
    before = told(core)
    with pytest.raises(Violation) as raised:
        core.handle(Received(message), now=core.next_deadline())
    assert raised.value.rule == rule
    assert told(core) == before
    core.check_invariants()


@pytest.mark.parametrize("blank", [False, True])
def test_bytes_that_the_state_machine_cannot_read_enter_no_log_and_are_not_installed(blank: bool) -> None:
    saved = Saved(me="a") if blank else bootstrapped("a", ("a", "b"))
    core = Core(saved, SMALL, draw=lambda: 0.5, now=0.0, contents=CONTENTS)
    bad = Entry(2, 2, UNREADABLE)
    entries = Append(sender="b", to="a", term=2, prev_index=1, prev_term=1, entries=(bad,), commit=2, round=0)
    with pytest.raises(Violation, match="that of entry 2 of term 2: it is unreadable"):
        core.handle(Received(entries), now=1.0)
    state = msgspec.structs.replace(CHUNK, size=len(UNREADABLE), crc=crc32(UNREADABLE), data=UNREADABLE[:4])
    core.handle(Received(state), now=1.0)
    before = told(core)
    with pytest.raises(Violation, match="that of the snapshot at 9: it is unreadable"):
        core.handle(Received(msgspec.structs.replace(state, offset=4, data=UNREADABLE[4:])), now=1.0)
    assert told(core) == before
    core.check_invariants()


def test_no_more_of_a_snapshot_is_acknowledged_than_there_is() -> None:
    core = group_of("leader")["a"]
    assert core._leading is not None
    core._leading.progress["b"].begin_snapshot(Snapshot(3, 2, core.members, b"state"))
    taken = Taken(sender="b", to="a", term=2, index=3, offset=5, round=0)
    core.handle(Received(taken), now=0.0)
    with pytest.raises(Violation, match="6 bytes of a state of 5 were taken"):
        core.handle(Received(msgspec.structs.replace(taken, offset=6)), now=0.0)
