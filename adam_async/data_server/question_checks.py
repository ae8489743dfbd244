"""Pure: checks of questions and reports to a data server, which refuses those that no correct peer sends."""

from collections.abc import Callable, Collection, Mapping

from adam_async.messages import LeaseGroups, ReadGroups, ReadTest, ReportGroups
from adam_async.run.cluster_map import ClusterMap
from transport import Identity, Link, RemoteProtocolError

UNREAD_BYTES = 1 << 16
"""Maximum number of unsent bytes of a link to which groups are sent: with more bytes, the worker has not read
the last answer."""

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


def busy_refusal(link: Link, asking: Collection[Link]) -> tuple[str, str] | None:
    """Return code and text of the refusal of a further question on a link; None if the link may ask."""
    # Unread answers to a worker would otherwise fill the memory.
    if link in asking or link.unsent_bytes > UNREAD_BYTES:
        return "busy", "one question for groups at a time: read the answer to the last one first"
    return None


def lease_refusal(body: LeaseGroups, *, partitions: int) -> tuple[str, str] | None:
    """Return code and text of the refusal of a question for leases; None for an acceptable question."""
    if body.partition >= partitions:
        return "no-part", f"replicas have parts 0 to {partitions - 1}, not {body.partition}"
    if body.count < 1:
        return "no-groups", f"a question is for at least one group, not {body.count}"
    return None


def groups_refusal(body: ReadGroups, *, groups: int, height: int) -> tuple[str, str] | None:
    """Return code and text of the refusal of a question for images; None for an acceptable question.

    Args:
        groups: Number of groups of an epoch.
        height: Number of rows of an image.
    """
    if max(body.numbers) >= groups or len(set(body.numbers)) < len(body.numbers):
        return "no-groups", f"an epoch has groups 0 to {groups - 1}, and a question names each group once"
    first, stop = body.rows or (0, height)
    if not first <= stop <= height:
        return "no-rows", f"images have rows 0 to {height - 1}: there are no rows {first} to {stop}"
    return None


def check_report(body: ReportGroups, partitions: int, *, images_of: Callable[[int], int]) -> None:
    """Refuse a report of groups that no worker can have finished.

    Args:
        images_of: Function from the number of a group to its number of images; 0 if no epoch has the group.

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
        if not each.images or each.images != images_of(each.number):
            text = f"an epoch has no group {each.number} of {each.images} images"
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
