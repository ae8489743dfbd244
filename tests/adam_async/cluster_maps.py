"""A controller's map with the training rules, and short words for the commands of tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from hypothesis.stateful import RuleBasedStateMachine

from adam_async.controller.state import Changed, Command, CompareAndSet, ControllerState, Event, NodeLost
from adam_async.driver.preparation import store_of
from adam_async.model.named import mlp
from adam_async.model.rules import Rule, Sgd
from adam_async.run.cluster_map import ClusterMap, NodeRecord, ready_word
from adam_async.run.config import Config
from adam_async.run.store_record import (
    ArrayRecord,
    BundleRecord,
    StoreRecord,
    bundle_key,
    cut_arrays,
    served_word,
)
from adam_async.run.training_program import ProgramRecord, ResumeRecord, TrainingProgram, read_training

SPEC = mlp((16, 8, 4), input_shape=(1, 4, 4)).to_dict()

SHAPES = {"fc1/weights": (8, 16), "fc1/biases": (8,), "fc2/weights": (4, 8), "fc2/biases": (4,)}
"""Shapes of the arrays of this model."""


class UnknownRule(Rule, frozen=True, kw_only=True, tag="unknown"):
    """A rule of another release, which no message may have."""


def node(role: str = "worker", incarnation: int = 1, **fields: Any) -> NodeRecord:
    """Return the record of a node as it joins."""
    info = {"train_images": 100} if role == "data" else {}
    return NodeRecord(
        **{"role": role, "address": "local://1", "incarnation": incarnation, "info": info, **fields}
    )


def run_record(
    id: str = "run-1",
    *,
    phase: Any = "preparing",
    epoch: int = 0,
    driver: str = "driver",
    incarnation: int = 1,
    resumed: ResumeRecord | None = None,
    **options: Any,
) -> ProgramRecord:
    """Return the record of a run with these options."""
    config = Config(**{"images_per_group": 10, "epochs": 2, **options})
    record = TrainingProgram(config=config, spec=SPEC, resumed=resumed).record(id, (driver, incarnation))
    return msgspec.structs.replace(record, phase=phase, epoch=epoch)


def store_record(id: str = "store-1", listed: Sequence[ArrayRecord] = (), **fields: Any) -> StoreRecord:
    """Return the record of a store with these arrays, one of 1024 float32 values by default."""
    arrays = listed or ARRAYS
    return StoreRecord(
        **{
            "id": id,
            "rules": (Sgd(),),
            "arrays": len(arrays),
            "nbytes": sum(array.nbytes for array in arrays),
            "state_arrays": 0,
            "pieces": len(cut_arrays(id, arrays)),
            "shard_bytes": 256,
            **fields,
        }
    )


ARRAYS = (ArrayRecord("w", (64, 16)),)


def bundle_map(
    in_sync: Mapping[str, Sequence[str]],
    *,
    joining: Mapping[str, Sequence[str]] = {},
    copies: int = 2,
    phase: Any = "open",
    **fields: Any,
) -> ClusterMap:
    """Return the map of a run that trains, with bundles of these members of ps-0 to ps-2 by home."""
    store = store_record(
        "run-1", program="run-1", copies=copies, phase=phase, buckets=tuple(in_sync), **fields
    )
    return ClusterMap(
        nodes={f"ps-{number}": node("ps") for number in range(3)},
        run=run_record(phase="training"),
        stores={"run-1": store},
        bundles={
            bundle_key("run-1", home): BundleRecord(
                store="run-1",
                in_sync=tuple((name, 1) for name in names),
                joining=tuple((name, 1) for name in joining.get(home, ())),
            )
            for home, names in in_sync.items()
        },
    )


class Cluster:
    """A controller's state; each command checks the invariants."""

    def __init__(self) -> None:
        self.state = ControllerState()

    @property
    def map(self) -> ClusterMap:
        """The map."""
        return self.state.map

    def apply(self, command: Command) -> list[Event]:
        """Apply one command."""
        before = self.map.version
        events = self.state.apply(command)
        self.state.check_invariants()
        assert self.map.version == before + any(isinstance(event, Changed) for event in events)
        return events

    def set(self, key: str, value: Any, expected: int | None = None) -> list[Event]:
        """Set a key, by default at its present version."""
        version = self.map.version_of(key) if expected is None else expected
        return self.apply(CompareAndSet(key=key, expected=version, value=msgspec.to_builtins(value)))

    def join(self, *names: str, incarnation: int = 1, **fields: Any) -> None:
        """Let nodes join; the text before the first hyphen is the role."""
        for name in names:
            self.set(f"nodes/{name}", node(name.partition("-")[0], incarnation, **fields))

    def submit(self, record: ProgramRecord, *, blob: bytes | None = None) -> list[Event]:
        """Submit a run, perhaps with another blob, and then its store; returns the events of the run."""
        sent = record if blob is None else msgspec.structs.replace(record, blob=blob)
        events = self.set("run", sent)
        program = read_training(record)
        arrays = tuple(ArrayRecord(name, shape, program.config.dtype) for name, shape in SHAPES.items())
        self.create(record.id, store_of(record, program, arrays), arrays)
        return events

    def create(self, name: str, record: StoreRecord, arrays: Sequence[ArrayRecord] = ARRAYS) -> list[Event]:
        """Create a store; returns the events of its record."""
        pieces = cut_arrays(record.id, arrays, creator=record.creator)
        for number, piece in enumerate(pieces):
            self.set(f"stores/{name}/{number}", piece)
        return self.set(f"stores/{name}", msgspec.structs.replace(record, pieces=len(pieces)))

    def serve(self, name: str, id: str) -> None:
        """Let a server report that it holds a store."""
        record, store = self.map.nodes[name], self.map.store(id)
        word = served_word(store) if store is not None else id
        serves = (*(each for each in record.serves if each != word), word)
        self.set(f"nodes/{name}", msgspec.structs.replace(record, serves=serves))

    def open(self, name: str, record: StoreRecord, arrays: Sequence[ArrayRecord] = ARRAYS) -> StoreRecord:
        """Create a store, and let its servers report that they hold it."""
        self.create(name, record, arrays)
        for server in sorted(set(self.map.stores[name].buckets)):
            self.serve(server, record.id)
        assert self.map.stores[name].phase == "open"
        return self.map.stores[name]

    def ready(self, *names: str, run: str = "run-1") -> None:
        """Let nodes report that they are ready for a run."""
        for name in names:
            record = self.map.nodes[name]
            if record.role == "ps":
                self.serve(name, run)
                continue
            word = (
                ready_word(run, self.map.replica_generation(record.replica))
                if record.role == "worker"
                else run
            )
            self.set(f"nodes/{name}", msgspec.structs.replace(record, ready=word))

    def lose(self, name: str) -> None:
        """Lose a node."""
        self.apply(NodeLost(name, self.map.nodes[name].incarnation))

    def end_epoch(self, **result: Any) -> None:
        """End the epoch with a result."""
        assert self.map.epoch is not None
        self.set("epoch", msgspec.structs.replace(self.map.epoch, ended=True, result=result))


class RecordedCluster(RuleBasedStateMachine):
    """A cluster for rules, with a log of its commands. At the end the same commands give the same map."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.log: list[Command] = []
        apply = self.cluster.state.apply

        def recorded(command: Command) -> list[Event]:
            self.log.append(command)
            return apply(command)

        self.cluster.state.apply = recorded

    def teardown(self) -> None:
        """Apply the commands again."""
        again = ControllerState()
        for command in self.log:
            again.apply(command)
        assert again.map == self.cluster.map


def training(**options: Any) -> Cluster:
    """Return a cluster in the first epoch of its run."""
    cluster = Cluster()
    servers = [f"ps-{number}" for number in range(options.get("servers", 1))]
    count = options.get("replicas", 1) * options.get("partitions", 1)
    workers = [f"worker-{number}" for number in range(count)]
    cluster.join("driver", "data-0", *servers, *workers)
    cluster.submit(run_record(**options))
    cluster.ready("data-0", *servers, *workers)
    assert cluster.map.run is not None
    assert cluster.map.run.phase == "training"
    return cluster
