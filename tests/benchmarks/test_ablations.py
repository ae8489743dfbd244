"""Safeguards are taken out as their rows say, and what does not miss them is not said to."""

import ast
from dataclasses import replace

import pytest

from benchmarks._bounds import BOUNDS
from benchmarks._safeguards import ABLATIONS
from benchmarks.ablations import (
    ROOT,
    check_guards,
    copied,
    seeds_until_found,
    taken_out,
)

ALL = (*ABLATIONS, *BOUNDS)
each = pytest.mark.parametrize("ablation", ALL, ids=lambda ablation: ablation.name)
NAMED = {ablation.name: ablation for ablation in ALL}
CONFLICT = NAMED["entries in conflict with the leader's go"]
LOSS = NAMED["a loss is agreed on before anybody acts on it"]
"""The first client that ends shows it."""


@each
def test_without_its_safeguard_a_source_is_another_one_that_can_be_compiled(ablation):
    source = (ROOT / ablation.file).read_text()
    assert source.count(ablation.old) == 1
    changed = source.replace(ablation.old, ablation.new)
    assert changed != source
    compile(changed, ablation.file, "exec")


@each
def test_the_guard_of_each_safeguard_is_a_test_that_there_is(ablation):
    path, _, name = ablation.guard.partition("::")
    functions = [
        node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")
    ]
    assert functions.count(name) == 1


@each
def test_what_seeds_are_not_expected_to_miss_says_why(ablation):
    assert bool(ablation.breaks) != bool(ablation.seldom)


def test_safeguards_are_told_apart_by_their_names():
    assert len(NAMED) == len(ALL)


def test_at_least_twelve_are_such_that_seeds_miss_them():
    assert sum(bool(ablation.breaks) for ablation in ABLATIONS) >= 12


def test_a_safeguard_is_out_as_long_as_the_block_lasts_and_the_repository_keeps_it():
    path = ROOT / CONFLICT.file
    with copied(tests=False) as folder:
        with taken_out(CONFLICT, folder):
            assert CONFLICT.old not in (folder / CONFLICT.file).read_text()
            assert CONFLICT.old in path.read_text()
        assert (folder / CONFLICT.file).read_text() == path.read_text()
        with (
            pytest.raises(SystemExit, match=r"core\.py has 'what no source has' 0 times instead of once"),
            taken_out(replace(CONFLICT, old="what no source has"), folder),
        ):
            pass


@pytest.mark.slow
@pytest.mark.processes
def test_a_guard_that_fails_without_its_safeguard_catches_it_and_one_that_passes_does_not(capsys):
    harmless = replace(CONFLICT, name="nothing", new=CONFLICT.old)
    rows = check_guards([CONFLICT, harmless])
    assert [row["caught"] for row in rows] == [True, False]
    said = capsys.readouterr().out
    assert f"not caught nothing: {CONFLICT.guard}\n1 of 2 caught" in said


@pytest.mark.slow
@pytest.mark.processes
def test_a_guard_that_cannot_be_run_catches_nothing():
    nowhere = replace(CONFLICT, guard=CONFLICT.guard + "_and_no_such_test")
    with pytest.raises(SystemExit, match="fails with nothing taken out"):
        check_guards([nowhere])


@pytest.mark.slow
@pytest.mark.processes
def test_seeds_miss_a_safeguard_and_say_what_broke_and_find_nothing_where_nothing_is_missing():
    # A command outside of the log breaks the order of commands, and what clients see of it: seeds decide
    # which of both is seen first.
    assert seeds_until_found(LOSS, 10)["invariant"] in (LOSS.breaks, "I7")
    harmless = replace(LOSS, new=LOSS.old)
    assert seeds_until_found(harmless, 1) == {"seeds": 0, "invariant": "", "text": ""}
