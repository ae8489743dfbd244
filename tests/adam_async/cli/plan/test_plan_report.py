"""The report of a plan adds up, holds the plan itself, and is what its document says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from adam_async.cli.plan.choice import SCHEMA, Candidate, Conditions, PlanKind, make_plan, plan_report
from adam_async.model import Network, named_model
from adam_async.model.named import NAMED_MODELS
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PartitionPlan
from adam_async.model.partition.planner import LinkCost, estimated_times
from adam_async.runtime.machine import describe_machine

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "reference" / "plan.md"
MACHINE = describe_machine(loop="asyncio")


def candidate(name: str, kind: PlanKind, workers: int, images: int = 16) -> Candidate:
    network = Network(named_model(name))
    where = Conditions(link=LinkCost(), cores=2, own_machines=True)
    times = estimated_times(network, images)
    return Candidate(network, make_plan(network, kind, workers, times, where), times, where)


def report_of(*found: Candidate) -> dict[str, Any]:
    text = plan_report(
        found[0], compared=found, recommendation="because", machine=MACHINE, command=["adam-async", "plan"]
    )
    report: dict[str, Any] = json.loads(text)
    return report


def test_the_plan_of_a_report_cuts_the_network_the_same_way() -> None:
    chosen = candidate("mnist-adam", "vertical", 2)
    report = report_of(chosen, candidate("mnist-adam", "layers", 2))
    plan = PartitionPlan.from_dict(report["plan"])
    part = Partition(chosen.network, plan, 1)

    assert report["schema"] == SCHEMA == "adam-async/plan/1"
    assert plan == chosen.plan
    assert part.layout.crossings == chosen.parts[1].layout.crossings
    assert [each["chosen"] for each in report["candidates"]] == [True, False]


@pytest.mark.parametrize("kind", ["vertical", "layers"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_workers_and_cuts_add_up_to_the_whole(name: str, workers: int, kind: PlanKind) -> None:
    chosen = candidate(name, kind, workers)
    report = report_of(chosen)
    crossings = chosen.parts[0].layout.crossings

    assert sum(each["pushed"] for each in report["workers"]) == report["model"]["parameters"]
    assert sum(each["held"] for each in report["workers"]) >= report["model"]["parameters"]
    assert sum(cut["bytes"] for cut in report["cuts"]) == chosen.crossing_bytes
    assert {(cut["source"], cut["target"]) for cut in report["cuts"]} == {
        (c.source, c.target) for c in crossings
    }
    for cut in report["cuts"]:
        parts = (cut["activations"], cut["errors"], cut["gradients"])
        assert cut["bytes"] == sum(part["bytes"] for part in parts)
        assert 1 <= cut["messages"] <= sum(part["tensors"] for part in parts)
    for layer in chosen.network.layers:
        blocks = [b for worker in report["workers"] for b in worker["layers"] if b["layer"] == layer.name]
        assert set().union(*(range(b["first"], b["stop"]) for b in blocks)) == set(range(blocks[0]["of"]))


def test_the_halo_of_the_paper_s_network_is_counted_by_hand() -> None:
    network = Network(named_model("mnist-adam"))
    where = Conditions(link=LinkCost(), cores=2, own_machines=True, halo="exchange")
    times = estimated_times(network, 16)
    report = report_of(Candidate(network, make_plan(network, "vertical", 2, times, where), times, where))
    down, up = report["cuts"]

    image = 16 * 4
    assert (down["source"], down["target"], up["source"], up["target"]) == (0, 1, 1, 0)
    assert (down["activations"]["bytes"], up["activations"]["bytes"]) == (800 * image, 805 * image)
    assert (down["errors"]["bytes"], up["errors"]["bytes"]) == (805 * image, 800 * image)
    assert (down["gradients"]["bytes"], up["gradients"]["bytes"]) == (4 * 5280, 0)
    # Both error gradients of the loss and of the last dense layer are there when one segment ends.
    assert (down["messages"], down["activations"]["tensors"] + down["errors"]["tensors"]) == (9, 9)
    assert report["whole"] == {"loss": "a loss reads every score"}
    assert report["prediction"]["chain"] == 10


def test_the_bound_is_the_largest_of_the_bounds() -> None:
    report = report_of(candidate("cifar-conv", "vertical", 3))
    slowest = max(report["prediction"]["bounds"], key=lambda bound: bound["seconds"])

    assert report["prediction"]["bound"] == slowest
    assert report["prediction"]["images_per_s"] == pytest.approx(16 / slowest["seconds"])


def test_each_worker_names_its_blocks_and_those_that_others_compute_too() -> None:
    network = Network(named_model("mnist-adam"))
    where = Conditions(link=LinkCost(), cores=2, own_machines=True, halo="recompute")
    times = estimated_times(network, 4)
    chosen = Candidate(network, make_plan(network, "vertical", 2, times, where), times, where)
    report = report_of(chosen)
    first = {block["layer"]: block for block in report["workers"][0]["layers"]}

    assert (first["conv1"]["first"], first["conv1"]["stop"], first["conv1"]["of"]) == (0, 16, 24)
    assert first["conv1"]["recomputed"]
    assert not first["conv2"]["recomputed"]
    assert report["recomputed"] == ["conv1", "relu1", "pool1"]
    assert "loss" not in {block["layer"] for block in report["workers"][1]["layers"]}


def test_a_block_is_a_range_of_rows_features_or_the_loss() -> None:
    layers = report_of(candidate("mnist-adam", "layers", 1))["workers"][0]["layers"]
    units = {block["layer"]: block["unit"] for block in layers}

    assert (units["conv1"], units["fc1"], units["loss"]) == ("rows", "features", "loss")


# --- the document ----------------------------------------------------------------------------


def documented() -> dict[str, list[str]]:
    """The tables of fields of the document: those under a heading that is a path, ``plan`` or below."""
    sections = re.split(r"^## (.+)$", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    rows = re.compile(r"^\| `(\w+)` \|[^|]*\|[^|]*\|$", re.MULTILINE)
    paths = zip(sections[::2], sections[1::2], strict=True)
    return {name: rows.findall(text) for name, text in paths if re.fullmatch(r"plan(\.\w+)*", name)}


def sections(value: dict[str, Any], path: str) -> dict[str, list[str]]:
    """The fields of each record in a report, by their paths; tables by the name of a layer are no records."""
    found = {path: list(value)}
    for name, field in value.items():
        one = field[0] if isinstance(field, list) and field else field
        if isinstance(one, dict) and name not in ("seconds", "whole", "plan"):
            found |= sections(one, f"{path}.{name}")
    return found


def test_the_document_names_every_field_and_no_other() -> None:
    report = report_of(candidate("mnist-adam", "vertical", 2))

    assert documented() == sections(report, "plan")
