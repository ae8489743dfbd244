"""Pure: the state of a cluster at one moment: roles and machines, the run, its copies, lags and condition.

The cluster map has the members, and each role reports its counts to a member that has a driver's keys. A
replica's lag is the most steps, over all shards, by which its clock is behind the fastest replica's. The
command `status`, the live table and the events of a run have these values.
"""

from collections.abc import Iterable, Mapping
from math import isfinite, nan

import msgspec

from adam_async.messages import read_number
from adam_async.run.cluster_map import NOTICE, ClusterMap, NodeRecord
from adam_async.run.condition import Condition, condition_of, images_per_s
from adam_async.run.config import Waits
from adam_async.run.counts import ControllerCounts, Counts, DataCounts, ServerCounts, WorkerCounts
from adam_async.run.run_copies import RunCopies, copies_of, store_copies

ROLES = ("controller", "data", "ps", "worker", "driver", "client", "reader")
"""Order of roles in a status."""

ASKED = ("ps", "data", "worker")
"""Roles in the map that report counts; the controllers are not in the map."""

DEFAULT_WAITS = Waits()
"""Deadlines of a cluster without a run."""


class RoleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One role."""

    node: str
    role: str
    state: str
    """State of a controller that answers: ``leads`` or ``follows``. State of any other role: ``joined``,
    ``spare``, ``replica N`` (with ``part N`` of a cut model), ``left`` or ``lost``."""
    address: str
    host: str = ""
    """Name of the role's machine; empty if the role did not report."""
    pid: int = 0
    peak_rss_mb: float = 0.0
    age_s: float = 0.0
    """Seconds since the role's process began; 0 if the role did not report."""
    shared: int = 0
    """Number of peers with which the role shares memory."""
    groups: int = 0
    """Number of groups that a worker has trained, or that a data server has counted as trained in this
    epoch."""
    lag: int | None = None
    """Number of steps by which a worker's replica is behind the fastest one; None without clocks."""
    version: tuple[int, int] | None = None
    """Lowest and highest version of a server's shards."""
    notice: str = ""
    """The role's newest notice, or the error that ended the role."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The program of the map."""

    id: str
    phase: str
    reason: str
    driver: str
    driven: bool
    """Whether the driver is live."""
    epoch: int
    epochs: int
    """Number of epochs in the run; 0 for a program without epochs."""
    finished: int
    """Number of trained groups in the epoch."""
    groups: int
    """Number of groups in the epoch; 0 before it begins."""
    replicas: int
    """Number of replicas that the run should have."""
    images: int
    """Number of trained images in the epoch."""
    images_per_s: float
    """Trained images per second since the last poll; without an earlier poll, in the epoch so far. 0 without
    a live replica."""
    loss: float | None
    """Mean loss of the epoch so far; None if unknown or not finite."""
    left_s: float | None
    """Seconds until the end of the last epoch at this epoch's rate, without evaluations; None if unknown, or
    without a live replica."""
    test_accuracy: float | None
    """Test accuracy of the newest evaluated epoch; None before any."""
    in_place: bool = False
    """Whether the workers train in the memory of the servers, without pushes."""


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster."""

    run: RunStatus | None
    stores: int
    roles: tuple[RoleStatus, ...]
    copies: RunCopies | None
    """Copies of the run's shards; None until the shards are placed."""
    store_copies: dict[str, RunCopies]
    """Copies of the shards in each clients' store, by store name."""
    condition: Condition


def status_of(
    cluster: ClusterMap,
    facts: Mapping[str, Counts],
    *,
    leading: str,
    controllers: int = 0,
    with_ended: bool = False,
    earlier: Mapping[str, Counts] = {},
    waits: Waits = DEFAULT_WAITS,
    asking: str = "",
) -> ClusterStatus:
    """Return the status of a cluster.

    Args:
        facts: Counts of the roles that answered, by node id.
        leading: Node id of the leading controller.
        controllers: Number of known controllers; 0 if no controller was asked.
        with_ended: Include nodes that have left or were lost.
        earlier: Counts at the poll before, for rates.
        waits: Deadlines of the run.
        asking: Node that asks, and is not in the status.
    """
    lags = _lags(facts.values())
    roles = [
        _reported(
            RoleStatus(
                node=node, role="controller", state="leads" if node == leading else "follows", address=""
            ),
            counts,
        )
        for node, counts in facts.items()
        if isinstance(counts, ControllerCounts)
    ]
    for node, record in cluster.nodes.items():
        if node != asking and (record.live or with_ended):
            roles.append(_role(node, record, facts.get(node), cluster, lags))
    roles.sort(key=lambda role: (ROLES.index(role.role) if role.role in ROLES else len(ROLES), role.node))
    of_clients = {name: store for name, store in sorted(cluster.stores.items()) if not store.program}
    copies = copies_of(cluster)
    by_store = {name: store_copies(cluster, store) for name, store in of_clients.items()}
    owners = {f"store {name!r}": each for name, each in by_store.items()}
    return ClusterStatus(
        run=_run(cluster, facts, earlier),
        stores=len(cluster.stores),
        roles=tuple(roles),
        copies=copies,
        store_copies=by_store,
        condition=condition_of(
            cluster,
            facts,
            owners if copies is None or not cluster.in_progress else {"the run": copies, **owners},
            controllers=controllers,
            earlier=earlier,
            waits=waits,
        ),
    )


