"""Pure: the cluster map: nodes, the run, its buckets and its current epoch, as one snapshot value.

The map is all the state there is in a controller. Nodes know only `get`, `compare-and-set` and
`watch`; five kinds of keys can be set: ``nodes/<id>``, ``run``, ``run/<n>``, ``epoch`` and ``lending``. Every
record carries the map version at which it last changed, which is what a compare-and-set expects.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal, Self

import msgspec

from adam_async.errors import RunFailed

RESULTS_KEPT = 32
"""Number of the newest results of epochs that the map holds."""

MOST_REASON = 2048
"""Maximum length of a node's reason for its end, in characters."""

RUN_PIECES = 24
"""Maximum number of pieces of a run's record."""

Phase = Literal["preparing", "training", "between", "finished", "failed"]
"""Where a run is. `between`: an epoch ended, the driver has not started the next one."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One node. Set by the node itself when it joins and when it is ready."""

    role: str
    address: str
    """Where it listens."""
    incarnation: int
    before: tuple[int, ...] = ()
    """Incarnations that it followed, given by the controller: none of them has this seat again."""
    live: bool = True
    ready: str = ""
    """Id of the run it has prepared for; for workers with the life of their replica, see `ready_word`."""
    left: bool = False
    """Whether it said goodbye: it is not live because it wanted to go."""
    failed: str = ""
    """What it is about to end by, if it could still say so."""
    replica: int = -1
    """For workers: the replica it trains, given by the controller; -1 outside a run."""
    partition: int = 0
    """For workers: which part of the replica's model it trains, given with the replica; from 0."""
    placed: int = 0
    """For workers: map version at which the controller gave it this place."""
    info: dict[str, Any] = {}
    """What others need to know: for data servers the shape and size of the data."""
    changed: int = 0


class ResumeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run that continues another one takes up."""

    epoch: int
    """The epoch in progress."""
    finished: tuple[tuple[int, int], ...]
    """Ranges of its groups that are trained."""
    clock: int
    """Steps that the fastest replica has behind it."""
    results: tuple[dict[str, Any], ...] = ()
    """What came of the epochs before, in order; their clocks and counts are not begun anew."""
    images: int = 0
    """Images of the groups in `finished`."""
    loss: float = 0.0
    """Mean over them."""
    train_s: float = 0.0
    """Seconds that they took."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The run. Submitted, advanced from epoch to epoch and ended by its driver."""

    id: str
    driver: str
    """Node id of the driver; the run fails when it leaves."""
    config: dict[str, Any]
    spec: dict[str, Any]
    """The model, as `ModelSpec.to_dict` gives it."""
    plan: dict[str, Any] | None = None
    """How the model is cut over a replica's workers, as `PartitionPlan.to_dict` gives it; None if not."""
    transforms: tuple[dict[str, Any], ...] = ()
    """What data servers do to training images, as `Recipe.of` takes it; nothing, if it is empty."""
    together: bool = False
    """Whether a replica's workers are in one process, and the first of them trains all parts."""
    phase: Phase = "preparing"
    epoch: int = 0
    """Epoch in training, from 1; 0 while preparing."""
    reason: str = ""
    """Why the run failed."""
    lost: str = ""
    """The role by whose loss it failed, if it did by one."""
    resumed: ResumeRecord | None = None
    """Starting point of a run that continues another run: servers then wait for their shards from the driver.
    Holds the results of the last epochs only, at least one."""
    carried: bytes = b""
    """Images that the first epoch of these results began with because the epoch before skipped them, as in
    `EpochOrder.carried_images`."""
    changed: int = 0

    def without_fixed(self) -> Self:
        """Return the record without the `FIXED` fields, which do not change during the run."""
        return msgspec.structs.replace(
            self, config={}, spec={}, plan=None, transforms=(), resumed=None, carried=b""
        )

    def with_fixed_of(self, run: "RunRecord") -> Self:
        """Return the record with the `FIXED` fields of another record of the same run."""
        return msgspec.structs.replace(self, **{name: getattr(run, name) for name in FIXED})

    def has_fixed_of(self, run: "RunRecord") -> bool:
        """Whether another record belongs to the same run, with the same `FIXED` fields."""
        pairs = ((getattr(self, name), getattr(run, name)) for name in FIXED)
        return self.id == run.id and all(here is there or here == there for here, there in pairs)

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self.phase in ("finished", "failed")


