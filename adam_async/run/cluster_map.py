"""Pure: the cluster map: nodes, stores, the current program and its records, as one snapshot value.

The map is the part of the controllers' state that nodes see. Nodes read it with `get` and `watch`, and change
it with `compare-and-set`; they may set these keys: ``nodes/<id>``, ``stores/<name>``, ``stores/<name>/<n>``,
``bundles/<store>/<home>``, ``run`` (the program) and ``run/<n>``, and for training runs ``epoch`` and
``dealer``. Every record has the map version of its last change, which a compare-and-set expects.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from adam_async.errors import RunFailed
from adam_async.run.counts import RESULTS_KEPT, EpochCounts
from adam_async.run.store_record import ArraysPiece, BundleRecord, StoreRecord, bundle_key, served_word
from adam_async.run.training_program import ProgramPiece, ProgramRecord, program_prefix

NOTICE = "notice"
"""Key of a driver's or server's `NodeRecord.info`: its newest notice for the operator of the controllers."""

DISK = "disk"
"""Key of a server's `NodeRecord.info`: whether it keeps its shards on a disk."""

NUMERICS = "numerics"
"""Key in a server's `NodeRecord.info`: the facts that decide the last bits of its results, by name."""

COPIES = "copies"
"""Key in a server's `NodeRecord.info`: its address for other servers, if that is not `address`."""

ELSEWHERE = "elsewhere"
"""Key of a server's `NodeRecord.info`: its address for data servers that cannot reach `address`."""

DATA_FACTS = ("shape", "classes", "train_images", "test_images", "digest")
"""Keys of a data server's `NodeRecord.info` that are equal in all data servers of a run."""

STORE_ROLES = ("ps", "client", "reader")
"""Roles that use stores. The roles wait for a controller for `Waits.controller_s`, and stay in a learned
map."""

MOST_REASON = 2048
"""Maximum length of `NodeRecord.failed` and of a notice, in characters."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One node. The node sets its record when it joins, and again when its state changes."""

    role: str
    address: str
    """Address of the node's listener."""
    incarnation: int
    before: tuple[int, ...] = ()
    """Earlier incarnations of the node, set by the controller; they may not join again."""
    live: bool = True
    ready: str = ""
    """Id of the run for which the node is ready; for a worker, together with its replica's generation: see
    `ready_word`."""
    left: bool = False
    """Whether the node left by itself; false for a lost node."""
    lost_at: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)] = 0.0
    """Time of the loss in seconds since 1970, by the clock of the leading controller or of the driver that
    reports it; 0 for a live node."""
    failed: str = ""
    """Run in which the node cannot take part, and the error, as written by `failed_word`."""
    replica: int = -1
    """For workers: replica that the worker trains; for clients: place in the clocks of the client's store.
    The controller sets the replica; -1 for no replica."""
    partition: int = 0
    """For workers: part of the replica's model that the worker trains, from 0; set with the replica."""
    placed: int = 0
    """For workers and clients: map version at which the controller assigned replica and part."""
    serves: tuple[str, ...] = ()
    """For parameter servers: stores whose shards here all have values, as written by `served_word`."""
    store: str = ""
    """For clients: id of the store to which the client pushes; empty for a reader."""
    info: dict[str, Any] = {}
    """Facts for other nodes: of data servers the shape and size of the data."""
    changed: int = 0


NO_SLOT = {"replica": -1, "partition": 0, "placed": 0}
"""Field values of a node that has no replica and no part."""


class EpochRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch: each replica's share of its groups, and its result."""

    run: str
    number: int
    groups: int
    shares: dict[str, tuple[int, int]]
    """Each replica's range of groups (as text, for msgpack). If `round_groups` is set, the replica's place
    and the number of places instead. The replica then has each round whose number, counted from 0, leaves its
    place as remainder when divided by the number of places. Rounds contain only the groups left after the
    warm start. If shards have groups of the epoch already, the dealer shares out the groups left among the
    same replicas."""
    round_groups: int = 0
    """With ssp and bsp, number of groups in a round, as many as in one step; 0 if shares are ranges."""
    first_clock: int = 0
    """Clock of every replica when the epoch begins, in steps; 0 in asp."""
    carried: int = 0
    """Number of groups, at the beginning of the epoch, whose images the epoch before skipped; replicas always
    train these groups."""
    behind: tuple[int, ...] = ()
    """Replicas whose shares of the epoch before have skipped groups."""
    drain: bool = False
    """Whether the driver stops the run with a checkpoint. The data servers then lease no more groups; in ssp
    and bsp they lease up to one clock for all replicas, the `clock` of the data server's statistics."""
    ended: bool = False
    result: EpochCounts = EpochCounts()
    """Counts that the dealer sets with `ended`."""
    changed: int = 0


class DealerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The dealer: the data server that leases the groups of a run to its replicas. The controllers set it."""

    run: str
    term: int
    """Term, which grows with each new dealer."""
    node: str
    incarnation: int
    data: dict[str, Any] = {}
    """The `DATA_FACTS` of the first dealer, so that no data server with other data continues the run."""
    changed: int = 0
    """Version of the map at which the term began."""


class ClusterMap(msgspec.Struct, frozen=True, kw_only=True):
    """The whole map."""

    version: int = 0
    nodes: dict[str, NodeRecord] = {}
    stores: dict[str, StoreRecord] = {}
    """Stores by name."""
    arrays: dict[str, ArraysPiece] = {}
    """Pieces of the lists of arrays, by key."""
    bundles: dict[str, BundleRecord] = {}
    """Bundles of the placed stores, by key."""
    placements: int = 0
    """Number of stores placed so far: the generation of the store placed last."""
    run: ProgramRecord | None = None
    """The current or last program."""
    epoch: EpochRecord | None = None
    ended: int = 0
    """Number of ended epochs in the run and in the runs that it continues."""
    results: tuple[EpochCounts, ...] = ()
    """Counts of the newest of these epochs, in order; at most `RESULTS_KEPT`."""
    dealer: DealerRecord | None = None
    """Dealer of the run, even after its loss until the next one is named; None before the first."""
    pieces: dict[str, ProgramPiece] = {}
    """Pieces of a program's blob, by key; submitting the program's record removes them."""

    def version_of(self, key: str) -> int:
        """Return the map version at which a key's record last changed; 0 without a record."""
        kind, _, name = key.partition("/")
        record: msgspec.Struct | None
        if kind == "nodes":
            record = self.nodes.get(name)
        elif kind == "stores":
            record = self.arrays.get(key) if "/" in name else self.stores.get(name)
        elif kind == "bundles":
            record = self.bundles.get(key)
        elif key.startswith("run/"):
            record = self.pieces.get(key)
        else:
            record = {"run": self.run, "epoch": self.epoch, "dealer": self.dealer}.get(key)
        return int(getattr(record, "changed", 0))

    @property
    def in_progress(self) -> bool:
        """Whether a program is submitted and has not ended."""
        return self.run is not None and not self.run.over

    @property
    def driven(self) -> bool:
        """Whether the driver of the program is live, in the incarnation of the program's record."""
        driver = self.nodes.get(self.run.driver) if self.run is not None else None
        return (
            self.run is not None
            and driver is not None
            and driver.live
            and driver.incarnation == self.run.incarnation
        )

    def is_of_program(self, text: str) -> bool:
        """Return whether a text is the id of the program, or an id that a live driver may give to one."""
        prefixes = tuple(
            program_prefix(name, node.incarnation)
            for name, node in self.nodes.items()
            if node.role == "driver" and node.live
        )
        return text.startswith(prefixes) or (self.run is not None and text == self.run.id)

    def result(self, epoch: int) -> EpochCounts:
        """Return the result of an epoch in the run, counted from 1.

        Raises:
            RunFailed: The epoch has not ended, or the map no longer has its result.
        """
        at = epoch - 1 - self.ended + len(self.results)
        if not 0 <= at < len(self.results):
            first = self.ended - len(self.results) + 1
            raise RunFailed(
                f"the cluster map holds the results of epochs {first} to {self.ended}, not of epoch {epoch}"
            )
        return self.results[at]

    def live(self, role: str) -> list[str]:
        """Return the live nodes of one role, sorted by id."""
        return sorted(id for id, node in self.nodes.items() if node.role == role and node.live)

    def copies_address(self, server: str) -> str:
        """Return the address of a parameter server for the other servers."""
        node = self.nodes[server]
        return str(node.info.get(COPIES, "")) or node.address

    # --- stores --------------------------------------------------------------------------------

    def store(self, id: str) -> StoreRecord | None:
        """Return the store with an id."""
        return next((store for store in self.stores.values() if store.id == id), None)

    def bundle(self, store: str, home: str) -> BundleRecord | None:
        """Return a bundle by its store's id and its home."""
        name = next((name for name, record in self.stores.items() if record.id == store), "")
        record = self.bundles.get(bundle_key(name, home))
        return record if record is not None and record.store == store else None

    def primary(self, store: str, home: str) -> NodeRecord | None:
        """Return a bundle's primary server; None while there is none."""
        return self._primary_of(self.bundle(store, home))

    def _primary_of(self, bundle: BundleRecord | None) -> NodeRecord | None:
        if bundle is None or bundle.primary is None:
            return None
        name, incarnation = bundle.primary
        node = self.nodes.get(name)
        return node if node is not None and node.incarnation == incarnation else None

    @property
    def run_store(self) -> StoreRecord | None:
        """Store of the run; None until the run has a store."""
        return self.store(self.run.id) if self.run is not None else None

    @property
    def buckets(self) -> tuple[str, ...]:
        """Home of each bucket in the run's store; empty until the store is placed."""
        store = self.run_store
        return store.buckets if store is not None else ()

    @property
    def generation(self) -> int:
        """Version of the run's `buckets`."""
        store = self.run_store
        return store.generation if store is not None else 0

    def serving(self, store: StoreRecord) -> bool:
        """Return whether the primaries of all bundles in a store have values for all their shards."""
        name = next((name for name, record in self.stores.items() if record.id == store.id), "")
        for home in set(store.buckets):
            bundle = self.bundles.get(bundle_key(name, home))
            node = self._primary_of(bundle) if bundle is not None and bundle.store == store.id else None
            if node is None or served_word(store) not in node.serves:
                return False
        return bool(store.buckets)

    def pushers(self, store: StoreRecord) -> dict[int, tuple[int, frozenset[tuple[str, int]]]]:
        """Return the replicas that push to a store: generation of each, node and incarnation of its members.

        A run's workers push to the run's store, by replica. A client counts as a replica.
        """
        if store.program:
            if self.run is None or self.run.id != store.program:
                return {}
            return {
                replica: (
                    generation,
                    frozenset((name, self.nodes[name].incarnation) for name in self.members(replica)),
                )
                for replica, generation in self.replica_generations().items()
            }
        return {
            node.replica: (
                replica_generation([(node.incarnation, node.placed)], 1),
                frozenset({(name, node.incarnation)}),
            )
            for name, node in self.nodes.items()
            if node.role == "client" and node.live and node.store == store.id and node.placed
        }

    # --- the run -------------------------------------------------------------------------------

    @property
    def partitions(self) -> int:
        """Workers of one replica in this run."""
        return int(self.run.terms.get("partitions", 1)) if self.run is not None else 1

    @property
    def dealing(self) -> str:
        """Data server that leases the run's groups; empty while there is none."""
        dealer, run = self.dealer, self.run
        node = self.nodes.get(dealer.node) if dealer is not None else None
        if dealer is None or node is None or run is None or dealer.run != run.id:
            return ""
        return dealer.node if node.live and node.incarnation == dealer.incarnation else ""

    @property
    def dealer_address(self) -> str:
        """Address of the dealer; empty while there is none."""
        return self.nodes[self.dealing].address if self.dealing else ""

    def data_servers_for(self, replica: int) -> tuple[str, ...]:
        """Return the addresses of the run's ready data servers for a replica's workers. First comes the
        server that the workers stay with while it answers."""
        run = self.run
        ready = sorted(name for name in self.live("data") if run and self.nodes[name].ready == run.id)
        first = replica % len(ready) if ready else 0
        return tuple(self.nodes[name].address for name in (*ready[first:], *ready[:first]))

    def members(self, replica: int) -> tuple[str, ...]:
        """Return a replica's live workers, in the order of their parts."""
        named = [
            (node.partition, name)
            for name, node in self.nodes.items()
            if node.role == "worker" and node.live and node.replica == replica
        ]
        return tuple(name for _, name in sorted(named))

    def replica_generation(self, replica: int) -> int:
        """Return the generation of a replica; 0 if a worker is missing.

        The generation changes when a worker of the replica is replaced, or leaves and joins again.
        """
        members = [self.nodes[name] for name in self.members(replica)]
        return replica_generation([(node.incarnation, node.placed) for node in members], self.partitions)

    def live_replicas(self) -> tuple[int, ...]:
        """Return the replicas whose workers are all live and ready for the run; clocks wait only for
        these."""
        return tuple(sorted(self.replica_generations()))

    def replica_generations(self) -> dict[int, int]:
        """Return the generation of each live replica."""
        if self.run is None:
            return {}
        named: dict[int, list[NodeRecord]] = {}
        for node in self.nodes.values():
            if node.role == "worker" and node.live and node.replica >= 0:
                named.setdefault(node.replica, []).append(node)
        found = {}
        for replica, members in named.items():
            generation = self.replica_generation(replica)
            word = ready_word(self.run.id, generation)
            if generation and all(node.ready == word for node in members):
                found[replica] = generation
        return found


