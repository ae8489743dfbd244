"""Stories that dice seldom tell: each fails without the safeguard that it is named for.

The ablations are put through them as well.
"""

from zlib import crc32

from adam_async.controller.consensus import messages
from tests.adam_async.controller.consensus.small_group import SmallGroup


def an_entry_of_an_earlier_term_is_committed_with_one_of_the_leaders_own():
    """As in figure 8 of the Raft paper: until then, one with a later entry may still be elected."""
    group = SmallGroup("abc", message_bytes=1)
    group.elect("a")
    group.propose("a", b"old")
    group.wire.clear()
    group.restart("a")
    group.tick("a")
    while group.wire:
        message = group.wire.pop(0)
        if "c" not in (message.sender, message.to):
            group.hand(message)
            assert group["a"].commit in (1, 4), group["a"]
    assert group["a"].commit == 4
    assert group.log("b") == [(2, None), (2, b"old"), (3, None)]


def entries_that_do_not_follow_a_snapshot_go():
    """A follower has five entries of its own, and is sent a snapshot that ends with another fourth one."""
    group = SmallGroup("abc")
    group.elect("a")
    for _ in range(4):
        group.propose("a")
    assert group["a"].log.last_index == 6
    chunk = messages.Chunk(
        sender="b",
        to="a",
        term=9,
        index=4,
        index_term=8,
        members=group["a"].members,
        size=1,
        crc=crc32(b"s"),
        offset=0,
        data=b"s",
        round=0,
    )
    group.hand(chunk)
    assert group["a"].log.last_index == 4, group["a"].log.entries


def a_step_waits_for_an_entry_of_the_leaders_term():
    """Else two leaders could each begin one that the other does not know, and be two steps apart."""
    group = SmallGroup("abc", joiners="d")
    group.tick("a")
    while group["a"].role.value != "leader":
        group.hand(group.wire.pop(0))
    effects = group.change("a", "add", "d")
    assert ["no entry of this term" in effect.reason for effect in effects] == [True]
    group.deliver()
    assert group.change("a", "add", "d") == []


STORIES = (
    an_entry_of_an_earlier_term_is_committed_with_one_of_the_leaders_own,
    entries_that_do_not_follow_a_snapshot_go,
    a_step_waits_for_an_entry_of_the_leaders_term,
)
