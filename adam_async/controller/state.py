"""Pure: the rules of the cluster map: members, places of buckets, begin and end of epochs.

A state machine: `apply` takes one command and returns the events that it caused. After each command the
standing rules run, each of which reads the map and may change it:

    place     a run is submitted and enough servers are live: buckets get their primaries
    number    a live worker without a slot gets one: a replica, and a part of its model
    lead      a data server is ready: it leads the run's ledger; the next replica replaces a lost leader
    begin     all primaries, a data server and the wanted number of replicas are ready: the run begins
    advance   the driver moved the run to its next epoch: its groups are shared out
    fail      a primary, the last ledger replica, or the driver is lost: the run has failed
    forget    the map drops departed nodes, except the last `DEPARTED_KEPT` of each role and those of the run

A replica has one worker for each part of its model, and restarts as a unit: without one of its workers it is
out, until another worker has the slot and all are ready for the next replica generation. `worker_assignment`
assigns the slots.

A run has all replicas that the workers suffice for: replicas beyond the wanted number, and later ones, take
part as soon as they are ready. A run that continues another one begins with that run's current epoch, and
takes over its results.

With one copy of each shard a lost primary means lost parameters, so the run fails and names it. A lost worker
is only a line in the log: its replica number is free for a successor.

The loss of a node is a command, `NodeLost`; `failure_detector` decides when to propose it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, assert_never

import msgspec

from adam_async.controller.records import check_epoch, check_ledger_record, check_node, is_piece, joined
from adam_async.controller.worker_assignment import assign_workers
from adam_async.errors import LOST_SHARDS, AdamError
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network
from adam_async.model.partition.plan import planned_cuts
from adam_async.model.spec import ModelSpec
from adam_async.run.cluster_map import (
    RESULTS_KEPT,
    ClusterMap,
    EpochRecord,
    LedgerRecord,
    NodeRecord,
    RunInPieces,
    RunPiece,
    RunRecord,
)
from adam_async.run.config import FIELDS
from adam_async.run.epoch_shares import covers, share_out, warm_groups
from adam_async.run.ids import NodeId
from adam_async.run.option_sources import make_config
from adam_async.run.partition import run_table
from adam_async.run.shard_table import assign_buckets

_NO_PLACE = {"replica": -1, "partition": 0, "placed": 0}
"""Fields of a node without a slot."""


class _MapFields(TypedDict, total=False):
    """Fields of `ClusterMap` that a rule sets."""

    nodes: dict[str, NodeRecord]
    run: RunRecord | None
    generation: int
    buckets: tuple[str, ...]
    epoch: EpochRecord | None
    ended: int
    results: tuple[dict[str, Any], ...]
    ledger_record: LedgerRecord | None
    pieces: dict[str, RunPiece]


INCARNATIONS_KEPT = 16
"""Maximum number of ended incarnations that the map keeps of a node."""

DEPARTED_KEPT = 64
"""Maximum number of departed nodes of each role in the map; the last ones to leave stay."""

MAX_SHARDS = 100_000
"""Maximum number of shards of a run. Placing them blocks the controller for a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAndSet:
    """Set `key` to `value` if its record still has version `expected`; 0: must not exist."""

    key: str
    expected: int
    value: Any


@dataclass(frozen=True, slots=True)
class NodeLost:
    """An incarnation of the node is lost."""

    node: str
    incarnation: int


Command = CompareAndSet | NodeLost


@dataclass(frozen=True, slots=True)
class Changed:
    """The map has a new version."""

    version: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """A compare-and-set came too late: its key has changed."""

    key: str
    version: int


@dataclass(frozen=True, slots=True)
class Invalid:
    """A compare-and-set named no key of the map, or held a value of another type."""

    reason: str


Event = Changed | Conflict | Invalid

_Record = NodeRecord | RunRecord | EpochRecord | LedgerRecord | RunPiece


