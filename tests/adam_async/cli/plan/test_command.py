"""The command `plan` prints what it found out, writes it down, and refuses what cannot be."""

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from adam_async.cli.commands import app
from adam_async.cli.plan import command
from adam_async.cli.plan.command import GROUPS, run_plan
from adam_async.cli.plan.options import PlanOptions
from adam_async.cli.plan.report import PlanReport
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError, DataError
from adam_async.model import Network, named_model
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PartitionPlan

SPEC = """
name = "little"
input = [2]

[[layers]]
name = "fc1"
kind = "dense"
outputs = 3

[[layers]]
name = "loss"
kind = "softmax_cross_entropy"
"""


async def printed(environment: dict[str, str] | None = None, **options: Any) -> str:
    """What the command prints; times are estimated unless it is said otherwise."""
    stream = io.StringIO()
    terminal = Terminal()
    terminal.out = Console(file=stream, soft_wrap=True, highlight=False, markup=False)
    given = PlanOptions(**{"calibrate": False, **options})

    assert await run_plan(given, environment or {}, terminal) == 0
    return stream.getvalue()


def lines_with(text: str, word: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if word in line]


async def test_a_plan_is_printed_with_its_blocks_cuts_protocols_and_rate() -> None:
    told = await printed(partitions=2, plan="vertical", images_per_group=16, halo="exchange")

    assert "mnist-adam: 298,090 parameters, 756,000 multiply-adds forward" in told
    assert "times estimated, not measured" in told
    assert "rows 0 to 11 of 24" in told
    assert "features 200 to 399 of 400" in told
    assert "whole: a loss reads every score" in told
    assert lines_with(told, "worker 0 to 1")[0][4:6] == ["9", "123,840"]
    assert lines_with(told, "fc2.weight")[0][-4:] == ["400", "320,000", "38,400", "factors"]
    assert "with 10 crossings one after the other" in told
    assert "images/s with 1 thread per worker" in told
    assert "bounded by" in told


async def test_what_is_left_open_is_tried_and_one_of_it_taken() -> None:
    told = await printed(model="digits", bandwidth="1Gbit/s")

    assert told.count("vertical") >= 3 * len(GROUPS)
    assert told.count("->") == 1
    assert "a machine each, like this one" in told
    assert "125 MB/s" in told
    assert "Take plan" in told or "Do not cut it" in told


async def test_one_worker_on_this_machine_trains_in_place() -> None:
    told = await printed(partitions=1, images_per_group=4)

    assert "nothing is pushed or pulled" in told
    assert "cuts, per group" not in told
    assert "crossings one after the other" not in told


async def test_recomputed_layers_are_named() -> None:
    told = await printed(partitions=2, plan="vertical", images_per_group=1, halo="recompute")

    assert [row[0] for row in lines_with(told, "recomputed")] == ["conv1", "relu1", "pool1"]


@pytest.mark.slow  # measures, and may compile kernels first
async def test_layers_are_measured_unless_it_is_said_otherwise() -> None:
    told = await printed(model="digits", partitions=2, images_per_group=4, calibrate=True)

    assert "times measured on one thread" in told


async def test_the_json_holds_the_plan_and_the_picture_is_drawn(tmp_path: Path) -> None:
    written, drawn = tmp_path / "a" / "plan.json", tmp_path / "b" / "plan.svg"
    await printed(model="digits", partitions=3, plan="layers", json=written, picture=drawn)
    report = msgspec.json.decode(written.read_bytes(), type=PlanReport)
    plan = PartitionPlan.from_dict(report.plan)
    network = Network(named_model("digits"))

    assert (plan.workers, plan.kind, report.partitions) == (3, "layers", 3)
    assert [Partition(network, plan, worker).has_loss for worker in range(3)] == [False, False, True]
    assert len(report.candidates) == len(GROUPS)
    assert ElementTree.fromstring(drawn.read_text()).tag.endswith("svg")


async def test_a_model_in_a_file_is_cut_and_data_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "little.toml"
    file.write_text(SPEC)
    told = await printed(model=str(file), partitions=2, images_per_group=3)

    assert told.startswith("little: 9 parameters")
    with pytest.raises(ConfigError, match="takes images of"):
        await printed(model=str(file), data="digits", partitions=2)


async def test_without_a_model_that_which_fits_the_data_is_cut() -> None:
    assert (await printed(model="auto", data="digits", partitions=2, images_per_group=2)).startswith(
        "digits: "
    )


async def test_a_machine_is_offered_no_more_workers_than_it_has_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = msgspec.structs.replace(command.describe_machine(loop="asyncio"), cores=3, l3_kb=1)
    monkeypatch.setattr(command, "describe_machine", lambda *, loop: here)
    told = await printed(model="digits")
    rows = [row for row in told.splitlines() if row.strip()[:1].isdigit() or row.startswith("->")]
    tried = {(int(row.replace("->", "").split()[0]), "64" in row.split()) for row in rows}

    # Nothing of 64 images fits a cache of 1 KiB.
    assert tried == {(1, False), (2, False), (3, False)}


@pytest.mark.parametrize(
    ("options", "claim"),
    [
        ({"partitions": 0}, "--partitions must be within 1 and 64, not 0"),
        ({"partitions": 65}, "--partitions must be within 1 and 64, not 65"),
        ({"images_per_group": 0}, "--images-per-group must be within 1 and 65536, not 0"),
        ({"threads": -1}, "--threads must be within 0 and"),
        ({"in_flight": 5000}, "--in-flight must be within 0 and 4096, not 5000"),
        ({"servers": 0}, "--servers must be within 1 and 64, not 0"),
        ({"bandwidth": "fast"}, "--bandwidth 'fast' is none: write 1Gbit/s"),
        ({"latency": "3 m"}, "--latency '3 m' is none: write 0.1ms"),
        (
            {"bandwidth": "125"},
            "--bandwidth '125' has no unit: write bits or bytes per second, as in 1Gbit/s",
        ),
        ({"latency": "5"}, "--latency '5' has no unit: write 5us, 5ms or 5s"),
        ({"plan": "layers", "halo": "exchange"}, "--halo exchange belongs to plan vertical, not layers"),
        ({"picture": Path("plan.gif")}, "--picture plan.gif: name a file that ends in .svg or .png"),
        ({"model": "nix"}, "no model is named 'nix'"),
        ({"model": "/gone/nix.toml"}, "--model /gone/nix.toml cannot be read"),
        ({"partitions": 40, "plan": "layers"}, "--partitions 40: plan 'layers' gives each of 40 workers"),
        ({"json": Path("/")}, "/ is a folder; name a file in it"),
    ],
)
async def test_what_cannot_be_is_named(options: dict[str, Any], claim: str) -> None:
    with pytest.raises(ConfigError) as raised:
        await printed(**options)
    assert claim in str(raised.value)


async def test_data_choose_the_model_that_is_planned_for() -> None:
    assert "digits" in (await printed(data="digits", partitions=2)).splitlines()[0]
    assert "mnist-adam" in (await printed(partitions=2)).splitlines()[0]


async def test_data_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        await printed(data=str(tmp_path))


def test_options_are_written_with_dashes() -> None:
    words = (
        "plan --partitions 2 --plan layers --images-per-group 64 --latency 0.1ms --no-calibrate --json a.json"
    )
    command, bound, _ = app.parse_args(words.split(), exit_on_error=False, print_error=False)

    assert command.__name__ == "plan"
    assert bound.arguments["options"] == PlanOptions(
        partitions=2,
        plan="layers",
        images_per_group=64,
        latency="0.1ms",
        calibrate=False,
        json=Path("a.json"),
    )
