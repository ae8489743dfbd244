"""Questions to a data server: a question enters in `ask` and leaves in `answer`.

A question for leases, or a report of groups, becomes an event of the dealer's state. A report is answered at
once, a question when the state grants it. Leases have the numbers of groups. A group's images depend only on
the run, the epoch and the number. So any data server can answer any worker, and the loss of a server loses
nothing. The server sends images as soon as the link has room and the producer has made the groups; a slow
reader delays no other worker.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import prod
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from adam_async.controller.role import reply_or_fail, reply_when_room
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.dealer import Dealer
from adam_async.data_server.epoch import EpochOrders
from adam_async.data_server.group_producer import GroupProducer
from adam_async.data_server.state import Grant, GroupsReported, LeaseAsked
from adam_async.messages import (
    MOST_LEASES,
    Groups,
    Lease,
    LeaseGroups,
    Leases,
    ReadGroups,
    ReadTest,
    Reported,
    ReportGroups,
    TestImages,
    pack,
)
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.ids import Replica
from adam_async.runtime.timeline import Timeline
from transport import Identity, Link, Message, RemoteProtocolError, Request

UNREAD_BYTES = 1 << 16
"""Maximum number of unsent bytes on a link for further groups: with more, the last answer is unread."""

Takers = Mapping[tuple[int, int, int], tuple[str, int]]
"""Node and incarnation of each worker, by the replica, generation and part that the worker has."""


def takers(cluster: ClusterMap) -> Takers:
    """Return the workers that may ask for groups and report them, by the map's replica generations."""
    replica_generations = cluster.replica_generations()
    return {
        (int(replica), replica_generation, part): (name, cluster.nodes[name].incarnation)
        for replica, replica_generation in replica_generations.items()
        for part, name in enumerate(cluster.members(int(replica)))
    }


def busy_refusal(link: Link, asking: Collection[Link]) -> tuple[str, str] | None:
    """Return code and text that refuse a further question on a link; None if the link may ask."""
    # Unread answers to a worker would otherwise fill the memory.
    if link in asking or link.unsent_bytes > UNREAD_BYTES:
        return "busy", "one question for groups at a time: read the answer to the last one first"
    return None


class Questions:
    """The questions for leases, and the reports, that workers send to one data server."""

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
        """Serve no run: refuse the open questions, and all later ones until the next run."""
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
        """Return code and text that refuse a question; None if the dealer accepts it."""
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
        images_of: Function from a group's number to its number of images; 0 if no epoch has the group.

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


ANSWER_BYTES = 8 << 20
"""Maximum size in bytes of the images in an answer of several groups; the worker asks again for more."""


LABEL_BYTES = 72
"""Upper bound of the bytes that a label and its padding add to an image."""


