"""Programs in other Python processes, for claims that a simulated run does not depend on its process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def printed_elsewhere(program: str, hash_seed: str) -> str:
    """Return the line that a program prints in a process of this hash seed: it decides the order of sets."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    return done.stdout.strip()


def replay_hash_elsewhere(module: str, scenario: str, seed: int, *, hash_seed: str = "4242") -> str:
    """Return the replay hash of a seed of a module's scenario, run in another process."""
    program = f"from {module} import *; from tests.simulation.runner import run_seed; "
    return printed_elsewhere(f"{program}print(run_seed({scenario}, {seed}).replay_hash)", hash_seed)
