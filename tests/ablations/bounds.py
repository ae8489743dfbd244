"""Bounds on the effects of one peer on a role, and their removals: more rows of `benchmarks.ablations`.

The scenario `hostile` finds most of them. A row that no seed is expected to find has the reason. The bounds
of message fields are type annotations, which a class reads when it is made, before any patch: their rows
replace source text.
"""

from tests.ablations import patches
from tests.ablations.safeguards import Ablation

TEST_MESSAGES, TEST_SERVER = "tests/adam_async/messages/", "tests/adam_async/parameter_server/"
TEST_CONTROLLER = "tests/adam_async/controller/"

BOUNDED = TEST_MESSAGES + "test_bounds.py::test_every_field_of_a_message_is_bounded"
REFUSED = "bad fields are refused"
CHECKS = TEST_SERVER + "test_question_checks.py::"


def _bound(name: str, old: str, new: str) -> Ablation:
    """Make the row that removes the bounds from a type of message fields."""
    return Ablation(
        name=f"{name} is bounded",
        file="adam_async/messages/bounds.py",
        old=old,
        new=new,
        guard=BOUNDED,
        breaks=REFUSED,
        scenario="hostile",
    )


BOUNDS = (
    _bound("a wait", "Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]", "Seconds = float"),
    _bound("a rate", "Rate = Annotated[float, Meta(ge=0.0, le=1e12)]", "Rate = float"),
    _bound("a drawn number", "DrawnId = Annotated[int, Meta(ge=0, le=(1 << 56) - 1)]", "DrawnId = int"),
    _bound("a staleness", "Staleness = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]", "Staleness = int"),
    _bound("a count", "Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]", "Count = int"),
    _bound("a number of images", "Images = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]", "Images = int"),
    _bound("an attempt", "Attempt = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]", "Attempt = int"),
    Ablation(
        name="a shard is named once in a question",
        patch=patches.take_repeated_shards,
        guard=CHECKS + "test_a_question_of_no_correct_client_is_refused_by_name",
        breaks=REFUSED,
        scenario="hostile",
    ),
    Ablation(
        name="an epoch is at most one ahead",
        patch=patches.take_any_epoch,
        guard=CHECKS + "test_bounds_of_epochs_and_clocks_follow_the_run",
        breaks=REFUSED,
        scenario="hostile",
    ),
    Ablation(
        name="a push for a later epoch delays its own session alone",
        patch=patches.delay_every_session,
        guard=TEST_SERVER
        + "test_state.py::test_an_event_that_waits_for_an_epoch_delays_its_own_session_only",
        breaks="the run ends, or every role lives",
        scenario="hostile",
    ),
    Ablation(
        name="a clock is within reach of a replica",
        patch=patches.take_any_clock,
        guard=CHECKS + "test_bounds_of_epochs_and_clocks_follow_the_run",
        breaks=REFUSED,
        scenario="hostile",
    ),
    Ablation(
        name="an answer fits into a message",
        patch=patches.take_large_answers,
        guard=CHECKS + "test_an_answer_that_fits_into_no_message_is_refused_before_it_is_made",
        seldom="models of simulated runs are smaller than a message",
        scenario="hostile",
    ),
    Ablation(
        name="a session belongs to its first link",
        patch=patches.take_sessions_of_others,
        guard=TEST_SERVER
        + "test_service.py::test_a_push_in_a_session_of_another_peer_is_refused_and_changes_nothing",
        breaks="sessions belong to their workers",
        scenario="hostile",
    ),
    Ablation(
        name="a session that the map does not name splits no tables",
        patch=patches.split_tables_for_anyone,
        guard=TEST_SERVER + "test_split_tables.py::test_a_client_that_the_map_does_not_name_splits_no_tables",
        breaks="tables stay shared",
        scenario="hostile",
    ),
    Ablation(
        name="a peer has few sessions that the map does not name",
        patch=patches.take_any_number_of_sessions,
        guard=CHECKS + "test_sessions_of_a_peer_and_of_all_are_bounded",
        breaks="sessions are bounded",
        scenario="hostile",
    ),
    Ablation(
        name="each role sets its own keys of the map",
        patch=patches.set_keys_of_other_roles,
        guard=TEST_CONTROLLER + "test_permissions.py::test_each_role_sets_what_the_table_gives_it",
        breaks="records belong to their roles",
        scenario="hostile",
    ),
    Ablation(
        name="a member's record agrees with its link",
        patch=patches.take_records_of_other_incarnations,
        guard=TEST_CONTROLLER
        + "test_permissions.py::test_a_member_sets_its_own_node_with_the_role_of_its_link",
        breaks="records belong to their roles",
        scenario="hostile",
    ),
    Ablation(
        name="each pair of roles has a key of its own",
        patch=patches.use_one_key_for_all_pairs,
        guard="tests/transport/test_keys.py::test_each_pair_has_a_key_of_its_own_on_both_sides",
        breaks="keys prove one role",
        scenario="hostile",
    ),
    Ablation(
        name="a silent connection makes room for a new one",
        patch=patches.close_newest_connection,
        guard="tests/transport/test_tcp.py::test_the_oldest_of_too_many_silent_connections_makes_room",
        breaks="correct peers are answered",
        scenario="hostile",
    ),
    Ablation(
        name="a link that only serves takes no messages",
        patch=patches.take_messages_while_serving,
        guard="tests/transport/test_intake.py::test_a_link_that_only_serves_ends_at_the_first_message",
        breaks="a link that only serves takes no messages",
        scenario="hostile",
    ),
    Ablation(
        name="an answer needs room in the budget",
        patch=patches.admit_every_answer,
        guard="tests/transport/test_budget.py::"
        "test_a_link_has_room_until_its_own_limit_and_one_answer_may_exceed_it",
        breaks="memory is bounded",
        scenario="hostile",
    ),
    Ablation(
        name="each link has a reserved part of the budget",
        patch=patches.reserve_no_part,
        guard="tests/transport/test_budget.py::"
        "test_successive_links_that_take_all_they_can_stay_within_the_budget",
        seldom="a hundred silent peers fill a budget, and a seed has a handful",
        scenario="hostile",
    ),
    Ablation(
        name="a closed link returns its bytes",
        patch=patches.keep_bytes_of_closed_links,
        guard="tests/transport/test_budget.py::test_a_closed_account_releases_all_its_bytes",
        breaks="memory is given back",
        scenario="hostile",
    ),
    Ablation(
        name="an attached record is bounded",
        patch=patches.take_long_records,
        guard=TEST_MESSAGES + "test_messages.py::test_too_long_text_is_refused_undecoded",
        seldom="virtual time passes while nothing is decoded, and the replicated state refuses the same",
        scenario="hostile",
    ),
    Ablation(
        name="a command is readable by the replicated state",
        patch=patches.take_unreadable_records,
        guard=TEST_CONTROLLER + "test_violations.py::test_a_command_that_the_machine_cannot_read_is_named",
        seldom="no peer without the controllers' keys brings bytes into a log",
        scenario="hostile",
    ),
    Ablation(
        name="a message that breaks a rule of consensus is refused",
        patch=patches.accept_violations,
        guard="tests/adam_async/controller/consensus/test_violations.py::test_a_violation_names_its_rule",
        seldom="no peer without the controllers' keys speaks to a core",
        scenario="hostile",
    ),
    Ablation(
        name="the map has room for a record",
        patch=patches.fill_map_without_bound,
        guard=TEST_CONTROLLER
        + "test_replicated_state.py::"
        + "test_a_full_map_takes_no_new_record_from_any_controller_and_its_members_go_on",
        seldom="a map of 8 MiB takes longer to fill than a seed may take",
        scenario="hostile",
    ),
    Ablation(
        name="a payload matches its checksum",
        patch=patches.take_damaged_payloads,
        guard="tests/transport/test_frames.py::test_damage_of_a_payload_is_named",
        breaks="damage is noticed",
        scenario="training",
    ),
    Ablation(
        name="a repeated push is applied once",
        patch=patches.apply_pushes_again,
        guard=TEST_SERVER + "test_state.py::test_a_retried_push_is_applied_once_and_answered_again",
        breaks="I2",
        scenario="training",
    ),
    Ablation(
        name="a pull waits for the clock that it names",
        patch=patches.answer_pulls_at_once,
        guard=TEST_SERVER
        + "test_consistency.py::test_a_pull_for_a_clock_is_answered_when_the_last_replica_gets_there",
        breaks="the run ends, or staleness",
        scenario="training",
    ),
    Ablation(
        name="a client learns of the end of its store",
        patch=patches.use_stores_after_loss,
        guard="tests/adam_async/simulation/scenarios/test_store_clients.py"
        "::test_clients_of_a_deleted_store_open_the_next_one",
        breaks="clients of stores are answered",
        scenario="training",
    ),
)
