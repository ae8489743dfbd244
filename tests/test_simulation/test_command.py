"""The command `simulate`: seeds, one run, a plan; and what is wrong with its options."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from adam_async.cli.commands import run_command
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError
from tests.simulation import simulate as running
from tests.simulation.command import ScenarioName, SimulateOptions, check_options, chosen_seeds
from tests.simulation.plan import Case, Fault, read_case
from tests.simulation.runner import MANY, SeedResult, digest, draw_case, run_seed
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.simulate import FAILED, chosen_scenarios, report_unreached, serve
from tests.simulation.work import Answer, Seeds

Call = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Call:
    """The exit code and the lines of a call, of its results."""

    def call(*words: object) -> tuple[int, list[str]]:
        code = run_command(["simulate", *map(str, words)])
        return code, capsys.readouterr().out.splitlines()

    return call


ONLY = ("--scenario", "members", "--jobs")


@pytest.mark.slow
def test_seeds_come_to_one_line_whoever_runs_them(simulate: Call) -> None:
    expected = digest(run_seed(SCENARIOS["members"], seed) for seed in (2, 3, 4))

    for jobs in (1, 2):
        code, (line,) = simulate(*ONLY, jobs, "--seeds", "2..4")

        assert code == 0
        assert line.startswith("members: 3 seeds, 3 count, 0 failed, ")
        assert line.endswith(f" s, hash {expected}")


@pytest.mark.slow
def test_a_seed_is_traced(tmp_path: Path, simulate: Call) -> None:
    file = tmp_path / "run.json"

    code, (line,) = simulate(*ONLY, 1, "--seed", 2, "--trace", file)

    assert code == 0
    assert line.startswith("members: 1 seed, 1 count, 0 failed, ")
    trace = json.loads(file.read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert {"controller", "worker-0"} <= names


def failing(case: Case) -> Case:
    """The same with a fault that cannot strike."""
    nobody = Fault(at_s=3.0, kind="crash", targets=("nobody",), lasts_s=1.0)
    plan = msgspec.structs.replace(case.plan, faults=(*case.plan.faults, nobody))
    return msgspec.structs.replace(case, plan=plan)


@pytest.mark.slow
def test_a_run_that_fails_says_all_that_it_takes_to_run_it_again(tmp_path: Path, simulate: Call) -> None:
    file, again = tmp_path / "plan.json", tmp_path / "again.json"
    case = failing(draw_case(SCENARIOS["members"], 2))
    file.write_bytes(msgspec.json.encode(case))

    code, lines = simulate("--plan", file)

    assert code == FAILED
    assert lines[0].startswith("members: seed 2 violates plan: at 3.000 s crash nobody for 1.000 s: there is")
    assert lines[1] == f"  options: {case.plan.options}"
    assert lines[2].startswith(f"  shrunk to 1 of {len(case.plan.faults)} faults in ")
    assert lines[3].strip().startswith("at 0.0")
    assert "crash nobody" in lines[3]
    assert lines[-1].startswith("members: 1 seed, 0 count, 1 failed, ")

    again.write_text(lines[-2])
    assert len(read_case(again.read_bytes(), origin="what was printed").plan.faults) == 1
    assert simulate("--plan", again)[0] == FAILED


@pytest.mark.slow
def test_shrinking_a_plan_prints_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "SHRINK_NOTICE_S", 0.0)
    case = failing(draw_case(SCENARIOS["members"], 2))
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(case))

    run_command(["simulate", "--plan", str(tmp_path / "plan.json")])

    first, *told = capsys.readouterr().err.splitlines()
    assert first == "members: seed 2 violates plan; shrinking its plan"
    assert told[-1].startswith(f"members: seed 2 is down to 1 of {len(case.plan.faults)} faults after ")


def results_of(*, reached: Sequence[str] = SCENARIOS["controllers"].marks, few: int = 0) -> list[SeedResult]:
    """The results of `MANY` seeds, of which `few` do not count, and one has reached the marks."""
    result = SeedResult(case=draw_case(SCENARIOS["controllers"], 1), replay_hash="")
    idle = msgspec.structs.replace(result, too_little=("no faults",))
    some = msgspec.structs.replace(result, counts=dict.fromkeys(reached, 1))
    return [some, *[idle] * few, *[result] * (MANY - 1 - few)]


def test_many_seeds_that_never_came_across_a_mark_fail(capsys: pytest.CaptureFixture[str]) -> None:
    marks = SCENARIOS["controllers"].marks

    assert not report_unreached("controllers", results_of(), Terminal())
    assert not report_unreached("controllers", results_of(reached=marks[1:])[1:], Terminal())
    assert report_unreached("controllers", results_of(reached=marks[1:]), Terminal())

    assert capsys.readouterr().out == f"controllers: no seed reached: {marks[0]}\n"


def test_many_seeds_of_which_few_count_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert not report_unreached("controllers", results_of(few=10), Terminal())
    assert not report_unreached("controllers", results_of(few=MANY - 1)[:-1], Terminal())
    assert report_unreached("controllers", results_of(few=11), Terminal())

    assert capsys.readouterr().out == "controllers: only 89 of 100 seeds count; 90% have to\n"


def test_scenarios_are_listed(simulate: Call) -> None:
    code, lines = simulate("--list")

    assert code == 0
    assert [line.partition(":")[0] for line in lines] == list(SCENARIOS)


def test_a_child_answers_line_by_line_until_there_is_no_more() -> None:
    target = io.StringIO()
    work = msgspec.json.encode(Seeds(scenario="members", seeds=(3,))).decode()

    assert serve(io.StringIO(f"{work}\n"), target) == 0

    (line,) = target.getvalue().splitlines()
    assert msgspec.json.decode(line, type=Answer).result == run_seed(SCENARIOS["members"], 3)


def test_the_option_takes_the_names_of_all_scenarios() -> None:
    assert get_args(ScenarioName) == (*SCENARIOS, "all")


def test_scenarios_are_chosen_by_name_in_the_order_of_the_list() -> None:
    assert chosen_scenarios(()) == chosen_scenarios(("all",)) == list(SCENARIOS)
    assert chosen_scenarios(("members", "members")) == ["members"]
    with pytest.raises(ConfigError, match=r"unknown scenario 'x': known are members.*, and all"):
        chosen_scenarios(("members", "x"))


def test_seeds_are_a_range_of_which_both_ends_belong_to_it() -> None:
    assert chosen_seeds(SimulateOptions(seeds="3..17")) == (3, 17)
    assert chosen_seeds(SimulateOptions(seed=4)) == (4, 4)
    assert chosen_seeds(SimulateOptions()) is None


@pytest.mark.parametrize("seeds", ["", "4", "4..3", "-1..3", "a..b", "1..2..3"])
def test_seeds_that_are_no_range_are_refused(seeds: str) -> None:
    with pytest.raises(ConfigError, match=r"--seeds must be A\.\.B, from 0 on and A at most B"):
        chosen_seeds(SimulateOptions(seeds=seeds))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SimulateOptions(seed=1, seeds="1..2"), "--seed and --seeds contradict"),
        (SimulateOptions(plan=Path("p"), seed=1), "leave out --seed"),
        (SimulateOptions(plan=Path("p"), scenario=("members",)), "leave out --scenario"),
        (SimulateOptions(trace=Path("t"), seeds="1..2"), "--trace is of one run"),
    ],
)
def test_options_that_contradict_one_another_are_refused(options: SimulateOptions, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_options(options)


def test_a_folder_is_no_file_for_results(simulate: Call) -> None:
    code, said = simulate(*ONLY, 1, "--seed", 2, "--trace", ".")

    assert (code, said) == (2, [])


def test_a_trace_of_several_scenarios_is_refused() -> None:
    with pytest.raises(ConfigError, match="one --scenario"):
        check_options(SimulateOptions(trace=Path("t"), seed=1, scenario=("members", "power")))


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / f"{'long' * 100}.json")

    assert run_command(["simulate", "--scenario", "members", "--seed", "2", "--trace", file]) == 2
    assert f"--trace {file} cannot be written" in capsys.readouterr().err
