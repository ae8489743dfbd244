"""Nodes of torchrun for tests: one launcher per node on this machine, each with its ranks.

torchrun comes from ADAM_TEST_TORCHRUN, or else from PATH; it may be in another environment than adam-async.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes.commands import ROOT, Command

TORCHRUN = os.environ.get("ADAM_TEST_TORCHRUN") or shutil.which("torchrun") or ""
TOKEN = "a token that nobody guesses"


def missing() -> str:
    """Return the reason that these tests cannot run; empty if they can."""
    if not TORCHRUN or not Path(TORCHRUN).exists():
        return "there is no torchrun: pip install torch, and name it in ADAM_TEST_TORCHRUN or put it on PATH"
    return "" if sys.platform == "linux" else "the tests read /proc"


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants, also those that left its process group."""
    found = [pid]
    for each in found:
        try:
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
        except OSError:
            continue
    return found


class TorchrunNode(Command):
    """torchrun on one node, as a context manager; `kill` ends it and all that it started."""

    def __init__(
        self,
        number: int,
        port: int,
        *words: str,
        nodes: int = 2,
        ranks: int = 1,
        restarts: int = 0,
        token: str = TOKEN,
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ADAM_")}
        if folder := os.environ.get("ADAM_DATA_DIR"):
            environment["ADAM_DATA_DIR"] = folder
        self.process = subprocess.Popen(
            [
                *(
                    TORCHRUN,
                    "--nnodes",
                    str(nodes),
                    "--node-rank",
                    str(number),
                    "--max-restarts",
                    str(restarts),
                ),
                *("--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", str(ranks)),
                *("--monitor-interval", "0.1", "--no-python"),
                *(sys.executable, "-m", "adam_async", "launch", "torchrun", *words),
            ],
            cwd=ROOT,
            env={**environment, "ADAM_TOKEN": token} if token else environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""

    def processes(self) -> list[int]:
        """Return torchrun, its ranks and their roles."""
        return descendants(self.pid)

    def kill(self) -> None:
        """Kill the node, as the loss of its machine would."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def __exit__(self, *exc: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
