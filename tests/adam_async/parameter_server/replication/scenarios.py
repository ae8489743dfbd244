"""Fixed runs of a bundle that random ones seldom have."""

from adam_async.messages.replication import Begun, Held
from tests.adam_async.parameter_server.replication.small_bundle import A, B, C, SmallBundle


def a_joining_member_has_the_tail_of_earlier_primaries_before_it_is_added():
    """A new primary cannot commit its tail alone, and its joining member has all pieces before the tail.

    Only a member that counts its pieces wrongly has them then: links are first in, first out.
    """
    bundle = SmallBundle(A, B, outside=(C,), min_in_sync=2)
    bundle.propose(A, "x", deliver=False)
    bundle[B].received(*bundle.waiting[B].popleft())
    bundle.carry_out(B)
    bundle.lose(A)
    bundle.change(to=(B,), generation=2, in_sync=(B,), joining=(C,))
    fields = {"store": "s", "home": "a", "generation": 2, "session": 1}
    bundle[B].received(C, Begun(**fields, position=0, applied=0))
    bundle.carry_out(B)
    bundle[B].received(C, Held(**fields, position=0, applied=0, pieces=1))
    bundle.carry_out(B)
    assert bundle.proposals(B) == []
    bundle[B].received(C, Held(**fields, position=1, applied=0, pieces=1))
    bundle.carry_out(B)
    assert bundle.proposals(B)[-1].record.in_sync == (B, C)


def another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it():
    """A member with three uncommitted entries gets another first one, and becomes primary with that alone.

    Random primaries go on ordering, so other entries soon take the places of the later two as well.
    """
    bundle = SmallBundle(A, B, C)
    bundle[A].link_lost(C)
    bundle.propose(A, "x1", "x2", "x3")
    bundle.lose(A)
    bundle.change(generation=2, in_sync=(C, B))
    bundle.settle()
    bundle.propose(C, "y")
    bundle.lose(C)

    bundle.change(generation=3, in_sync=(B,))

    assert bundle.applied[B] == ["y"]
