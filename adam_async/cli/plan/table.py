"""The output of `plan`: its conditions, one table of the compared plans, and the prediction."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from adam_async.cli.plan.choice import Candidate
from adam_async.cli.terminal import Terminal
from adam_async.runtime.machine import Machine

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


def show(
    best: Candidate, compared: Sequence[Candidate], recommendation: str, machine: Machine, terminal: Terminal
) -> None:
    """Print the plans, the recommendation last. Layers, workers, cuts and protocols are in the JSON alone."""
    for line in _conditions(best, machine):
        terminal.print(line)
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for each in compared:
        table.add_row("->" if each is best else "", *_cells(each))
    terminal.table(table)
    for line in (*_prediction(best), *([recommendation] if recommendation else [])):
        terminal.print(line)


def _conditions(best: Candidate, machine: Machine) -> Iterator[str]:
    network, where = best.network, best.conditions
    times = "measured on one thread" if best.times.measured else "estimated, not measured"
    size = f"{network.num_parameters:,} parameters, {network.multiply_adds:,} multiply-adds forward"
    yield f"{network.spec.name}: {size}, {network.dtype}, kernels {network.kernels}, times {times}"
    machines = "a machine each, like this one" if where.own_machines else "all on this machine"
    caches = f"L2 {_cache(machine.l2_kb)}, L3 {_cache(machine.l3_kb)}"
    speed = f"{where.link.bytes_per_s / 1e6:,.6g} MB/s each way and {_seconds(where.link.latency_s)}"
    yield f"workers: {machines} ({where.cores} cores, {caches}), links of {speed}"


def _cells(each: Candidate) -> Iterator[str]:
    yield str(each.plan.workers)
    yield each.plan.kind if each.plan.workers > 1 else ""
    yield str(each.images)
    yield str(each.threads)
    yield f"{each.prediction.images_per_s:,.0f}"
    yield str(each.prediction.slowest)
    yield f"{each.crossing_bytes:,}"
    yield str(each.prediction.chain)


def _prediction(best: Candidate) -> Iterator[str]:
    found = best.prediction
    threads = f"{best.threads} thread{'s' * (best.threads > 1)} per worker"
    rate = f"{found.images_per_s:,.0f} images/s with {threads} and {found.in_flight} groups in flight"
    took = f"{_seconds(found.slowest.seconds)} per group of {best.images}"
    yield f"predicted: {rate}; bounded by {found.slowest}: {took}"
    if found.chain:
        alone = f"{_seconds(found.chain_s)}, with {found.chain} crossings one after the other"
        yield f"one group alone takes {alone}; hidden with {found.needed_in_flight} in flight"
    if best.in_place:
        yield "one worker on this machine trains in place: nothing is pushed or pulled"


def _cache(kib: int | None) -> str:
    return "unknown" if kib is None else f"{kib:,} KiB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
