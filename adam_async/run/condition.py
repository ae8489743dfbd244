"""Pure: how well a cluster is: losses that it survives, what limits it, who takes part, waits, a verdict.

Status, live table, events and dashboard have these values from here. They are those of two polls of the
roles: the counts now, and earlier ones, of which the differences are rates. Without earlier counts the rates
are those since the start of the run.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import msgspec

from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.counts import ControllerCounts, Counts, DataCounts, ServerCounts, WorkerCounts
from adam_async.run.run_copies import BundleCopies, RunCopies

Verdict = Literal["well", "degraded", "ending"]

Limit = Literal["", "compute", "wire", "server", "clock", "input", "loop"]
"""Limit of the rate of a run; empty if unknown.

compute: threads that train. wire: the way of pushes and pulls. server: parameter servers that apply pushes.
clock: the slowest replica. input: images of data servers. loop: event loops of workers, which are late.
"""

LATE_S = 0.1
"""Median lateness of the timers of a worker's loop above which the loop limits the run, in seconds."""

BUSY = 0.8
"""Share of a core that a server's process uses, above which the server limits waits for pushes."""

_Counts = TypeVar("_Counts", bound=Counts)


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One wait that holds up a run or a store."""

    who: str
    """Node that waits, or the pushes that wait."""
    what: str
    """Missing thing."""
    deadline_s: float | None
    """Time after which the wait fails, in seconds; None for a wait without an end."""
    cure: str
    """Action that ends the wait."""

    def __str__(self) -> str:
        most = "without a deadline" if self.deadline_s is None else f"at most {self.deadline_s:g} s"
        return f"{self.who}: waits for {self.what}, {most}; {self.cure}"


class LostRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role that was lost, and that no other one has replaced."""

    node: str
    role: str
    since: float | None
    """Time of the loss, in seconds since 1970, by the clock of the leading controller; None if unknown."""


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """How well a run and the stores of a cluster are."""

    verdict: Verdict
    """``degraded``: copies, roles or replicas are lacking. ``ending``: the run or a store has failed, or all
    copies of a shard are lost."""
    reasons: tuple[str, ...] = ()
    """Reasons of a verdict other than ``well``, in words, the worst first."""
    survives: int | None = None
    """Losses of servers or controllers that run and stores survive now, whichever roles they hit; None if
    neither exists."""
    weakest: str = ""
    """Roles that survive the fewest losses: those with the copies of a bundle, or the controllers."""
    limited_by: Limit = ""
    live: int = 0
    """Number of replicas whose workers are all live and ready."""
    taking_part: int = 0
    """Number of replicas that have trained a group between the two polls."""
    waits: tuple[Wait, ...] = ()
    lost: tuple[LostRole, ...] = ()

    @property
    def line(self) -> str:
        """The numbers in words."""
        words = []
        if self.survives is not None:
            losses = "1 loss" if self.survives == 1 else f"{self.survives} losses"
            words.append(f"survives {losses} ({self.weakest})")
        if self.limited_by:
            words.append(f"limited by {self.limited_by}")
        return "; ".join((*words, f"{self.live} live, {self.taking_part} taking part"))


def condition_of(
    cluster: ClusterMap,
    counts: Mapping[str, Counts],
    copies: Mapping[str, RunCopies],
    *,
    controllers: int,
    earlier: Mapping[str, Counts] = {},
    waits: Waits,
) -> Condition:
    """Return the condition of a cluster.

    Args:
        counts: Counts of the roles that answered, by node.
        copies: Copies of the shards of the run, and of each store, by the words for them.
        controllers: Number of controllers that should run; 0 if unknown.
        earlier: Counts at the poll before.
        waits: Deadlines of the run.
    """
    replicas = cluster.live_replicas()
    lost = _lost_roles(cluster, replicas)
    ending, degraded = _faults(cluster, counts, copies, lost=lost, controllers=controllers)
    survives, weakest = _survived(copies, counts, controllers=controllers)
    return Condition(
        verdict="ending" if ending else "degraded" if degraded else "well",
        reasons=(*ending, *degraded),
        survives=survives,
        weakest=weakest,
        limited_by=limit_of(counts, earlier) if cluster.in_progress else "",
        live=len(replicas),
        taking_part=_taking_part(cluster, counts, earlier),
        waits=_waits(cluster, counts, copies, waits) if cluster.in_progress or copies else (),
        lost=lost,
    )


