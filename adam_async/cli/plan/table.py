"""The output of `plan`: its conditions, one table of the plans compared, and the prediction."""

from collections.abc import Iterator

from rich.table import Table

from adam_async.cli.plan.report import PlanReport
from adam_async.cli.terminal import Terminal

COLUMNS = (
    "",
    "workers",
    "plan",
    "images per group",
    "threads",
    "images/s",
    "bound",
    "crossing bytes",
    "chain",
)
"""Titles of the table. docs/reference/plan.md explains them under `plan.candidates`."""


def show(report: PlanReport, terminal: Terminal) -> None:
    """Print a report, the recommendation last. Layers, workers, cuts and protocols are in the JSON alone."""
    for line in _conditions(report):
        terminal.print(line)
    terminal.table(_candidates(report))
    for line in _conclusions(report):
        terminal.print(line)


def _conditions(report: PlanReport) -> Iterator[str]:
    model, machine, link = report.model, report.machine, report.link
    where = "a machine each, like this one" if machine.own else "all on this machine"
    times = "measured on one thread" if report.times.measured else "estimated, not measured"
    size = f"{model.parameters:,} parameters, {model.multiply_adds:,} multiply-adds forward"
    yield f"{model.name}: {size}, {model.dtype}, kernels {model.kernels}, times {times}"
    caches = f"L2 {_cache(machine.l2_kb)}, L3 {_cache(machine.l3_kb)}"
    speed = f"{link.bytes_per_s / 1e6:,.6g} MB/s each way and {_seconds(link.latency_s)}"
    yield f"workers: {where} ({machine.cores} cores, {caches}), links of {speed}"


def _candidates(report: PlanReport) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for each in report.candidates:
        table.add_row(
            "->" if each.chosen else "",
            str(each.partitions),
            each.plan if each.partitions > 1 else "",
            str(each.images_per_group),
            str(each.threads),
            f"{each.images_per_s:,.0f}",
            each.bound,
            f"{each.crossing_bytes:,}",
            str(each.chain),
        )
    return table


def _conclusions(report: PlanReport) -> Iterator[str]:
    found = report.prediction
    bound = next(each.bound for each in report.candidates if each.chosen)
    threads = f"{found.threads} thread{'s' * (found.threads > 1)} per worker"
    rate = f"{found.images_per_s:,.0f} images/s with {threads} and {found.in_flight} groups in flight"
    took = f"{_seconds(found.bound.seconds)} per group of {report.images_per_group}"
    yield f"predicted: {rate}; bounded by {bound}: {took}"
    if found.chain:
        alone = f"{_seconds(found.chain_s)}, with {found.chain} crossings one after the other"
        yield f"one group alone takes {alone}; hidden with {found.needed_in_flight} in flight"
    if report.partitions == 1 and not report.machine.own:
        yield "one worker on this machine trains in place: nothing is pushed or pulled"
    if report.recommendation:
        yield report.recommendation


def _cache(kib: int | None) -> str:
    return "unknown" if kib is None else f"{kib:,} KiB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
