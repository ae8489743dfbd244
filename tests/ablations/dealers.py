"""Safeguards of the dealer, and their removals."""

from functools import partial

from tests.ablations.ablation import Ablation

EPOCH, DEALER = "adam_async/data_server/epoch.py", "adam_async/data_server/dealer.py"
RULES = "adam_async/driver/training_rules.py"
SETTLING = "tests/adam_async/data_server/test_settling.py::"
PARTY = "tests/adam_async/data_server/test_dealer.py::"
CHANGES = "tests/adam_async/driver/test_training_rules.py::"

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
        "a dealer that follows another one reads the sets",
        DEALER,
        "or (self.term > 1 and not self.state.epoch)",
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
        "deque((number, 2 if number in self.ragged else 1) for number in numbers)",
        "deque((number, 1) for number in numbers)",
        SETTLING + "test_a_dealer_goes_on_with_the_groups_that_not_all_shards_have",
        seldom="the workers of the scenario push group by group",
    ),
    _row(
        "a new dealer ends all replica generations",
        RULES,
        "return _end_replica_generations(cluster) if cluster.epoch is not None else cluster",
        "return cluster",
        CHANGES + "test_another_ready_data_server_replaces_a_lost_dealer_and_ends_all_replica_generations",
        seldom="in members the map checker does not run; workers of the old generation ask the new dealer",
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
        seldom="a second replica must be lost within the milliseconds of a reading",
    ),
    _row(
        "a late end of an epoch by a replaced dealer is a conflict",
        RULES,
        "    epoch = msgspec.structs.replace(cluster.epoch, changed=changed) if",
        "    epoch = cluster.epoch if",
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