def _lost_roles(cluster: ClusterMap, replicas: Iterable[int]) -> tuple[LostRole, ...]:
    """Return the lost roles; a worker whose replica is whole again counts as replaced."""
    wanted = cluster.run.terms.get("replicas", 0) if cluster.run is not None else 0
    complete = not cluster.in_progress or len(tuple(replicas)) >= wanted
    return tuple(
        LostRole(node=name, role=node.role, since=node.lost_at or None)
        for name, node in sorted(cluster.nodes.items())
        if not node.live and not node.left and node.role in ("ps", "data", *(() if complete else ("worker",)))
    )


def _faults(
    cluster: ClusterMap,
    counts: Mapping[str, Counts],
    copies: Mapping[str, RunCopies],
    *,
    lost: Iterable[LostRole],
    controllers: int,
) -> tuple[list[str], list[str]]:
    """Return the reasons why run or stores end, and the things that are lacking."""
    ending, lacking, run = [], [], cluster.run
    if run is not None and run.phase == "failed":
        ending.append(f"run {run.id} has failed: {run.reason}")
    for name, store in sorted(cluster.stores.items()):
        if store.phase == "failed" and not (run is not None and store.id == run.id):
            ending.append(f"store {name} has failed: {store.reason}")
    for owner, each in copies.items():
        ending += [f"all copies of {bundle.home} of {owner} are lost" for bundle in _without_copy(each)]
        lacking += [
            f"bundle {bundle.home} of {owner} has {len(bundle.in_sync)} of {each.copies} copies in sync"
            for bundle in each.lagging
            if bundle.in_sync
        ]
    lacking += [f"{each.node} is lost" for each in lost]
    answering = len(_of(ControllerCounts, counts))
    if 0 < answering < controllers:
        lacking.append(f"{answering} of {controllers} controllers answer")
    if run is not None and not run.over:
        wanted, live = run.terms.get("replicas", 0), len(cluster.live_replicas())
        if run.phase != "preparing" and live < wanted:
            lacking.append(f"{live} of {wanted} replicas are live")
        if not cluster.driven:
            lacking.append(f"the driver of run {run.id}, {run.driver}, is lost")
    return ending, lacking


def _without_copy(copies: RunCopies) -> list[BundleCopies]:
    return [bundle for bundle in copies.bundles if not bundle.in_sync]


