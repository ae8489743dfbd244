"""kill -9 during the training of a small ResNet: examples/torch_resnet.py beside PyTorch's DDP.

    python -m benchmarks.torch_kills --json FILE

- ours: `examples/torch_resnet.py --kill` kills one of two workers, and then one of three servers.
- DDP: two processes over gloo train the same module on images of the same shape; the second kills itself.

Rows: case; finished, whether the training reached its end; seconds from start to end; text, the last line of
the output, or of the error of the remaining process.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

STEPS = 400
"""Number of steps of each DDP process."""
KILLED_AT = 50
"""Step after which the second DDP process kills itself, from 0."""
LIMIT_S = 300.0
"""Deadline of a run, in seconds."""


def train_with_ddp(rank: int, port: int) -> None:
    """Train as one of two processes; the second kills itself after step `KILLED_AT`."""
    import torch
    from torch import distributed, nn

    sys.path.append(str(EXAMPLES))
    from torch_resnet import resnet_module

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    module = nn.parallel.DistributedDataParallel(resnet_module())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        images, labels = torch.rand(16, 3, 32, 32), torch.randint(10, (16,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(images), labels).backward()
        optimizer.step()
        if rank and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {rank} trained {STEPS} steps")


def ended(command: list[str], **also: Any) -> dict[str, Any]:
    """Run a program to its end or its deadline, and return a row."""
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **also)
        finished = not done.returncode
        lines = (done.stdout if finished else done.stderr).strip().splitlines()
        text = lines[-1] if lines else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        finished, text = False, f"no end within {LIMIT_S:g} s"
    return {"finished": finished, "seconds": round(time.perf_counter() - begin, 1), "text": text}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=29_517, help="TCP port of DDP's first process")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        train_with_ddp(arguments.rank, arguments.port)
        return
    rows = [
        {
            "case": "ours: a worker of two and a server of three killed",
            **ended([sys.executable, str(EXAMPLES / "torch_resnet.py"), "--kill"]),
        }
    ]
    command = [sys.executable, "-m", "benchmarks.torch_kills", "--port", str(arguments.port), "--rank"]
    with subprocess.Popen([*command, "1"], stderr=subprocess.DEVNULL):
        rows.append({"case": "DDP: a process of two killed", **ended([*command, "0"])})
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
