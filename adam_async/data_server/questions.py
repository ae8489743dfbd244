"""Questions to a data server: a question enters in `ask` and leaves in `answer`.

A question for leases, or a report of groups, becomes an event of the dealer's state. A report is answered at
once, a question when the state grants it. Leases have the numbers of groups; `image_questions` answers
questions for their images.
"""

from collections.abc import Mapping
from weakref import WeakSet

from adam_async.controller.role import reply_or_fail
from adam_async.data_server.dealer import Dealer
from adam_async.data_server.order import EpochOrders
from adam_async.data_server.question_checks import (
    busy_refusal,
    check_report,
    lease_refusal,
    taker_refusal,
)
from adam_async.data_server.state import Grant, GroupsReported, LeaseAsked
from adam_async.messages import MOST_GROUPS, Lease, LeaseGroups, Leases, Reported, ReportGroups, pack
from adam_async.run.config import Waits
from adam_async.run.ids import Replica
from adam_async.runtime.timeline import Timeline
from transport import Identity, Link, Request


class Questions:
    """Questions for leases, and reports, of the workers of one data server."""

    def __init__(
        self,
        *,
        identity: Identity,
        waits: Waits,
        dealer: Dealer,
        timeline: Timeline | None,
    ) -> None:
        self._node = identity.node
        self._wait_s = waits.call_s / 2
        self._dealer = dealer
        self._timeline = timeline
        self._run = ""
        self._orders: EpochOrders
        self._partitions = 1
        self.takers: Mapping[tuple[int, int, int], tuple[str, int]] = {}
        """The workers that may ask; see `question_checks.takers`."""
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
                position=body.position,
                heard=body.heard,
                count=min(body.count, MOST_GROUPS),
                wait_s=min(body.wait_s, self._wait_s),
            )
        )

    def _refusal(self, request: Request, body: LeaseGroups | ReportGroups) -> tuple[str, str] | None:
        """Return code and text of the refusal of a question; None if the dealer accepts it."""
        if body.run != self._run:
            return "wrong-run", f"this data server is on {self._run or 'no run'}, not on {body.run}"
        if not self._dealer.deals:
            return "no-leases", f"{self._node} does not deal out the groups of run {self._run}"
        if text := taker_refusal(body, request.link.peer, self.takers):
            return "not-yours", text
        if isinstance(body, ReportGroups):
            check_report(body, self._partitions, images_of=self._orders.images_of)
            return None
        refused = lease_refusal(body, partitions=self._partitions)
        return refused or busy_refusal(request.link, self._asking)

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
        answer = Leases(leases=tuple(leases), last=grant.last, clock=grant.clock, end=grant.end)
        reply_or_fail(request, pack(answer))
        if timeline is not None and leases:
            timeline.leased(self._node, self._run, request.link.peer.node, leases, begin)