class ControllerState:
    """The map.

    Args:
        layers: Kinds of layers that models may use.
    """

    def __init__(self, *, layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS) -> None:
        self._layers = layers
        self.map = ClusterMap()

    # --- commands ----------------------------------------------------------------------------

    def apply(self, command: Command) -> list[Event]:
        """Apply one command, then the standing rules. The same commands give the same map."""
        before = self.map
        match command:
            case CompareAndSet():
                problem = self._compare_and_set(command)
                if problem is not None:
                    return [problem]
            case NodeLost():
                self._node_lost(command)
            case _:
                assert_never(command)
        if self.map is before:
            return []
        self._run_rules()
        self._forget_departed()
        self.map = msgspec.structs.replace(self.map, version=before.version + 1)
        return [Changed(self.map.version)]

    def _compare_and_set(self, command: CompareAndSet) -> Conflict | Invalid | None:
        key = command.key
        kind, _, name = key.partition("/")
        old: _Record | None
        wanted: type[_Record]
        if kind == "nodes" and name:
            old, wanted = self.map.nodes.get(name), NodeRecord
        elif key == "run":
            old, wanted = self.map.run, RunRecord
        elif is_piece(key):
            old, wanted = self.map.pieces.get(key), RunPiece
        elif key == "epoch":
            old, wanted = self.map.epoch, EpochRecord
        elif key == "lending":
            old, wanted = self.map.ledger_record, LedgerRecord
        else:
            return Invalid(f"no key {key!r}; there are nodes/<id>, run, run/<n>, epoch and lending")
        version = old.changed if old is not None else 0
        if version != command.expected:
            return Conflict(key, version)
        new = self._read_value(command.value, wanted)
        if isinstance(new, str):
            return Invalid(f"{key}: {new}")
        new = msgspec.structs.replace(new, changed=self.map.version + 1)
        match new:
            case NodeRecord():
                return self._set_node(name, new)
            case RunRecord():
                return self._set_run(new)
            case RunPiece():
                self._set(pieces={**self.map.pieces, key: new})
            case EpochRecord():
                # Without a run nothing reads the epoch.
                problem = check_epoch(new, self.map.epoch) if self.map.run is not None else ""
                if problem:
                    return Invalid(f"{key}: {problem}")
                self._set(epoch=new)
            case LedgerRecord():
                problem = check_ledger_record(new, self.map.ledger_record)
                if problem:
                    return Invalid(f"{key}: {problem}")
                self._set(ledger_record=new)
            case _:
                assert_never(new)
        return None

    def _read_value(self, value: Any, wanted: type[_Record]) -> _Record | str:
        """Return the record of a value, or the fault of the value."""
        try:
            if wanted is RunRecord and isinstance(value, dict) and "pieces" in value:
                return joined(msgspec.convert(value, RunInPieces), self.map.pieces)
            return msgspec.convert(value, wanted)
        except msgspec.ValidationError as error:
            return str(error)

    def _set_node(self, name: str, new: NodeRecord) -> Invalid | None:
        old = self.map.nodes.get(name)
        problem = _check_node(new)
        if problem:
            return Invalid(f"nodes/{name}: {problem}")
        before = old.before if old is not None else ()
        if new.incarnation in before:
            return Invalid(f"nodes/{name}: a later incarnation of {name} has joined; start this one again")
        if old is not None and old.incarnation != new.incarnation:
            before = (*before, old.incarnation)[-INCARNATIONS_KEPT:]
        new = msgspec.structs.replace(new, before=before)
        if old is not None and old.live and old.incarnation != new.incarnation:
            # The old incarnation was not reported lost yet, but its state is lost all the same.
            self._node_lost(NodeLost(name, old.incarnation))
            self._fail_if_lost()
        if old is not None and old.incarnation == new.incarnation and old.live:
            new = msgspec.structs.replace(
                new, replica=old.replica, partition=old.partition, placed=old.placed
            )
        else:
            new = msgspec.structs.replace(new, **_NO_PLACE)
        self._set(nodes={**self.map.nodes, name: new})
        return None

    def _set_run(self, new: RunRecord) -> Invalid | None:
        old = self.map.run
        goes_on = old is not None and old.id == new.id
        if old is not None and goes_on:
            new = new.with_fixed_of(old)
        else:
            problem = _check_run(new, self._layers)
            if problem:
                return Invalid(f"run: {problem}")
        if old is not None and new.driver != old.driver and self._in_progress(old):
            return Invalid(f"run {old.id} of {old.driver} is in progress; it ends when {old.driver} does")
        if not goes_on:
            self._set(buckets=(), epoch=None, results=(), ended=0, ledger_record=None, pieces={})
            self._forget_replicas()
        self._set(run=new)
        return None

    def _in_progress(self, run: RunRecord) -> bool:
        driver = self.map.nodes.get(run.driver)
        return not run.over and driver is not None and driver.live

    def _node_lost(self, command: NodeLost) -> None:
        node = self.map.nodes.get(command.node)
        if node is None or not node.live or node.incarnation != command.incarnation:
            return
        dead = msgspec.structs.replace(node, live=False, changed=self.map.version + 1)
        self._set(nodes={**self.map.nodes, command.node: dead})
        self._strike_out()

    def _strike_out(self) -> None:
        """Remove lost data servers from the ledger replicas; a new leader begins a new term."""
        ledger_record, nodes = self.map.ledger_record, self.map.nodes
        if ledger_record is None:
            return
        left = tuple(
            (name, incarnation)
            for name, incarnation in ledger_record.ledger_replicas
            if name in nodes and nodes[name].live and nodes[name].incarnation == incarnation
        )
        if left != ledger_record.ledger_replicas:
            term = ledger_record.term + (left[:1] != ledger_record.ledger_replicas[:1])
            changed = self.map.version + 1
            self._set(
                ledger_record=msgspec.structs.replace(
                    ledger_record, ledger_replicas=left, term=term, changed=changed
                )
            )

    def _forget_departed(self) -> None:
        """Remove nodes that left long ago from the map, except those of its run.

        A removed node can join again as a new one; the map also drops its ended incarnations.
        """
        run, kept = self.map.run, set(self.map.buckets)
        if run is not None:
            kept.add(run.driver)
        departed: dict[str, list[tuple[int, str]]] = {}
        for name, node in self.map.nodes.items():
            if not node.live and name not in kept:
                departed.setdefault(node.role, []).append((node.changed, name))
        gone = {name for of_role in departed.values() for _, name in sorted(of_role)[:-DEPARTED_KEPT]}
        if gone:
            self._set(nodes={name: node for name, node in self.map.nodes.items() if name not in gone})

    def _forget_replicas(self) -> None:
        self._set(
            nodes={
                name: msgspec.structs.replace(node, ready="", failed="", **_NO_PLACE)
                for name, node in self.map.nodes.items()
            }
        )

    def _set(self, **fields: Unpack[_MapFields]) -> None:
        self.map = msgspec.structs.replace(self.map, **fields)

    # --- standing rules ----------------------------------------------------------------------

    def _run_rules(self) -> None:
        self._strike_out()
        self._fail_if_lost()
        run = self.map.run
        if run is None or run.over:
            return
        self._place(run)
        self._number_replicas(run)
        self._name_ledger_leader(run)
        self._begin(run)
        self._advance()

    def _fail_if_lost(self) -> None:
        run, nodes = self.map.run, self.map.nodes
        if run is None or run.over:
            return
        driver = nodes.get(run.driver)
        reason = lost = ""
        if driver is None or not driver.live:
            reason = f"its driver {run.driver} left"
        for name in sorted(set(self.map.buckets)):
            if not nodes[name].live:
                lost, reason = name, f"{name} died: {LOST_SHARDS}"
        failures = [
            f"{name}: {node.failed}" for name, node in nodes.items() if node.role == "data" and node.failed
        ]
        live, ledger_leader = self.map.live("data"), "the data server"
        if failures and all(nodes[name].failed for name in live):
            lost, reason = ledger_leader, f"{ledger_leader} cannot serve the run: {failures[0]}"
        elif self.map.epoch is not None and not self.map.ledger_leaders:
            others = "no other has all its leases" if live else "no other has joined"
            lost, reason = ledger_leader, f"{ledger_leader} died: {others}"
        if reason:
            changed = self.map.version + 1
            failed = msgspec.structs.replace(run, phase="failed", reason=reason, lost=lost, changed=changed)
            self._set(run=failed)

    def _place(self, run: RunRecord) -> None:
        wanted = int(run.config["servers"])
        servers = self.map.live("ps")
        if self.map.buckets or len(servers) < wanted:
            return
        network = Network(ModelSpec.from_dict(run.spec), dtype=str(run.config["dtype"]), layers=self._layers)
        table = run_table(run, network)
        primaries = assign_buckets(table, [NodeId(name) for name in servers[:wanted]])
        self._set(buckets=tuple(primaries), generation=self.map.generation + 1)

    def _number_replicas(self, run: RunRecord) -> None:
        slots = {
            name: (self.map.nodes[name].replica, self.map.nodes[name].partition)
            for name in self.map.live("worker")
        }
        changed = self.map.version + 1
        moved = {
            name: msgspec.structs.replace(
                self.map.nodes[name], replica=replica, partition=partition, placed=changed, changed=changed
            )
            for name, (replica, partition) in assign_workers(slots, int(run.config["partitions"])).items()
            if (replica, partition) != slots[name]
        }
        if moved:
            self._set(nodes={**self.map.nodes, **moved})

    def _name_ledger_leader(self, run: RunRecord) -> None:
        """Let the first ready data server lead the ledger; before the first epoch the ledger is empty."""
        nodes, ledger_record = self.map.nodes, self.map.ledger_record
        ready = [name for name in self.map.live("data") if nodes[name].ready == run.id]
        if self.map.ledger_leaders or not ready:
            return
        record = LedgerRecord(
            run=run.id,
            term=ledger_record.term if ledger_record is not None else 1,
            ledger_replicas=((ready[0], nodes[ready[0]].incarnation),),
            changed=self.map.version + 1,
        )
        self._set(ledger_record=record)

    def _begin(self, run: RunRecord) -> None:
        if run.phase != "preparing" or not self.map.buckets:
            return
        nodes = self.map.nodes
        primaries_ready = all(nodes[name].ready == run.id for name in set(self.map.buckets))
        replicas = self.map.live_replicas()
        if self.map.ledger_leaders and primaries_ready and len(replicas) >= int(run.config["replicas"]):
            resumed = run.resumed
            number, results = (resumed.epoch, resumed.results) if resumed is not None else (1, ())
            changed = self.map.version + 1
            started = msgspec.structs.replace(run, phase="training", epoch=number, changed=changed)
            self._set(run=started, results=results[-RESULTS_KEPT:], ended=number - 1)

    def _advance(self) -> None:
        run, epoch = self.map.run, self.map.epoch
        assert run is not None
        if epoch is not None and epoch.ended and run.phase == "training" and run.epoch == epoch.number:
            concurrent = run.config.get("evaluation") == "concurrent"
            last = epoch.number >= int(run.config["epochs"])
            changed = self.map.version + 1
            if concurrent and not last:
                run = msgspec.structs.replace(run, epoch=run.epoch + 1, changed=changed)
            else:
                run = msgspec.structs.replace(run, phase="between", changed=changed)
            results = (*self.map.results, epoch.result)[-RESULTS_KEPT:]
            self._set(run=run, results=results, ended=epoch.number)
        due = run.phase == "training" and (epoch is None or epoch.number < run.epoch)
        if due and self.map.ledger_leaders:
            self._set(epoch=self._share_out(run))

    def _share_out(self, run: RunRecord) -> EpochRecord:
        data = self.map.nodes[self.map.ledger_leaders[0]]
        config = run.config
        images = int(data.info["train_images"]) - int(config.get("validation", 0))
        groups = -(-max(images, 1) // int(config["images_per_group"]))
        replicas = self.map.live_replicas() or tuple(range(int(config["replicas"])))
        round_groups = 0 if config["consistency"] == "asp" else int(config["push_every"])
        resumed = run.resumed if run.resumed is not None and run.resumed.epoch == run.epoch else None
        finished = _within(resumed.finished, groups) if resumed is not None else ()
        clock = resumed.clock if resumed is not None else self._last_clock()
        warm = warm_groups(
            int(config["warm_start"]),
            epoch=run.epoch,
            groups=groups,
            finished=finished,
            round_groups=round_groups,
        )
        before = self.map.results[-1] if self.map.results else {}
        carried = -(-int(before.get("skipped", 0)) // int(config["images_per_group"]))
        return EpochRecord(
            run=run.id,
            number=run.epoch,
            groups=groups,
            shares=share_out(
                replicas,
                groups=groups,
                round_groups=round_groups,
                warm=warm,
                finished=finished,
                carried=carried,
            ),
            round_groups=round_groups,
            carried=carried,
            behind=tuple(before.get("behind", ())),
            first_clock=clock if round_groups else 0,
            finished=finished,
            changed=self.map.version + 1,
        )

    def _last_clock(self) -> int:
        """Return the sync clock at the end of the epoch before."""
        return int(self.map.results[-1].get("clock", 0)) if self.map.results else 0

    # --- invariants --------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert the invariants after a command."""
        workers = [self.map.nodes[name] for name in self.map.live("worker")]
        taken = Counter((node.replica, node.partition) for node in workers if node.replica >= 0)
        assert all(count == 1 for count in taken.values()), f"two live workers share a slot: {taken}"
        run, epoch = self.map.run, self.map.epoch
        if run is not None and run.phase == "training":
            assert epoch is not None
            assert epoch.number == run.epoch
            assert covers(epoch.shares.values(), groups=epoch.groups, round_groups=epoch.round_groups), (
                epoch.shares
            )
        if run is not None and not run.over:
            partitions = int(run.config["partitions"])
            sizes = Counter(node.replica for node in workers)
            spares = sizes.pop(-1, 0)
            lacking = [replica for replica, size in sizes.items() if size < partitions]
            assert spares < partitions, f"{spares} workers wait that could begin a replica"
            assert not spares or not lacking, f"{spares} workers wait, and replicas {lacking} lack some"
            assert len(lacking) <= 1, f"replicas {lacking} lack workers that others of them have"
        for name in self.map.buckets:
            assert name in self.map.nodes, f"bucket on unknown node {name}"


def _check_node(record: NodeRecord) -> str:
    """Return a fault that the standing rules cannot work with; empty if there is none."""
    if record.role == "data" and record.live:
        images = record.info.get("train_images")
        if not isinstance(images, int) or images < 1:
            return f"info of a data server needs train_images, a positive number, not {images!r}"
    return check_node(record)


def _check_run(record: RunRecord, layers: Mapping[str, type[Layer]]) -> str:
    """Return the fault of the record of a new run; empty if it has none."""
    resumed = record.resumed
    if resumed is not None and not min(resumed.epoch - 1, 1) <= len(resumed.results) < resumed.epoch:
        return f"it resumes epoch {resumed.epoch}, but has the results of {len(resumed.results)} before it"
    try:
        config = make_config(record.config)
        network = Network(ModelSpec.from_dict(record.spec), dtype=config.dtype, layers=layers)
        planned_cuts(record.plan, network.layers)
    except AdamError as error:
        return str(error)
    shards = network.num_parameters * network.dtype.itemsize // config.shard_bytes
    if shards > MAX_SHARDS:
        return (
            f"shard_bytes={config.shard_bytes} cuts the {network.num_parameters} parameters of model "
            f"{network.spec.name!r} into {shards} shards; raise it, so that there are at most {MAX_SHARDS}"
        )
    missing = [name for name in FIELDS if name not in record.config]
    return f"config lacks {', '.join(missing)}" if missing else ""


def _within(ranges: tuple[tuple[int, int], ...], groups: int) -> tuple[tuple[int, int], ...]:
    """Return the parts of the ranges within the groups of the epoch."""
    return tuple((max(start, 0), min(stop, groups)) for start, stop in ranges if start < min(stop, groups))
