"""In a narrow terminal `plan` breaks no word and no number, and gives each plan one line."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from rich.console import Console

from adam_async.cli.plan.choice import Candidate, Conditions, candidates, reason, recommend
from adam_async.cli.plan.narrow import (
    Sheet,
    bound_words,
    left_out,
    short_cuts,
    short_layers,
    short_plans,
    short_protocols,
    short_workers,
)
from adam_async.cli.plan.report import BoundReport, PlanReport, build_plan_report
from adam_async.cli.plan.tables import ROOMY, WIDE, show
from adam_async.cli.terminal import Terminal
from adam_async.model import Network, named_model
from adam_async.model.partition.prediction import Bound, LinkCost, estimated_times
from adam_async.runtime.machine import describe_machine

NETWORK = Network(named_model("mnist-adam"))
MACHINE = describe_machine(loop="asyncio")
WORKERS = (1, 2, 3, 4)
SHORT: Sequence[Callable[[PlanReport], Iterable[list[Sheet]]]] = (
    short_plans,
    short_layers,
    short_workers,
    short_cuts,
    short_protocols,
)


def compared(workers: Sequence[int], **where: float) -> list[Candidate]:
    """Both plans of so many workers, on 1 Gbit/s with 0.1 ms unless it is said otherwise."""
    link = LinkCost(**{"bytes_per_s": 125e6, "latency_s": 1e-4, **where})
    times = [estimated_times(NETWORK, images) for images in (1, 16, 64)]
    conditions = Conditions(link=link, cores=2, own_machines=True)
    return candidates(NETWORK, times, conditions, workers=workers, kinds=("vertical", "layers"))


def report_of(found: list[Candidate], chosen: Candidate | None = None) -> PlanReport:
    best = recommend(found) if chosen is None else chosen
    return build_plan_report(
        best, compared=found, recommendation=reason(best, found), machine=MACHINE, command=()
    )


def shown(report: PlanReport, width: int) -> list[str]:
    """The lines that a terminal of this width shows."""
    stream = io.StringIO()
    terminal = Terminal()
    terminal.out = Console(
        file=stream, width=width, force_terminal=True, color_system=None, soft_wrap=True, highlight=False
    )
    show(report, terminal)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def words_of(report: PlanReport) -> Iterator[str]:
    """Every word that there is to show, in a long or a short table."""
    for line in shown(report, WIDE):
        yield from line.split()
    for short in SHORT:
        for sheet in (sheet for sheets in short(report) for sheet in sheets):
            for text in (*sheet.columns, *(cell for row in sheet.rows for cell in row)):
                yield from text.split()


def table_of_plans(lines: list[str]) -> list[list[str]]:
    """The rows of the table, without its title and the lines of its head."""
    first = lines.index("plans")
    rows = [line.split() for line in lines[first + 1 : lines.index("", first)]]
    return [row for row in rows if row[0] == "->" or row[0].isdigit()]


def test_at_80_columns_each_plan_is_one_line_and_its_numbers_are_whole() -> None:
    report = report_of(compared(WORKERS))
    lines = shown(report, 80)
    rows = table_of_plans(lines)

    assert len(report.candidates) == 21
    for row, each in zip(rows, report.candidates, strict=True):
        assert (row[0] == "->") == each.chosen
        assert row[-2:] == [f"{each.crossing_bytes:,}", str(each.chain)]
        assert " ".join(row[-4:-2]) == bound_words(each.slowest)
    head = lines.index("plans")
    assert lines.index("", head) - head == 1 + 2 + 21 + 1  # a title, two lines of head, the plans, a note
    assert "no room here for: in flight; a wider terminal and --json have it" in lines
    assert len(lines) < 75


@pytest.mark.parametrize(
    ("width", "latency_s", "chosen"), [(80, 1e-6, 0), (80, 0.3, 20), (100, 1e-6, 20), (100, 0.3, 0)]
)
def test_no_word_is_broken_and_no_line_is_too_long(width: int, latency_s: float, chosen: int) -> None:
    found = compared(WORKERS, latency_s=latency_s)
    report = report_of(found, found[chosen])
    lines = shown(report, width)

    assert {word for line in lines for word in line.split()} - set(words_of(report)) <= set(notes(lines))
    assert max(map(len, lines)) <= width
    assert len(table_of_plans(lines)) == len(found)


def notes(lines: list[str]) -> list[str]:
    """The words of the lines that only short tables have."""
    return [
        word
        for line in lines
        if line.startswith(("no room here for:", "recomputed:", "loss is whole:"))
        for word in line.split()
    ]


def test_layers_of_many_workers_are_told_in_several_tables() -> None:
    found = compared([10])
    report = report_of(found, next(each for each in found if each.plan.kind == "vertical"))
    lines = shown(report, 80)
    heads = [line.split() for line in lines if line.split()[:2] == ["group", "of"]]

    assert len(heads) > 1
    assert [name for head in heads for name in head[2:]] == [f"w{worker}" for worker in range(10)]
    assert max(map(len, lines)) <= 80
    assert {word for line in lines for word in line.split()} - set(words_of(report)) <= set(notes(lines))


def test_with_room_the_long_tables_are_as_they_were() -> None:
    report = report_of(compared(WORKERS))
    lines = shown(report, ROOMY)

    assert not [line for line in lines if line.startswith("no room")]
    assert "partitions" in " ".join(lines)
    assert "links of the servers" in " ".join(shown(report, 200)[5:])
    assert "images per group" in shown(report, 200)[4]


def test_columns_go_one_by_one_until_there_is_room() -> None:
    report = report_of(compared([2]))
    forms = [sheets[0] for sheets in short_plans(report)]

    assert left_out(forms[0]) == []
    assert left_out(forms[2]) == ["chain", "in flight"]
    assert forms[-1].columns == ("", "workers", "plan", "images\na group", "images\nper s")
    assert [len(row) for row in forms[-1].rows] == [5] * len(report.candidates)
    for width in (40, 50, 60, 70):
        assert len(table_of_plans(shown(report, width))) == len(report.candidates)


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (Bound(what="compute", workers=(3,), seconds=1), "compute w3"),
        (Bound(what="cores", workers=(), seconds=1), "cores"),
        (Bound(what="link", workers=(0, 1), seconds=1), "bytes w0-w1"),
        (Bound(what="servers", workers=(2,), seconds=1), "bytes w2-ps"),
        (Bound(what="servers", workers=(), seconds=1), "bytes ps"),
        (Bound(what="latency", workers=(), seconds=1), "latency"),
    ],
)
def test_bounds_have_short_names(bound: Bound, said: str) -> None:
    assert bound_words(BoundReport(what=bound.what, workers=bound.workers, seconds=1)) == said