FIXED = ("config", "spec", "plan", "transforms", "resumed", "carried")
"""Names of the `RunRecord` fields that never change; a later change of the record omits them."""


class RunPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the JSON text of a run's record that is too long for one value of the map."""

    run: str
    """Id of the run."""
    text: bytes
    changed: int = 0


class RunInPieces(msgspec.Struct, frozen=True, kw_only=True):
    """Placeholder for the record of a run with its text in the pieces ``run/0``, ``run/1``, and so on."""

    id: str
    pieces: int


class EpochRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"round_groups": "turn"}):
    """One epoch: how its groups are shared out, and what came of them."""

    run: str
    number: int
    groups: int
    shares: dict[str, tuple[int, int]]
    """Replica (as text, for msgpack) to its range of groups; or with `turn`, to its place and the number
    of places: of the turns 0, 1, 2, ... it has those whose number, modulo places, is its place. Turns are
    counted over what is left behind `finished` and the warm start."""
    round_groups: int = 0
    """With ssp and bsp: groups go to replicas in turns of so many, the groups of one step. 0: in ranges."""
    first_clock: int = 0
    """Where every replica's clock stands when the epoch begins. 0 in asp."""
    finished: tuple[tuple[int, int], ...] = ()
    """Ranges of groups that were trained before the run was resumed."""
    carried: int = 0
    """Groups, from the first one, with what the epoch before has skipped: they are trained in any case."""
    behind: tuple[int, ...] = ()
    """Replicas in whose shares that was."""
    paused: int = 0
    """Set by the data server while it leases nothing and nothing is leased: groups finished. The driver sets
    it back to 0 when its checkpoint is taken. In ssp and bsp all clocks meet meanwhile, at the `clock` of the
    data server's statistics, but their ticks may still be on the way: who reads values first asks for some
    that are bound to that clock."""
    ended: bool = False
    result: dict[str, Any] = {}
    """Set by the data server with `ended`: images, loss, seconds, and the clock at which all meet, in asp the
    highest one of any replica; images that were skipped and trained again, ranges of the groups that were
    skipped, and the replicas in whose shares these were."""
    changed: int = 0


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"ledger_replicas": "keepers"}):
    """Which data servers have the ledger of a run's leases (`data_server/ledger.py`)."""

    run: str
    term: int
    """Grows when another server becomes the lender."""
    ledger_replicas: tuple[tuple[str, int], ...]
    """Node and incarnation of each. The first one is the lender; it adds those that have all that it has,
    and strikes out those that it cannot reach. The controller strikes out the lost ones."""
    changed: int = 0