def _lags(facts: Iterable[Counts]) -> dict[str, int]:
    """Return the lag of each replica: the largest lag over all shards of all servers."""
    lags: dict[str, int] = {}
    for each in facts:
        for clocks in each.clocks.values() if isinstance(each, ServerCounts) else ():
            first = max(clocks.values(), default=0)
            for replica, clock in clocks.items():
                lags[replica] = max(lags.get(replica, 0), first - clock)
    return lags


def _role(
    node: str, record: NodeRecord, facts: Counts | None, cluster: ClusterMap, lags: Mapping[str, int]
) -> RoleStatus:
    notice = record.failed or str(record.info.get(NOTICE, ""))
    status = RoleStatus(
        node=node,
        role=record.role,
        state=_state(record, cluster),
        address=record.address,
        notice=notice,
        lag=lags.get(str(record.replica)) if record.role == "worker" else None,
    )
    if facts is None:
        return status
    versions = facts.versions.values() if isinstance(facts, ServerCounts) else ()
    groups = facts.finished if isinstance(facts, DataCounts) else 0
    groups = facts.groups if isinstance(facts, WorkerCounts) else groups
    version = (min(versions), max(versions)) if versions else None
    return msgspec.structs.replace(_reported(status, facts), groups=groups, version=version)


def _reported(status: RoleStatus, facts: Counts) -> RoleStatus:
    """Return the status of a role with the facts of its process."""
    own = {name: getattr(facts, name) for name in ("host", "pid", "peak_rss_mb", "age_s")}
    shared = {row.receiver for row in facts.sent if row.shared}
    return msgspec.structs.replace(status, shared=len(shared), **own)


def _state(record: NodeRecord, cluster: ClusterMap) -> str:
    if not record.live:
        return "left" if record.left else "lost"
    if record.role != "worker" or cluster.run is None:
        return "joined"
    if record.replica < 0:
        return "spare"
    part = f" part {record.partition}" if cluster.partitions > 1 else ""
    return f"replica {record.replica}{part}"


def _run(cluster: ClusterMap, facts: Mapping[str, Counts], earlier: Mapping[str, Counts]) -> RunStatus | None:
    run = cluster.run
    if run is None:
        return None
    dealer = facts.get(cluster.dealing)
    dealer = dealer if isinstance(dealer, DataCounts) else None
    epoch = cluster.epoch if cluster.epoch is not None and cluster.epoch.run == run.id else None
    epochs, replicas = run.terms.get("epochs", 1), run.terms.get("replicas", 1)  # terms leave out defaults
    loss = read_number(dealer.loss) if dealer is not None and dealer.loss_images else nan
    trains = not run.over and bool(cluster.live_replicas())
    return RunStatus(
        id=run.id,
        phase=run.phase,
        reason=run.reason,
        driver=run.driver,
        driven=cluster.driven,
        epoch=run.epoch,
        epochs=epochs if isinstance(epochs, int) else 0,
        finished=dealer.finished if dealer is not None else 0,
        groups=epoch.groups if epoch is not None else 0,
        replicas=replicas if isinstance(replicas, int) else 0,
        images=dealer.images if dealer is not None else 0,
        images_per_s=images_per_s(facts, earlier) if trains else 0.0,
        loss=loss if isfinite(loss) else None,
        left_s=_left_s(run.epoch, epochs, epoch.groups, dealer) if trains and epoch is not None else None,
        test_accuracy=run.evaluated[-1].test_accuracy if run.evaluated else None,
        in_place=cluster.run_store is not None and cluster.run_store.in_place,
    )


def _left_s(epoch: int, epochs: int, groups: int, dealer: DataCounts | None) -> float | None:
    if dealer is None or not dealer.finished or not dealer.train_s:
        return None
    left = max(groups - dealer.finished, 0) + max(epochs - epoch, 0) * groups
    return left * dealer.train_s / dealer.finished
