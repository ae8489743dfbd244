"""A run shows what it does: lines where nobody watches, a table on a terminal, one line when quiet."""

import dataclasses
import io
import logging
import re

import msgspec
import pytest
from msgspec import structs

from adam_async.cli import live_table
from adam_async.cli.live_table import (
    GAP,
    LiveTable,
    busy_share,
    caption,
    cells_of,
    consistency_line,
    cut_line,
    epoch_line,
    fitting,
    introduction,
    summary,
    why_not_one,
)
from adam_async.cli.terminal import Terminal as Words
from adam_async.cli.terminal import log_to_stderr
from adam_async.cluster.local import LocalCluster
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.model import Network, named_model
from adam_async.model.partition.plan import Layout
from adam_async.model.partition.planner import layers_plan, vertical_plan
from adam_async.report.baseline import Baseline
from adam_async.report.report import EventReport, Report, build_report
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.cluster_status import ClusterStatus, status_of
from adam_async.run.condition import Condition, Wait
from adam_async.run.config import Config
from adam_async.run.counts import ControllerCounts
from adam_async.run.events import Noted
from adam_async.run.progress import Progress
from adam_async.run.result import EpochResult, RunResult
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import describe_machine
from tests.adam_async.cluster_maps import node, run_record
from tests.adam_async.role_counts import counts_of

MODEL = Network(named_model("mnist-adam"))
DATA = {
    "name": "mnist",
    "source": "MNIST, from the cache",
    "shape": [1, 28, 28],
    "classes": 10,
    "train_images": 60000,
    "test_images": 10000,
}
EPOCH = EpochResult(epoch=1, images=60000, skipped=0, train_loss=0.25, test_accuracy=0.9876, train_s=4.0)
WELL = Condition(verdict="well", live=2)
CLEAR = "\x1b["
DEATH = "worker-1 died: killed by signal 9; starting it again"
PLAN = vertical_plan(MODEL, 2)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """Return the rows of a terminal after this output, those that scrolled away included."""
    rows, row, column = [""], 0, 0
    for control, count, action, end, text in re.findall(
        r"(\x1b\[(\??[\d;]*)([A-Za-z]))|([\r\n])|([^\x1b\r\n]+)", written
    ):
        if end == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif end == "\r":
            column = 0
        elif action == "A":
            row = max(row - int(count or 1), 0)
        elif action == "K":
            assert count == "2", "the whole row is erased"
            rows[row] = ""
        elif text:
            rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
            column += len(text)
        else:
            assert action in "mhl", f"{control!r} moves the cursor"
    return [each.rstrip() for each in rows if each.strip()]


def drawing(**progress) -> tuple[Terminal, LiveTable]:
    """A terminal, and a table on it that is told nothing new while it is looked at."""
    stream = Terminal()
    return stream, LiveTable(Progress(last_epoch=3, phase="training", epoch=2, **progress), stream=stream)


def status_with(condition: Condition = WELL, **run) -> ClusterStatus:
    """Return the status of a cluster with a run."""
    record = run_record("run-1", phase="training")
    nodes = {f"worker-{n}": node("worker") for n in range(2)}
    status = status_of(ClusterMap(run=record, nodes=nodes), {}, leading="")
    changed = structs.replace(status.run, **{"replicas": 4, **run})
    return structs.replace(status, run=changed, condition=condition)


def small_report(**changes) -> Report:
    result = RunResult(
        epochs=(EPOCH,),
        weights={},
        model=MODEL,
        data=DATA,
        statistics={},
        events=({"s": 1.5, "event": "worker-1 died"},),
    )
    baseline = Baseline(threads=2, before=19000.0, after=21000.0, sgemm=100e9)
    machine = msgspec.structs.replace(describe_machine(loop="asyncio"), warnings=[])
    report = build_report(result, config=Config(), command=[], machine=machine, baseline=baseline)
    return msgspec.structs.replace(report, **changes)


def test_the_introduction_says_which_data_and_how_large_the_model_is() -> None:
    data, model = introduction(DATA, MODEL)

    assert data == (
        "data   mnist: MNIST, from the cache; 60,000 training and 10,000 test images of 1x28x28, 10 classes"
    )
    assert "298,090 parameters, 756,000 multiply-adds forward per image (our definition" in model


def test_the_introduction_says_that_data_of_one_class_teach_nothing() -> None:
    assert introduction({**DATA, "classes": 1}, MODEL)[0].endswith(
        "of 1x28x28, one class, so every answer is right"
    )


