"""Counts of a shard by replica stay small, and their totals stay right."""

from adam_async.parameter_server.shard import EXACT, MOST_ROWS
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.statistics import count_server
from tests.adam_async.parameter_server.timelines import shard_of


def test_staleness_has_few_rows_for_replicas_that_the_map_does_not_name():
    shard = shard_of(0)
    for replica in range(1000, 1000 + 2 * MOST_ROWS):
        shard.separate().count_staleness(replica, 3)
    shard.separate().name_replicas([7, 8])
    shard.separate().count_staleness(7, 1)
    assert shard.staleness == {3: 2 * MOST_ROWS, 1: 1}
    rows = count_server([ServerState(store="s", generation=1, shards=[shard])]).clients
    assert len(rows) == MOST_ROWS + 2
    assert (rows["others"].staleness, rows["7"].staleness) == ({"3": MOST_ROWS}, {"1": 1})


def test_a_row_of_staleness_has_few_values_whatever_versions_pushes_claim_to_have_read():
    shard = shard_of(0)
    for staleness in (*range(EXACT), *range(EXACT, 1 << 20, 999)):
        shard.separate().count_staleness(7, staleness)
    assert len(shard.staleness) <= EXACT + 20
    assert max(shard.staleness) == 1 << 19
    assert shard.staleness[EXACT - 1] == 1
