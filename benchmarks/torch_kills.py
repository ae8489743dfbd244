"""kill -9 during the training of a small ResNet: examples/torch_resnet.py beside PyTorch's DDP.

    python -m benchmarks.torch_kills --json FILE

- ours: `examples/torch_resnet.py --kill` kills one of two workers, and then one of three servers.
- DDP: two processes over gloo train the same module on images of the same shape; the second kills itself.

Rows: case; finished, whether the training reached its end; seconds from start to end; text, the last line of
the output, or of the error of the remaining process.
"""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator

from benchmarks.harness import ROOT, Option, Row, program, run

EXAMPLES = ROOT / "examples"

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


def ended(*words: str) -> Row:
    """Run a program to its end or its deadline; returns the fields of its row."""
    begin = time.perf_counter()
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
        finished = not done.returncode
        lines = (done.stdout if finished else done.stderr).strip().splitlines()
        text = lines[-1] if lines else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        finished, text = False, f"no end within {LIMIT_S:g} s"
    return {"finished": finished, "seconds": round(time.perf_counter() - begin, 1), "text": text}


def measure(options: Namespace) -> Iterator[Row]:
    """Yield both rows."""
    killed = ended(sys.executable, str(EXAMPLES / "torch_resnet.py"), "--kill")
    yield {"case": "ours: a worker of two and a server of three killed", **killed}
    call = f"from benchmarks.torch_kills import train_with_ddp; train_with_ddp(%d, {options.port})"
    with program(sys.executable, "-c", call % 1, cwd=ROOT):
        yield {"case": "DDP: a process of two killed", **ended(sys.executable, "-c", call % 0)}


if __name__ == "__main__":
    run(__doc__, measure, port=Option(29_517, "TCP port of DDP's first process"))
