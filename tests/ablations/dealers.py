"""Safeguards of the dealer, and their removals."""

from functools import partial

from tests.ablations.ablation import Ablation

EPOCH, DEALER = "adam_async/data_server/epoch.py", "adam_async/data_server/dealer.py"
RULES = "adam_async/controller/training_rules.py"
STATE = "tests/adam_async/data_server/test_state.py::"
SKIPPING = "tests/adam_async/data_server/test_skipping.py::"
SETTLING = "tests/adam_async/data_server/test_settling.py::"
PARTY = "tests/adam_async/data_server/test_dealer.py::"
FOLLOWING = "tests/adam_async/data_server/test_following.py::"
CLIENT = "tests/adam_async/data_server/test_client.py::"
CHANGES = "tests/adam_async/controller/test_training_rules.py::"

_row = partial(Ablation, scenario="members")

DEALERS = (
    _row(
        "a group that all shards have is not leased again",
        EPOCH,
        "done = [number for number in settled if number in sets.every]",
        "done = [number for number in settled if number < 0]",
        SETTLING + "test_a_group_that_every_shard_has_is_finished_and_its_loss_counts",
        breaks="each group once",
    ),
    _row(
        "a group is finished when all parts of its replica have reported it",
        "adam_async/data_server/state.py",
        "if len(lease.losses) == self._partitions:",
        "if lease.losses:",
        STATE + "test_a_group_is_finished_when_all_parts_are_and_its_losses_add_up",
        breaks="every group on every shard",
    ),
    _row(
        "a group with images that the epoch before has skipped is not skipped",
        EPOCH,
        "return number < self._carried or number in self.ragged",
        "return number in self.ragged",
        SKIPPING + "test_an_epoch_does_not_end_before_what_was_carried_is_trained",
        breaks="no image is skipped twice",
    ),
    _row(
        "one of the epochs whose results the map keeps has trained all groups",
        "adam_async/run/cluster_map.py",
        "return len(newest) == RESULTS_KEPT - 1 and all(each.skipped_groups for each in newest)",
        "return False",
        "tests/adam_async/run/test_counts.py::"
        "test_runs_that_go_on_with_each_other_find_the_order_of_each_epoch_from_few_results",
        seldom="a run must have 32 epochs that skip groups",
    ),
    _row(
        "a worker reads from another data server what the first one owes",
        "adam_async/data_server/group_reader.py",
        "if len(servers) == 1 or call.done():",
        "if servers:",
        "tests/adam_async/data_server/test_group_reader.py::"
        "test_a_slow_server_that_answers_first_after_all_is_kept_to",
        seldom="the cost is the time until the link of the first one ends",
    ),
    _row(
        "a dealer that follows another one reads the sets",
        DEALER,
        "or self.state.needs_held",
        "",
        PARTY + "test_when_the_dealer_is_lost_another_goes_on_and_every_group_is_counted_once",
        breaks="each group once",
    ),
    _row(
        "the dealer of a resumed run reads the sets",
        DEALER,
        "return self._program.resumed is not None or",
        "return",
        PARTY + "test_a_resumed_run_trains_what_each_shard_lacks",
        breaks="each group once",
    ),
    _row(
        "ragged groups that an epoch begins with are steps of their own",
        EPOCH,
        "deque((number, 2 if number in self.ragged else 1) for number in left)",
        "deque((number, 1) for number in left)",
        SETTLING + "test_a_dealer_goes_on_with_the_groups_that_not_all_shards_have",
        breaks="steps are taken whole",
    ),
    _row(
        "a dealer that follows another one leaves to the workers what they hold",
        EPOCH,
        "            if number in assigned.progress\n        }",
        "            if number < 0\n        }",
        FOLLOWING + "test_what_the_workers_hold_stays_with_them_and_the_rest_is_dealt_out",
        breaks="each group once",
    ),
    _row(
        "a dealer that follows another one reads the sets after all workers have told what they hold",
        DEALER,
        "version = cluster.version if not self.state.lacks_held else 0",
        "version = cluster.version",
        PARTY + "test_a_dealer_reads_no_sets_before_all_workers_have_told_what_they_hold",
        seldom="a worker must report to the dealer that was replaced after the reading has begun",
    ),
    _row(
        "a dealer reads the sets anew if a replica is lost meanwhile",
        DEALER,
        "self._cancel_reading()  # the sets are final for replicas that were lost before the reading",
        "pass",
        PARTY + "test_a_replica_that_is_lost_while_a_dealer_begins_costs_no_group",
        seldom="a replica that knows the new dealer must be lost within one reading",
    ),
    _row(
        "a dealer that follows another one continues its rounds",
        "adam_async/run/epoch_shares.py",
        "rest = range(warm, groups) if follows else left[rest_at:]",
        "rest = left[rest_at:]",
        FOLLOWING + "test_rounds_go_on_with_the_same_groups_clocks_and_end",
        seldom="the scenario compares no bits of two runs",
    ),
    _row(
        "a worker reports again to the next dealer what the one before has acknowledged",
        "adam_async/data_server/client.py",
        "        self._reports[:0] = self._reported.values()\n",
        "",
        CLIENT + "test_another_data_server_is_told_what_the_client_holds_and_gets_the_reports_again",
        breaks="epochs end",
    ),
    _row(
        "a ragged group is never skipped",
        EPOCH,
        "return number < self._carried or number in self.ragged",
        "return number < self._carried",
        SETTLING + "test_of_a_closed_epoch_groups_that_no_shard_has_are_skipped_and_ragged_ones_are_trained",
        seldom="an epoch must close while a group of a lost replica of two parts is ragged",
    ),
    _row(
        "an epoch does not close while leases are unsettled",
        EPOCH,
        "        if self.unsettled:\n            return\n",
        "",
        SETTLING + "test_an_epoch_does_not_close_while_a_lease_is_unsettled",
        seldom="the unsettled groups themselves are never skipped; only others would be",
    ),
    _row(
        "sets of an older map do not settle later losses",
        EPOCH,
        "if lease.lost_at <= sets.version]",
        "if sets.version]",
        SETTLING + "test_sets_of_an_older_map_settle_older_losses_only",
        seldom="a second replica must push a group, and be lost, within one reading",
    ),
    _row(
        "a late end of an epoch by a replaced dealer is a conflict",
        RULES,
        "epoch = cluster.epoch and msgspec.structs.replace(cluster.epoch, changed=cluster.version + 1)",
        "epoch = cluster.epoch",
        CHANGES + "test_a_late_end_of_an_epoch_by_a_replaced_dealer_is_void",
        seldom="a frozen dealer must have sent the end of the epoch, and not heard of its successor",
    ),
    _row(
        "all replicas reach the highest clock of the sets",
        EPOCH,
        "self.clock_targets.seen(sets.clock)",
        "self.clock_targets.seen(0)",
        SETTLING + "test_the_clock_of_the_sets_raises_the_end_of_all",
        seldom="the end is usually above the clock of a lost replica",
    ),
)
