"""Whether memory or time of a run of many epochs grows while workers come and go.

    python -m benchmarks.soak --epochs 10000 --replacements 1000 [--json FILE] [--picture FILE.svg]
    python -m benchmarks.soak --processes --epochs 4000 --replacements 50 [--json FILE]

The first command trains digits in one process: a `LocalCluster` of a controller, a data server, a parameter
server and a worker, and a second worker that another one with a new name replaces at a fixed interval of
epochs. Python's garbage collector runs at each replacement, because by itself it frees an ended worker much
later. The time of the collection is left out, because it visits all results of epochs that the driver keeps.
With `--processes` each role is a process, and workers are killed (SIGKILL) and started again.

The benchmark takes about 200 samples, at ends of epochs: resident memory, bytes of the cluster map as JSON
text, open descriptors, and processor time per epoch since the last sample. With `--processes` memory,
descriptors and time are those of all processes except the workers, which are short-lived.

One row for each of these: the median of the second tenth of the samples, the median of the last tenth, and
their ratio; the last row has the samples. The measurement leaves out the first tenth, because caches fill
and libraries load in it. `--picture` needs matplotlib.
"""

import asyncio
import gc
import os
import signal
import statistics
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from adam_async import Config, LocalCluster
from adam_async.cluster.launcher import RestartPolicy
from adam_async.cluster.processes import ProcessCluster
from adam_async.controller.role import RoleSettings
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.result import EpochResult
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.worker.run_session import ComputeSettings
from adam_async.worker.service import ModelWorker
from benchmarks.harness import Option, Row, run
from transport import Identity

IMAGES = 128
"""Images of a group: epochs of digits are short, so most of the work is done once per epoch."""

WARM_EPOCHS = 5
"""Number of epochs after which all libraries are loaded."""

SAMPLES = 200
PAGE, TICK_S = os.sysconf("SC_PAGE_SIZE"), 1.0 / os.sysconf("SC_CLK_TCK")

