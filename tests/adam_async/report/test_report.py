"""The report has the counts of the nodes, and the counts are correct."""

import asyncio
import dataclasses
import re
import typing
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from struct import Struct
from types import UnionType
from typing import Any

import msgspec
import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.messages import role_table
from adam_async.model import Network, named_model
from adam_async.model.keyed_random import Dice
from adam_async.report.baseline import Baseline
from adam_async.report.report import Report, build_report, compare, to_json, write
from adam_async.run.config import Config
from adam_async.run.counts import ONCE, Counts
from adam_async.run.learning_rate import default_rate
from adam_async.run.result import EpochResult, RunResult
from adam_async.run.series import add_up
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import describe_machine, pinned_cpus
from tests.adam_async.reports import real_report
from tests.adam_async.role_counts import counts_of
from transport import Identity, Link, TcpNetwork
from transport.frames import CHUNK, MESSAGE, REPLY

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "report.md"
MACHINE = describe_machine(loop="asyncio")
TEN_KEYS = (
    "schema command config machine model data epochs totals baseline traffic protocols staleness events"
).split()


async def few_digits(count: int = 320) -> Dataset:
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    return dataclasses.replace(
        digits, train_images=digits.train_images[:count], train_labels=digits.train_labels[:count]
    )


def report_of(result: RunResult, config: Config, baseline: Baseline | None = None) -> Report:
    return build_report(
        result, config=config, command=["adam-async", "train"], machine=MACHINE, baseline=baseline
    )


async def trained(config: Config) -> Report:
    async with LocalCluster(config, dataset=await few_digits()) as cluster:
        return report_of(await cluster.train(), config)


def made_up(statistics: dict[str, Counts], epochs: tuple[EpochResult, ...] = ()) -> RunResult:
    """The result of a run that never was."""
    model = Network(named_model("digits"))
    data = {
        "name": "digits",
        "source": "made up",
        "shape": [1, 8, 8],
        "classes": 10,
        "train_images": 100,
        "test_images": 10,
    }
    return RunResult(
        epochs=epochs,
        weights=model.initial_weights(Dice(1)),
        model=model,
        data=data,
        statistics=statistics,
        events=({"s": 1.5, "event": "worker-1 died"},),
    )


def process(pid: int, peak_rss_mb: float) -> dict[str, Any]:
    return {"host": "here", "pid": pid, "peak_rss_mb": peak_rss_mb}


