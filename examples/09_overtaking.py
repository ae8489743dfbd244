"""Groups in a cut model over a slow link: a later group overtakes an earlier one.

A worker begins each step when its tensors have arrived, for any group, so a late tensor delays its own group
and no thread. With a file name, the program writes a trace there, for Perfetto and for
docs/images/draw_overtaking.py.

python examples/09_overtaking.py [FILE.json]
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import uvloop

from adam_async import Config, Disk, LocalCluster, Timeline, load_dataset

CABLE = "worker-0~worker-1:4ms+8ms"


def overtakings(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return pairs of groups of which the second began later at both workers, and ended earlier at both."""
    begin, end = moments(events, "segment-0"), moments(events, "push")
    groups = sorted({group for _, group in end})
    return [
        (first, later)
        for first in groups
        for later in groups
        if all(
            begin[worker, first] < begin[worker, later] and end[worker, later] < end[worker, first]
            for worker in ("worker-0", "worker-1")
        )
    ]


def moments(events: list[dict[str, Any]], node: str) -> dict[tuple[str, int], float]:
    """Return the start of a node in microseconds, by worker and group."""
    return {(e["cat"], e["args"]["group"]): e["ts"] for e in events if e["ph"] == "X" and e["name"] == node}


async def main(file: str = "") -> list[tuple[int, int]]:
    async with Disk() as disk:
        dataset = await load_dataset("digits", disk, cache_dir=Path())
    config = Config(epochs=1, partitions=2, in_flight=8, slow=(CABLE,))
    timeline = Timeline()
    async with LocalCluster(config, dataset=dataset, timeline=timeline) as cluster:
        print(await cluster.train())
    pairs = overtakings(timeline.document()["traceEvents"])
    print(f"{len(pairs)} times a group overtook one that began before it: {pairs[:5]}")
    if file:
        await asyncio.to_thread(Path(file).write_bytes, timeline.trace())
    return pairs


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