class ClusterMap(msgspec.Struct, frozen=True, kw_only=True, rename={"ledger_record": "lending"}):
    """The whole map."""

    version: int = 0
    nodes: dict[str, NodeRecord] = {}
    run: RunRecord | None = None
    generation: int = 0
    buckets: tuple[str, ...] = ()
    """Primary of each bucket; empty until the run is placed."""
    epoch: EpochRecord | None = None
    ended: int = 0
    """Number of ended epochs of the run and of the runs that it continues."""
    results: tuple[dict[str, Any], ...] = ()
    """Results of the newest of these epochs, in order; `RESULTS_KEPT` at most."""
    ledger_record: LedgerRecord | None = None
    """Who leases the run's groups; None before a data server is ready for it."""
    pieces: dict[str, RunPiece] = {}
    """Pieces of a run in submission, by key; setting a run removes them."""

    def result(self, epoch: int) -> dict[str, Any]:
        """Return the result of an epoch of the run, counted from 1.

        Raises:
            RunFailed: The epoch has not ended, or the map no longer holds its result.
        """
        at = epoch - 1 - self.ended + len(self.results)
        if not 0 <= at < len(self.results):
            first = self.ended - len(self.results) + 1
            raise RunFailed(
                f"the cluster map holds the results of epochs {first} to {self.ended}, not of epoch {epoch}"
            )
        return self.results[at]

    def live(self, role: str) -> list[str]:
        """Live nodes of one role, in the order of their ids."""
        return sorted(id for id, node in self.nodes.items() if node.role == role and node.live)

    @property
    def partitions(self) -> int:
        """Workers of one replica in this run."""
        return int(self.run.config.get("partitions", 1)) if self.run is not None else 1

    @property
    def takers(self) -> int:
        """Workers of one replica that take its groups from a data server."""
        return 1 if self.run is not None and self.run.together else self.partitions

    @property
    def ledger_leaders(self) -> tuple[str, ...]:
        """Data servers that a worker may ask for groups of the run; the first of them orders all leases."""
        ledger_record, run = self.ledger_record, self.run
        if ledger_record is None or run is None or ledger_record.run != run.id:
            return ()
        return tuple(node for node, _ in ledger_record.ledger_replicas)

    def ledger_leader_for(self, replica: int, attempt: int = 0) -> str:
        """Address of the data server that a replica's workers ask; empty while there is none.

        Args:
            replica: Whose workers.
            attempt: How often in a row nobody answered them.
        """
        servers = sorted(self.ledger_leaders)
        return self.nodes[servers[(replica + attempt) % len(servers)]].address if servers else ""

    def members(self, replica: int) -> tuple[str, ...]:
        """The live workers that have a part of this replica, in the order of their parts."""
        named = [
            (node.partition, name)
            for name, node in self.nodes.items()
            if node.role == "worker" and node.live and node.replica == replica
        ]
        return tuple(name for _, name in sorted(named))

    def replica_generation(self, replica: int) -> int:
        """The life of a replica, 0 if not all its workers are there.

        It is another number as soon as one of its workers is another one, or was gone and has come back.
        """
        members = [self.nodes[name] for name in self.members(replica)]
        return replica_generation([(node.incarnation, node.placed) for node in members], self.partitions)

    def live_replicas(self) -> tuple[int, ...]:
        """Replicas all of whose workers are live and ready for the run: those that others wait for."""
        return tuple(sorted(self.replica_generations()))

    def replica_generations(self) -> dict[int, int]:
        """For each live replica its life."""
        if self.run is None:
            return {}
        named: dict[int, list[NodeRecord]] = {}
        for node in self.nodes.values():
            if node.role == "worker" and node.live and node.replica >= 0:
                named.setdefault(node.replica, []).append(node)
        found = {}
        for replica, members in named.items():
            replica_generation = self.replica_generation(replica)
            if replica_generation and all(
                node.ready == ready_word(self.run.id, replica_generation) for node in members
            ):
                found[replica] = replica_generation
        return found


def skipped_groups(results: Sequence[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """For each epoch that has ended, ranges of its groups that were skipped."""
    return [[(start, stop) for start, stop in result.get("skipped_groups", ())] for result in results]


def replica_generation(members: Sequence[tuple[int, int]], partitions: int) -> int:
    """Make one number of a replica's workers; 0 if some lack.

    Args:
        members: Incarnation of each, and when it was given its place, in the order of their parts.
        partitions: How many there must be.
    """
    if len(members) != partitions:
        return 0
    text = ",".join(f"{incarnation}@{placed}" for incarnation, placed in members).encode()
    return int.from_bytes(blake2b(text, digest_size=7).digest(), "little") or 1


def ready_word(run: str, replica_generation: int) -> str:
    """What a worker is ready for: a run, in one life of its replica. What it was ready for before is over."""
    return f"{run}/{replica_generation}"
