"""Each row of the ablations removes one safeguard, and rows report only real failures."""

import ast
from dataclasses import replace

import pytest

from adam_async.controller.consensus.membership import Members
from benchmarks.ablations import check_guards, copied, count_seeds, removed, seeds_until_found
from tests.ablations.ablation import ROOT
from tests.ablations.dealers import DEALERS
from tests.ablations.every import EVERY, NAMED
from tests.ablations.group_sets import GROUP_SETS
from tests.adam_async.controller.consensus.ablations import ABLATIONS as CONSENSUS
from tests.adam_async.parameter_server.replication.ablations import ABLATIONS as REPLICATION
from tests.adam_async.persistence.test_ablations import OWN as PERSISTENCE

each = pytest.mark.parametrize("ablation", EVERY, ids=lambda ablation: ablation.name)
ALL = [*dict.fromkeys((*EVERY, *CONSENSUS, *REPLICATION, *PERSISTENCE))]
BOUND = NAMED["a wait is bounded"]
LOSS = NAMED["a loss takes effect after agreement"]
"""A safeguard whose removal the first client that ends shows."""


@pytest.mark.parametrize("ablation", ALL, ids=lambda ablation: ablation.name)
def test_a_source_without_its_safeguard_differs_and_compiles(ablation):
    source = (ROOT / ablation.file).read_text()
    changed = ablation.removed_from(source)
    assert changed != source
    compile(changed, ablation.file, "exec")


@each
def test_the_guard_of_each_safeguard_is_an_existing_test(ablation):
    path, _, name = ablation.guard.partition("::")
    functions = [
        node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")
    ]
    assert functions.count(name) == 1


@each
def test_a_safeguard_that_no_seed_is_expected_to_show_has_a_reason(ablation):
    assert bool(ablation.breaks) != bool(ablation.seldom)


def test_names_of_safeguards_are_unique():
    assert len({ablation.name for ablation in ALL}) == len(ALL)


def test_seeds_show_at_least_half_of_the_safeguards_of_groups():
    of_groups = [row for row in EVERY if "group" in row.name or row in (*DEALERS, *GROUP_SETS)]
    assert sum(bool(row.breaks) for row in of_groups) >= len(of_groups) / 2
    assert sum(bool(row.breaks) for row in EVERY) >= len(EVERY) / 2


def test_a_safeguard_is_removed_for_the_duration_of_the_block_and_in_the_copy_alone():
    path = ROOT / BOUND.file
    with copied() as folder:
        with removed(BOUND, folder):
            assert BOUND.old not in (folder / BOUND.file).read_text()
            assert BOUND.old in path.read_text()
        assert (folder / BOUND.file).read_text() == path.read_text()
        with (
            pytest.raises(ValueError, match=r"body\.py has 'what no source has' 0 times instead of once"),
            removed(replace(BOUND, old="what no source has"), folder),
        ):
            pass


def test_a_safeguard_is_removed_from_functions_in_memory_until_the_change_is_undone():
    quorum = NAMED["a majority is more than half"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        quorum.remove(monkeypatch.setattr)
        assert Members(("a", "b")).quorum == 1
    assert Members(("a", "b")).quorum == 2
    with pytest.raises(ValueError, match=r"no function of .*body\.py has 'Seconds = "):
        BOUND.remove(setattr)


@pytest.mark.slow
@pytest.mark.processes
def test_a_guard_that_fails_without_its_safeguard_catches_it_and_one_that_passes_does_not(capsys):
    harmless = replace(BOUND, name="nothing", new=BOUND.old)
    rows = check_guards([BOUND, LOSS, harmless])
    assert [row["caught"] for row in rows] == [True, True, False]
    printed = capsys.readouterr().out
    assert f"not caught nothing: {BOUND.guard}\n2 of 3 caught" in printed


@pytest.mark.slow
@pytest.mark.processes
def test_a_guard_that_cannot_be_run_catches_nothing():
    nowhere = replace(BOUND, guard=BOUND.guard + "_and_no_such_test")
    with pytest.raises(SystemExit, match="fails with all safeguards in place"):
        check_guards([nowhere])


@pytest.mark.slow
@pytest.mark.processes
def test_seeds_name_the_broken_invariant_and_pass_with_all_safeguards_in_place():
    # A command outside of the log breaks the order of commands and the answers to clients; the seed decides
    # which check fails first.
    assert seeds_until_found(LOSS, 10)["invariant"] in (LOSS.breaks, "I7")
    harmless = replace(LOSS, new=LOSS.old)
    assert seeds_until_found(harmless, 1) == {
        "seeds": 0,
        "invariant": "",
        "text": "",
        "errors": 0,
        "error": "",
    }


BROKEN = replace(
    BOUND,
    name="a scenario that can be run",
    file="tests/simulation/scenarios/controllers.py",
    old="run=lambda world, plan, ledger: _Run(world, plan, ledger).run(),",
    new="run=lambda world, plan, ledger: _Run(world, plan).run(),",
    breaks="I7",
    scenario="controllers",
)
"""A removal that breaks the simulator itself: each run ends with a TypeError."""


@pytest.mark.processes
def test_an_exception_that_no_check_raises_is_shown_and_is_no_find(capsys):
    (row,) = count_seeds([BROKEN], 2)
    assert (row["seeds"], row["invariant"], row["errors"]) == (0, "", 2)
    assert row["error"].startswith("seed 1: TypeError: ")
    printed = capsys.readouterr().out
    assert "0 of 1 found within 2 seeds\n" in printed
    assert f"not counted: {BROKEN.name}: 2 runs ended with exceptions, seed 1: TypeError: " in printed


@pytest.mark.processes
def test_an_exception_of_a_declared_type_is_a_find():
    found = seeds_until_found(replace(BROKEN, errors=("TypeError",)), 2)
    assert (found["seeds"], found["invariant"], found["errors"]) == (1, "TypeError", 0)
