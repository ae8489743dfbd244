"""Pure: the rules of training runs.

The permanent rules, each of which reads the map and may change it:

    fail      the run's store is lost, or too few workers can train the run, or a data server refuses the run
              and no other one may serve it, or the driver is lost before training: the run has failed
    number    a live worker without a slot gets one: a replica, and a part of its model
    deal      the run has no dealer, and a data server is ready: it deals out the groups
    begin     the store, a data server and the wanted number of replicas are ready: the run begins
    advance   the epoch has ended: the map gets its result; the next epoch is due: its groups are shared out

A replica has one worker for each part of its model, and restarts as a unit. If a worker is missing, the
replica waits until another worker has the slot and all are ready for the next replica generation. Free
workers fill gaps before they begin a replica, the lowest gap first; the rest wait as spares
(`assign_workers`). At most one replica lacks workers: if several would, the highest gives up its workers.

A run has as many replicas as its workers allow: replicas beyond the wanted number, and later ones, take part
as soon as they are ready. A run that continues another run begins with that run's current epoch, finished
groups and clock.

The dealer keeps no state that outlives it. The workers send the next dealer their leases, and then it reads
which groups of the epoch the shards have. A run without a data server waits for one.

The driver submits the run, and then its store with the model's arrays. The loss of a worker fails no run that
has enough other workers; the lost worker's slot is free for the next worker.

A run that trains outlives its driver. The run goes on to the end of its epoch, or with concurrent evaluation
to the end of its last epoch. Then it waits for another driver to take it over.

The driver sets the pieces of the program's blob (``run/<n>``), then the program's record (``run``). The map
has one program at a time; the program's stores leave the map with the program. No rule reads the blob.
"""

import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Annotated, Any

import msgspec

from adam_async.controller.records import info_problem
from adam_async.controller.store_rules import without_stores
from adam_async.messages.body import Count, Images, Row
from adam_async.option_types import fault_of
from adam_async.run.cluster_map import (
    DATA_FACTS,
    NO_SLOT,
    ClusterMap,
    DealerRecord,
    EpochRecord,
    NodeRecord,
    failure_of,
)
from adam_async.run.counts import RESULTS_KEPT, EpochCounts
from adam_async.run.epoch_shares import covers, share_out, warm_groups
from adam_async.run.training_program import ProgramPiece, ProgramRecord, TrainingTerms, joined_blob


class _WorkerInfo(msgspec.Struct):
    threads: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    in_flight: Count = 0


class _DataInfo(msgspec.Struct):
    name: str = ""
    source: str = ""
    shape: tuple[Row, Row, Row] = (1, 1, 1)
    classes: Images = 0
    train_images: Images = 0
    test_images: Images = 0
    digest: str = ""


_INFO: Mapping[str, type[msgspec.Struct]] = {"worker": _WorkerInfo, "data": _DataInfo}
"""Types of those `NodeRecord.info` fields that other roles use in calculations, by role."""

PHASES: Mapping[str, str] = {
    "preparing": "is preparing",
    "training": "is training",
    "between": "is training",
    "finished": "has finished",
    "failed": "has failed",
}
"""Phases of a run in words."""


# --- records -----------------------------------------------------------------------------------


def set_piece(cluster: ClusterMap, key: str, new: ProgramPiece) -> ClusterMap:
    """Return the map with a new piece of the blob of a program in submission."""
    piece = msgspec.structs.replace(new, changed=cluster.version + 1)
    return _with(cluster, pieces={**cluster.pieces, key: piece})


def set_epoch(cluster: ClusterMap, new: EpochRecord) -> ClusterMap | str:
    """Return the map with a new record of the epoch, or the fault of the record."""
    # Without a run, no role reads the epoch.
    problem = _check_epoch(new, cluster.epoch, cluster.run) if cluster.run is not None else ""
    return problem or _with(cluster, epoch=msgspec.structs.replace(new, changed=cluster.version + 1))


