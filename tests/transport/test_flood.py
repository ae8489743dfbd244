"""A member joins a listener that attackers without the token flood with connections."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.flood import FLOODS, OTHER, OWN
from benchmarks.flood import flood as run_flood
from tests.transport.testing import FAR, NEAR, open_rules
from transport import LinkConfig, TcpNetwork

ROOT = Path(__file__).resolve().parents[2]

JOIN_S = 2.0
"""Maximum time of a join, in seconds."""

KINDS = FLOODS["all kinds"]


@pytest.mark.parametrize("source", [OWN, OTHER])
async def test_a_member_joins_beside_attackers_that_connect_again_at_once(source: str) -> None:
    config = LinkConfig(max_unauthenticated=4)
    network = TcpNetwork(token=bytes(16), entropy=os.urandom, rules=open_rules(), config=config)
    here = asyncio.Event()
    made = 0

    def count() -> None:
        nonlocal made
        made += 1
        if made == 16 * len(KINDS):
            here.set()

    async with network.listen(f"tcp://{OWN}:0", FAR, lambda link: link.wait_closed()) as listener:
        flood = run_flood(listener.address, source, KINDS, attackers=8, most=10_000, made=count)
        async with asyncio.TaskGroup() as group:
            flooding = group.create_task(flood, name="flood")
            await here.wait()
            for _ in range(3):
                async with asyncio.timeout(JOIN_S), network.connect(listener.address, NEAR):
                    pass
            flooding.cancel()


@pytest.mark.processes
def test_a_member_joins_beside_2000_attackers_of_another_process(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    flood = ["-m", "benchmarks.flood", "--floods", "all kinds", "--joins", "3", "--json", str(file)]
    subprocess.run([sys.executable, *flood], check=True, cwd=ROOT)

    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2
    for row in rows:
        assert row["connections_per_s"] > 0, row
        assert row["longest_ms"] < JOIN_S * 1e3, row
