"""kill -9 at random moments over a real folder: no acknowledged entry is lost, and each state is whole."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = 40
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_killed_server_finds_all_that_it_acknowledged(tmp_path):
    dice = random.Random(7)
    acknowledged = 0
    for _ in range(ROUNDS):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.adam_async.persistence.killed_server", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            begin = int(process.stdout.readline())
            assert begin >= acknowledged
            for _ in range(dice.randrange(1, 60)):
                acknowledged = int(process.stdout.readline())
            process.kill()
            rest = process.stdout.read().splitlines()
        assert process.returncode == -9
        # The last line may be cut off.
        acknowledged = max([acknowledged, *map(int, rest[:-1])])
    assert acknowledged > 10 * ROUNDS
