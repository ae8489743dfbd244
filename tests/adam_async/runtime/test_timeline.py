"""Profiles of whole runs: each group once, arrows with both ends, bounded, gathered, refused in time."""

import gc
import re
import textwrap
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from runpy import run_path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from adam_async.cli.options import TrainOptions
from adam_async.cli.terminal import Terminal
from adam_async.cli.train import configure, run_training
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.cluster.roles.place import Place, listening
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server.service import DataServer
from adam_async.driver.driver import Driver
from adam_async.driver.settings import DriverSettings
from adam_async.errors import ConfigError
from adam_async.messages import GetProfile, Profile, pack, read_text_tensor, unpack
from adam_async.run.config import Config
from adam_async.runtime.disk import Disk
from adam_async.runtime.timeline import LIMIT_EVENTS, Timeline, answer_profile
from adam_async.runtime.trace_events import Carried, Part
from adam_async.worker.run_session import ComputeSettings
from adam_async.worker.service import ModelWorker
from tests.adam_async.runs import NETWORKS, SHARDED, address_of, cluster_of, entropy_of, tiny_dataset
from tests.transport.testing import link_pair
from transport import BufferPool, Identity, RemoteError

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "profile.md"
ROUNDING_US = 0.002
WAYS = {
    "in place": {"weights": "aliased"},
    "in place, many shards": {"weights": "aliased", **SHARDED},
    "copy": {"weights": "copy"},
    "copy, one in flight": {"weights": "copy", "in_flight": 1},
    "copy, steps of three": {"weights": "copy", "push_every": 3, "pull_every": 2},
    "copy, two workers": {"weights": "copy", "replicas": 2, **SHARDED},
}


async def profiled(timeline: Timeline | None = None, network=None, **options) -> list[dict[str, Any]]:
    """The trace events of a run of 2 epochs of 15 groups."""
    timeline = timeline or Timeline()
    config = Config(epochs=2, threads=2, rate=0.01, images_per_group=4, kernels="numpy", **options)
    async with cluster_of(config, network, timeline=timeline) as cluster:
        await cluster.train()
    return msgspec.json.decode(timeline.trace())["traceEvents"]


def slices(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def group_of(event: dict) -> tuple[int, int]:
    return event["args"]["epoch"], event["args"]["group"]


def journeys(events: list[dict]) -> dict[int, list[dict]]:
    found: dict[int, list[dict]] = {}
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            found.setdefault(event["id"], []).append(event)
    return found


def encloses(outer: dict, point: dict) -> bool:
    same = (outer["pid"], outer["tid"]) == (point["pid"], point["tid"])
    return same and outer["ts"] <= point["ts"] < outer["ts"] + outer["dur"]


def assert_sound(events: list[dict]) -> None:
    """Check that a profile is ordered, its lanes named, its slices nested, and its arrows complete."""
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in timed} == named
    open_: dict[tuple[int, int], list[float]] = {}
    for event in (event for event in timed if event["ph"] == "X"):
        assert event["dur"] >= 0
        ends = open_.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1] <= event["ts"] + ROUNDING_US:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + ROUNDING_US, "slices of a lane overlap"
        ends.append(event["ts"] + event["dur"])
    waits = {phase: {e["id"] for e in timed if e["ph"] == phase} for phase in "be"}
    assert waits["b"] == waits["e"]
    complete = [event for event in timed if event["ph"] == "X"]
    for flow in journeys(events).values():
        assert [event["ph"] for event in flow] == ["s", *"t" * (len(flow) - 2), "f"]
        for point in flow:
            assert any(encloses(slice_, point) for slice_ in complete), "an arrow that leads nowhere"


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.thorough] * (way not in {"in place", "copy, two workers"}))
        for way in WAYS
    ],
)
async def test_every_trained_group_is_there_once_with_its_whole_journey(way):
    events = await profiled(**WAYS[way])

    assert_sound(events)
    expected = Counter((epoch, number) for epoch in (1, 2) for number in range(15))
    for name in ("deliver", "train", "push", "report"):
        assert Counter(map(group_of, slices(events, name))) == expected, name
    leased = Counter(
        group for event in events if event["name"].startswith("lease ") for group in event["args"]["groups"]
    )
    assert leased == Counter(dict.fromkeys(range(15), 2))
    settled = "record" if WAYS[way]["weights"] == "aliased" else "apply"
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    flows = journeys(events)
    assert len(flows) == 30
    servers = WAYS[way].get("servers", 1)
    for flow in flows.values():
        at_servers = {
            slice_["cat"] for slice_ in slices(events, settled) for point in flow if encloses(slice_, point)
        }
        assert len(at_servers) == servers
        assert sum(re.fullmatch(r"worker-\d/\d", named[e["pid"], e["tid"]]) is not None for e in flow) == 1
        # In place a group may be counted before its own node has fired, so its report may not be the last.
        ends = [e for e in slices(events, "report") for point in flow if encloses(e, point)]
        begins = [e for e in events if e["name"].startswith("lease ") and encloses(e, flow[0])]
        assert len(ends) == len(begins) == 1


