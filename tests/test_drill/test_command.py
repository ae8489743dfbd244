"""The command `drill`: its help, wrong options, tables and file."""

import pytest

from adam_async.cli.commands import run_command
from adam_async.cli.terminal import Terminal
from tests.drill.command import DrillOptions
from tests.drill.drill import fault_count, print_results, report_of
from tests.drill.judging import Audit, FaultObservation, Observations, PairObservation, judge


def test_the_help_names_options_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["drill", "--help"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "Exit codes: 0 all claims hold" in shown
    for option in ("--workload", "--faults", "--for", "--require"):
        assert option in shown


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--faults", "fire"], "--faults takes kill, freeze, cut"),
        (["--count", "3", "--for", "9", "--every", "3"], "leave one out"),
        (["--for", "9"], "--for needs --every"),
        (["--every", "0"], "--every must be above 0"),
        (["--count", "0"], "must be within 1 and 100000, not 0"),
        (["--every", "10", "--for", "5"], "must be within 1"),
        (["--pairs", "0"], "--pairs must be within 1"),
        (["--pairs", "3"], "--pairs belongs to --workload train"),
        (["--copies", "2"], "at least 3"),
        (["--controllers", "2"], "controllers must be"),
    ],
)
def test_a_wrong_option_ends_with_code_2(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["drill", *words]) == 2

    assert error in capsys.readouterr().err


def test_the_number_of_faults_is_given_or_that_of_a_time() -> None:
    assert fault_count(DrillOptions()) == 4
    assert fault_count(DrillOptions(count=7)) == 7
    assert fault_count(DrillOptions(every=15.0, for_=300.0)) == 20


def observed() -> Observations:
    return Observations(
        planned=1,
        faults=[
            FaultObservation(
                number=1, kind="kill", server="ps-1", at_s=0.5, resumed_s={"ps-1": 0.75}, whole_s=3.0
            )
        ],
        audit=Audit(acknowledged=1234, lost=1),
        pairs=[
            PairObservation(
                seed=5,
                faults=1,
                accuracy_without=0.95,
                accuracy_with=0.945,
                images_per_s_without=1500.0,
                images_per_s_with=900.0,
            )
        ],
    )


def test_the_tables_have_times_pairs_and_claims(capsys: pytest.CaptureFixture[str]) -> None:
    seen = observed()
    print_results(seen, judge(seen, margin=0.005), Terminal())

    out = capsys.readouterr().out
    for text in ("0.75", "-0.50", "1,500", "FAILED", "not checked", "1 lost"):
        assert text in out


def test_the_file_has_settings_claims_and_observations() -> None:
    seen = observed()
    report = report_of(DrillOptions(seed=9), seen, judge(seen, margin=0.005), {"cut": "no"}, 1)

    assert report["settings"]["seed"] == 9
    assert report["skipped"] == {"cut": "no"}
    assert report["exit_code"] == 1
    assert report["kinds"][0]["p50_s"] == 0.75
    assert report["observations"]["audit"]["lost"] == 1
    assert any(claim["holds"] is False for claim in report["claims"])
