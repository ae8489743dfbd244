"""What the command `plan` prints: tables of workers, layers, cuts, protocols and candidates."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from adam_async.cli.escaping_console import EscapingConsole
from adam_async.cli.plan.narrow import (
    Row,
    Sheet,
    layer_notes,
    left_out,
    short_cuts,
    short_layers,
    short_plans,
    short_protocols,
    short_workers,
)
from adam_async.cli.plan.report import BlockReport, CutReport, PlannedWorker, PlanReport, block_words
from adam_async.cli.terminal import Terminal

WIDE = 1000
"""Characters that a table may take where no terminal says how wide it is."""

ROOMY = 120
"""From so many characters on, tables keep their long titles, and wrap what has no room."""


def show(report: PlanReport, terminal: Terminal) -> None:
    """Print a report, the recommendation last."""
    out = terminal.out
    if not out.is_terminal:
        out = EscapingConsole(file=out.file, width=WIDE)
    _say(out, _conditions(report))
    if len(report.candidates) > 1:
        wide = Sheet(_CANDIDATES, list(_candidates(report)))
        if short := _print(out, "plans", wide, short_plans(report)):
            _say(out, _missing(left_out(short[0])))
    wide = Sheet(_layer_columns(report), list(_layers(report)))
    if _print(out, "layers", wide, short_layers(report)):
        _say(out, layer_notes(report))
    _print(out, "workers", Sheet(_WORKERS, [_worker(each) for each in report.workers]), short_workers(report))
    if report.cuts:
        _print(out, "cuts, per group", Sheet(_CUTS, [_cut(each) for each in report.cuts]), short_cuts(report))
    wide = Sheet(_PROTOCOLS, list(_protocols(report)))
    _print(out, "gradients to the servers, per group", wide, short_protocols(report))
    out.print()
    _say(out, _conclusions(report))


def _say(out: Console, lines: Iterable[str]) -> None:
    for line in lines:
        # A narrow terminal would break a long line within a word.
        out.print(line, soft_wrap=out.width >= ROOMY)


def _print(out: Console, title: str, wide: Sheet, short: Iterable[Sequence[Sheet]]) -> Sequence[Sheet]:
    """Print the wide form of a table, or the first of the short ones that there is room for.

    Returns:
        The short ones that were printed; none if it was the wide one.
    """
    chosen: Sequence[Sheet] = ()
    if not _fits(out, wide) and out.width < ROOMY:
        for chosen in short:
            if all(_fits(out, each) for each in chosen):
                break
    for each in chosen or [wide]:
        out.print()
        out.print(_table(each, title), soft_wrap=False)
    return chosen


def _fits(out: Console, sheet: Sheet) -> bool:
    return out.measure(_table(sheet), options=out.options.update(width=WIDE)).maximum <= out.width


def _table(sheet: Sheet, title: str | None = None) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for number, name in enumerate(sheet.columns):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    return table


def _missing(columns: Sequence[str]) -> Iterable[str]:
    if columns:
        yield f"no room here for: {', '.join(columns)}; a wider terminal and --json have it"


def _conditions(report: PlanReport) -> list[str]:
    model, machine, link = report.model, report.machine, report.link
    where = "a machine each, like this one" if machine.own else "all on this machine"
    times = "measured on one thread" if report.times.measured else "estimated, not measured"
    kept = f"{model.dtype}, kernels {model.kernels}, times {times}"
    caches = f"L2 {_cache(machine.l2_kb)}, L3 {_cache(machine.l3_kb)}"
    speed = f"{link.bytes_per_s / 1e6:,.6g} MB/s each way and {_seconds(link.latency_s)}"
    size = f"{model.parameters:,} parameters, {model.multiply_adds:,} multiply-adds forward"
    return [
        f"{model.name}: {size}, {kept}",
        f"workers: {where} ({machine.cores} cores, {caches}), links of {speed}",
    ]


_CANDIDATES = (
    "",
    "partitions",
    "plan",
    "images per group",
    "threads",
    "images/s",
    "bounded by",
    "crossing bytes",
    "chain",
    "in flight to hide it",
)


def _candidates(report: PlanReport) -> Iterable[Row]:
    for each in report.candidates:
        yield (
            "->" if each.chosen else "",
            str(each.partitions),
            each.plan if each.partitions > 1 else "",
            str(each.images_per_group),
            str(each.threads),
            f"{each.images_per_s:,.0f}",
            each.bound,
            f"{each.crossing_bytes:,}",
            str(each.chain),
            str(each.needed_in_flight),
        )


def _layer_columns(report: PlanReport) -> Sequence[str]:
    return ("", "kind", "us per group", *(f"worker {each.worker}" for each in report.workers), "")


def _layers(report: PlanReport) -> Iterable[Row]:
    for name, seconds in report.times.seconds.items():
        blocks = {
            worker.worker: block
            for worker in report.workers
            for block in worker.layers
            if block.layer == name
        }
        kind = next(iter(blocks.values())).kind if blocks else ""
        cells = [_cell(blocks.get(worker.worker)) for worker in report.workers]
        note = f"whole: {report.whole[name]}" if name in report.whole else ""
        note = "recomputed" if name in report.recomputed else note
        yield name, kind, f"{seconds * 1e6:,.0f}", *cells, note


def _cell(block: BlockReport | None) -> str:
    return "-" if block is None else block_words(block.unit, block.first, block.stop, block.of)


_WORKERS = ("", "holds", "pushes", "working set", "fits", "computes", "pushed bytes", "pulled bytes")


def _worker(each: PlannedWorker) -> Row:
    return (
        f"worker {each.worker}",
        f"{each.held:,}",
        f"{each.pushed:,}",
        f"{_kib(each.working_set)} KiB",
        each.fits or "unknown",
        f"{each.compute_s * 1e6:,.0f} us",
        f"{each.pushed_bytes:,}",
        f"{each.pulled_bytes:,}",
    )


_CUTS = ("", "messages", "bytes", "activations", "error gradients", "weight gradients to be added up")


def _cut(each: CutReport) -> Row:
    parts = (each.activations, each.errors, each.gradients)
    return (
        f"worker {each.source} to {each.target}",
        f"{each.messages:,}",
        f"{each.bytes:,}",
        *(f"{part.bytes:,} in {part.tensors}" if part.tensors else "-" for part in parts),
    )


_PROTOCOLS = ("", "worker", "shape", "delta bytes", "factor bytes", "travels as")


def _protocols(report: PlanReport) -> Iterable[Row]:
    for worker in report.workers:
        for row in worker.protocols:
            yield (
                row.tensor,
                str(worker.worker),
                " x ".join(map(str, row.shape)),
                f"{row.delta_bytes:,}",
                "-" if row.factor_bytes is None else f"{row.factor_bytes:,}",
                row.chosen,
            )


def _conclusions(report: PlanReport) -> Iterable[str]:
    found = report.prediction
    bound = next(each.bound for each in report.candidates if each.chosen)
    threads = f"{found.threads} thread{'s' * (found.threads > 1)} per worker"
    took = f"{_seconds(found.bound.seconds)} per group of {report.images_per_group}"
    rate = f"{found.images_per_s:,.0f} images/s with {threads} and {found.in_flight} groups in flight"
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


def _kib(size: int) -> str:
    return f"{-(-size // 1024):,}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
