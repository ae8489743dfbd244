"""The display of a run in progress: on a terminal a table that redraws itself, otherwise lines.

The display reads `Driver.progress`, which the driver updates, and has no other part in the run.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import util
from typing import TYPE_CHECKING, Any, Self, TextIO

from adam_async.cli.terminal import age_text, printable
from adam_async.errors import counted
from adam_async.model.network import Network
from adam_async.model.partition.plan import Layout, PartitionPlan
from adam_async.model.partition.planner import crossing_bytes
from adam_async.report.report import Report
from adam_async.run.events import AnyEvent, text_of
from adam_async.run.progress import Progress
from adam_async.run.result import EpochResult
from adam_async.run.series import waited_s
from adam_async.run.step_model import RunModel, StepModel

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

INTERVAL_S = 0.25
"""Time between two updates of the table, in seconds."""

WAITING_SHOWN = 2
"""Maximum numbers of waits, and of roles without an answer, that the table names."""

GAP = 2
"""Number of blanks between two columns."""

PATIENCE_S = 5.0
"""Length of a wait for roles after which a display without a table reports the wait in a line, in seconds."""

QUIET_S = 10.0
"""Time in seconds without a line after which a display without a table reports the progress."""


class LiveTable:
    """Shows one run, for the duration of its `async with`.

    Args:
        quiet: Show only the last line of `finish`.
        leader: Returns which of several controllers leads; empty while unknown.

    The block owns one task that redraws the table. The end of the block removes the table, and keeps the
    lines.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        stream: TextIO,
        quiet: bool = False,
        terminal: bool | None = None,
        leader: Callable[[], str] = str,
    ) -> None:
        self._progress = progress
        self._leader = leader
        self._led_by = ""
        self._stream = stream
        self._quiet = quiet
        wanted = stream.isatty() if terminal is None else terminal
        self._draws = wanted and not quiet and util.find_spec("rich") is not None
        self._introduced = False
        self._cut_shown = False
        self._waits_since: float | None = None
        self._wait_shown = False
        self._wrote_at: float | None = None
        self._live: Live | None = None
        self._announced: set[str] = set()
        """Events before training, such as the checkpoint that the run continues."""

    async def __aenter__(self) -> Self:
        if self._draws:
            self._live = _new_live(self._stream)
            self._live.start()
        self._group = await asyncio.TaskGroup().__aenter__()
        self._task = self._group.create_task(self._look(), name="live-table")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        try:
            # The group does not get the block's exception, because it would wrap the exception.
            await self._group.__aexit__(None, None, None)
        finally:
            if self._live is not None:
                self._live.stop()
                self._live = None

    async def _look(self) -> None:
        while True:
            self.refresh()
            await asyncio.sleep(INTERVAL_S)

    # --- showing -----------------------------------------------------------------------------

    def refresh(self) -> None:
        """Show the current progress."""
        progress = self._progress
        if progress.model is not None:
            self.introduce(progress.data, progress.model)
            if progress.plan is not None and not self._cut_shown and isinstance(progress.model, Network):
                self._cut_shown = True
                self.print(cut_line(progress.model, progress.plan))
        leader = self._leader()
        if leader not in ("", self._led_by):
            self._led_by = leader
            self.print(f"{leader} leads the controllers")
        if not self._draws:
            self._mind_waiting(progress.missing)
            self._mind_quiet()
        if self._live is not None:
            now = asyncio.get_running_loop().time()
            self._live.update(_table(progress, now=now, width=self._live.console.width), refresh=True)

    def _mind_waiting(self, missing: str) -> None:
        """Report missing roles once, after a long wait, on a display without a table."""
        now = asyncio.get_running_loop().time()
        if not missing:
            self._waits_since, self._wait_shown = None, False
        elif self._waits_since is None:
            self._waits_since = now
        elif not self._wait_shown and now - self._waits_since >= PATIENCE_S:
            self._wait_shown = True
            self.print(f"waiting for {missing}")

    def _mind_quiet(self) -> None:
        """On a display without a table, report the progress after a time without a line."""
        now = asyncio.get_running_loop().time()
        if self._wrote_at is None:
            self._wrote_at = now
        elif now - self._wrote_at >= QUIET_S:
            self.print(progress_line(self._progress))
            self._wrote_at = now

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the table from the terminal within the block, so that other code can write there.

        Text that the code writes stays above the table if it ends with a newline.
        """
        live, self._live = self._live, None
        if live is None:
            yield
            return
        live.stop()
        try:
            yield
        finally:
            self._live = _new_live(self._stream)
            self._live.start()
            self.refresh()

    def introduce(self, data: Mapping[str, Any], model: RunModel) -> None:
        """Print data and model once. `refresh` calls this method as soon as the driver has both."""
        if not self._introduced:
            self._introduced = True
            for line in introduction(data, model):
                self.print(line)

    def on_epoch(self, result: EpochResult) -> None:
        """Print a finished epoch. `Driver.train` takes this method as its callback."""
        self.refresh()
        self.print(epoch_line(result, self._progress.last_epoch))

    def print(self, line: str) -> None:
        """Write a line that stays above the table, unless quiet."""
        if not self._quiet:
            self._write(line)

    def on_event(self, event: AnyEvent) -> None:
        """Take an event of the run. Another listener prints the event; the summary repeats events of the
        training."""
        if not self._progress.epoch:
            self._announced.add(text_of(event))

    def finish(self, report: Report) -> None:
        """Write the summary; if quiet, only its last line."""
        lines = summary(report, without=self._announced)
        for line in lines[-1:] if self._quiet else lines:
            self._write(line)

    def _write(self, line: str) -> None:
        self._wrote_at = None  # the next update restarts the measurement of `QUIET_S`
        if self._live is not None:
            self._live.console.print(printable(line), soft_wrap=True)
        else:
            self._stream.write(f"{printable(line)}\n")
            self._stream.flush()


def introduction(data: Mapping[str, Any], model: RunModel) -> list[str]:
    """Return the lines about the data and the model, with the reason for the data."""
    shape = "x".join(str(size) for size in data["shape"])
    images = (
        f"{_count(data['train_images'])} training and {_count(data['test_images'])} test images of {shape}, "
        + (f"{data['classes']} classes" if data["classes"] > 1 else "one class, so every answer is right")
    )
    if isinstance(model, StepModel):
        arrays = f"{_count(model.num_parameters)} values in {counted(len(model.arrays), 'array')}"
        return [f"data   {data['name']}: {data['source']}; {images}", f"step   {model.spec.name}: {arrays}"]
    size = (
        f"{_count(model.num_parameters)} parameters, {_count(model.multiply_adds)} multiply-adds forward "
        "per image (our definition of its connections)"
    )
    return [f"data   {data['name']}: {data['source']}; {images}", f"model  {model.spec.name}: {size}"]


def cut_line(model: Network, plan: Mapping[str, Any]) -> str:
    """Return the line about the cut of the model over the workers of a replica."""
    cut = PartitionPlan.from_dict(plan)
    crossings = Layout(model.topology, model.input_shape, cut).crossings
    none, one = (sum(crossing_bytes(each, n, model.dtype.itemsize) for each in crossings) for n in (0, 1))
    sums = f" and {_count(none)} per group" if none else ""  # of weight gradients, independent of the images
    return (
        f"cut    {cut.kind} over {cut.workers} workers: {counted(len(crossings), 'crossing')}, "
        f"{_count(one - none)} bytes per image{sums}"
    )


def progress_line(progress: Progress) -> str:
    """Return the line about the progress of a run."""
    if progress.phase != "training":
        return progress.phase
    return (
        f"training epoch {progress.epoch}/{progress.last_epoch or '?'}: {_count(progress.images)} of "
        f"{_count(progress.images_of_epoch)} images, {_count(progress.images_per_s)}/s"
    )


def epoch_line(result: EpochResult, epochs: int) -> str:
    """Return the line about a finished epoch."""
    skipped = f", {_count(result.skipped)} skipped" if result.skipped else ""
    return (
        f"epoch {result.epoch}/{epochs}: loss {result.train_loss:.4f}, {result.accuracies}, "
        f"{counted(result.images, 'image')} in {result.train_s:.2f} s "
        f"({_count(result.images_per_s)}/s){skipped}"
    )


def summary(report: Report, *, without: Collection[str] = ()) -> list[str]:
    """Return the lines about the result of a run, the most important line last.

    Args:
        without: Events that have no line.
    """
    totals, staleness, epochs = report.totals, report.staleness, len(report.epochs)
    events = [event for event in report.events if event.event not in without]
    lines = [f"event  at {event.s:.1f} s: {event.event}" for event in events]
    lines += [f"slower {warning}" for warning in report.machine.warnings]
    if report.baseline is not None:
        lines.append(
            f"kernels alone on {report.baseline.threads} threads: "
            f"{_count(report.baseline.images_per_s)} images/s, efficiency "
            f"{report.baseline.efficiency:.2f}: {why_not_one(report, report.baseline.efficiency)}"
        )
        lines.append(
            f"matrix products on {report.baseline.threads} threads: {report.baseline.sgemm / 1e9:.1f} "
            f"GFLOP/s, training reaches {report.baseline.share:.2f} of that"
        )
    early = sum(worker.kernels.numpy_groups for worker in report.workers if worker.kernels is not None)
    if early:
        lines.append(
            f"NumPy's kernels trained {counted(early, 'group')}, because compiled ones were not ready; "
            "a later run begins with those that are compiled by now, and --kernels numba waits for all"
        )
    if len(report.controllers) > 1:
        # A leader that does not know of its replacement yet reports an earlier term.
        latest = max(report.controllers, key=lambda each: (each.role == "leader", each.term))
        leader = latest.node if latest.role == "leader" else "none"
        lines.append(f"leader {leader} of {len(report.controllers)} controllers, in term {latest.term}")
    if report.copies is not None and report.copies.copies > 1:
        lagging = [bundle.home for bundle in report.copies.lagging]
        fewer = f", fewer of those of {', '.join(lagging)}" if lagging else ""
        lines.append(f"{report.copies.copies} copies of each shard{fewer}")
    lines.append(
        f"staleness mean {staleness.mean:.2f}, max {staleness.max} "
        "(pushes applied to a shard between the read of its values and the push)"
    )
    last = report.epochs[-1].epoch if report.epochs else None
    kept = f" (of epoch {totals.kept_epoch}, which is kept)" if totals.kept_epoch not in (None, last) else ""
    connections = totals.images_per_s * report.model.multiply_adds
    rate = f"{_count(totals.images_per_s)} images/s"
    if connections:  # the figures of a step are unknown
        rate += f" ({connections / 1e9:.2f} billion connections/s, multiply-adds forward)"
    lines.append(
        f"test accuracy {totals.test_accuracy:.2%} after {epochs} epoch{'s' if epochs != 1 else ''}{kept}, "
        f"{rate}, {totals.train_s:.1f} s of training, {totals.peak_rss_mb:.0f} MB"
    )
    return lines


def why_not_one(report: Report, efficiency: float) -> str:
    """Return the reasons for an efficiency other than 1, as a clause.

    The efficiency is the threads' busy share times their speed while busy, relative to the kernels alone.
    """
    if efficiency > 1:
        return "above 1, so the machine was busier with other things while the kernels ran alone"
    servers_s, images_s, clock_s = waited_s(report.workers)
    others = f", {clock_s:.1f} s for the clocks of others" if clock_s else ""
    share = busy_share(report)
    speed = min(efficiency / share, 1.0) if share else 0.0
    return (
        f"threads computed {share:.0%} of the time (workers waited {servers_s:.1f} s for servers, "
        f"{images_s:.1f} s for images{others}), at {speed:.0%} of that speed, because updates and messages "
        f"need the same {report.machine.cores} cores"
    )


def busy_share(report: Report) -> float:
    """Return the share of the training time in which all workers' compute threads ran jobs; at most 1."""
    pools = [worker.pool for worker in report.workers if worker.pool is not None]
    available_s = report.totals.train_s * sum(pool.threads for pool in pools)
    return min(sum(pool.busy_s for pool in pools) / available_s, 1.0) if available_s else 0.0


