"""Questions to a data server: a question enters in `ask` and leaves in `answer`.

A question for leases, or a report of groups, becomes an event of the dealer's state. A report is answered at
once, a question when the state grants it. Leases have the numbers of groups; `image_questions` answers
questions for their images.
"""

from collections.abc import Callable, Collection, Mapping
from weakref import WeakSet

from adam_async.controller.role import reply_or_fail
from adam_async.data_server.dealer import Dealer
from adam_async.data_server.order import EpochOrders
from adam_async.data_server.state import Grant, GroupsReported, LeaseAsked
from adam_async.messages import MOST_LEASES, Lease, LeaseGroups, Leases, Reported, ReportGroups, pack
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.ids import Replica
from adam_async.runtime.timeline import Timeline
from transport import Identity, Link, RemoteProtocolError, Request

UNREAD_BYTES = 1 << 16
"""Maximum number of unsent bytes of a link to which groups are sent: with more bytes, the worker has not read
the last answer."""

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


def busy_refusal(link: Link, asking: Collection[Link]) -> tuple[str, str] | None:
    """Return code and text of the refusal of a further question on a link; None if the link may ask."""
    # Unread answers to a worker would otherwise fill the memory.
    if link in asking or link.unsent_bytes > UNREAD_BYTES:
        return "busy", "one question for groups at a time: read the answer to the last one first"
    return None


class Questions:
    """Questions for leases, and reports, of the workers of one data server."""

    def __init__(
        self, *, identity: Identity, waits: Waits, dealer: Dealer, timeline: Timeline | None
    ) -> None:
        self._node = identity.node
        self._wait_s = waits.call_s / 2
        self._dealer = dealer
        self._timeline = timeline
        self._run = ""
        self._orders: EpochOrders
        self._partitions = 1
        self.takers: Takers = {}
        """The workers that may ask."""
        self._open: dict[int, Request] = {}
        """Open questions by number, the oldest first."""
        self._asking: WeakSet[Link] = WeakSet()
        """Links with an open question for leases."""
        self._number = 0

    def take_up(self, run: str, orders: EpochOrders, *, partitions: int) -> None:
        """Serve the workers of a run; each replica has this many workers."""
        self._run, self._orders, self._partitions = run, orders, partitions

    def refuse_all(self, code: str, text: str) -> None:
        """Refuse the open questions."""
        for request in self._open.values():
            request.fail(code, text)
        self._open.clear()
        self._asking.clear()

    def leave(self, why: str) -> None:
        """Serve no run: refuse the open questions and all later ones, until the next run."""
        self._run = ""
        self.refuse_all("wrong-run", why)

    # --- in ----------------------------------------------------------------------------------

    def ask(self, request: Request, body: LeaseGroups | ReportGroups) -> None:
        """Enter a question or report, or refuse it.

        Raises:
            RemoteProtocolError: No worker can have finished the reported groups.
        """
        refused = self._refusal(request, body)
        if refused is not None:
            request.fail(*refused)
            return
        replica = Replica(body.replica)
        if isinstance(body, ReportGroups):
            self._dealer.enter(
                GroupsReported(replica, body.replica_generation, body.partition, body.finished)
            )
            reply_or_fail(request, pack(Reported()))
            return
        self._number += 1
        self._asking.add(request.link)
        self._open[self._number] = request
        self._dealer.enter(
            LeaseAsked(
                request=self._number,
                replica=replica,
                replica_generation=body.replica_generation,
                partition=body.partition,
                epoch=body.epoch,
                position=body.position,
                heard=body.heard,
                count=min(body.count, MOST_LEASES),
                wait_s=min(body.wait_s, self._wait_s),
                held=body.held,
            )
        )

    def _refusal(self, request: Request, body: LeaseGroups | ReportGroups) -> tuple[str, str] | None:
        """Return code and text of the refusal of a question; None if the dealer accepts it."""
        if body.run != self._run:
            return "wrong-run", f"this data server is on {self._run or 'no run'}, not on {body.run}"
        if not self._dealer.deals:
            return "no-leases", f"{self._node} does not deal out the groups of run {self._run}"
        # The questions of an unknown generation are allowed and wait, because the map may be late.
        peer, part = request.link.peer, body.partition
        taker = self.takers.get((body.replica, body.replica_generation, part))
        if taker is not None and taker != (peer.node, peer.incarnation):
            return "not-yours", f"{peer.node} is not the worker with part {part} of replica {body.replica}"
        # On a link from an earlier term the worker has not sent its leases.
        if self._dealer.state.needs_held and (isinstance(body, ReportGroups) or body.count):
            return "no-leases", f"{self._node} does not know yet which groups the workers hold"
        if isinstance(body, ReportGroups):
            check_report(body, self._partitions, images_of=self._orders.images_of)
            return None
        if part >= self._partitions:
            return "no-part", f"replicas have parts 0 to {self._partitions - 1}, not {part}"
        if len(body.held) > body.position:
            return "no-groups", f"a worker with {body.position} groups does not hold {len(body.held)}"
        return busy_refusal(request.link, self._asking)

    # --- out ---------------------------------------------------------------------------------

    def answer(self, grant: Grant) -> None:
        """Answer the question of a grant."""
        request, timeline = self._open.pop(grant.request, None), self._timeline
        if request is None:
            return
        epoch, images_of = grant.epoch, self._orders.images_of
        groups = zip(grant.groups, grant.progress, strict=True)
        leases = [Lease(epoch, number, attempt, images_of(number), at) for (number, attempt), at in groups]
        begin = timeline.clock() if timeline is not None else 0.0
        self._asking.discard(request.link)
        answer = Leases(
            leases=tuple(leases), last=grant.last, clock=grant.clock, end=grant.end, settled=grant.settled
        )
        reply_or_fail(request, pack(answer))
        if timeline is not None and leases:
            timeline.leased(self._node, self._run, request.link.peer.node, leases, begin)


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
