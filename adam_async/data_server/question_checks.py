"""Pure: checks of questions and reports to a data server, which refuses those that no correct peer sends."""

from collections.abc import Callable, Mapping

from adam_async.data_server.epoch import EpochBegan
from adam_async.data_server.ledger_replication import Part
from adam_async.data_server.state import GroupsReported, LeaseAsked
from adam_async.messages import LeaseGroups, ReadTest, ReportGroups
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.epoch_shares import covers
from transport import Identity, RemoteProtocolError

MOST_ASKED, MOST_WAIT_S = 64, 3600.0
"""Maximum number of groups, and maximum wait in seconds, of a lease question that another server enters."""

LABEL_BYTES = 72
"""Upper bound of the bytes that a label and its padding add to an image."""


Takers = Mapping[tuple[int, int, int], tuple[str, int]]
"""Node and incarnation of each worker, by the replica, generation and part that the worker has."""


def takers(cluster: ClusterMap) -> Takers:
    """Return the workers that may ask for groups and report them, in the replica generations of the map."""
    replica_generations = cluster.replica_generations()
    return {
        (int(replica), replica_generation, part): (name, cluster.nodes[name].incarnation)
        for replica, replica_generation in replica_generations.items()
        for part, name in enumerate(cluster.members(int(replica)))
    }


def taker_refusal(body: LeaseGroups | ReportGroups, peer: Identity, known: Takers) -> str:
    """Return the reason for which a peer may not ask for groups as a part of a replica; empty if it may.

    The questions of an unknown generation are allowed and wait, because the map may be late.
    """
    taker = known.get((body.replica, body.replica_generation, body.partition))
    if taker is None or taker == (peer.node, peer.incarnation):
        return ""
    return f"{peer.node} is not the worker with part {body.partition} of replica {body.replica}"


def lease_refusal(body: LeaseGroups, *, partitions: int, height: int) -> tuple[str, str] | None:
    """Return code and text of the refusal of a question for groups; None for an acceptable question."""
    if body.partition >= partitions:
        return "no-part", f"replicas have parts 0 to {partitions - 1}, not {body.partition}"
    if body.count < 1:
        return "no-groups", f"a question is for at least one group, not {body.count}"
    first, stop = body.rows or (0, height)
    if not first <= stop <= height:
        return "no-rows", f"images have rows 0 to {height - 1}: there are no rows {first} to {stop}"
    return None


def check_report(
    body: ReportGroups,
    partitions: int,
    *,
    group_images: int,
    epoch: int,
    groups: int,
    count: Callable[[int], int],
) -> None:
    """Refuse a report of groups that no worker can have finished.

    Args:
        epoch: The epoch in progress; 0 if its groups are unknown.
        count: Function from the number of a group to its number of images.

    Raises:
        RemoteProtocolError: The report is impossible; the error says why.
    """
    if body.partition >= partitions:
        raise RemoteProtocolError(
            "report", f"replicas have parts 0 to {partitions - 1}, not {body.partition}"
        )
    if len({(each.epoch, each.number) for each in body.finished}) < len(body.finished):
        raise RemoteProtocolError("report", "a report names a group twice")
    for each in body.finished:
        if each.images > group_images:
            text = f"a group has {group_images} images at most, not {each.images}"
            raise RemoteProtocolError("report", text)
        if each.epoch == epoch and (each.number >= groups or each.images != count(each.number)):
            text = f"epoch {epoch} has no group {each.number} of {each.images} images"
            raise RemoteProtocolError("report", text)


def check_test_part(body: ReadTest, total: int, *, image_bytes: int, most_bytes: int) -> str:
    """Return the reason for which these test images do not fit into one message; empty if they fit.

    Raises:
        RemoteProtocolError: The end of the range is below its start.
    """
    if body.stop < body.start:
        raise RemoteProtocolError("test images", f"there are none from {body.start} to {body.stop}")
    images = max(min(body.stop, total) - body.start, 0)
    if images * (image_bytes + LABEL_BYTES) > most_bytes:
        return f"no message holds {images} test images: ask for fewer"
    return ""


def check_entering(event: LeaseAsked | GroupsReported, peer: Identity) -> None:
    """Refuse an event that another data server has no reason to enter.

    Raises:
        RemoteProtocolError: The event is about a question to another server, or one that no worker asks.
    """
    if event.request is None or event.request[0] != peer.node:
        raise RemoteProtocolError("events", f"{peer.node} may enter questions of its own workers only")
    if isinstance(event, LeaseAsked) and (event.count > MOST_ASKED or event.wait_s > MOST_WAIT_S):
        text = f"a question for {event.count} groups within {event.wait_s:g} s is above the limits"
        raise RemoteProtocolError("events", text)


def check_part(part: Part, *, partitions: int, images: int, groups: int) -> None:
    """Refuse a part of a ledger that belongs to another run or another data set.

    Raises:
        RemoteProtocolError: The part is impossible in this run.
    """
    opening = part.opening
    if opening is not None:
        lengths = {len(log.positions) for log in opening.logs}
        if opening.partitions != partitions or not lengths <= {partitions}:
            raise RemoteProtocolError("ledger", f"replicas have {partitions} parts in this run")
    for entry in part.entries:
        if isinstance(entry.event, EpochBegan):
            _check_epoch(entry.event, images=images, groups=groups)


def _check_epoch(event: EpochBegan, *, images: int, groups: int) -> None:
    if not 1 <= event.groups <= groups:
        text = f"an epoch of the data set has {groups} groups, not {event.groups}"
        raise RemoteProtocolError("ledger", text)
    if len(event.carried_images) not in (0, -(-images // 8)):
        text = f"{len(event.carried_images)} bytes of images, and the data set has {images} images"
        raise RemoteProtocolError("ledger", text)
    ends = [end for part in event.finished for end in part]
    if (
        ends != sorted(ends)
        or max([0, *ends]) > event.groups
        or max(event.warm, event.carried) > event.groups
    ):
        raise RemoteProtocolError("ledger", f"groups beyond the {event.groups} of epoch {event.number}")
    if not event.shares or not covers(
        event.shares.values(), groups=event.groups, round_groups=event.round_groups
    ):
        raise RemoteProtocolError("ledger", f"the shares of epoch {event.number} do not cover it")