def _new_live(stream: TextIO) -> "Live":
    """Return a display without a thread; only `refresh` redraws it."""
    from rich.live import Live

    from adam_async.cli.terminal import EscapingConsole

    console = EscapingConsole(file=stream, force_terminal=True)
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)


def _table(progress: Progress, *, now: float, width: int) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    cells = fitting(cells_of(progress, now=now), width)
    for name in cells:
        table.add_column(name, justify="right" if name != "phase" else "left")
    table.add_row(*cells.values())
    # A line printed above the table draws it again without wrapping, unless the text asks for it.
    table.caption = Text("\n".join(caption(progress)), no_wrap=False, overflow="fold")
    table.caption_justify = "left"
    return table


PRIORITY = "phase epoch done accuracy loss images/s left replicas elapsed images staleness waited checkpoint"
"""Columns, those that a narrow terminal keeps longest first; ``on disk`` comes after them."""

BAR = 10
"""Width of an epoch's bar, in characters."""


def cells_of(progress: Progress, *, now: float) -> dict[str, str]:
    """Return the table's cells by their heads; `now` is in seconds of the loop's clock."""
    run = progress.status.run if progress.status is not None else None
    whole = progress.images_of_epoch
    done = min(progress.images / whole, 1.0) if whole else 0.0
    live = progress.status.condition.live if progress.status is not None else 0
    cells = {
        "phase": progress.phase,
        "epoch": f"{progress.epoch}/{progress.last_epoch or '?'}",
        "done": f"{'#' * round(done * BAR):.<{BAR}} {done:4.0%}",
        "images": f"{_count(progress.images)}/{_count(whole)}",
        "images/s": _count(progress.images_per_s),
        "loss": f"{progress.loss:.4f}",
        "staleness": f"{progress.staleness_mean:.2f}",
        "waited": f"{progress.waited_s:.1f} s",
        "replicas": f"{live}/{run.replicas}" if run is not None and run.replicas else str(live),
    }
    if progress.epochs:
        cells["accuracy"] = f"{progress.epochs[-1].test_accuracy:.2%}"
    if progress.began_at is not None:
        cells["elapsed"] = age_text(max(now - progress.began_at, 0.0))
    if run is not None and run.left_s is not None:
        cells["left"] = age_text(run.left_s)
    if progress.takes_checkpoints:
        cells["checkpoint"] = checkpoint_age(progress, now=now)
    if progress.disk_age_s is not None:
        cells["on disk"] = f"{progress.disk_age_s:.1f} s ago"
    return cells