def test_a_role_that_does_not_answer_is_shown_in_the_table() -> None:
    progress = Progress(phase="training", silent=("ps-0 for 4 s",))
    assert consistency_line(progress).endswith("; no answer: ps-0 for 4 s")


async def test_a_long_silence_ends_with_a_line_of_what_the_run_is_at(monkeypatch) -> None:
    monkeypatch.setattr(live_table, "QUIET_S", 0.0)
    progress, stream = Progress(phase="preparing kernels 3/20", last_epoch=3), io.StringIO()
    async with LiveTable(progress, stream=stream) as table:
        table.refresh()
        table.refresh()
        progress.begin_epoch(2, now=0.0)
        progress.data, progress.images, progress.status = DATA, 12800, status_with(images_per_s=5000.0)
        table.refresh()
        table.refresh()

    first, *_, last = stream.getvalue().splitlines()
    assert first == "preparing kernels 3/20"
    assert last == "training epoch 2/3: 12,800 of 60,000 images, 5,000/s"


async def test_the_introduction_comes_once_as_soon_as_the_driver_knows() -> None:
    progress, stream = Progress(last_epoch=3), io.StringIO()
    async with LiveTable(progress, stream=stream) as table:
        table.refresh()
        assert stream.getvalue() == ""
        progress.data, progress.model = DATA, MODEL
        table.refresh()
        table.refresh()

    assert stream.getvalue().splitlines() == introduction(DATA, MODEL)


async def test_a_pipe_gets_plain_lines() -> None:
    stream = io.StringIO()
    async with LiveTable(Progress(last_epoch=3, data=DATA, model=MODEL), stream=stream) as table:
        table.on_epoch(EPOCH)
        table.finish(small_report())

    lines = stream.getvalue().splitlines()
    assert lines[2] == ("epoch 1/3: loss 0.2500, test accuracy 98.76%, 60,000 images in 4.00 s (15,000/s)")
    assert CLEAR not in stream.getvalue()
    assert lines[-1].startswith("test accuracy 98.76% after 1 epoch, 15,000 images/s")


async def test_quiet_leaves_the_last_line_only() -> None:
    stream = Terminal()
    async with LiveTable(Progress(last_epoch=3, data=DATA, model=MODEL), stream=stream, quiet=True) as table:
        table.refresh()
        table.on_epoch(EPOCH)
        table.finish(small_report())

    assert stream.getvalue().splitlines() == summary(small_report())[-1:]


async def test_a_terminal_gets_a_table_that_is_gone_at_the_end_and_lines_that_stay() -> None:
    stream = Terminal()
    progress = Progress(last_epoch=3, data=DATA, model=MODEL, phase="training", epoch=2, images=1600)
    progress.consistency, progress.clock = "bsp", 100
    async with LiveTable(progress, stream=stream) as table:
        table.on_epoch(EPOCH)
        shown = stream.getvalue()
        table.finish(small_report())

    assert CLEAR in shown
    for cell in ("training", "2/3", "1,600/60,000", "replicas", "bsp, staleness at most 0", "clock 100"):
        assert cell in shown
    assert "epoch 1/3: loss 0.2500" in shown
    assert "test accuracy 98.76% after 1 epoch" in stream.getvalue()
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"


async def test_news_stand_above_the_table_and_no_row_of_it_stays_behind(monkeypatch) -> None:
    stream, table = drawing()
    monkeypatch.setattr("sys.stderr", stream)
    words = Words()
    words.give_way(table.aside)
    async with table:
        table.refresh()
        before = screen(stream.getvalue())
        words.notice(DEATH)
        words.notice("worker-1 has joined")
        table.refresh()
        assert screen(stream.getvalue()) == [DEATH, "worker-1 has joined", *before]
        table.on_epoch(EPOCH)

    assert len(before) == 3, "a header, a row and a caption"
    assert screen(stream.getvalue()) == [DEATH, "worker-1 has joined", epoch_line(EPOCH, 3)]
    assert stream.getvalue().endswith("\x1b[2K"), "nothing is drawn any more"
    words.notice("after it")
    assert screen(stream.getvalue())[-1] == "after it"


