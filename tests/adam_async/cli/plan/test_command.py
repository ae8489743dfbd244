"""The command `plan` prints what it found out, writes it down, and refuses what cannot be."""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adam_async.cli.commands import app
from adam_async.cli.options import PlanOptions
from adam_async.cli.plan import command
from adam_async.cli.plan.command import GROUPS, run_plan
from adam_async.cli.terminal import EscapingConsole, Terminal
from adam_async.errors import ConfigError
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
    """Return the output of the command; by default times are estimated."""
    stream = io.StringIO()
    terminal = Terminal()
    terminal.out = EscapingConsole(file=stream, soft_wrap=True)
    given = PlanOptions(**{"calibrate": False, **options})

    assert await run_plan(given, environment or {}, terminal) == 0
    return stream.getvalue()


def lines_with(text: str, word: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if word in line]


async def test_a_plan_is_printed_with_its_crossings_and_its_rate() -> None:
    text = await printed(partitions=2, plan="vertical", images_per_group=16, halo="exchange")

    assert "mnist-adam: 298,090 parameters, 756,000 multiply-adds forward" in text
    assert "times estimated, not measured" in text
    assert lines_with(text, "->")[0][1:4] == ["2", "vertical", "16"]
    assert lines_with(text, "->")[0][-2:] == ["226,560", "10"]
    assert "with 10 crossings one after the other" in text
    assert "images/s with 1 thread per worker" in text
    assert "bounded by" in text


@pytest.mark.parametrize("width", [80, 120])
async def test_a_narrow_terminal_gets_the_whole_table(width: int) -> None:
    stream = io.StringIO()
    terminal = Terminal()
    terminal.out = EscapingConsole(file=stream, force_terminal=True, width=width)

    await run_plan(PlanOptions(model="digits", calibrate=False, bandwidth="1Gbit/s"), {}, terminal)

    table = [line for line in stream.getvalue().splitlines() if "vertical" in line or "layers" in line]
    assert max(map(len, table[:-1])) <= width
    for column in ("workers", "threads", "bound", "chain"):
        assert column in stream.getvalue()


async def test_open_options_are_tried_and_one_plan_is_recommended() -> None:
    text = await printed(model="digits", bandwidth="1Gbit/s")

    assert text.count("vertical") >= 3 * len(GROUPS)
    assert text.count("->") == 1
    assert "a machine each, like this one" in text
    assert "125 MB/s" in text
    assert "Take plan" in text or "Do not cut it" in text


async def test_one_worker_on_this_machine_trains_in_place() -> None:
    text = await printed(partitions=1, images_per_group=4)

    assert "nothing is pushed or pulled" in text
    assert "crossings one after the other" not in text


@pytest.mark.slow  # measures, and may compile kernels first
async def test_layers_are_measured_unless_it_is_said_otherwise() -> None:
    text = await printed(model="digits", partitions=2, images_per_group=4, calibrate=True)

    assert "times measured on one thread" in text


async def test_the_json_holds_the_plan(tmp_path: Path) -> None:
    written = tmp_path / "a" / "plan.json"
    await printed(model="digits", partitions=3, plan="layers", json=written)
    report = json.loads(written.read_bytes())
    plan = PartitionPlan.from_dict(report["plan"])
    network = Network(named_model("digits"))

    assert (plan.workers, plan.kind, report["partitions"]) == (3, "layers", 3)
    assert [Partition(network, plan, worker).has_loss for worker in range(3)] == [False, False, True]
    assert len(report["candidates"]) == len(GROUPS)


async def test_a_model_in_a_file_is_cut_and_data_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "little.toml"
    file.write_text(SPEC)
    text = await printed(model=str(file), partitions=2, images_per_group=3)

    assert text.startswith("little: 9 parameters")
    with pytest.raises(ConfigError, match="takes images of"):
        await printed(model=str(file), data="digits", partitions=2)


async def test_model_auto_is_the_one_that_fits_the_data() -> None:
    assert (await printed(model="auto", data="digits", partitions=2, images_per_group=2)).startswith(
        "digits: "
    )


async def test_a_machine_is_offered_no_more_workers_than_it_has_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = msgspec.structs.replace(command.describe_machine(loop="asyncio"), cores=3, l3_kb=1)
    monkeypatch.setattr(command, "describe_machine", lambda *, loop: here)
    text = await printed(model="digits")
    rows = [row for row in text.splitlines() if row.strip()[:1].isdigit() or row.startswith("->")]
    tried = {(int(row.replace("->", "").split()[0]), "64" in row.split()) for row in rows}

    # Nothing of 64 images fits a cache of 1 KiB.
    assert tried == {(1, False), (2, False), (3, False)}


async def test_more_workers_than_layers_are_refused_by_the_option() -> None:
    with pytest.raises(ConfigError, match="--partitions 40: plan 'layers' gives each of 40 workers"):
        await printed(partitions=40, plan="layers")


async def test_data_choose_the_model_that_is_planned_for() -> None:
    assert "digits" in (await printed(data="digits", partitions=2)).splitlines()[0]
    assert "mnist-adam" in (await printed(partitions=2)).splitlines()[0]


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
