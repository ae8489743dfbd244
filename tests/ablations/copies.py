"""Safeguards of shards with several copies and their removals: more rows of `benchmarks.ablations`.

The scenario `pushes` finds most of them. A row that no seed is expected to find has the reason.
"""

from tests.ablations import copy_patches
from tests.ablations.patches import Patch
from tests.ablations.safeguards import Ablation

CORE = "tests/adam_async/replication/test_member.py::"
SERVER = "tests/adam_async/parameter_server/"
PIECES = SERVER + "test_shard_pieces.py::test_a_copy_made_of_pieces_is_equal_to_the_last_bit"
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
        guard=PIECES,
        breaks="equal copies",
    ),
    _row(
        "a piece has the clocks of replicas",
        copy_patches.copy_without_clocks,
        guard=PIECES,
        breaks="equal copies",
    ),
    _row(
        "an entry is not applied again to a piece that has it",
        copy_patches.apply_entries_of_pieces_again,
        guard=CORE + "test_an_entry_in_a_piece_is_not_applied_to_it_again_and_none_to_a_lacking_piece",
        seldom="a small store is one piece, which is there before the entries that it has are committed",
    ),
    _row(
        "an entry has the verdict of each gradient",
        copy_patches.ship_no_verdict,
        guard=SERVER
        + "test_log_entries.py::test_a_push_arrives_with_its_places_and_the_bits_of_its_gradients",
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
        guard=SERVER
        + "test_replicated_state.py::test_a_new_primary_orders_from_the_numbers_that_are_applied",
        breaks="pending pushes end, or I2",
    ),
    _row(
        "open requests are sent again in their order",
        copy_patches.send_again_in_reverse,
        guard=SERVER + "test_session.py::"
        "test_open_exchanges_are_sent_again_in_the_order_of_their_first_sending",
        seldom="each attempt applies the earliest push at least, so the cost is time only",
    ),
    _row(
        "a copy knows the links that its server has",
        copy_patches.forget_links_of_later_members,
        guard=RETURNS,
        breaks="all copies return, or pending pushes end",
    ),
    _row(
        "a repetition of a refused push is refused",
        copy_patches.answer_refused_pushes_as_duplicates,
        guard=SERVER + "test_replicated_state.py::"
        "test_a_repetition_of_a_refused_push_is_refused_again_also_by_a_new_primary",
        seldom="the gradients of the scenario are finite",
    ),
    _row(
        "a repeated tick finds its entry in flight",
        copy_patches.enter_each_tick,
        guard=SERVER + "test_replicated_state.py::"
        "test_a_repeated_tick_in_flight_is_no_further_entry_and_is_answered_with_the_first",
        seldom="a further entry of the same tick changes nothing, and the cost is the length of the log",
    ),
    _row(
        "a joining member without progress is struck out",
        copy_patches.let_members_join_for_ever,
        guard=SERVER + "test_joining_members.py::"
        "test_a_member_without_a_new_piece_is_stalled_also_if_it_begins_again_and_again",
        seldom="each server of the scenario can take up its copies",
    ),
)