@pytest.mark.parametrize("network", NETWORKS)
async def test_each_message_is_seen_at_both_ends_with_its_type_and_bytes(network):
    timeline = Timeline()
    await profiled(timeline, NETWORKS[network](), weights="copy")

    carried = [event for event in timeline.part().events if isinstance(event, Carried)]
    sent = Counter((e.node, e.peer, e.kind, e.size_bytes) for e in carried if e.sent and "Push" in e.kind)
    came = Counter((e.peer, e.node, e.kind, e.size_bytes) for e in carried if not e.sent and "Push" in e.kind)

    assert sent == came
    pushes = [event for event in sent.elements() if event[2] == "Push"]
    assert len(pushes) == 30
    assert all(node == "worker-0" and peer == "ps-0" and size > 1000 for node, peer, _, size in pushes)


async def test_epochs_and_their_evaluation_are_phases_of_the_driver():
    events = await profiled()

    phases = [event for event in events if event["ph"] == "X" and event["cat"] == "driver"]

    assert [event["name"] for event in phases] == ["epoch 1", "evaluate 1", "epoch 2", "evaluate 2"]


async def test_two_runs_of_one_cluster_are_in_one_file_and_their_groups_are_told_apart():
    timeline = Timeline()
    async with cluster_of(
        Config(epochs=1, images_per_group=4, kernels="numpy"), timeline=timeline
    ) as cluster:
        for _ in range(2):
            await cluster.train()

    events = msgspec.json.decode(timeline.trace())["traceEvents"]

    assert_sound(events)
    assert len(journeys(events)) == len(slices(events, "train")) == 30


async def test_a_full_profile_says_so_and_what_it_has_is_sound():
    timeline = Timeline(limit_events=100)

    events = await profiled(timeline)

    assert_sound(events)
    assert timeline.full
    assert timeline.num_events == 100
    (said,) = [event for event in events if "profile full" in event["name"]]
    assert said["name"] == f"profile full: 100 events, {timeline.dropped} more dropped"


def test_a_profile_without_room_is_refused():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Timeline(limit_events=0)


def test_events_dropped_by_another_process_count_too():
    timeline = Timeline()
    assert not timeline.full
    timeline.others.append(Part("worker-0", 1, []))
    assert timeline.full


def test_many_events_are_none_of_the_garbage_collectors_business():
    timeline = Timeline(clock=lambda: 1.0)
    timeline.carried("a", "b", True, "Push", 1, 2)
    assert not any(gc.is_tracked(event) for event in timeline.part().events)


# --- roles of other processes ----------------------------------------------------------------


def serving(timeline: Timeline | None):
    def answer(request) -> None:
        answer_profile(request, unpack(request.message, GetProfile), timeline)

    return answer


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_role_hands_over_its_events_piece_by_piece(network):
    links, timeline = NETWORKS[network](), Timeline("ps-0", limit_events=5)
    for number in range(7):
        timeline.carried("ps-0", "driver", True, "Values", number, 0)
    near = Identity(role="driver", node="driver", incarnation=1)
    far = Identity(role="ps", node="ps-0", incarnation=2)
    parts = []
    async with link_pair(links, address=address_of(links), near=near, far=far) as (one, other):
        other.serve(serving(timeline))
        for start in (0, 3):
            reply = await one.call(pack(GetProfile(start=start, stop=start + 3)), timeout_s=50.0)
            assert unpack(reply, Profile).total == 5
            parts.append(read_text_tensor(reply, Part, 1 << 20))

    assert [event for part in parts for event in part.events] == timeline.part().events
    assert {(part.process, part.dropped) for part in parts} == {("ps-0", 2)}


async def test_a_role_that_notes_nothing_says_so():
    links = NETWORKS["local"]()
    near = Identity(role="driver", node="driver", incarnation=1)
    far = Identity(role="ps", node="ps-0", incarnation=2)
    async with link_pair(links, address="local://", near=near, far=far) as (one, other):
        other.serve(serving(None))
        with pytest.raises(RemoteError, match="started without a profile"):
            await one.call(pack(GetProfile(start=0, stop=3)), timeout_s=50.0)


