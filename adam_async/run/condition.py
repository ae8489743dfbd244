"""Pure: how well a cluster is: losses that it survives, what limits it, who takes part, waits, a verdict.

Status, live table, events and metrics have these values from here. The facts come from two polls of the
roles: the current counts, and earlier ones, whose differences give rates. Without earlier counts the rates
are those since the start of the run.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.counts import ControllerCounts, Counts, DataCounts, ServerCounts, WorkerCounts, of_kind
from adam_async.run.run_copies import RunCopies

Verdict = Literal["well", "degraded", "ending"]

Limit = Literal["", "compute", "wire", "server", "clock", "input", "loop"]
"""The limit of a run's rate; empty if unknown.

compute: threads that train. wire: the transfer of pushes and pulls. server: parameter servers that apply
pushes. clock: the slowest replica. input: images from data servers. loop: workers' event loops, which are
late.
"""

LATE_S = 0.1
"""Median lateness in seconds of the timers in a worker's loop, above which the loop limits the run."""

BUSY = 0.8
"""Share of a core that a server's process uses, above which waits for pushes count as the server's limit."""

MOST_WAITED_FOR = 200
"""Maximum length of a worker's wait as text, in characters: a table draws a longer text slowly."""

CopiesOf = Mapping[str, RunCopies]
"""Copies of the shards, whose owner is given in words: the run, or a store."""

CountsOf = Mapping[str, Counts]
"""Counts of the roles that answered, by node."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A wait that holds up a run or a store."""

    who: str
    """Node that waits, or the pushes that wait."""
    what: str
    """Missing thing."""
    deadline_s: float | None
    """Time in seconds after which the wait fails; None for an endless wait."""
    cure: str
    """Action that ends the wait."""

    def __str__(self) -> str:
        most = "without a deadline" if self.deadline_s is None else f"at most {self.deadline_s:g} s"
        return f"{self.who}: waits for {self.what}, {most}; {self.cure}"


class LostRole(msgspec.Struct, frozen=True, kw_only=True):
    """A lost role that no other role has replaced."""

    node: str
    role: str
    since: float | None
    """Time of the loss in seconds since 1970, by the leading controller's clock; None if unknown."""


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a run, and of a cluster's stores."""

    verdict: Verdict
    """``degraded``: copies, roles or replicas are lacking. ``ending``: the run or a store has failed, or all
    copies of a shard are lost."""
    reasons: tuple[str, ...] = ()
    """Reasons of a verdict other than ``well``, in words, the worst first."""
    survives: int | None = None
    """Number of lost servers or controllers that run and stores survive now, whichever are lost; None without
    run and stores."""
    weakest: str = ""
    """Roles that survive the fewest losses: those with a bundle's copies, or the controllers."""
    limited_by: Limit = ""
    live: int = 0
    """Number of replicas whose workers are all live and ready."""
    taking_part: int = 0
    """Number of replicas that have trained a group between the two polls."""
    waits: tuple[Wait, ...] = ()
    lost: tuple[LostRole, ...] = ()

    @property
    def judgement(self) -> str:
        """The verdict with its reasons, in words."""
        return f"{self.verdict}{': ' if self.reasons else ''}{'; '.join(self.reasons)}"

    @property
    def survival(self) -> str:
        """The losses that run and stores survive, in words; empty without run and stores."""
        if self.survives is None:
            return ""
        losses = "1 loss" if self.survives == 1 else f"{self.survives} losses"
        return f"survives {losses} ({self.weakest})"

    @property
    def line(self) -> str:
        """The numbers in words."""
        words = [self.survival] if self.survival else []
        if self.limited_by:
            words.append(f"limited by {self.limited_by}")
        return "; ".join((*words, f"{self.live} live, {self.taking_part} taking part"))


