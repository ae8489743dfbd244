"""The harness of the benchmarks: sides in turn, honest ratios, rows with the machine, processes that end."""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from benchmarks.harness import (
    LEAST_PAIRS,
    Option,
    apart,
    beside,
    compared,
    interleaved,
    median_interval,
    parsed,
    printed,
    program,
    run,
    turns,
)


@pytest.fixture(autouse=True, scope="module")
def pipe_of_processes_is_open() -> None:
    """Start the tracker of processes, whose pipe stays open: no test is the one that leaves it."""
    resource_tracker.ensure_running()


FEW = [0.82, 0.97, 1.14, 0.9, 0.95, 1.02]


def test_the_interval_of_a_median_holds_it_and_lies_within_the_ratios() -> None:
    low, high = median_interval(FEW)
    assert min(FEW) <= low < statistics.median(FEW) < high <= max(FEW)
    assert median_interval(FEW) == (low, high)


@pytest.mark.parametrize("ratios", [[0.97] * 6, [0.97]])
def test_equal_pairs_and_a_single_pair_have_an_interval_of_no_width(ratios: list[float]) -> None:
    assert median_interval(ratios) == (0.97, 0.97)


def test_more_pairs_narrow_the_interval() -> None:
    few = [0.9, 1.0, 1.1]
    widths = [high - low for low, high in map(median_interval, (few, few * 10))]
    assert widths[1] < widths[0]


def test_every_round_has_each_side_once_and_each_side_is_first_in_turn() -> None:
    assert "".join(turns("abc", 4)) == "abcbcacababc"
    counts = iter(range(9))
    sides = {"one": lambda: next(counts), "two": lambda: next(counts)}
    assert interleaved(sides, 2) == {"one": [0, 3], "two": [1, 2]}


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_above_1_if_ours_is_better() -> None:
    ours, peer = [10.0, 30.0, 20.0], [5.0, 20.0, 40.0]
    more = compared("rate", ours, peer, "1/s", commit="abc")
    assert (more["ours"], more["peer"], more["ratio"], more["commit"]) == (20.0, 20.0, 1.5, "abc")
    assert more["ratios"] == [2.0, 1.5, 0.5]
    assert compared("time", ours, peer, "s", less_is_better=True)["ratio"] == pytest.approx(0.667)


@pytest.mark.parametrize(
    ("pairs", "value", "met"),
    [(LEAST_PAIRS, 0.98, True), (LEAST_PAIRS, 0.97, False), (LEAST_PAIRS - 1, 0.98, None)],
)
def test_a_goal_needs_its_ratio_in_enough_pairs(pairs: int, value: float, met: bool | None) -> None:
    assert compared("", [value] * pairs, [1.0] * pairs, "s", goal=0.98)["met"] is met


def test_a_goal_is_missed_if_the_interval_begins_far_below_it() -> None:
    ours = [0.9] * 9 + [1.0] * 11
    row = compared("", ours, [1.0] * 20, "s", goal=0.98)
    assert (row["ratio"], row["interval"][0], row["met"]) == (1.0, 0.9, False)


def test_an_argument_has_the_type_of_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--rounds", "2", "--sizes", "1", "2", "--quick", "--peer", "a=b", "--peer", "c", "--no-draw"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    options = {"rounds": 3, "sizes": [1024], "quick": False, "peer": Option([], repeated=True), "draw": True}
    assert vars(parsed("", **options, file_of=Option(None, type=Path))) == {
        "rounds": 2,
        "sizes": [1, 2],
        "quick": True,
        "peer": ["a=b", "c"],
        "draw": False,
        "file_of": None,
    }


@pytest.mark.parametrize("is_async", [False, True])
def test_rows_are_printed_and_written_with_the_machine(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json", str(file), "--rounds", "2"])
    handler = signal.getsignal(signal.SIGTERM)

    def measure(options):
        for number in range(options.rounds):
            yield {"case": number, "before": file.exists()}

    async def measure_later(options):
        for row in measure(options):
            await asyncio.sleep(0)
            yield row

    try:
        run("", measure_later if is_async else measure, rounds=1)
    finally:
        signal.signal(signal.SIGTERM, handler)

    rows = [{"case": 0, "before": False}, {"case": 1, "before": True}]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    report = json.loads(file.read_text())
    assert (report["benchmark"], report["arguments"], report["rows"]) == ("test_harness", {"rounds": 2}, rows)
    assert set(report["machine"]) == {"processor", "cores", "vectors", "system", "python", "numpy", "commit"}


async def doubled(value: int) -> int:
    return 2 * value


def echo_pid(channel) -> None:
    channel.send(os.getpid())
    channel.recv()


def fails() -> None:
    raise ValueError("on purpose")


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.processes
def test_a_function_runs_apart_and_its_failure_ends_the_benchmark() -> None:
    assert apart(doubled, 21) == 42
    assert apart(os.getpid) != os.getpid()
    with pytest.raises(SystemExit, match="fails failed"):
        apart(fails)


@pytest.mark.processes
def test_processes_end_with_their_block_and_take_their_children_along() -> None:
    with pytest.raises(KeyError), beside(echo_pid) as channel:
        pid = channel.recv()
        assert is_alive(pid)
        raise KeyError
    assert not is_alive(pid)
    script = "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with program(sys.executable, "-c", script) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
    assert parent.returncode == -signal.SIGKILL
    while is_alive(child):  # its end follows the signal at once
        pass


@pytest.mark.processes
def test_a_peer_without_rows_ends_the_benchmark() -> None:
    assert printed([sys.executable, "-c", "print('no row'); print('{\"a\": 1}')"]) == [{"a": 1}]
    with pytest.raises(SystemExit, match=r"printed no rows: .*on purpose"):
        printed([sys.executable, "-c"], "raise SystemExit('on purpose')")


TERMINATED = """
import asyncio
from benchmarks.harness import looped
async def work():
    try:
        print("works", flush=True)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)
        print("has ended", flush=True)
looped(work())
"""


@pytest.mark.processes
def test_a_terminated_benchmark_runs_its_last_steps() -> None:
    root = Path(__file__).resolve().parents[2]
    with program(sys.executable, "-c", TERMINATED, cwd=root) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == "works\n"
        benchmark.terminate()
        assert benchmark.stdout.read() == "has ended\n"
        assert benchmark.wait(30) == 1


ORPHAN = """
import os, sys
from benchmarks.harness import beside
from tests.benchmarks.test_harness import echo_pid
with beside(echo_pid) as channel:
    print(channel.recv(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.processes
def test_a_process_ends_with_a_benchmark_that_is_killed() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", ORPHAN]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        assert is_alive(pid)
        benchmark.kill()
    while is_alive(pid):  # a time-out of the test if the process outlives its parent
        pass