def fitting(cells: Mapping[str, str], width: int) -> dict[str, str]:
    """Return the cells that fit into a line of this many characters, chosen by `PRIORITY`."""
    left, kept = width + GAP, set()
    for name in (*PRIORITY.split(), "on disk"):
        if name in cells:
            left -= max(len(name), len(cells[name])) + GAP
            if left < 0:
                break
            kept.add(name)
    return {name: cell for name, cell in cells.items() if name in kept or name == "phase"}


def caption(progress: Progress) -> list[str]:
    """Return the lines below the table: consistency, condition, and each wait with its deadline and cure."""
    lines = [consistency_line(progress)]
    if progress.status is None:
        return lines
    condition = progress.status.condition
    lines += [condition.judgement] * (condition.verdict != "well")
    lines.append(condition.line)
    lines += [f"{each}" for each in condition.waits[:WAITING_SHOWN]]
    if (more := len(condition.waits) - WAITING_SHOWN) > 0:
        lines.append(f"{counted(more, 'more wait')}")
    return lines


def checkpoint_age(progress: Progress, *, now: float) -> str:
    """Return the age of the newest checkpoint; `now` is in seconds of the loop's clock."""
    if not progress.checkpoint:
        return "none yet"
    return f"{_count(max(now - progress.checkpointed_at, 0.0))} s old"


def consistency_line(progress: Progress) -> str:
    """Return the line about bound and staleness of the replicas, and about silent roles."""
    line = f"{progress.consistency}, staleness at most {progress.staleness_max} so far"
    if progress.consistency != "asp":
        line += f", slowest clock {_count(progress.clock)}"
    if progress.skipped:
        line += f", {_count(progress.skipped)} images skipped"
    if progress.silent:
        more = len(progress.silent) - WAITING_SHOWN
        line += f"; no answer: {', '.join(progress.silent[:WAITING_SHOWN])}"
        line += f" and {more} more" if more > 0 else ""
    return line


def _count(number: float) -> str:
    return f"{number:,.0f}"