async def test_a_driver_gathers_what_roles_with_timelines_of_their_own_noted():
    """As with processes: each role has its own, the driver asks for them over links."""
    config = Config(epochs=1, weights="copy", images_per_group=4, threads=1, kernels="numpy")
    network, buffers, entropy = NETWORKS["tcp"](), BufferPool(), entropy_of("roles")
    mine = Timeline()
    async with AsyncExitStack() as stack:
        identity = Identity(role="controller", node="controller", incarnation=1)
        controller = await stack.enter_async_context(
            Controller(
                RoleSettings(
                    network=network, address="tcp://127.0.0.1:0", identity=identity, waits=config.waits
                )
            )
        )

        def place(node: str) -> Place:
            return Place(
                node=node,
                bind="tcp://127.0.0.1:0",
                controller=controller.address,
                network=network,
                buffers=buffers,
                waits=config.waits,
                entropy=entropy,
                timeline=Timeline(node),
            )

        data, worker = place("data-0"), place("worker-0")
        trainer = ModelWorker(
            worker.settings("worker"),
            ComputeSettings(threads=1, in_flight=0),
            buffers=buffers,
            entropy=entropy,
        )
        await stack.enter_async_context(listening(DataServer(data.settings("data"), tiny_dataset()), data))
        await stack.enter_async_context(parameter_server(place("ps-0")))
        await stack.enter_async_context(listening(trainer, worker))
        driver = await stack.enter_async_context(
            Driver(
                config,
                DriverSettings(
                    network=network,
                    controller=controller.address,
                    identity=Identity(role="driver", node="driver", incarnation=2),
                    threads=1,
                    timeline=mine,
                ),
            )
        )
        await driver.train()
        await driver.gather_profile()

    events = msgspec.json.decode(mine.trace())["traceEvents"]
    assert_sound(events)
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"adam-async", "data-0", "ps-0", "worker-0"}
    assert len(journeys(events)) == len(slices(events, "train")) == 15
    for flow in journeys(events).values():
        assert len({event["pid"] for event in flow}) == 3  # data server, worker, parameter server


# --- the command line ------------------------------------------------------------------------


async def trained(tmp_path: Path, file: Path) -> int:
    options = TrainOptions(
        data="digits", epochs=1, images_per_group=64, kernels="numpy", profile=file, quiet=True
    )
    return await run_training(options, {"ADAM_DATA_DIR": str(tmp_path)}, Terminal(quiet=True))


async def test_the_command_writes_the_profile_where_it_is_told_to(tmp_path):
    file = tmp_path / "new" / "profile.json"

    assert await trained(tmp_path, file) == 0

    events = msgspec.json.decode(file.read_bytes())["traceEvents"]
    assert_sound(events)
    assert len(slices(events, "train")) == 23


async def test_a_full_profile_is_named_on_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("adam_async.runtime.timeline.Timeline.full", True)

    await trained(tmp_path, tmp_path / "profile.json")

    assert f"notes at most {LIMIT_EVENTS} events" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "claim"), [(".", "is a folder"), ("file/profile.json", "cannot be made")], ids=["folder", "file"]
)
async def test_a_place_that_cannot_be_written_is_refused_before_training(name, claim, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("adam_async.cli.train.open_cluster", lambda *_: pytest.fail("training began"))

    with pytest.raises(ConfigError, match=claim):
        await trained(tmp_path, tmp_path / name)


async def test_roles_that_were_started_by_hand_are_not_profiled():
    options = TrainOptions(controller="tcp://127.0.0.1:1", profile=Path("p.json"))
    async with Disk() as disk:
        with pytest.raises(ConfigError, match="--profile is for roles that this command starts"):
            await configure(options, {}, disk)


# --- the document ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_of_the_document_writes_a_profile(tmp_path, monkeypatch):
    (example,) = re.findall(r"(?:^    .*\n|^\n)+(?=^`ProcessCluster)", DOCUMENT.read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)

    exec(compile(textwrap.dedent(example), str(DOCUMENT), "exec"), {})

    events = msgspec.json.decode((tmp_path / "run.json").read_bytes())["traceEvents"]
    assert_sound(events)
    assert len(slices(events, "train")) == 90


@pytest.mark.thorough
async def test_every_slice_and_lane_is_in_the_document():
    named = {re.sub(r"\d+$", "1", name) for name in re.findall(r"`([^`]+)`", DOCUMENT.read_text())}

    for way in WAYS.values():
        events = await profiled(**way)
        shown = {e["name"] for e in events if e["ph"] in "Xb"} | {
            e["args"]["name"] for e in events if e["name"] == "thread_name"
        }
        kinds = {re.sub(r"^links of .*", "links of ps-1", re.sub(r"\d+$", "1", name)) for name in shown}
        assert kinds <= named | {"worker-1/1"}


async def test_the_picture_has_lanes_slices_and_arrows():
    draw = run_path(str(DOCUMENT.parents[1] / "images" / "draw_profile.py"))["picture"]

    root = ElementTree.fromstring(draw(await profiled()))

    words = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"event loop", "worker-0/0", "worker-0/1", "links of ps-0", "train", "record", "report"} <= words
    curves = [p for p in root.iter("{http://www.w3.org/2000/svg}path") if "C" in p.attrib["d"]]
    assert len([curve for curve in curves if curve.attrib.get("marker-end")]) == 1


def test_the_picture_of_the_document_is_small_enough_to_look_at():
    assert 10_000 < (DOCUMENT.parents[1] / "images" / "profile.svg").stat().st_size < 200_000
