"""The floor is honest and short: it keeps the promises of a push, and a page shows all of it."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest

from benchmarks import floor
from transport import Message, RemoteError


@pytest.fixture(autouse=True, scope="module")
def pipe_of_processes_is_open() -> None:
    """Start the tracker of processes, whose pipe stays open: no test is the one that leaves it."""
    resource_tracker.ensure_running()


@pytest.fixture
def address() -> Iterator[str]:
    """Return the address of a server with one shard of 1 KiB, in its own process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=floor.serve, args=(theirs, [1024]), daemon=True)
    server.start()
    yield ours.recv()
    server.terminate()
    server.join()
    server.close()
    for end in (ours, theirs):
        end.close()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["push", "once"])
async def test_a_push_is_applied_once_in_order_and_only_if_it_is_finite(address: str, kind: str) -> None:
    values = np.zeros(256, np.float32)

    async with floor.NETWORK.connect(address, floor.CLIENT) as link:

        async def push(number: int, gradient: np.ndarray, rate: float = 1.0) -> float:
            meta = floor.write(kind, floor.Push(0, 7, number, rate))
            message = Message(type=kind, meta=meta, tensors=(gradient,))
            reply = await link.call(message, timeout_s=20, into=(values,))
            assert floor.read(kind, reply.meta, floor.Pushed) == floor.Pushed(number, number)
            return float(values[0])

        one = np.ones(256, np.float32)
        assert await push(1, one) == -1
        assert await push(1, one) == -1, "a repeated push is only answered"
        huge = np.full(256, 1e30, np.float32)  # finite, but its sum of squares is not
        assert await push(2, huge) == np.float32(-1e30)
        wrong = [
            (4, one, 1.0),
            (3, np.full(256, np.nan, np.float32), 1.0),
            (3, np.full(256, -np.inf, np.float32), 1.0),
            (3, one, float("inf")),
            (3, np.ones(255, np.float32), 1.0),
            (3, np.ones(256, np.float64), 1.0),
        ]
        for number, gradient, rate in wrong:
            with pytest.raises(RemoteError, match="refused"):
                await push(number, gradient, rate)
        assert await push(3, -huge) == 0


def test_the_program_stays_below_120_lines() -> None:
    assert len(Path(floor.__file__).read_text().splitlines()) < 120