PANELS = {
    "memory_mb": "resident memory, MB",
    "map_kb": "cluster map, KB",
    "descriptors": "open descriptors",
    "cpu_ms": "processor time of an epoch, ms",
}
"""Titles of the measured series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """State of a run at one moment."""

    epoch: int
    replaced: int
    """Number of workers replaced so far."""
    memory_mb: float
    map_kb: float
    descriptors: int
    cpu_ms: float
    """Processor time per epoch since the sample before, in milliseconds."""
    wall_ms: float
    """Elapsed time per epoch since the sample before, in milliseconds."""


class Sampler:
    """Takes samples at the ends of epochs.

    Args:
        epochs: Number of epochs of the run.
    """

    def __init__(self, epochs: int) -> None:
        self._every = max(1, epochs // SAMPLES)
        self.samples: list[Sample] = []
        self.epoch = self.replaced = 0
        self._collecting_s = 0.0
        """Processor time of the garbage collector since the last sample, in seconds."""
        self.next_epoch = asyncio.Event()
        self._last: tuple[int, float, float] | None = None

    def ended(self, result: EpochResult, cluster: ClusterMap, pids: Iterable[int]) -> None:
        """Note the end of an epoch, and take a sample if it is due."""
        self.epoch = result.epoch
        self.next_epoch.set()
        if self.epoch == WARM_EPOCHS:
            gc.collect()
            gc.freeze()  # a replacement need not visit the objects that libraries have made
        if self.epoch % self._every:
            return
        used = [usage(pid) for pid in pids]
        cpu_s, wall_s = sum(each[1] for each in used), time.monotonic()
        if self._last is not None:
            epoch, cpu_before_s, wall_before_s = self._last
            epochs = self.epoch - epoch
            self.samples.append(
                Sample(
                    epoch=self.epoch,
                    replaced=self.replaced,
                    memory_mb=round(sum(each[0] for each in used) / 1e6, 2),
                    map_kb=round(len(msgspec.json.encode(cluster)) / 1e3, 3),
                    descriptors=sum(each[2] for each in used),
                    cpu_ms=round((cpu_s - cpu_before_s - self._collecting_s) / epochs * 1e3, 3),
                    wall_ms=round((wall_s - wall_before_s) / epochs * 1e3, 3),
                )
            )
        self._last = self.epoch, cpu_s, wall_s
        self._collecting_s = 0.0

    def collect(self) -> None:
        """Collect garbage; samples leave this time out."""
        begin_s = time.thread_time()
        gc.collect()
        self._collecting_s += time.thread_time() - begin_s

    async def reached(self, epoch: int) -> None:
        """Wait until this many epochs have ended."""
        while self.epoch < epoch:
            self.next_epoch.clear()
            await self.next_epoch.wait()


def usage(pid: int) -> tuple[int, float, int]:
    """Resident bytes, seconds of processor time and open descriptors of a process."""
    folder = Path(f"/proc/{pid}")
    resident = int((folder / "statm").read_text().split()[1]) * PAGE
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return resident, (int(fields[11]) + int(fields[12])) * TICK_S, len(os.listdir(folder / "fd"))


# --- one process -----------------------------------------------------------------------------


async def in_one_process(epochs: int, replacements: int) -> Sampler:
    """Train in a `LocalCluster` that replaces one of two workers repeatedly."""
    sampler = Sampler(epochs)
    config = Config(data="digits", epochs=epochs, weights="copy", threads=1, images_per_group=IMAGES)
    async with Disk() as disk:
        cluster = LocalCluster(config, dataset=await load_dataset("digits", disk))
    pid = os.getpid()
    async with cluster, asyncio.TaskGroup() as group:
        replacing = group.create_task(replace(cluster, sampler, epochs, replacements), name="replace")
        await cluster.train(lambda result: sampler.ended(result, cluster.controller.map, [pid]))
        replacing.cancel()
    return sampler


async def replace(cluster: LocalCluster, sampler: Sampler, epochs: int, replacements: int) -> None:
    """Replace a worker at a fixed interval of epochs, until cancelled."""
    every = max(1, epochs // max(1, replacements))
    async with AsyncExitStack() as stack:
        for number in range(1, replacements + 2):
            await stack.aclose()
            sampler.collect()  # tracebacks of cancelled tasks keep the arrays of a worker that has ended
            await stack.enter_async_context(guest(cluster, f"guest-{number}"))
            sampler.replaced = number - 1
            await sampler.reached(number * every)


def guest(cluster: LocalCluster, name: str) -> ModelWorker:
    """One more worker for a cluster."""
    return ModelWorker(
        RoleSettings(
            network=cluster.network,
            address="local://",
            identity=Identity(
                role="worker", node=name, incarnation=int.from_bytes(system_entropy(6), "little")
            ),
            waits=cluster.config.waits,
            controller=cluster.controller.address,
        ),
        ComputeSettings(threads=1, in_flight=0),
        buffers=cluster.buffers,
        entropy=system_entropy,
    )


# --- processes -------------------------------------------------------------------------------


async def in_processes(epochs: int, replacements: int) -> Sampler:
    """Train in a `ProcessCluster` whose workers are killed repeatedly."""
    sampler = Sampler(epochs)
    config = Config(data="digits", epochs=epochs, replicas=2, threads=1, images_per_group=IMAGES)
    cluster = ProcessCluster(config, restarts=RestartPolicy(most=replacements), on_line=lambda _: None)
    async with cluster, asyncio.TaskGroup() as group:

        def pids() -> list[int]:
            lasting = [pid_of(cluster, name) for name in cluster.children if not name.startswith("worker")]
            return [os.getpid(), *lasting]

        killing = group.create_task(kill(cluster, sampler, epochs, replacements), name="kill")
        await cluster.train(lambda result: sampler.ended(result, cluster.driver.map, pids()))
        killing.cancel()
    return sampler


async def kill(cluster: ProcessCluster, sampler: Sampler, epochs: int, replacements: int) -> None:
    """Kill one of the workers at a fixed interval of epochs, when both are ready, until cancelled."""
    every = max(1, epochs // (replacements + 1))
    for number in range(1, replacements + 1):
        await sampler.reached(number * every)
        while len(cluster.driver.map.live_replicas()) < 2:
            await sampler.reached(sampler.epoch + 1)
        os.kill(pid_of(cluster, f"worker-{number % 2}"), signal.SIGKILL)
        sampler.replaced = number


def pid_of(cluster: ProcessCluster, node: str) -> int:
    """Process id of a role on this machine."""
    child = cluster.children[node]
    assert isinstance(child, ChildProcess)
    assert child.pid is not None
    return child.pid


# --- what came of it -------------------------------------------------------------------------


def rows_of(case: str, samples: list[Sample]) -> Iterator[Row]:
    """Yield one row for each measured quantity."""
    tenth = max(1, len(samples) // 10)
    for name, words in PANELS.items():
        early = statistics.median(getattr(sample, name) for sample in samples[tenth : 2 * tenth])
        late = statistics.median(getattr(sample, name) for sample in samples[-tenth:])
        yield {
            "case": f"{case}: {words}",
            "second_tenth": round(early, 3),
            "last_tenth": round(late, 3),
            "ratio": round(late / early, 3) if early else None,
        }


def draw(samples: list[Sample], file: Path) -> None:
    """The picture: the measured quantities over the epochs, a panel each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 5.4), sharex=True)
    epochs = [sample.epoch for sample in samples]
    for axis, (name, words) in zip(axes.flat, PANELS.items(), strict=True):
        values = [getattr(sample, name) for sample in samples]
        axis.plot(epochs, values, color="#1f5fa8", linewidth=1.2)
        axis.set_ylim(0, max(values) * 1.25)
        axis.set_title(words, fontsize=10)
        axis.grid(color="#dfe4ea", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel(f"epoch ({samples[-1].replaced} workers replaced by the last)", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else {})


async def measure(options: Namespace) -> AsyncIterator[Row]:
    """Yield the rows, and a last one with the samples."""
    work, where = (in_processes, "processes") if options.processes else (in_one_process, "one process")
    sampler = await work(options.epochs, options.replacements)
    case = f"{where}, {sampler.epoch} epochs, {sampler.replaced} replacements"
    for row in rows_of(case, sampler.samples):
        yield row
    if options.picture is not None:
        draw(sampler.samples, options.picture)
    yield {"case": f"{case}: samples", "samples": [asdict(sample) for sample in sampler.samples]}


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        epochs=10_000,
        replacements=1000,
        processes=Option(False, "run each role as a process"),
        picture=Option(None, "draw the samples into this file, .svg or .png", type=Path),
    )
