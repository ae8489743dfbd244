"""Loop lag: what is measured, and that measuring costs nothing when it ends."""

import asyncio
import time

from adam_async.runtime.loop_lag import INTERVAL_S, LoopLag


def test_without_samples_there_is_no_lag():
    assert LoopLag().percentiles() == {"p50": 0.0, "p99": 0.0, "max": 0.0}


async def test_a_loop_that_is_blocked_is_seen_to_lag():
    lag = LoopLag()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(lag.run(), name="lag")
        await asyncio.sleep(0)
        until = time.perf_counter() + 4 * INTERVAL_S
        while time.perf_counter() < until:
            sum(range(1000))  # nobody else gets a turn
        for _ in range(3):  # the timer that is late runs, then the sampler
            await asyncio.sleep(0)
        task.cancel()
    found = lag.percentiles()
    assert found["max"] >= found["p99"] >= found["p50"] >= 0.0
    assert found["max"] >= INTERVAL_S