def must_train_all(results: Sequence[EpochCounts]) -> bool:
    """Return whether the next epoch must train all its groups.

    An epoch's order depends on the results since the last epoch without skipped groups. The map has only the
    last `RESULTS_KEPT` results, so one of them must be of such an epoch.

    Args:
        results: Results of the epochs before, also of the runs that the run continues.
    """
    newest = results[1 - RESULTS_KEPT :]
    return len(newest) == RESULTS_KEPT - 1 and all(each.skipped_groups for each in newest)


def replica_generation(members: Sequence[tuple[int, int]], partitions: int) -> int:
    """Return the number of a replica's set of workers; 0 if some are missing.

    Args:
        members: Each worker's incarnation and the map version of its assignment, in the order of their parts.
    """
    if len(members) != partitions:
        return 0
    text = ",".join(f"{incarnation}@{placed}" for incarnation, placed in members).encode()
    return int.from_bytes(blake2b(text, digest_size=7).digest(), "little") or 1


def ready_word(run: str, replica_generation: int) -> str:
    """Return the text that reports a worker ready for a run in one replica generation."""
    return f"{run}/{replica_generation}"


def failed_word(run: str, why: str) -> str:
    """Return the text that reports why a worker or data server cannot take part in a run."""
    return f"{run}: {why}"[:MOST_REASON]


def failure_of(node: NodeRecord, run: str) -> str:
    """Return why a node cannot take part in a run; empty if the node has not reported this."""
    before, _, why = node.failed.partition(": ")
    return why if before == run else ""