def set_program(cluster: ClusterMap, new: ProgramRecord) -> ClusterMap | str:
    """Return the map with a new record of its program, or what is wrong with the record."""
    old, new = cluster.run, msgspec.structs.replace(new, changed=cluster.version + 1)
    if problem := fault_of(new):
        return problem
    goes_on = old is not None and old.id == new.id
    if old is not None and goes_on:
        new = new.with_fixed_of(old)
    else:
        joined = joined_blob(new, cluster.pieces)
        if isinstance(joined, str):
            return joined
        new = joined
    if problem := _check_run(new):
        return problem
    changed = _with(cluster, run=new)
    if old is not None and not old.over and new.driven_by != old.driven_by:
        if cluster.driven:
            return f"run {old.id} is in progress, and its driver {old.driver} is live"
        if not changed.driven:
            return f"its driver {new.driver} has not joined in this incarnation"
    if old is not None and goes_on:
        return _takeover_problem(old, new) or changed
    nodes = {
        name: msgspec.structs.replace(node, ready="", failed="", **(NO_SLOT if node.role == "worker" else {}))
        for name, node in cluster.nodes.items()
    }
    return _with(changed, pieces={}, nodes=nodes, epoch=None, results=(), ended=0, dealer=None)


def _check_run(program: ProgramRecord) -> str:
    """Return what is wrong with the terms or phase in a run's record; empty if nothing is."""
    try:
        _terms(program)
    except msgspec.ValidationError as error:
        return f"terms: {error}"
    if program.phase not in PHASES:
        return f"unknown phase {program.phase[:80]!r} of a run; known: {', '.join(PHASES)}"
    return ""


def _takeover_problem(old: ProgramRecord, new: ProgramRecord) -> str:
    """Return what is wrong with a new record that has another driver; empty for the same driver."""
    if new.driven_by == old.driven_by:
        return ""
    if old.over:
        return f"run {old.id} is over ({old.phase}): it takes no other driver"
    taken = msgspec.structs.replace(old, driver=new.driver, incarnation=new.incarnation, changed=new.changed)
    return "" if new == taken else f"a driver that takes run {old.id} over sets driver and incarnation only"


def check_node(record: NodeRecord) -> str:
    """Return what is wrong with a node's record for runs; empty if nothing is."""
    kind = _INFO.get(record.role)
    if kind is not None and (problem := info_problem(record, kind)):
        return problem
    if record.role == "data" and record.live:
        images = record.info.get("train_images")
        if not isinstance(images, int) or images < 1:
            return f"info of a data server needs train_images, a positive number, not {images!r}"
    return ""


# --- standing rules ----------------------------------------------------------------------------


def standing(cluster: ClusterMap) -> ClusterMap:
    """Drop the stores of earlier programs, and apply the standing rules."""
    cluster = _drop_stores(cluster)
    if cluster.run is None or cluster.run.over:
        return cluster
    for rule in (_number_workers, _name_dealer, _begin, _advance):
        cluster = rule(cluster)
    return cluster


def in_use(cluster: ClusterMap) -> frozenset[str]:
    """Return the nodes that the map has to keep after their departure."""
    return frozenset({cluster.run.driver}) if cluster.run is not None else frozenset()


def program_lines(before: ClusterMap, after: ClusterMap) -> Iterator[str]:
    """Yield a log line for each important change of the program from one map to the next."""
    run, ran = after.run, before.run
    if run is None:
        return
    if ran is not None and ran.id == run.id and not run.over:
        yield from _driver_lines(before, after, run)
        yield from _dealer_lines(before, after, run)
    if ran and (ran.id, ran.phase, ran.epoch) == (run.id, run.phase, run.epoch):
        return
    if run.phase == "failed":
        yield f"run {run.id} failed: {run.reason}"
    elif run.phase == "finished" and run.evaluated:
        accuracy = run.evaluated[-1].test_accuracy
        yield f"run {run.id} has finished with {accuracy:.2%} of the test images correct"
    elif run.phase in ("preparing", "finished") or ran is None or ran.phase == "preparing":
        yield f"run {run.id} {PHASES[run.phase]}"


