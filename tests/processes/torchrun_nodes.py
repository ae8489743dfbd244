"""Nodes of torchrun for tests: one launcher per node on this machine, each with its ranks.

torchrun comes from ADAM_TEST_TORCHRUN, from PATH, or from the PyTorch of this Python; it may be in another
environment than adam-async.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from tests.processes.commands import ROOT, Command, descendants, kill_all

NAMED = os.environ.get("ADAM_TEST_TORCHRUN") or shutil.which("torchrun") or ""
TORCHRUN = [NAMED] if NAMED else [sys.executable, "-m", "torch.distributed.run"]
TOKEN = "a token that nobody guesses"


def missing() -> str:
    """Return the reason that these tests cannot run; empty if they can."""
    if not Path(NAMED).exists() if NAMED else importlib.util.find_spec("torch") is None:
        return "there is no torchrun: pip install torch, and name it in ADAM_TEST_TORCHRUN or put it on PATH"
    return "" if sys.platform == "linux" else "the tests read /proc"


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
        kept = {name: value for name in ("ADAM_DATA_DIR",) if (value := os.environ.get(name))}
        words = (
            *(*TORCHRUN, "--nnodes", str(nodes), "--node-rank", str(number)),
            *("--max-restarts", str(restarts)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", str(ranks)),
            *("--monitor-interval", "0.1", "--no-python"),
            *(sys.executable, "-m", "adam_async", "launch", "torchrun", *words),
        )
        self._start([*words], {**kept, "ADAM_TOKEN": token} if token else kept, ROOT)

    def processes(self) -> list[int]:
        """Return torchrun, its ranks and their roles."""
        return descendants(self.pid)

    def kill(self) -> None:
        """Kill the node, as the loss of its machine would."""
        kill_all(self.processes())
        self.process.wait()

    def __exit__(self, *exc: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