def condition_of(
    cluster: ClusterMap,
    counts: CountsOf,
    copies: CopiesOf,
    *,
    controllers: int,
    earlier: CountsOf,
    waits: Waits,
) -> Condition:
    """Return the condition of a cluster.

    Args:
        controllers: Number of controllers that should run; 0 if unknown.
        earlier: Counts at the poll before.
        waits: Deadlines of the run.
    """
    lost = tuple(_lost_roles(cluster))
    ending = tuple(_ends(cluster, copies))
    lacking = tuple(_lacks(cluster, counts, copies, lost, controllers))
    survives, weakest = _survived(copies, len(of_kind(ControllerCounts, counts.values())), controllers)
    return Condition(
        verdict="ending" if ending else "degraded" if lacking else "well",
        reasons=ending + lacking,
        survives=survives,
        weakest=weakest,
        limited_by=limit_of(counts, earlier) if cluster.in_progress else "",
        live=len(cluster.live_replicas()),
        taking_part=_taking_part(cluster, counts, earlier),
        waits=tuple(_waits(cluster, counts, copies, waits)),
        lost=lost,
    )


def _wanted(cluster: ClusterMap) -> int:
    """Return the number of replicas that should be live."""
    run = cluster.run
    return (
        run.terms.get("replicas", 1) if run is not None and run.phase not in ("preparing", "finished") else 0
    )


def _lost_roles(cluster: ClusterMap) -> Iterator[LostRole]:
    """Yield the lost roles; a worker counts as replaced if all replicas are live."""
    workers = ("worker",) if len(cluster.live_replicas()) < _wanted(cluster) else ()
    for name, node in sorted(cluster.nodes.items()):
        if not node.live and not node.left and node.role in ("ps", "data", *workers):
            yield LostRole(node=name, role=node.role, since=node.lost_at or None)


def _ends(cluster: ClusterMap, copies: CopiesOf) -> Iterator[str]:
    """Yield the reasons why the run or stores end."""
    run = cluster.run
    if run is not None and run.phase == "failed":
        yield f"run {run.id} has failed: {run.reason}"
    for name, store in sorted(cluster.stores.items()):
        if store.phase == "failed" and not (run is not None and store.id == run.id):
            yield f"store {name} has failed: {store.reason}"
    for owner, each in copies.items():
        yield from (
            f"all copies of {one.home} of {owner} are lost" for one in each.bundles if not one.in_sync
        )


def _lacks(
    cluster: ClusterMap, counts: CountsOf, copies: CopiesOf, lost: tuple[LostRole, ...], controllers: int
) -> Iterator[str]:
    """Yield the things that are lacking."""
    for owner, each in copies.items():
        for bundle in each.lagging:
            if bundle.in_sync:
                have = f"{len(bundle.in_sync)} of {each.copies} copies in sync"
                yield f"bundle {bundle.home} of {owner} has {have}"
    yield from (f"{each.node} is lost" for each in lost)
    answering, live = len(of_kind(ControllerCounts, counts.values())), len(cluster.live_replicas())
    if 0 < answering < controllers:
        yield f"{answering} of {controllers} controllers answer"
    if cluster.run is not None and cluster.in_progress:
        if live < _wanted(cluster):
            yield f"{live} of {_wanted(cluster)} replicas are live"
        if not cluster.driven:
            yield f"the driver of run {cluster.run.id}, {cluster.run.driver}, is lost"


def _survived(copies: CopiesOf, answering: int, controllers: int) -> tuple[int | None, str]:
    """Return the number of losses that run and stores survive, and the roles that survive the fewest."""
    found = [
        (max(len(bundle.in_sync) - 1, 0), f"the servers of {bundle.home} of {owner}")
        for owner, each in copies.items()
        for bundle in each.bundles
    ]
    if found and answering:
        majority = max(controllers, answering) // 2 + 1
        found.append((max(answering - majority, 0), "the controllers"))
    return min(found, default=(None, ""), key=lambda each: each[0])


