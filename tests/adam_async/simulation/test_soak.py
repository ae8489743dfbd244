"""The file of a soak has the finished seeds of the present code alone."""

import json
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.errors import ConfigError
from adam_async.runtime.disk import Disk
from adam_async.simulation.runner import run_seed
from adam_async.simulation.soak import (
    CORE,
    Soak,
    core_hash,
    joined,
    read_soak,
    seeds_to_do,
    write_soak,
)
from tests.adam_async.simulation.toy import BROKEN, toy

SEEDS = st.sets(st.integers(0, 40))


@given(done=SEEDS, first=st.integers(0, 45), count=st.integers(0, 45))
def test_exactly_the_seeds_that_are_not_done_are_to_do(done: set[int], first: int, count: int) -> None:
    ranges = joined([(seed, seed) for seed in done])
    last = first + count - 1

    assert list(seeds_to_do(ranges, first, last)) == [
        seed for seed in range(first, last + 1) if seed not in done
    ]


@given(done=SEEDS)
def test_without_an_end_seeds_go_on_for_ever(done: set[int]) -> None:
    ranges = joined([(seed, seed) for seed in done])

    assert (
        list(islice(seeds_to_do(ranges, 0, None), 50))
        == [seed for seed in range(100) if seed not in done][:50]
    )


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8))
def test_ranges_are_joined_to_as_few_as_there_can_be(pairs: list[tuple[int, int]]) -> None:
    ranges = [(first, first + more) for first, more in pairs]

    result = joined(ranges)

    assert {seed for first, last in result for seed in range(first, last + 1)} == {
        seed for first, last in ranges for seed in range(first, last + 1)
    }
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(result))


@pytest.fixture(scope="module")
def soak() -> Soak:
    done = Soak().with_results("toy", "core", [run_seed(toy(), seed) for seed in (0, 1, 3)])
    return done.with_results("broken", "core", [run_seed(BROKEN, 2)])


async def test_a_saved_soak_is_read_with_its_failures(tmp_path: Path, soak: Soak) -> None:
    file = tmp_path / "soaks" / "soak.json"

    async with Disk() as disk:
        await write_soak(file, soak, disk)
        again = await read_soak(file, disk)

    assert again == soak
    assert (again.of("toy", "core").done, again.of("toy", "core").counted) == (((0, 1), (3, 3)), 3)
    (failure,) = again.of("broken", "core").failures
    assert (failure.case.seed, failure.invariant) == (2, "I0")
    assert str(again.of("broken", "core")) == "1 seeds done, 0 count, 1 failed, core core"


def test_a_soak_keeps_the_marks_that_seeds_reached() -> None:
    def coming_across(mark: str):
        async def run(world, plan, ledger):
            ledger.counts[mark] += len([ledger.fired(fault) for fault in plan.faults])

        return toy(run=run)

    soak = Soak().with_results("toy", "core", [run_seed(coming_across("lost"), 0)])
    soak = soak.with_results("toy", "core", [run_seed(coming_across("found"), 1)])

    assert soak.of("toy", "core").reached == ("found", "lost")
    assert soak.of("toy", "core").seeds == 2


def test_another_core_begins_anew_and_keeps_the_results_of_the_old_one() -> None:
    soak = Soak().with_results("toy", "old", [run_seed(toy(), 0)])

    assert soak.of("toy", "new").done == ()
    both = soak.with_results("toy", "new", [run_seed(toy(), 1)])
    assert (both.of("toy", "old").done, both.of("toy", "new").done) == (((0, 0),), ((1, 1),))


async def test_the_core_is_a_hash_of_all_its_source(tmp_path: Path) -> None:
    (tmp_path / "core" / "deeper").mkdir(parents=True)
    source = tmp_path / "core" / "deeper" / "a.py"
    source.write_text("one")
    (tmp_path / "core" / "a.pyc").write_text("compiled")

    async with Disk() as disk:
        before = await core_hash(disk, [tmp_path / "core"])
        assert await core_hash(disk, [tmp_path / "core"]) == before
        (tmp_path / "core" / "a.pyc").write_text("compiled anew")
        assert await core_hash(disk, [tmp_path / "core"]) == before
        source.write_text("two")
        assert await core_hash(disk, [tmp_path / "core"]) != before


def test_the_core_is_the_source_of_product_and_simulator() -> None:
    assert [folder.name for folder in CORE] == ["adam_async", "dataflow", "transport"]
    assert all(folder.is_dir() for folder in CORE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no soak: .*; name a new file"),
        ("{", "holds no soak"),
        ('{"more": ' + "[" * 99999, "holds no soak"),
        ("{}", "holds no soak: Object missing required field `schema`"),
        ("[]", "holds no soak: Expected `object`, got `array`"),
        ("\x00garbage", "holds no soak"),
        ('{"schema": "adam-async soak 1", "progress": 3}', "holds no soak"),
        (
            json.dumps(
                {
                    "schema": "adam-async soak 1",
                    "progress": [{"scenario": "toy", "core": "c", "done": [[5, 1]]}],
                }
            ),
            "holds no soak: toy has invalid ranges",
        ),
        ('{"schema": "adam-async soak 0", "progress": []}', "is of schema 'adam-async soak 0'"),
    ],
)
async def test_an_invalid_soak_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "soak.json"
    file.write_text(text)

    async with Disk() as disk:
        with pytest.raises(ConfigError, match=said):
            await read_soak(file, disk)


async def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async with Disk() as disk:
        with pytest.raises(ConfigError, match="cannot be read"):
            await read_soak(tmp_path, disk)
        with pytest.raises(ConfigError, match="cannot be written"):
            await write_soak(tmp_path / "file" / "soak.json", Soak(), disk)