class ImageQuestions:
    """Questions for images to one data server."""

    def __init__(self, dataset: Dataset, producer: GroupProducer) -> None:
        self._dataset = dataset
        self._image_bytes = prod(dataset.image_shape)
        self._height = dataset.image_shape[1]
        self._producer = producer
        self._run = ""
        self._orders: EpochOrders
        self._most_groups = 1
        self._takers: Takers = {}
        self._asking: WeakSet[Link] = WeakSet()
        """Links with an open question for groups."""
        self._early: list[tuple[Request, ReadGroups]] = []
        """Questions for which the map of this server is too old."""

    def take_up(self, run: str, orders: EpochOrders) -> None:
        """Serve the workers of a run."""
        self._run, self._orders = run, orders
        most = min(ANSWER_BYTES, self._producer.answer_bytes)
        self._most_groups = max(most // (orders.images_of(0) * self._image_bytes), 1)

    def leave(self, why: str) -> None:
        """Serve no run until the next one: refuse the waiting questions and all later ones."""
        self._run = ""
        early, self._early = self._early, []
        for request, _ in early:
            self._fail(request, "wrong-run", why)

    # --- groups ------------------------------------------------------------------------------

    def read_groups(self, request: Request, body: ReadGroups) -> None:
        """Send groups once they are made and the link has room; refuse groups of an ended epoch."""
        if refused := self._refusal(request, body):
            request.fail(*refused)
            return
        self._asking.add(request.link)
        self._answer(request, body)

    def map_changed(self, known: Takers) -> None:
        """Answer the questions that waited for a newer map with these workers."""
        self._takers = known
        early, self._early = self._early, []
        for request, body in early:
            self._answer(request, body)

    def link_closed(self) -> None:
        """Drop the waiting questions of closed links, which no link's budget counts any more."""
        self._early = [(request, body) for request, body in self._early if request.is_open]
        self._producer.drop_closed()

    def _refusal(self, request: Request, body: ReadGroups) -> tuple[str, str] | None:
        """Return code and text that refuse a question; None for an acceptable question."""
        if body.run != self._run:
            return "wrong-run", f"this data server is on {self._run or 'no run'}, not on {body.run}"
        groups, numbers = self._orders.num_groups, body.numbers
        if max(numbers) >= groups or len(set(numbers)) < len(numbers):
            return "no-groups", f"an epoch has groups 0 to {groups - 1}, and a question names each group once"
        first, stop = body.rows or (0, self._height)
        if not first <= stop <= self._height:
            return "no-rows", f"images have rows 0 to {self._height - 1}: there are no rows {first} to {stop}"
        return busy_refusal(request.link, self._asking)

    def _answer(self, request: Request, body: ReadGroups) -> None:
        peer = request.link.peer
        if body.epoch < self._producer.epoch:
            self._fail(request, "epoch-over", f"epoch {body.epoch} is over")
            return
        # The map of this server may be older than that of the worker.
        if body.epoch > self._producer.epoch or (peer.node, peer.incarnation) not in self._takers.values():
            self._early.append((request, body))
            return
        size = self._size(len(body.numbers[: self._most_groups]) * self._orders.images_of(0))
        if body.rows is not None:
            first, stop = body.rows
            size = size * (stop - first) // self._height
        # Charge memory before the groups are made: a full budget then delays only them, and no other
        # question.
        request.charge(size, partial(self._make, request, body))

    def _make(self, request: Request, body: ReadGroups) -> None:
        """Wait for the groups of a question, and make the further ones ahead of the next question."""
        if body.run != self._run or body.epoch != self._producer.epoch:
            self._fail(request, "epoch-over", f"epoch {body.epoch} is over")
            return
        least, most = min(max(body.least, 1), self._most_groups), self._most_groups
        self._producer.when_ready(
            body.numbers[:least], partial(self._send, request, body), is_open=lambda: request.is_open
        )
        if ahead := body.numbers[most if self._producer.instant else least :]:
            self._producer.prepare(ahead)

    def _send(self, request: Request, body: ReadGroups) -> None:
        numbers = self._producer.ready(body.numbers[: self._most_groups])
        images, labels = self._producer.take(numbers)
        rows = None if body.rows == (0, self._height) else body.rows
        tensors = _cut(images, labels, rows)
        if rows is not None:
            self._producer.watch(tensors[:-1])
        self._asking.discard(request.link)
        reply_or_fail(request, pack(Groups(count=len(numbers)), tensors))

    def _fail(self, request: Request, code: str, text: str) -> None:
        self._asking.discard(request.link)
        request.fail(code, text)

    # --- test images -------------------------------------------------------------------------

    def read_test(self, request: Request, body: ReadTest) -> None:
        """Send images of the test set, the validation set or the sample, as soon as the link has room.

        Raises:
            RemoteProtocolError: The end of the range is below its start.
        """
        images, labels = self._dataset.test_images, self._dataset.test_labels
        if body.validation:
            images, labels = self._producer.validation
        elif body.sample:
            images, labels = self._producer.sample
        total, most = len(labels), request.link.max_message_bytes
        refused = check_test_part(body, total, image_bytes=self._image_bytes, most_bytes=most)
        if refused:
            request.fail("too-large", refused)
            return
        part = slice(body.start, body.stop)

        def make() -> Message:
            tensors: list[NDArray[Any]] = [images[part], labels[part]]
            return pack(TestImages(total=total), tensors)

        reply_when_room(request, self._size(len(range(total)[part])), make)

    def _size(self, images: int) -> int:
        """Return the size in bytes of this many images with their labels."""
        return images * (self._image_bytes + self._dataset.test_labels.itemsize)


def _cut(
    images: tuple[NDArray[Any], ...], labels: NDArray[Any], rows: tuple[int, int] | None
) -> tuple[NDArray[Any], ...]:
    """Return the tensors of an answer from images (n, C, H, W); copy rows only, not whole images."""
    if rows is None:
        return *images, labels
    first, stop = rows
    if first == stop:
        return (labels,)
    return *(np.ascontiguousarray(piece[:, :, first:stop]) for piece in images), labels


def check_test_part(body: ReadTest, total: int, *, image_bytes: int, most_bytes: int) -> str:
    """Return why these test images do not fit into one message; empty if they do.

    Raises:
        RemoteProtocolError: The end of the range is below its start.
    """
    if body.stop < body.start:
        raise RemoteProtocolError("test images", f"there are none from {body.start} to {body.stop}")
    images = max(min(body.stop, total) - body.start, 0)
    if images * (image_bytes + LABEL_BYTES) > most_bytes:
        return f"no message holds {images} test images: ask for fewer"
    return ""