def limit_of(counts: CountsOf, earlier: CountsOf) -> Limit:
    """Return what limits a run's rate: whatever takes the largest share of its workers' time.

    A worker computes, waits for servers, images or clocks, or has a late event loop. A wait for servers is
    one of the wire, unless a server uses `BUSY` of a core.
    """
    workers = of_kind(WorkerCounts, counts.values())
    spent = [0.0] * 4
    for each in workers:
        before = earlier.get(each.node)
        then = (0.0,) * 4
        if isinstance(before, WorkerCounts) and before.pid == each.pid:
            then = before.spent_s
        spent = [
            total + max(new - old, 0.0) for total, new, old in zip(spent, each.spent_s, then, strict=True)
        ]
    late = sorted(each.lag_s.p50 for each in workers if each.lag_s is not None)
    if not any(spent):
        return ""
    if late and late[len(late) // 2] > LATE_S:
        return "loop"
    limits: tuple[Limit, ...] = ("compute", _push_limit(counts, earlier), "input", "clock")
    return limits[spent.index(max(spent))]


def _push_limit(counts: CountsOf, earlier: CountsOf) -> Limit:
    """Return whether pushes wait for a busy server or for the wire."""
    for each in of_kind(ServerCounts, counts.values()):
        before = earlier.get(each.node, Counts())
        if each.cpu_s - before.cpu_s > BUSY * max(each.age_s - before.age_s, 0.1):
            return "server"
    return "wire"


def _taking_part(cluster: ClusterMap, counts: CountsOf, earlier: CountsOf) -> int:
    """Return the number of replicas with a worker that has trained a group since the earlier counts."""
    found = set()
    for each in of_kind(WorkerCounts, counts.values()):
        before, node = earlier.get(each.node), cluster.nodes.get(each.node)
        done = each.groups - (before.groups if isinstance(before, WorkerCounts) else 0)
        if done > 0 and node is not None and node.live and node.replica >= 0:
            found.add(node.replica)
    return len(found)


def _waits(cluster: ClusterMap, counts: CountsOf, copies: CopiesOf, waits: Waits) -> Iterator[Wait]:
    """Yield each wait with its deadline and its cure."""
    cure = "restart the worker of that replica, or allow more steps with --consistency ssp:N"
    for each in sorted(of_kind(WorkerCounts, counts.values()), key=lambda each: each.node):
        if each.waiting_for and cluster.in_progress:
            what = each.waiting_for[:MOST_WAITED_FOR]
            yield Wait(who=each.node, what=what, deadline_s=waits.clock_s, cure=cure)
    start = "start one: adam-async"
    for owner, copied in copies.items():
        for bundle in copied.lagging:
            lacking = copied.min_in_sync - len(bundle.in_sync)
            if bundle.in_sync and lacking > 0:
                who, what = f"pushes to {bundle.home} of {owner}", f"{lacking} more copies in sync"
                yield Wait(who=who, what=what, deadline_s=waits.copies_s, cure=f"{start} ps --controller")
    run = cluster.run
    if run is None or run.over:
        return
    who = f"run {run.id}"
    if run.phase == "training":
        if not cluster.live_replicas():
            cure = f"{start} worker --join"
            yield Wait(who=who, what="a live replica", deadline_s=waits.replica_s, cure=cure)
        if not cluster.dealing:
            cure = f"{start} data --controller"
            yield Wait(who=who, what="a data server", deadline_s=waits.replica_s, cure=cure)
    if not cluster.driven:
        cure = "adam-async train --attach takes the run over"
        yield Wait(who=who, what="a driver", deadline_s=None, cure=cure)


def images_per_s(counts: CountsOf, earlier: CountsOf) -> float:
    """Return the images per second between two polls of an epoch; without earlier counts, over the epoch."""
    dealer = next((each for each in of_kind(DataCounts, counts.values()) if each.term), None)
    if dealer is None:
        return 0.0
    before = earlier.get(dealer.node)
    if isinstance(before, DataCounts) and (before.term, before.epoch) == (dealer.term, dealer.epoch):
        if (span_s := dealer.age_s - before.age_s) > 0:
            return max(dealer.images - before.images, 0) / span_s
    return dealer.images / dealer.train_s if dealer.train_s else 0.0