async def test_a_line_above_a_narrow_table_cuts_no_line_below_it(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream, progress = Terminal(), Progress(phase="training", last_epoch=3)
    progress.silent = ("ps-0 for 4 s", "ps-1 for 4 s", "ps-2 for 4 s")
    async with LiveTable(progress, stream=stream) as table:
        table.refresh()
        table.print("a line")
        shown = " ".join(" ".join(screen(stream.getvalue())).split())
    assert "no answer: ps-0 for 4 s, ps-1 for 4 s and 1 more" in shown


async def test_log_lines_stay_above_the_table(monkeypatch) -> None:
    root, stream = logging.getLogger(), Terminal()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr("sys.stderr", stream)
    level = root.level
    table = LiveTable(Progress(last_epoch=3), stream=stream)
    log_to_stderr(verbose=False)
    try:
        Words().give_way(table.aside)
        async with table:
            table.refresh()
            before = screen(stream.getvalue())
            root.warning("lost the controller")
            table.refresh()
            assert screen(stream.getvalue()) == ["lost the controller", *before]
    finally:
        root.setLevel(level)

    assert screen(stream.getvalue()) == ["lost the controller"]


async def test_news_on_another_stream_leave_the_table_as_it_is(monkeypatch) -> None:
    (stream, table), other = drawing(), io.StringIO()
    monkeypatch.setattr("sys.stderr", other)
    words = Words()
    words.give_way(table.aside)
    async with table:
        table.refresh()
        before = screen(stream.getvalue())
        words.notice(DEATH)
        assert screen(stream.getvalue()) == before

    assert other.getvalue() == f"{DEATH}\n"


async def test_without_a_table_news_are_lines_like_any(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    table, words = LiveTable(Progress(last_epoch=3), stream=stream), Words()
    words.give_way(table.aside)
    async with table:
        words.notice(DEATH)
        table.print("said")

    assert stream.getvalue() == f"{DEATH}\nsaid\n"


@pytest.mark.parametrize(("plan", "kind"), [(PLAN, "vertical"), (layers_plan(MODEL, 2), "layers")])
def test_how_the_model_is_cut_is_said_with_what_crosses(plan, kind) -> None:
    line = cut_line(MODEL, plan.to_dict())

    match = re.fullmatch(
        rf"cut    {kind} over 2 workers: ([\d,]+) crossings, "
        r"([\d,]+) bytes per image( and [\d,]+ per group)?",
        line,
    )
    assert match is not None, line
    assert all(int(match[number].replace(",", "")) > 0 for number in (1, 2))
    assert (match[3] is not None) == any(
        crossing.kind == "gradient" for crossing in Layout(MODEL.topology, MODEL.input_shape, plan).crossings
    )


async def test_the_cut_is_said_once_as_soon_as_it_is_known() -> None:
    progress, stream = Progress(last_epoch=3, data=DATA, model=MODEL), io.StringIO()
    async with LiveTable(progress, stream=stream) as table:
        table.refresh()
        progress.plan = PLAN.to_dict()
        table.refresh()
        table.refresh()

    cut = cut_line(MODEL, PLAN.to_dict())
    assert stream.getvalue().splitlines() == [*introduction(DATA, MODEL), cut]


async def test_a_long_wait_for_roles_is_said_once_where_no_table_shows_it(monkeypatch) -> None:
    progress, stream = Progress(last_epoch=3, missing="1 of 4 workers"), io.StringIO()
    async with LiveTable(progress, stream=stream) as table:
        table.refresh()
        table.refresh()
        assert stream.getvalue() == "", "it has only begun"
        monkeypatch.setattr(live_table, "PATIENCE_S", 0.0)
        table.refresh()
        table.refresh()
        assert stream.getvalue() == "waiting for 1 of 4 workers\n"
        progress.missing = ""
        table.refresh()
        progress.missing = "a data server"
        table.refresh()
        table.refresh()

    assert stream.getvalue().splitlines() == ["waiting for 1 of 4 workers", "waiting for a data server"]


@pytest.mark.parametrize("how", [{"quiet": True}, {"terminal": True}])
async def test_a_long_wait_is_no_line_on_a_terminal_or_when_quiet(monkeypatch, how) -> None:
    monkeypatch.setattr(live_table, "PATIENCE_S", 0.0)
    stream = io.StringIO()
    async with LiveTable(Progress(last_epoch=3, missing="1 of 4 workers"), stream=stream, **how) as table:
        table.refresh()
        table.refresh()

    assert "waiting for" not in stream.getvalue()


def test_a_bounded_run_shows_its_mode_the_slowest_clock_and_who_waits_for_whom() -> None:
    progress = Progress(consistency="ssp:4", clock=1234, staleness_max=17)
    assert consistency_line(progress) == "ssp:4, staleness at most 17 so far, slowest clock 1,234"


def test_each_wait_has_a_line_with_its_deadline_and_cure() -> None:
    wait = Wait(who="worker-0", what="replica 3 at clock 9", deadline_s=120.0, cure="restart its worker")
    waits = (wait, *[structs.replace(wait, who=f"worker-{n}") for n in (1, 2)])
    progress = Progress(status=status_with(condition=Condition(verdict="well", waits=waits, live=3)))
    assert caption(progress)[1:] == [
        "3 live, 0 taking part",
        "worker-0: waits for replica 3 at clock 9, at most 120 s; restart its worker",
        "worker-1: waits for replica 3 at clock 9, at most 120 s; restart its worker",
        "1 more wait",
    ]


def training(width: int) -> list[str]:
    """Return the heads of the columns in a terminal of this width."""
    progress = Progress(phase="training", last_epoch=30, epoch=2, data=DATA, images=15_000, loss=0.25)
    progress.status, progress.began_at = status_with(images_per_s=5321.0, left_s=3725.0), 100.0
    progress.epochs.append(EPOCH)
    progress.takes_checkpoints, progress.disk_age_s = True, 0.5
    cells = fitting(cells_of(progress, now=165.0), width)
    assert sum(max(len(head), len(cell)) + GAP for head, cell in cells.items()) - GAP <= width
    expected = {
        "epoch": "2/30",
        "done": "##........  25%",
        "elapsed": "1m 05s",
        "left": "1h 02m",
        "replicas": "2/4",
        "accuracy": "98.76%",
    }
    assert {head: expected[head] for head in cells if head in expected} == {
        head: cell for head, cell in cells.items() if head in expected
    }
    return list(cells)


def test_a_narrow_terminal_has_fewer_columns_and_no_cut_numbers() -> None:
    assert training(40) == ["phase", "epoch", "done"]
    assert training(60) == ["phase", "epoch", "done", "images/s", "loss", "accuracy"]
    assert set(training(100)) >= {"images/s", "left", "replicas", "elapsed"}
    assert set(training(200)) >= {"images", "staleness", "waited", "checkpoint", "on disk"}


def test_an_asynchronous_run_shows_no_clock() -> None:
    assert consistency_line(Progress(clock=5)) == "asp, staleness at most 0 so far"
    assert consistency_line(Progress(skipped=1600)).endswith("so far, 1,600 images skipped")


def test_the_line_of_an_epoch_says_what_it_skipped_if_it_did():
    assert "skipped" not in epoch_line(EPOCH, 3)
    assert epoch_line(dataclasses.replace(EPOCH, skipped=2000), 3).endswith("/s), 2,000 skipped")


async def test_the_table_goes_when_the_run_fails() -> None:
    stream = Terminal()
    with pytest.raises(KeyError, match="lost"):
        async with LiveTable(Progress(last_epoch=3), stream=stream):
            raise KeyError("lost")

    assert "\x1b[?25h" in stream.getvalue()


def test_the_summary_repeats_no_event_from_before_the_training() -> None:
    progress, stream = Progress(), io.StringIO()
    table = LiveTable(progress, stream=stream)
    printed = ["run r goes on from the disks of its servers, in epoch 2", "worker-1 died"]
    table.on_event(Noted(text=printed[0]))
    progress.epoch = 2
    table.on_event(Noted(text=printed[1]))
    events = [EventReport(s=0.1, event=printed[0]), EventReport(s=1.5, event=printed[1])]
    table.finish(msgspec.structs.replace(small_report(), events=events))
    found = [line for line in stream.getvalue().splitlines() if line.startswith("event")]
    assert found == ["event  at 1.5 s: worker-1 died"]


def test_the_summary_names_events_baseline_and_staleness() -> None:
    text = "\n".join(summary(small_report()))

    assert "event  at 1.5 s: worker-1 died" in text
    assert (
        "kernels alone on 2 threads: 20,000 images/s, efficiency 0.75: threads computed 0% of the time"
        in text
    )
    assert "matrix products on 2 threads: 100.0 GFLOP/s, training reaches 0.64 of that" in text
    assert "staleness mean 0.00, max 0" in text


def test_the_summary_says_which_of_several_controllers_leads() -> None:
    def line(*controllers: ControllerCounts) -> str:
        lines = summary(small_report(controllers=list(controllers)))
        return "\n".join(line for line in lines if line.startswith("leader"))

    one, two = (ControllerCounts(node=f"controller-{n}", role="follower", term=4) for n in (1, 2))
    leader = ControllerCounts(node="controller-3", role="leader", term=4)
    assert line(one, two, leader) == "leader controller-3 of 3 controllers, in term 4"
    assert line(one, two) == "leader none of 2 controllers, in term 4"
    assert line(leader) == ""
    deposed = ControllerCounts(node="controller-4", role="leader", term=3)
    assert line(deposed, one, leader) == "leader controller-3 of 3 controllers, in term 4"


async def test_the_leader_is_printed_when_known_and_when_it_changes() -> None:
    stream, leaders = (
        io.StringIO(),
        iter(["", "controller-2", "controller-2", "", "controller-2", "controller-1"]),
    )
    table = LiveTable(Progress(last_epoch=1), stream=stream, leader=lambda: next(leaders))
    for _ in range(6):
        table.refresh()
    assert stream.getvalue() == "controller-2 leads the controllers\ncontroller-1 leads the controllers\n"


def test_waits_for_the_clocks_of_others_are_named_where_there_were_some() -> None:
    worker = counts_of(
        "worker", parameters={"admission_wait_s": 1.0}, data={"blocked_s": 2.0}, clock_wait_s=3.0
    )
    text = why_not_one(small_report(workers=[worker]), 0.5)

    assert "(workers waited 1.0 s for servers, 2.0 s for images, 3.0 s for the clocks of others)" in text
    assert "clocks" not in why_not_one(small_report(), 0.5)


def test_an_efficiency_above_one_is_blamed_on_the_machine() -> None:
    assert why_not_one(small_report(), 1.25).startswith("above 1, so the machine was busier")


def test_without_a_baseline_nothing_is_said_of_efficiency() -> None:
    assert "efficiency" not in "\n".join(summary(small_report(baseline=None)))


def test_causes_of_slowness_are_in_the_summary() -> None:
    machine = msgspec.structs.replace(describe_machine(loop="asyncio"), warnings=["BLAS has 8 threads"])

    assert "slower BLAS has 8 threads" in summary(small_report(machine=machine))


async def test_a_real_run_is_shown_from_its_first_to_its_last_line() -> None:
    config = Config(epochs=2, threads=1)
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    few = dataclasses.replace(
        digits, train_images=digits.train_images[:160], train_labels=digits.train_labels[:160]
    )
    stream = io.StringIO()
    async with LocalCluster(config, dataset=few) as cluster:
        progress = cluster.driver.progress
        async with LiveTable(progress, stream=stream) as table:
            result = await cluster.train(table.on_epoch)
        assert (progress.epoch, progress.images) == (2, 160)
        assert progress.status is not None
        assert progress.status.condition.live == 1
        await cluster.driver.look()
        assert (progress.images, progress.loss) == (160, pytest.approx(result.epochs[-1].train_loss))
        report = build_report(
            result, config=config, command=[], machine=describe_machine(loop="asyncio"), baseline=None
        )
        assert progress.staleness_mean == pytest.approx(report.staleness.mean)
        table.finish(report)

    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("data   digits: the digits inside the package, as asked for; 160 training")
    assert lines[1].startswith("model  digits: 17,258 parameters")
    assert [line[:9] for line in lines[2:4]] == ["epoch 1/2", "epoch 2/2"]
    assert 0.01 < busy_share(report) <= 1.0
    half_speed = why_not_one(report, busy_share(report) / 2)
    assert f"threads computed {busy_share(report):.0%} of the time" in half_speed
    assert "at 50% of that speed" in half_speed


def test_the_table_shows_how_old_the_newest_checkpoint_is() -> None:
    progress = Progress(takes_checkpoints=True)
    assert live_table.checkpoint_age(progress, now=100.0) == "none yet"
    progress.written("checkpoint-0001-000015", now=100.0)
    assert live_table.checkpoint_age(progress, now=1334.4) == "1,234 s old"


def test_the_caption_names_what_is_lacking_above_the_numbers() -> None:
    lacking = Condition(verdict="degraded", reasons=("ps-1 is lost", "1 of 2 replicas are live"))
    for condition, line in ((lacking, "degraded: ps-1 is lost; 1 of 2 replicas are live"), (WELL, WELL.line)):
        assert caption(Progress(status=status_with(condition=condition)))[1] == line
