"""Memory of roles in processes of their own, beside peers that have the rights of members and misuse them.

Eight peers ask for large answers and read none; a hundred send messages that the role does not receive.
Meanwhile the roles answer valid questions. `benchmarks/peer_memory.py` has more kinds and all roles.
"""

import argparse
import sys

import pytest

from benchmarks.peer_memory import measure

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the process's status"),
]

BUDGET_MB = 512
KEPT_MB = 128
"""Memory for the pools and link tables of a process, in MB."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("role", "kind"), [("ps", "deaf"), ("controller", "one-way")])
async def test_hostile_peers_take_no_more_than_the_budget_and_give_it_back(role: str, kind: str) -> None:
    options = argparse.Namespace(deaf=8, dead=100, seconds=3.0, roles=[role], kinds=[kind])
    (row,) = [row async for row in measure(options)]
    assert row["most_mb"] - row["before_mb"] <= 1.1 * BUDGET_MB, row
    assert row["after_mb"] - row["before_mb"] <= KEPT_MB, row
    assert row["honest_answers"] > 10, row