def _survived(
    copies: Mapping[str, RunCopies], counts: Mapping[str, Counts], *, controllers: int
) -> tuple[int | None, str]:
    """Return the number of losses that run and stores survive, and the roles that survive the fewest."""
    found = [
        (max(len(bundle.in_sync) - 1, 0), f"the servers of {bundle.home} of {owner}")
        for owner, each in copies.items()
        for bundle in each.bundles
    ]
    answering = len(_of(ControllerCounts, counts))
    if found and answering:
        total = max(controllers, answering)
        found.append((max(answering - total // 2 - 1, 0), "the controllers"))
    return min(found, default=(None, ""), key=lambda each: each[0])


def limit_of(counts: Mapping[str, Counts], earlier: Mapping[str, Counts]) -> Limit:
    """Return what limits the rate of a run: the largest of the shares of the time of its workers.

    A worker computes, waits for servers, for images or for clocks, or its event loop is late. A wait for
    servers is one of the wire, unless a server uses `BUSY` of a core.
    """
    workers = _of(WorkerCounts, counts)
    compute, server, image, clock, passed_s = 0.0, 0.0, 0.0, 0.0, 0.0
    for each in workers:
        before = earlier.get(each.node)
        before = before if isinstance(before, WorkerCounts) and before.pid == each.pid else None
        span_s = each.age_s - (before.age_s if before is not None else 0.0)
        passed_s += span_s
        if each.pool is not None:
            busy_s = each.pool.busy_s - (before.pool.busy_s if before is not None and before.pool else 0.0)
            compute += busy_s / max(each.pool.threads, 1)
        spent = [
            max(now - then, 0.0)
            for now, then in zip(
                each.waited_s, before.waited_s if before is not None else (0.0,) * 3, strict=True
            )
        ]
        server, image, clock = server + spent[0], image + spent[1], clock + spent[2]
    if passed_s <= 0.0 or not compute + server + image + clock:
        return ""
    late = sorted(each.lag_s.p50 for each in workers if each.lag_s is not None)
    if late and late[len(late) // 2] > LATE_S:
        return "loop"
    named: tuple[tuple[float, Limit], ...] = (
        (compute, "compute"),
        (server, _push_limit(counts, earlier)),
        (image, "input"),
        (clock, "clock"),
    )
    return max(named, key=lambda each: each[0])[1]


def _push_limit(counts: Mapping[str, Counts], earlier: Mapping[str, Counts]) -> Limit:
    """Return whether pushes wait for a busy server or for the wire."""
    busiest = 0.0
    for each in _of(ServerCounts, counts):
        before = earlier.get(each.node, Counts())
        span_s = each.age_s - before.age_s
        busiest = max(busiest, (each.cpu_s - before.cpu_s) / span_s if span_s > 0 else 0.0)
    return "server" if busiest >= BUSY else "wire"


def _taking_part(cluster: ClusterMap, counts: Mapping[str, Counts], earlier: Mapping[str, Counts]) -> int:
    """Return the number of replicas with a worker that has trained a group since the earlier counts."""
    found = set()
    for each in _of(WorkerCounts, counts):
        before, node = earlier.get(each.node), cluster.nodes.get(each.node)
        done = _groups(each) - (_groups(before) if isinstance(before, WorkerCounts) else 0)
        if done > 0 and node is not None and node.live and node.replica >= 0:
            found.add(node.replica)
    return len(found)


def _groups(counts: WorkerCounts) -> int:
    return counts.data.groups if counts.data is not None else 0


def _waits(
    cluster: ClusterMap, counts: Mapping[str, Counts], copies: Mapping[str, RunCopies], waits: Waits
) -> tuple[Wait, ...]:
    found = [
        Wait(
            who=each.node,
            what=each.waiting_for,
            deadline_s=waits.clock_s,
            cure="restart the worker of that replica, or allow more steps with --consistency ssp:N",
        )
        for each in sorted(_of(WorkerCounts, counts), key=lambda each: each.node)
        if each.waiting_for
    ]
    for owner, each in copies.items():
        found += [
            Wait(
                who=f"pushes to {bundle.home} of {owner}",
                what=f"{each.min_in_sync - len(bundle.in_sync)} more copies in sync",
                deadline_s=waits.copies_s,
                cure="start a parameter server: adam-async ps --controller",
            )
            for bundle in each.lagging
            if 0 < len(bundle.in_sync) < each.min_in_sync
        ]
    if cluster.run is not None and cluster.run.phase == "training":
        run = f"run {cluster.run.id}"
        start = "start one: adam-async "
        if not cluster.live_replicas():
            found.append(
                Wait(
                    who=run,
                    what="a live replica",
                    deadline_s=waits.replica_s,
                    cure=f"{start}worker --join",
                )
            )
        if not cluster.dealing:
            found.append(
                Wait(
                    who=run,
                    what="a data server",
                    deadline_s=waits.replica_s,
                    cure=f"{start}data --controller",
                )
            )
    if cluster.in_progress and not cluster.driven:
        found.append(
            Wait(
                who=f"run {cluster.run.id}" if cluster.run is not None else "",
                what="a driver",
                deadline_s=None,
                cure="adam-async train --attach takes the run over",
            )
        )
    return tuple(found)


def images_per_s(counts: Mapping[str, Counts], earlier: Mapping[str, Counts]) -> float:
    """Return the images per second between two polls of an epoch; without earlier counts, of the epoch."""
    dealer = next((each for each in _of(DataCounts, counts) if each.term), None)
    if dealer is None:
        return 0.0
    before = earlier.get(dealer.node)
    if isinstance(before, DataCounts) and (before.term, before.epoch) == (dealer.term, dealer.epoch):
        span_s = dealer.age_s - before.age_s
        if span_s > 0:
            return max(dealer.images - before.images, 0) / span_s
    return dealer.images / dealer.train_s if dealer.train_s else 0.0


def _of(kind: type[_Counts], counts: Mapping[str, Counts]) -> list[_Counts]:
    return [each for each in counts.values() if isinstance(each, kind)]
