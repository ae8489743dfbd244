"""Pure: the tables of `plan` for narrow terminals: short titles with their units, a worker as ``w0``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from adam_async.cli.plan.report import BlockReport, BoundReport, CutReport, PlannedWorker, PlanReport

Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Sheet:
    """The contents of a table.

    Attributes:
        columns: Their titles.
        rows: A text for each column.
    """

    columns: Sequence[str]
    rows: Sequence[Row]

    def without(self, *columns: str) -> "Sheet":
        """The same but for some columns."""
        kept = [number for number, name in enumerate(self.columns) if name not in columns]
        return Sheet(
            tuple(self.columns[number] for number in kept),
            [tuple(row[number] for number in kept) for row in self.rows],
        )


_PLANS = (
    "",
    "workers",
    "plan",
    "images\na group",
    "threads",
    "images\nper s",
    "bound",
    "crossing\nbytes",
    "chain",
    "in\nflight",
)
_LEFT_OUT = ("in\nflight", "chain", "threads", "crossing\nbytes", "bound")
"""Columns of plans that are left out where there is no room, one after the other."""


def short_plans(report: PlanReport) -> Iterator[list[Sheet]]:
    """The plans that were compared, with fewer and fewer columns."""
    rows = [
        (
            "->" if each.chosen else "",
            str(each.partitions),
            each.plan if each.partitions > 1 else "",
            str(each.images_per_group),
            str(each.threads),
            f"{each.images_per_s:,.0f}",
            bound_words(each.slowest),
            f"{each.crossing_bytes:,}",
            str(each.chain),
            str(each.needed_in_flight),
        )
        for each in report.candidates
    ]
    for number in range(len(_LEFT_OUT) + 1):
        yield [Sheet(_PLANS, rows).without(*_LEFT_OUT[:number])]


def left_out(plans: Sheet) -> list[str]:
    """What a table of plans does not show."""
    return [name.replace("\n", " ") for name in _PLANS if name in _LEFT_OUT and name not in plans.columns]


def bound_words(bound: BoundReport) -> str:
    """Name a bound in few letters, such as ``bytes w0-w1``; the servers are ``ps``."""
    named = "-".join(f"w{worker}" for worker in bound.workers)
    return {
        "compute": f"compute {named}",
        "cores": "cores",
        "link": f"bytes {named}",
        "servers": f"bytes {named}-ps" if named else "bytes ps",
        "latency": "latency",
    }[bound.what]


def short_layers(report: PlanReport) -> Iterator[list[Sheet]]:
    """The layers: with their kinds, without, and then in several tables with fewer and fewer workers each."""
    yield [_layers(report, report.workers)]
    for size in range(len(report.workers), 0, -1):
        parts = [report.workers[first : first + size] for first in range(0, len(report.workers), size)]
        yield [_layers(report, part).without("kind") for part in parts]


def _layers(report: PlanReport, workers: Sequence[PlannedWorker]) -> Sheet:
    found = {(each.worker, block.layer): block for each in report.workers for block in each.layers}
    any_block = {layer: block for (_, layer), block in found.items()}
    rows = [
        (
            name,
            any_block[name].kind,
            f"{seconds * 1e6:,.0f}",
            _extent(any_block[name]),
            *(_block(found.get((each.worker, name))) for each in workers),
        )
        for name, seconds in report.times.seconds.items()
    ]
    return Sheet(("", "kind", "us a\ngroup", "of", *(f"w{each.worker}" for each in workers)), rows)


def _extent(block: BlockReport) -> str:
    if block.unit == "loss":
        return "the loss"
    return f"{block.of} {block.unit if block.of > 1 else block.unit.removesuffix('s')}"


def _block(block: BlockReport | None) -> str:
    if block is None:
        return "-"
    if block.stop - block.first == block.of:
        return "all"
    return str(block.first) if block.stop - block.first == 1 else f"{block.first}-{block.stop - 1}"


def layer_notes(report: PlanReport) -> Iterable[str]:
    """What a wide table of layers says in its last column."""
    if report.recomputed:
        yield f"recomputed: {', '.join(report.recomputed)}"
    for name, why in report.whole.items():
        if name not in report.recomputed:
            yield f"{name} is whole: {why}"


def short_workers(report: PlanReport) -> Iterator[list[Sheet]]:
    """The workers."""
    columns = ("", "holds", "pushes", "set\nKiB", "fits", "computes\nus", "pushed\nbytes", "pulled\nbytes")
    rows = [
        (
            f"w{each.worker}",
            f"{each.held:,}",
            f"{each.pushed:,}",
            f"{-(-each.working_set // 1024):,}",
            each.fits or "unknown",
            f"{each.compute_s * 1e6:,.0f}",
            f"{each.pushed_bytes:,}",
            f"{each.pulled_bytes:,}",
        )
        for each in report.workers
    ]
    yield [Sheet(columns, rows)]


def short_cuts(report: PlanReport) -> Iterator[list[Sheet]]:
    """What workers send one another; without the kinds of it where there is no room."""
    kinds = ("activations", "error\ngradients", "weight\ngradients")
    cuts = Sheet(("", "messages", "bytes", *kinds), [_cut(each) for each in report.cuts])
    yield [cuts]
    yield [cuts.without(*kinds)]


def _cut(each: CutReport) -> Row:
    parts = (each.activations, each.errors, each.gradients)
    return (
        f"w{each.source} to w{each.target}",
        f"{each.messages:,}",
        f"{each.bytes:,}",
        *(f"{part.bytes:,} in {part.tensors}" if part.tensors else "-" for part in parts),
    )


def short_protocols(report: PlanReport) -> Iterator[list[Sheet]]:
    """How gradients travel; without the shapes where there is no room."""
    columns = ("", "worker", "shape", "delta\nbytes", "factor\nbytes", "travels\nas")
    rows = [
        (
            row.tensor,
            f"w{worker.worker}",
            "x".join(map(str, row.shape)),
            f"{row.delta_bytes:,}",
            "-" if row.factor_bytes is None else f"{row.factor_bytes:,}",
            row.chosen,
        )
        for worker in report.workers
        for row in worker.protocols
    ]
    yield [Sheet(columns, rows)]
    yield [Sheet(columns, rows).without("shape")]
