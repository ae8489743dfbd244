"""Bounds on the effects of one peer on a role, and their removals.

The scenario `hostile` finds most of them. A row that no seed is expected to find has the reason.
"""

from functools import partial

from tests.ablations.ablation import Ablation

CONTROLLER, SERVER = "adam_async/controller/", "adam_async/parameter_server/"
RULES, TESTS = "tests/adam_async/controller/test_", "tests/adam_async/parameter_server/test_"
CHECKS, CHECKS_TEST = SERVER + "question_checks.py", TESTS + "question_checks.py::test_"
MESSAGES = "tests/adam_async/messages/test_"
BUDGET, BUDGET_TEST = "transport/budget.py", "tests/transport/test_budget.py::test_"
REFUSED, RECORDS = "bad fields are refused", "records belong to their roles"

_row = partial(Ablation, scenario="hostile")
_training = partial(Ablation, scenario="training")


def _bound(name: str, old: str, new: str) -> Ablation:
    """Make the row that removes the bounds from a type of message fields."""
    return _row(
        f"{name} is bounded",
        "adam_async/messages/body.py",
        old,
        new,
        MESSAGES + "body.py::test_every_field_of_a_message_is_bounded",
        breaks=REFUSED,
    )


BOUNDS = (
    _bound("a wait", "Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]", "Seconds = float"),
    _bound("a rate", "Rate = Annotated[float, Meta(ge=0.0, le=1e12)]", "Rate = float"),
    _bound("a drawn number", "DrawnId = Annotated[int, Meta(ge=0, le=(1 << 56) - 1)]", "DrawnId = int"),
    _bound("a staleness", "Staleness = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]", "Staleness = int"),
    _bound("a count", "Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]", "Count = int"),
    _bound("a number of images", "Images = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]", "Images = int"),
    _bound("an attempt", "Attempt = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]", "Attempt = int"),
    _row(
        "a shard is named once in a question",
        CHECKS,
        'return f"{again} is named twice"',
        'return ""',
        CHECKS_TEST + "a_question_of_no_correct_client_is_refused_by_name",
        breaks=REFUSED,
    ),
    _row(
        "an epoch is at most one ahead",
        CHECKS,
        'return "" if epoch <= most else f"epoch',
        'return "" if True else f"epoch',
        CHECKS_TEST + "bounds_of_epochs_and_clocks_follow_the_run",
        breaks=REFUSED,
    ),
    _row(
        "a push for a later epoch delays its own session alone",
        SERVER + "waiting_requests.py",
        "return session in self._sessions",
        "return bool(self._sessions)",
        TESTS + "state.py::test_an_event_that_waits_for_an_epoch_delays_its_own_session_only",
        breaks="the run ends, or every role lives",
    ),
    _row(
        "a clock is within reach of a replica",
        CHECKS,
        'return "" if clock <= most else f"clock',
        'return "" if True else f"clock',
        CHECKS_TEST + "bounds_of_epochs_and_clocks_follow_the_run",
        breaks=REFUSED,
    ),
    _row(
        "an answer fits into a message",
        CHECKS,
        "return self._too_large(body, most_bytes)",
        "return None",
        CHECKS_TEST + "an_answer_that_fits_into_no_message_is_refused_before_it_is_made",
        seldom="models of simulated runs are smaller than a message",
    ),
    _row(
        "a session belongs to its first link",
        SERVER + "served_store.py",
        "text = self._sender_checks.refusal(request.link.peer, body)",
        'text = ""',
        TESTS + "service.py::test_a_push_in_a_session_of_another_peer_is_refused_and_changes_nothing",
        breaks="sessions belong to their workers",
    ),
    _row(
        "a session that the map does not name splits no tables",
        SERVER + "state.py",
        "return (replica, message.incarnation) not in clocks.ended",
        "return False",
        TESTS + "split_tables.py::test_a_client_that_the_map_does_not_name_splits_no_tables",
        breaks="tables stay shared",
    ),
    _row(
        "a peer has few sessions that the map does not name",
        SERVER + "question_checks.py",
        "if mine >= MOST_SESSIONS:",
        "if False:",
        CHECKS_TEST + "sessions_of_a_peer_and_of_all_are_bounded",
        breaks="sessions are bounded",
    ),
    _row(
        "each role sets its own keys of the map",
        CONTROLLER + "permissions.py",
        "if found is WRONG:",
        "if False:",
        RULES + "permissions.py::test_each_role_sets_what_the_table_gives_it",
        breaks=RECORDS,
    ),
    _row(
        "a member's record agrees with its link",
        CONTROLLER + "permissions.py",
        'return value.get("role") == peer.role and value.get("incarnation") == peer.incarnation',
        "return True",
        RULES + "permissions.py::test_a_member_sets_its_own_node_with_the_role_of_its_link",
        breaks=RECORDS,
    ),
    _row(
        "each pair of roles has a key of its own",
        "transport/keys.py",
        'return b"\\0".join((_LABEL, first.encode(), second.encode()))',
        "return _LABEL",
        "tests/transport/test_keys.py::test_each_pair_has_a_key_of_its_own_on_both_sides",
        breaks="keys prove one role",
    ),
    _row(
        "a silent connection makes room for a new one",
        "transport/entrance.py",
        "        self._admission.arrived(greeter, source_of(host))\n",
        "        if len(self._admission) >= self._admission._limit:\n"
        "            return greeter.crowd_out()\n"
        "        self._admission.arrived(greeter, source_of(host))\n",
        "tests/transport/test_stream.py::test_the_oldest_of_too_many_silent_connections_makes_room",
        breaks="correct peers are answered",
    ),
    _row(
        "a link that only serves takes no messages",
        "transport/link.py",
        "self._receives = receives\n",
        "self._receives = receives = True\n",
        "tests/transport/test_intake.py::test_a_link_that_only_serves_ends_at_the_first_message",
        breaks="a link that only serves takes no messages",
    ),
    _row(
        "an answer needs room in the budget",
        BUDGET,
        "if held + nbytes <= self.part_bytes and held < self.limit_bytes:",
        "if True:",
        BUDGET_TEST + "a_link_has_room_until_its_own_limit_and_one_answer_may_exceed_it",
        breaks="memory is bounded",
    ),
    _row(
        "each link has a reserved part of the budget",
        BUDGET,
        "budget.reserved_bytes += self.part_bytes",
        "pass",
        BUDGET_TEST + "successive_links_that_take_all_they_can_stay_within_the_budget",
        seldom="a hundred silent peers fill a budget, and a seed has a handful",
    ),
    _row(
        "a closed link returns its bytes",
        BUDGET,
        "        budget.beyond_bytes -= max(self.held_bytes - self.part_bytes, 0)\n"
        "        budget.held_bytes -= self.held_bytes\n",
        "",
        BUDGET_TEST + "a_closed_account_releases_all_its_bytes",
        breaks="memory is given back",
    ),
    _row(
        "an attached record is bounded",
        "adam_async/messages/tensors.py",
        "if size > most_bytes:",
        "if False:",
        MESSAGES + "messages.py::test_too_long_text_is_refused_undecoded",
        seldom="virtual time passes while nothing is decoded, and the replicated state refuses the same",
    ),
    _row(
        "a command is readable by the replicated state",
        CONTROLLER + "replicated_state.py",
        "    if len(value) > MOST_VALUE_BYTES:\n",
        '    return ""\n    if len(value) > MOST_VALUE_BYTES:\n',
        RULES + "violations.py::test_a_command_that_the_machine_cannot_read_is_named",
        seldom="no peer without the controllers' keys brings bytes into a log",
    ),
    _row(
        "a message that breaks a rule of consensus is refused",
        CONTROLLER + "consensus/violations.py",
        "        _check_shape(message, self._settings)\n",
        "        return\n",
        "tests/adam_async/controller/consensus/test_violations.py::test_a_violation_names_its_rule",
        seldom="no peer without the controllers' keys speaks to a core",
    ),
    _row(
        "the map has room for a record",
        CONTROLLER + "replicated_state.py",
        'if "/" not in key or size <= held:',
        "if True:",
        RULES + "replicated_state.py::"
        "test_a_full_map_takes_no_new_record_from_any_controller_and_its_members_go_on",
        seldom="a map of 8 MiB takes longer to fill than a seed may take",
    ),
    _training(
        "a payload matches its checksum",
        "transport/decoder.py",
        "if self._computed != expected:",
        "if False:",
        "tests/transport/test_frames.py::test_damage_of_a_payload_is_named",
        breaks="damage is noticed",
    ),
    _training(
        "a repeated push is applied once",
        SERVER + "push_queue.py",
        "    if number == last + 1:\n        tables",
        "    if number <= last + 1:\n        tables",
        TESTS + "state.py::test_a_retried_push_is_applied_once_and_answered_again",
        breaks="I2",
    ),
    _training(
        "a pull waits for the clock that it names",
        SERVER + "waiting_requests.py",
        "if queued.clock and applied_clock(queued.shards) < queued.clock:",
        "if queued.is_reading and queued.clock and applied_clock(queued.shards) < queued.clock:",
        TESTS + "consistency.py::test_a_pull_for_a_clock_is_answered_when_the_last_replica_gets_there",
        breaks="the run ends, or staleness",
    ),
    _training(
        "a client learns of the end of its store",
        "adam_async/store/opening.py",
        "name, node = self.name, self._identity.node\n        async for",
        "return\n        async for",
        "tests/test_simulation/scenarios/test_store_clients.py::"
        "test_clients_of_a_deleted_store_open_the_next_one",
        breaks="clients of stores are answered",
    ),
)
