"""How late the event loop is: the time between when a timer was due and when it ran.

A loop that shares the interpreter with compute threads waits for them; this is how one sees it.
"""

import asyncio
from collections import deque

INTERVAL_S = 0.02
SAMPLES = 4096
"""About 80 s of samples are kept."""


class LoopLag:
    """Samples the lag of the running loop every 20 ms."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    async def run(self) -> None:
        """Sample until cancelled. Cancelling it loses nothing."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self._samples.append(max(loop.time() - due, 0.0))

    def percentiles(self) -> dict[str, float]:
        """Median, 99th percentile and largest lag of the samples kept, in seconds."""
        ordered = sorted(self._samples) or [0.0]
        last = len(ordered) - 1
        return {
            "p50": ordered[last // 2],
            "p99": ordered[round(last * 0.99)],
            "max": ordered[last],
        }