def check_invariants(cluster: ClusterMap) -> None:
    """Assert the invariants after a command."""
    workers = [cluster.nodes[name] for name in cluster.live("worker")]
    taken = Counter((node.replica, node.partition) for node in workers if node.replica >= 0)
    assert all(count == 1 for count in taken.values()), f"two live workers share a slot: {taken}"
    run, epoch = cluster.run, cluster.epoch
    if run is not None and run.phase == "training":
        assert epoch is not None
        # The next epoch begins with the next dealer.
        is_due = epoch.ended and epoch.number == run.epoch - 1 and not cluster.dealing
        assert is_due or epoch.number == run.epoch, f"epoch {epoch.number} in place of {run.epoch}"
        assert covers(epoch.shares.values(), groups=epoch.groups, round_groups=epoch.round_groups), (
            epoch.shares
        )
    if run is not None and not run.over:
        partitions = _terms(run).partitions
        sizes = Counter(node.replica for node in workers)
        spares = sizes.pop(-1, 0)
        lacking = [replica for replica, size in sizes.items() if size < partitions]
        assert spares < partitions, f"{spares} workers wait that could begin a replica"
        assert not spares or not lacking, f"{spares} workers wait, and replicas {lacking} lack some"
        assert len(lacking) <= 1, f"replicas {lacking} lack workers that others of them have"


def _check_epoch(record: EpochRecord, old: EpochRecord | None, run: ProgramRecord) -> str:
    """Return what is wrong with a change of a run's epoch; empty if nothing is.

    The controllers begin epochs and deal out their shares. Nodes set only the drain, end and result.
    """
    if old is None:
        return "no epoch is in progress, and the controllers begin each of them"
    fixed = msgspec.structs.replace(
        record, drain=old.drain, ended=old.ended, result=old.result, changed=old.changed
    )
    if fixed != old:
        return f"only drain, ended and result of epoch {old.number} of run {old.run} can be set"
    result = record.result
    ends, ranges = [0, *chain.from_iterable(result.skipped_groups), old.groups], result.skipped_groups
    if any(after < before for before, after in pairwise(ends)) or any(
        first == stop for first, stop in ranges
    ):
        return f"result: skipped_groups are not ranges in order within the {old.groups} groups of the epoch"
    groups = sum(stop - first for first, stop in ranges)
    room = groups * _terms(run).images_per_group
    if result.skipped > room:
        return f"result: skipped is {result.skipped}, and the skipped groups have at most {room} images"
    if len(result.behind) > groups or any(after <= before for before, after in pairwise(result.behind)):
        return f"result: behind has {len(result.behind)} replicas in no order or for {groups} skipped groups"
    return ""


def _terms(run: ProgramRecord) -> TrainingTerms:
    """Return the terms of a run, which were checked at its submission."""
    return msgspec.convert(run.terms, TrainingTerms)


def _with(cluster: ClusterMap, **fields: Any) -> ClusterMap:
    return msgspec.structs.replace(cluster, **fields)


def _drop_stores(cluster: ClusterMap) -> ClusterMap:
    """Return the map without the stores of programs other than the map's program."""
    program = cluster.run.id if cluster.run is not None else ""
    old = {name for name, store in cluster.stores.items() if store.program and store.program != program}
    return without_stores(cluster, old) if old else cluster


def fail_if_lost(cluster: ClusterMap) -> ClusterMap:
    """Apply the rule `fail`."""
    run, store = cluster.run, cluster.run_store
    if run is None or run.over:
        return cluster
    reason = lost = ""
    if run.phase == "preparing" and not cluster.driven:
        reason = f"its driver {run.driver} was lost before training"
    if store is not None and store.phase == "failed":
        lost, reason = store.lost, store.reason
    if refusal := _data_refusal(cluster, run):
        lost = "the data server"
        reason = f"{lost} cannot serve the run: {refusal}"
    if not reason:
        lost, reason = _refusal(cluster, run)
    if not reason:
        return cluster
    changed = cluster.version + 1
    failed = msgspec.structs.replace(run, phase="failed", reason=reason, lost=lost, changed=changed)
    return _with(cluster, run=failed)