# --- counts of a run -------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["auto", "copy"])
async def test_versions_are_pushes_applied_are_the_total_of_the_staleness_histogram(weights: str) -> None:
    config = Config(epochs=2, replicas=2, servers=2, threads=1, shard_bytes=4096, weights=weights)

    report = await trained(config)

    assert len(report.servers) == 2
    for server in report.servers:
        assert sum(server.versions.values()) == sum(server.staleness.values())
        assert set(server.versions.values()) == {2 * 320 // config.images_per_group}
        assert len(server.versions) == server.shards
        assert (server.refused, server.duplicates) == (0, 0)
    acknowledged = [worker.parameters.acknowledged for worker in report.workers if worker.parameters]
    assert len(acknowledged) == 2
    assert sum(acknowledged) == report.staleness.pushes
    groups = sum(epoch.images for epoch in report.epochs) // config.images_per_group
    assert report.staleness.pushes == groups * sum(server.shards for server in report.servers)


async def test_pushes_counted_by_replica_and_by_tensor_are_those_counted_by_shard() -> None:
    staleness = (await trained(Config(epochs=1, replicas=2, threads=1, weights="copy"))).staleness

    assert list(staleness.by_replica) == ["0", "1"]
    assert set(staleness.by_tensor) == {p.name for p in Network(named_model("digits")).parameters}
    for parts in (staleness.by_replica, staleness.by_tensor):
        assert add_up(part.histogram for part in parts.values()).histogram == staleness.histogram


async def test_workers_with_pinned_threads_say_which_cores_they_keep_to() -> None:
    pinned = await trained(Config(epochs=1, replicas=2, threads=1, pin_threads=True))
    free = await trained(Config(epochs=1, threads=1))

    cpus = [worker.cpus for worker in pinned.workers]
    assert sorted(cpus) == sorted(pinned_cpus(threads=1, first=replica) for replica in range(2))
    assert [worker.cpus for worker in free.workers] == [None]


def test_working_sets_are_held_against_the_caches_of_the_machine() -> None:
    machine = msgspec.structs.replace(MACHINE, l2_kb=64, l3_kb=256)
    report = build_report(
        made_up({}), config=Config(images_per_group=8), command=[], machine=machine, baseline=None
    )
    *parts, whole = report.model.working_sets

    assert whole.layers == tuple(layer["name"] for layer in report.model.spec["layers"])
    assert whole.weights == 4 * report.model.parameters
    for each in (*parts, whole):
        sizes = (each.weights, each.activations, each.gradients, each.scratch, each.push_buffers)
        assert each.total == sum(sizes)
        limits = {"L2": 64 << 10, "L3": 256 << 10, "memory": each.total}
        assert each.fits == next(level for level, most in limits.items() if each.total <= most)


async def test_totals_are_those_of_the_epochs() -> None:
    report = await trained(Config(epochs=2, threads=1))

    assert [epoch.epoch for epoch in report.epochs] == [1, 2]
    assert [epoch.images for epoch in report.epochs] == [320, 320]
    assert report.totals.images == 640
    assert report.totals.train_s == pytest.approx(sum(epoch.train_s for epoch in report.epochs))
    assert report.totals.images_per_s == pytest.approx(640 / report.totals.train_s)
    assert report.totals.test_accuracy == report.epochs[-1].test_accuracy
    assert 20 < report.totals.peak_rss_mb < 2000


async def test_a_report_in_json_has_the_keys_of_the_schema_and_reads_back() -> None:
    report = await trained(Config(epochs=1, threads=1))

    text = to_json(report)

    assert [key for key in TEN_KEYS if key not in msgspec.json.decode(text)] == []
    assert msgspec.json.decode(text, type=Report) == report
    rows = msgspec.json.decode(text)["traffic"]
    assert {"from", "to", "type", "messages", "payload_bytes", "frame_bytes", "shared"} == rows[0].keys()


async def test_every_link_of_the_cluster_is_in_the_traffic() -> None:
    report = await trained(Config(epochs=1, replicas=2, servers=2, threads=1, shard_bytes=4096))

    pairs = {(row.sender, row.receiver) for row in report.traffic}
    members = ("ps-0", "ps-1", "data-0", "worker-0", "worker-1", "driver")
    assert {(member, "controller") for member in members} <= pairs
    assert {("controller", member) for member in members} <= pairs
    for worker in ("worker-0", "worker-1"):
        assert {(worker, "ps-0"), (worker, "ps-1"), (worker, "data-0")} <= pairs
        assert {("ps-0", worker), ("ps-1", worker), ("data-0", worker)} <= pairs


async def test_the_series_ends_with_the_totals_and_has_a_record_for_each_epoch() -> None:
    report = await trained(Config(epochs=3, replicas=2, threads=1, schedule="cosine", weights="copy"))

    series = report.series
    assert sorted({sample.epoch for sample in series}) == [1, 2, 3]
    for name in ("s", "images", "bytes", "waited_s"):
        values = [getattr(sample, name) for sample in series]
        assert values == sorted(values), name
    last = series[-1]
    assert (last.images, last.loss) == (report.totals.images, report.epochs[-1].train_loss)
    assert last.s == pytest.approx(report.totals.train_s, abs=1e-5)
    assert last.rate == pytest.approx(0.0, abs=1e-12)
    assert 0 < last.bytes <= sum(row.payload_bytes + row.frame_bytes for row in report.traffic)
    weighted = [sample.staleness_mean for sample in series]
    assert all(mean is not None and 0 <= mean <= report.staleness.max for mean in weighted)


async def test_pushes_on_the_wire_have_the_sizes_of_their_protocols() -> None:
    config = Config(epochs=1, threads=1, servers=2, weights="copy")

    report = await trained(config)

    pushed = sum(row.payload_bytes for row in report.traffic if row.type == "Push")
    step = sum(
        row.delta_bytes if row.chosen == "delta" else (row.factor_bytes or 0) for row in report.protocols
    )
    assert pushed == step * (320 // config.images_per_group)
    assert {row.tensor for row in report.protocols} == {
        p.name for p in Network(named_model("digits")).parameters
    }


# --- sums of the counts ----------------------------------------------------------------------


def test_a_rate_is_compared_with_the_baseline_and_with_matrix_products() -> None:
    epoch = EpochResult(epoch=1, images=1000, skipped=0, train_loss=1.0, test_accuracy=0.5, train_s=2.0)
    result = made_up({"driver": counts_of("driver", **process(1, 10.0))}, (epoch,))

    measured = Baseline(threads=2, before=800.0, after=1200.0, sgemm=1e9)
    baseline = report_of(result, Config(), measured).baseline

    assert baseline is not None
    assert (baseline.images_per_s, baseline.efficiency) == (1000.0, 0.5)
    assert (baseline.before, baseline.after, baseline.threads) == (800.0, 1200.0, 2)
    assert baseline.share == pytest.approx(500.0 * result.model.operations / 1e9)


def test_memory_is_summed_over_processes_and_not_over_roles() -> None:
    statistics = {
        "driver": counts_of("driver", **process(1, 90.0)),
        "controller": counts_of("controller", **process(1, 80.0)),
        "data-0": counts_of("data", **process(2, 50.0)),
    }

    assert report_of(made_up(statistics), Config()).totals.peak_rss_mb == 140.0


def test_nodes_that_stood_by_are_reported_as_idle() -> None:
    statistics = {
        "ps-7": counts_of("ps", "ps-7", **process(1, 10.0)),
        "worker-9": counts_of("worker", "worker-9", **process(2, 20.0)),
    }

    report = report_of(made_up(statistics), Config())

    assert (report.servers[0].node, report.servers[0].shards) == ("ps-7", 0)
    assert (report.workers[0].node, report.workers[0].parameters) == ("worker-9", None)
    assert (report.staleness.mean, report.staleness.max) == (0.0, 0)
    assert report.protocols == []


def test_the_report_has_the_leader_of_the_controllers() -> None:
    group = {"group": "g", "term": 3, "leader": "controller-2"}
    one = counts_of("controller", "controller-1", role="follower", **group)
    two = counts_of("controller", "controller-2", role="leader", **group)
    lost = counts_of("controller", "controller-3")

    rows = report_of(made_up({each.node: each for each in (one, two, lost)}), Config()).controllers

    assert [(each.node, each.role, each.leader, each.term) for each in rows] == [
        ("controller-1", "follower", "controller-2", 3),
        ("controller-2", "leader", "controller-2", 3),
        ("controller-3", "founding", "", 0),
    ]


def test_staleness_is_counted_by_replica_and_by_tensor() -> None:
    one = counts_of(
        "ps", staleness={"0": 3}, clients={"0": {"staleness": {"0": 3}}}, staleness_by_tensor={"w": {"0": 3}}
    )
    two = counts_of(
        "ps",
        staleness={"0": 1, "2": 1},
        clients={"0": {"staleness": {"0": 1}}, "1": {"staleness": {"2": 1}}},
        staleness_by_tensor={"b": {"0": 1, "2": 1}},
    )

    staleness = report_of(made_up({"ps-0": one, "ps-1": two}), Config()).staleness

    assert staleness.histogram == {"0": 4, "2": 1}
    assert {name: each.histogram for name, each in staleness.by_replica.items()} == {
        "0": {"0": 4},
        "1": {"2": 1},
    }
    assert {name: each.mean for name, each in staleness.by_tensor.items()} == {"b": 1.0, "w": 0.0}


def test_a_run_without_an_epoch_has_no_rate() -> None:
    totals = report_of(made_up({}), Config()).totals

    assert (totals.images, totals.images_per_s, totals.test_accuracy) == (0, 0.0, 0.0)


def test_events_and_the_rate_in_force_are_kept() -> None:
    report = report_of(made_up({}), Config(momentum=0.5))

    assert [(event.s, event.event) for event in report.events] == [(1.5, "worker-1 died")]
    assert report.config["rate"] == default_rate(Config(momentum=0.5))
    assert report.baseline is None


def test_a_loss_that_is_no_number_is_null() -> None:
    epoch = EpochResult(
        epoch=1, images=10, skipped=0, train_loss=float("nan"), test_accuracy=0.1, train_s=1.0
    )

    report = report_of(made_up({}, (epoch,)), Config())

    assert report.epochs[0].train_loss is None
    assert msgspec.json.decode(to_json(report), type=Report) == report


async def test_a_report_is_written_whole(tmp_path: Path) -> None:
    report = report_of(made_up({}), Config())

    async with Disk() as disk:
        await write(report, tmp_path / "runs" / "report.json", disk)

    assert (tmp_path / "runs" / "report.json").read_bytes() == to_json(report)


# --- the document ----------------------------------------------------------------------------


def records(kind: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    """The sections that docs/reference/report.md must have: the path of each record and its fields' names."""
    if isinstance(kind, UnionType) or typing.get_origin(kind) in (list, tuple, dict):
        for part in typing.get_args(kind):
            yield from records(part, path)
        return
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        once = ONCE if issubclass(kind, Counts) else frozenset()
        fields = msgspec.structs.fields(kind)
        names = {field.name: field.encode_name for field in fields if field.name not in once}
    elif dataclasses.is_dataclass(kind):
        names = {field.name: field.name for field in dataclasses.fields(kind)}
    else:
        return
    yield path or "report", list(names.values())
    for name, inner in typing.get_type_hints(kind).items():
        if name in names:
            yield from records(inner, f"{path}.{names[name]}".removeprefix("."))


def documented() -> dict[str, list[str]]:
    sections = re.split(r"^## (.+)$", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    rows = re.compile(r"^\| `(\w+)` \|[^|]*\|[^|]*\|$", re.MULTILINE)
    return {name: rows.findall(text) for name, text in zip(sections[::2], sections[1::2], strict=True)}


def test_the_document_names_every_field_and_no_other() -> None:
    wanted = dict(records(Report, ""))

    assert documented().keys() == wanted.keys()
    for section, names in documented().items():
        assert names == wanted[section], f"section {section} of {DOCUMENT.name}"


# --- the wire --------------------------------------------------------------------------------

PRELUDE = Struct("<4sBBHQIQI")
RECORD_BYTES = 256


class Tap:
    """A reader of one direction of a connection that counts its messages by type."""

    def __init__(self) -> None:
        self.sender = ""
        self.counts: dict[str, list[int]] = {}
        self._bytes = bytearray()
        self._greeting = 2
        self._skip = 0
        self._type = ""

    def feed(self, data: bytes) -> None:
        self._bytes += data
        while self._step():
            pass

    def _step(self) -> bool:
        if self._skip:
            taken = min(self._skip, len(self._bytes))
            del self._bytes[:taken]
            self._skip -= taken
            return not self._skip
        if self._greeting:
            if len(self._bytes) < RECORD_BYTES:
                return False
            if not self.sender:
                self.sender = self._bytes[44:124].rstrip(b"\0").decode()
            del self._bytes[:RECORD_BYTES]
            self._greeting -= 1
            return True
        if len(self._bytes) < PRELUDE.size:
            return False
        _, _, kind, _, _, meta_bytes, payload_bytes, _ = PRELUDE.unpack_from(self._bytes)
        if len(self._bytes) < PRELUDE.size + meta_bytes:
            return False
        if MESSAGE <= kind <= REPLY:
            # Meta is a msgpack array that begins with the type, a short text.
            length = self._bytes[PRELUDE.size + 1] & 0x1F
            self._type = self._bytes[PRELUDE.size + 2 : PRELUDE.size + 2 + length].decode()
            self.counts.setdefault(self._type, [0, 0])[0] += 1
        if MESSAGE <= kind <= REPLY or kind == CHUNK:
            self.counts[self._type][1] += PRELUDE.size + meta_bytes + payload_bytes
        self._skip = PRELUDE.size + meta_bytes + payload_bytes
        return True


class TappedNetwork(TcpNetwork):
    """TCP links through relays, which count the bytes of the sockets."""

    def __init__(self) -> None:
        super().__init__(token=None, entropy=system_entropy, rules=role_table())
        self._relays: dict[str, str] = {}
        self._stack = AsyncExitStack()
        self.taps: list[tuple[Tap, Tap]] = []

    async def __aenter__(self) -> "TappedNetwork":
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def dial(self, address: str, identity: Identity, **options: Any) -> Link:
        if address not in self._relays:
            self._relays[address] = await self._open_relay(address)
        return await super().dial(self._relays[address], identity, **options)

    async def _open_relay(self, address: str) -> str:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            taps = (Tap(), Tap())
            self.taps.append(taps)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, far_writer, taps[0]), name="relay/out")
                group.create_task(_pump(far_reader, writer, taps[1]), name="relay/in")

        def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._group.create_task(relay(reader, writer), name="relay")

        server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        self._stack.callback(server.close)
        return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def carried(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """Messages and bytes on the wire, by sender, receiver and message type."""
        totals: dict[tuple[str, str, str], tuple[int, int]] = {}
        for out, back in self.taps:
            for tap, receiver in ((out, back.sender), (back, out.sender)):
                for kind, (messages, size) in tap.counts.items():
                    before = totals.get((tap.sender, receiver, kind), (0, 0))
                    totals[tap.sender, receiver, kind] = (before[0] + messages, before[1] + size)
        return totals


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tap: Tap) -> None:
    try:
        while data := await reader.read(1 << 16):
            tap.feed(data)
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def counted(cluster: LocalCluster) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return the counts of sent messages by the nodes themselves."""
    nodes = (cluster.controller, cluster.data, *cluster.servers, *cluster.workers)
    rows = [row for node in nodes for row in node.statistics().traffic]
    rows += cluster.driver._traffic.rows()
    return {
        (row.sender, row.receiver, row.type): (row.messages, row.payload_bytes + row.frame_bytes)
        for row in rows
    }


async def test_the_counts_equal_the_traffic_of_the_sockets() -> None:
    config = Config(epochs=1, replicas=2, servers=2, threads=1, shard_bytes=4096)
    async with (
        TappedNetwork() as network,
        LocalCluster(config, dataset=await few_digits(), network=network) as cluster,
    ):
        report = report_of(await cluster.train(), config)
        # The last messages may still be between two sockets.
        try:
            async with asyncio.timeout(10.0):
                while network.carried() != counted(cluster):  # noqa: ASYNC110 - sockets have no event
                    await asyncio.sleep(0)
        except TimeoutError:
            assert network.carried() == counted(cluster)
        final = network.carried()

    reported = {
        (row.sender, row.receiver, row.type): (row.messages, row.payload_bytes + row.frame_bytes)
        for row in report.traffic
    }
    pushes = {key: value for key, value in final.items() if key[2] in ("Push", "Pushed")}
    assert len(pushes) == 2 * 2 * 2
    assert {key: reported[key] for key in pushes} == pushes
    assert all(value <= final[key] for key, value in reported.items())


async def test_every_row_has_a_value_for_each_report() -> None:
    one = await real_report(epochs=1)
    two = await real_report(epochs=2, weights="copy", schedule="cosine", rate=0.05, warm_up=0.5)

    rows = {name: values for name, *values in compare([one, two])}

    assert all(len(values) == 2 for values in rows.values())
    assert rows["epochs"] == ["1", "2"]
    assert rows["consistency"] == ["asp", "asp"]
    assert rows["weights"] == ["aliased", "copy"]
    assert rows["rate"] == [f"{one.config['rate']:.4g}, cosine, warm-up 0.1", "0.05, cosine, warm-up 0.5"]
    assert rows["test accuracy"] == [f"{each.totals.test_accuracy:.2%}" for each in (one, two)]
    assert rows["staleness, mean / max"] == [
        f"{each.staleness.mean:.2f} / {each.staleness.max}" for each in (one, two)
    ]
    assert float(rows["sent, MB"][0]) < float(rows["sent, MB"][1])


async def test_rows_without_anything_to_say_are_left_out() -> None:
    report = await real_report(epochs=1)
    names = [row[0] for row in compare([report])]
    cut_short = msgspec.structs.replace(report, ended="interrupted", epochs=[])
    rows = {name: values for name, *values in compare([report, cut_short])}

    assert not {"ended", "efficiency", "push / pull every", "events"} & set(names)
    assert rows["ended"] == ["", "interrupted"]
    assert rows["train loss"][1] == ""


async def test_how_models_are_cut_stands_beside_those_that_are_not() -> None:
    whole, cut = await real_report(epochs=1), await real_report(epochs=1, partitions=2, halo="recompute")
    rows = {name: values for name, *values in compare([whole, cut])}

    assert rows["partitions"] == ["1", "2"]
    assert rows["plan"] == ["", "vertical, halo recompute"]
    assert "plan" not in [row[0] for row in compare([whole])]
