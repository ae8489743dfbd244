"""Safeguards of shards with several copies and their removals: more rows of `benchmarks.ablations`.

The scenario `pushes` finds most of them. A row that no seed is expected to find has the reason.
"""

from tests.ablations import copy_patches
from tests.ablations.patches import Patch
from tests.ablations.safeguards import Ablation

CORE = "tests/adam_async/replication/test_member.py::"
KILLED = (
    "tests/adam_async/simulation/scenarios/test_pushes.py::"
    "test_a_killed_server_costs_no_push_and_returns_with_all_copies"
)
RETURNS = (
    "tests/adam_async/simulation/scenarios/test_pushes.py::"
    "test_two_of_three_copies_may_be_lost_one_after_the_other"
)
RARE = "a primary must be lost within milliseconds, and seeds of the core find it in a few runs"


def _row(name: str, patch: Patch, *, guard: str = KILLED, breaks: str = "", seldom: str = "") -> Ablation:
    return Ablation(name=name, patch=patch, guard=guard, breaks=breaks, seldom=seldom, scenario="pushes")


COPIES = (
    _row(
        "an entry is acknowledged once all members in sync hold it",
        copy_patches.commit_without_members,
        guard=CORE + "test_an_entry_is_committed_once_all_members_in_sync_hold_it",
        breaks="one log",
    ),
    _row(
        "a member applies committed entries only",
        copy_patches.apply_uncommitted_entries,
        breaks="all copies return",
    ),
    _row(
        "a member keeps its tail when a new primary begins",
        copy_patches.drop_tail_at_begin,
        guard=CORE + "test_after_two_successive_losses_an_acknowledged_entry_is_there",
        seldom=RARE,
    ),
    _row(
        "the new primary's entry takes the place of an uncommitted one",
        copy_patches.keep_conflicting_copies,
        guard=CORE + "test_another_entry_takes_the_place_of_an_uncommitted_one_and_of_all_behind_it",
        seldom=RARE,
    ),
    _row(
        "a piece has the numbers of applied pushes",
        copy_patches.copy_without_numbers,
        breaks="equal copies",
    ),
    _row("a piece has the clocks of replicas", copy_patches.copy_without_clocks, breaks="equal copies"),
    _row(
        "an entry is not applied again to a piece that has it",
        copy_patches.apply_entries_of_pieces_again,
        guard=CORE + "test_an_entry_in_a_piece_is_not_applied_to_it_again_and_none_to_a_lacking_piece",
        seldom="a small store is one piece, which is there before the entries that it has are committed",
    ),
    _row(
        "an entry has the verdict of each gradient",
        copy_patches.ship_no_verdict,
        breaks="equal copies",
    ),
    _row(
        "pushes are sent again under their numbers",
        copy_patches.send_again_under_new_numbers,
        breaks="pending pushes end, or I2",
    ),
    _row(
        "a new primary begins with the applied numbers",
        copy_patches.lead_without_numbers,
        breaks="pending pushes end, or I2",
    ),
    _row(
        "open requests are sent again in their order",
        copy_patches.send_again_in_reverse,
        guard="tests/adam_async/parameter_server/test_session.py::"
        "test_open_exchanges_are_sent_again_in_the_order_of_their_first_sending",
        seldom="each attempt applies the earliest push at least, so the cost is time only",
    ),
    _row(
        "a copy knows the links that its server has",
        copy_patches.forget_links_of_later_members,
        guard=RETURNS,
        breaks="all copies return, or pending pushes end",
    ),
)
