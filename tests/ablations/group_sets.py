"""Safeguards of the sets of groups that shards have, and of answers with these sets; and their removals."""

from functools import partial

from tests.ablations.ablation import Ablation

FOLDER, TESTS = "adam_async/parameter_server/", "tests/adam_async/parameter_server/"
QUESTIONS = TESTS + "test_group_questions.py::"
STATE, CHECKS = TESTS + "test_state.py::", TESTS + "test_question_checks.py::"
FINAL, REFUSED = "answered groups are final", "bad fields are refused"
OWN, LOSSES = "groups belong to their workers", "each loss once"

_row = partial(Ablation, scenario="training")
_hostile = partial(Ablation, scenario="hostile")

GROUP_SETS = (
    _row(
        "a question for groups waits for the pushes before it",
        FOLDER + "state.py",
        "if self.idle or (self.synchronous and not self._queue and not self._in_flight):",
        "if self is not None:",
        QUESTIONS + "test_the_answer_waits_for_all_pushes_before_it_and_has_their_groups",
        breaks=FINAL,
    ),
    _row(
        "a question for groups waits for the map at whose version a generation has ended",
        FOLDER + "question_checks.py",
        "if version < asked.map_version:",
        "if version < 0:",
        TESTS
        + "test_service.py::test_a_data_server_reads_the_groups_that_a_bundle_has_at_a_version_of_the_map",
        breaks=FINAL,
    ),
    _row(
        "a generation ends with the map of the primary, before the entry in the log",
        FOLDER + "state.py",
        "return self._named.get(Replica(message.replica)) == message.incarnation",
        "return self.live.get(Replica(message.replica)) == message.incarnation",
        QUESTIONS + "test_a_bundle_takes_no_groups_of_an_ended_generation_"
        "before_the_entry_of_its_end_is_applied",
        seldom="a push must arrive within the milliseconds between the map and the entry",
    ),
    _hostile(
        "a bundle takes groups only of generations that its map names",
        FOLDER + "state.py",
        "needs_name = bool(push.groups) or (self.synchronous and not self.program)",
        "needs_name = self.synchronous and not self.program",
        QUESTIONS + "test_a_generation_that_the_map_has_not_named_or_named_between_two_versions_must_wait",
        breaks=OWN,
    ),
    _hostile(
        "a generation that the map has not named has no lane",
        FOLDER + "state.py",
        "return not self.program or self.is_named(push)",
        "return True",
        TESTS + "test_at_once.py::test_a_generation_that_the_map_has_not_named_takes_the_long_way",
        breaks=OWN,
    ),
    _row(
        "a push on a lane is queued only if its generation is in the newest map",
        FOLDER + "state.py",
        "return not self.epoch_gate.events and self.is_named(push)",
        "return not self.epoch_gate.events",
        TESTS + "test_at_once.py::test_a_push_behind_the_end_of_its_generation_takes_the_long_way",
        seldom="a push must arrive while the end of its generation waits behind a batch",
    ),
    _row(
        "the newest clock is part of the replicas' state",
        FOLDER + "replica_clocks.py",
        "self._first_clock, self.newest_clock = state.first_clock, state.newest_clock",
        "self._first_clock = state.first_clock",
        QUESTIONS + "test_the_newest_clock_goes_with_the_state_of_the_replicas",
        breaks="equal copies",
        scenario="pushes",
    ),
    _row(
        "frozen shards restrict no answer",
        FOLDER + "state.py",
        "if not shard.spec.frozen]",
        "]",
        QUESTIONS + "test_frozen_shards_restrict_nothing",
        seldom="groups that a frozen shard lacks are trained again, and each shard refuses them",
    ),
    _row(
        "groups of pushes that wait are bounded with the counted ones",
        FOLDER + "question_checks.py",
        "sets = tables.ordered_groups",
        "sets = tables.groups",
        TESTS
        + "test_question_checks.py::test_the_groups_of_pushes_that_wait_are_bounded_with_the_counted_ones",
        seldom="correct groups have a few ranges",
    ),
    _row(
        "a new primary compares with the counted groups",
        FOLDER + "state.py",
        "            tables.ordered_groups = tables.groups\n",
        "",
        STATE + "test_a_new_primary_knows_the_counted_groups_and_no_ordered_ones",
        breaks="every group on every shard",
    ),
    _row(
        "the short way refuses groups that the shards have",
        FOLDER + "at_once.py",
        "tables.ordered_groups, push.groups) is not False",
        "tables.ordered_groups, push.groups) is None",
        TESTS + "test_at_once.py::test_groups_that_the_shards_have_take_the_long_way",
        breaks="each group once",
    ),
    _row(
        "a refused gradient uses up its groups",
        FOLDER + "bundle.py",
        "for shard in (*accepted, *queued.shards_at(queued.refused))]",
        "for shard in accepted]",
        STATE + "test_a_shard_counts_the_groups_of_each_push_that_it_takes_or_refuses",
        seldom="the gradients of the scenario are finite",
    ),
    _row(
        "the loss of a group counts only on shards that did not have the group",
        FOLDER + "bundle.py",
        "count_groups(queued.push, [*fresh, *known], fresh)",
        "count_groups(queued.push, [*fresh, *known], [*fresh, *known])",
        STATE + "test_a_shard_takes_each_group_once_whichever_session_sends_it",
        breaks=LOSSES,
    ),
    _row(
        "a push of known groups counts as a tick",
        FOLDER + "bundle.py",
        "named = shards if not queued.unapplied else [*shards, *queued.unapplied_shards()]",
        "named = shards",
        STATE + "test_a_shard_takes_each_group_once_whichever_session_sends_it",
        seldom="the next push or tick of the replica advances its clock",
    ),
    _row(
        "shards have all groups of an epoch whose set is dropped",
        "adam_async/run/group_ranges.py",
        "return len(sets) >= KEPT_EPOCHS and epoch < min(sets)",
        "return False",
        "tests/adam_async/run/test_group_ranges.py::test_an_epoch_whose_set_is_dropped_is_over",
        seldom="a push must be late by two epochs",
    ),
    _hostile(
        "the groups of a push are of its epoch",
        FOLDER + "question_checks.py",
        "if epoch and groups[0] != epoch:",
        "if epoch < 0:",
        CHECKS + "test_groups_are_those_of_a_known_epoch_of_the_run",
        breaks=REFUSED,
    ),
    _hostile(
        "groups are within their epoch",
        FOLDER + "question_checks.py",
        "if groups[-1] > self._most_groups:",
        "if groups[-1] < 0:",
        CHECKS + "test_groups_are_those_of_a_known_epoch_of_the_run",
        breaks=REFUSED,
    ),
    _hostile(
        "a store of clients with clocks has no groups",
        FOLDER + "question_checks.py",
        "if not is_of_run and self._state.clocked:",
        "if is_of_run is None:",
        CHECKS + "test_a_client_names_groups_of_any_epoch_in_a_store_without_clocks_only",
        breaks=REFUSED,
    ),
    _hostile(
        "steps are reported to a store in place only",
        FOLDER + "served_store.py",
        "if isinstance(body, ReportSteps) and not self.store.in_place:",
        "if self.store is None:",
        TESTS + "test_service.py::test_steps_are_reported_to_a_store_in_place_only",
        breaks=OWN,
    ),
    _row(
        "a loaded shard begins with its groups",
        FOLDER + "shard_transfer.py",
        "        tables.groups = tables.ordered_groups = state.groups\n",
        "",
        TESTS + "test_shard_transfer.py::test_shards_are_set_as_they_were_read",
        breaks=LOSSES,
    ),
    _row(
        "the groups of a shard in bsp are those of its values",
        FOLDER + "shard.py",
        "sets = without_groups(sets, (epoch, *named))",
        "pass",
        TESTS + "test_kept_shards.py::"
        "test_a_shard_is_read_without_the_groups_of_contributions_that_are_due_or_wait_for_a_replica",
        seldom="a shard is usually read before the next contributions arrive",
    ),
    _row(
        "a loaded shard begins with its losses",
        FOLDER + "shard_transfer.py",
        "        tables.losses = state.losses\n",
        "",
        TESTS + "test_shard_transfer.py::test_shards_are_set_as_they_were_read",
        breaks=LOSSES,
    ),
    _row(
        "the losses of a shard in bsp are those of its values",
        FOLDER + "shard.py",
        "losses = without_losses(losses, epoch, push.weight, push.loss_sum)",
        "pass",
        TESTS + "test_kept_shards.py::"
        "test_a_shard_is_read_without_the_groups_of_contributions_that_are_due_or_wait_for_a_replica",
        seldom="a shard is usually read before the next contributions arrive",
    ),
    _row(
        "ranges of loaded sets ascend",
        "adam_async/messages/shard_states.py",
        '            check_ascending(ranges, "bounds")\n',
        "",
        TESTS + "test_shard_transfer.py::test_sets_that_no_shard_can_have_are_refused",
        seldom="correct drivers load what they read",
    ),
    _row(
        "sets in an answer have no common group",
        "adam_async/messages/group_sets.py",
        "if (starts % 2).any() or (starts != stops).any():",
        "if starts is None:",
        "tests/adam_async/messages/test_group_sets.py::test_sets_that_no_correct_server_sends_are_refused",
        seldom="a server must lie",
    ),
)