def _driver_lines(before: ClusterMap, after: ClusterMap, run: ProgramRecord) -> Iterator[str]:
    """Yield a line for the loss of a run's driver, its return, and its successor."""
    if before.driven and not after.driven:
        yield (
            f"run {run.id} waits for a driver, because {run.driver} is lost: "
            f"adam-async train --controller ... --attach {shlex.quote(run.id)} takes it over"
        )
    elif after.driven and not before.driven:
        yield f"run {run.id} goes on with driver {run.driver}"


def _dealer_lines(before: ClusterMap, after: ClusterMap, run: ProgramRecord) -> Iterator[str]:
    """Yield a line for the loss of a run's dealer, and for its successor."""
    if before.dealing and not after.dealing:
        yield f"run {run.id} waits for a data server, because {before.dealing} is lost"
    elif before.dealer is not None and after.dealing and before.dealer != after.dealer:
        yield f"run {run.id} goes on with data server {after.dealing}, after the loss of {before.dealer.node}"


def _data_refusal(cluster: ClusterMap, run: ProgramRecord) -> str:
    """Return a data server that cannot serve the run, and the reason; an empty text while others may serve
    it.

    If a server that was ready refuses the run, the run's own transforms have failed, and they would fail on
    all other servers, too.
    """
    data = {name: node for name, node in cluster.nodes.items() if node.role == "data"}
    refusals = {name: why for name, node in data.items() if (why := failure_of(node, run.id))}
    served = [name for name in refusals if data[name].live and data[name].ready == run.id]
    # A run that has had a dealer waits for another one, even if a server with other data joins.
    others = cluster.dealer is not None or any(name not in refusals for name in cluster.live("data"))
    if not refusals or (not served and others):
        return ""
    name = (served or list(refusals))[0]
    return f"{name}: {refusals[name]}"


def _refusal(cluster: ClusterMap, run: ProgramRecord) -> tuple[str, str]:
    """Return a worker that cannot train the run, and the reason; empty texts while enough others can.

    The record of a single worker must not end a run, because other workers may be able to train it.
    """
    workers = cluster.live("worker")
    refusals = {name: why for name in workers if (why := failure_of(cluster.nodes[name], run.id))}
    needed = _terms(run).replicas * cluster.partitions if run.phase == "preparing" else 1
    if not refusals or len(workers) - len(refusals) >= needed:
        return "", ""
    name, why = next(iter(refusals.items()))
    return name, f"{name} cannot train the run: {why}"


def _number_workers(cluster: ClusterMap) -> ClusterMap:
    slots = {
        name: (cluster.nodes[name].replica, cluster.nodes[name].partition) for name in cluster.live("worker")
    }
    changed = cluster.version + 1
    moved = {
        name: msgspec.structs.replace(
            cluster.nodes[name], replica=replica, partition=partition, placed=changed, changed=changed
        )
        for name, (replica, partition) in assign_workers(slots, cluster.partitions).items()
        if (replica, partition) != slots[name]
    }
    return _with(cluster, nodes={**cluster.nodes, **moved}) if moved else cluster


def _name_dealer(cluster: ClusterMap) -> ClusterMap:
    """Name the first ready data server if the run has no dealer."""
    run, nodes, record = cluster.run, cluster.nodes, cluster.dealer
    assert run is not None
    ready = [name for name in cluster.live("data") if nodes[name].ready == run.id]
    if cluster.dealing or not ready:
        return cluster
    facts = {key: nodes[ready[0]].info.get(key) for key in DATA_FACTS}
    dealer = DealerRecord(
        run=run.id,
        term=record.term + 1 if record is not None else 1,
        node=ready[0],
        incarnation=nodes[ready[0]].incarnation,
        data=record.data if record is not None else facts,
        changed=cluster.version + 1,
    )
    # With a new version of the epoch, a late report of its end by the dealer before is a conflict.
    epoch = cluster.epoch and msgspec.structs.replace(cluster.epoch, changed=cluster.version + 1)
    return _with(cluster, dealer=dealer, epoch=epoch)


def _begin(cluster: ClusterMap) -> ClusterMap:
    run, store = cluster.run, cluster.run_store
    assert run is not None
    if run.phase != "preparing" or store is None or store.phase != "open" or not cluster.dealing:
        return cluster
    terms = _terms(run)
    if len(cluster.live_replicas()) < terms.replicas:
        return cluster
    number = terms.start.epoch if terms.start is not None else 1
    started = msgspec.structs.replace(run, phase="training", epoch=number, changed=cluster.version + 1)
    return _with(cluster, run=started, results=(), ended=number - 1)


def _advance(cluster: ClusterMap) -> ClusterMap:
    run, epoch = cluster.run, cluster.epoch
    assert run is not None
    if epoch is not None and epoch.ended and run.phase == "training" and run.epoch == epoch.number:
        terms = _terms(run)
        goes_on = terms.concurrent and epoch.number < terms.epochs
        changes: dict[str, Any] = {"epoch": run.epoch + 1} if goes_on else {"phase": "between"}
        run = msgspec.structs.replace(run, changed=cluster.version + 1, **changes)
        results = (*cluster.results, epoch.result)[-RESULTS_KEPT:]
        cluster = _with(cluster, run=run, results=results, ended=epoch.number)
    due = run.phase == "training" and (epoch is None or epoch.number < run.epoch)
    return _with(cluster, epoch=_share_out(cluster, run)) if due and cluster.dealing else cluster


def _share_out(cluster: ClusterMap, run: ProgramRecord) -> EpochRecord:
    data = cluster.nodes[cluster.dealing]
    terms = _terms(run)
    images = int(data.info["train_images"]) - terms.validation
    groups = -(-max(images, 1) // terms.images_per_group)
    replicas = cluster.live_replicas() or tuple(range(terms.replicas))
    round_groups = terms.round_groups
    start = terms.start if terms.start is not None and terms.start.epoch == run.epoch else None
    if start is not None:
        clock, skipped, behind = start.clock, start.skipped, start.behind
    else:
        before = cluster.results[-1] if cluster.results else EpochCounts()
        clock, skipped, behind = before.clock, before.skipped, before.behind
    warm = warm_groups(terms.warm_start, epoch=run.epoch, groups=groups, round_groups=round_groups)
    carried = min(-(-skipped // terms.images_per_group), groups)
    return EpochRecord(
        run=run.id,
        number=run.epoch,
        groups=groups,
        shares=share_out(replicas, groups=groups, round_groups=round_groups, warm=warm, carried=carried),
        round_groups=round_groups,
        carried=carried,
        behind=behind,
        first_clock=clock if round_groups else 0,
        changed=cluster.version + 1,
    )


Slot = tuple[int, int]
"""Replica and part; ``(-1, 0)`` for a spare worker."""


def assign_workers(slots: Mapping[str, Slot], partitions: int) -> dict[str, Slot]:
    """Assign workers to slots.

    Args:
        slots: The live workers with their present slots; each slot has one worker.

    Returns:
        All workers with their slots; a worker of a complete replica keeps its slot.
    """
    placed = {name: slot for name, slot in sorted(slots.items()) if slot[0] >= 0}
    free = sorted(set(slots) - set(placed))
    while True:
        gaps = _gaps(placed.values(), partitions)
        while free and gaps:
            placed[free.pop(0)] = gaps.pop(0)
        lacking = sorted({replica for replica, _ in gaps})
        if len(lacking) < 2:
            break
        given_up = [name for name, (replica, _) in placed.items() if replica == lacking[-1]]
        free = sorted(given_up)
        for name in given_up:
            del placed[name]
    taken = {replica for replica, _ in placed.values()}
    unused = (replica for replica in itertools.count() if replica not in taken)
    while len(free) >= partitions:
        replica = next(unused)
        placed.update((free.pop(0), (replica, part)) for part in range(partitions))
    return {**placed, **dict.fromkeys(free, (-1, 0))}


def _gaps(placed: Iterable[Slot], partitions: int) -> list[Slot]:
    """Return the empty slots of replicas with workers, the lowest first."""
    taken = set(placed)
    replicas = sorted({replica for replica, _ in taken})
    everything = ((replica, part) for replica in replicas for part in range(partitions))
    return [slot for slot in everything if slot not in taken]
