"""Questions to a data server: a question enters in `ask` and leaves in `answer`.

A question for groups, or a report of groups, becomes an event of the ledger under a number. The settled event
answers the question: a report at once, a question for groups as soon as its link has room and the producer
has made the groups. Test images need no ledger; they are sent as soon as the link has room.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from adam_async.controller.role import reply_or_fail, reply_when_room
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.group_producer import GroupProducer
from adam_async.data_server.ledger_service import LedgerService
from adam_async.data_server.question_checks import (
    MOST_WAIT_S,
    check_report,
    check_test_part,
    lease_refusal,
    taker_refusal,
)
from adam_async.data_server.state import Event, Grant, GroupsReported, LeaseAsked
from adam_async.messages import Groups, Lease, LeaseGroups, ReadTest, Reported, ReportGroups, TestImages, pack
from adam_async.run.config import Config, Waits
from adam_async.run.ids import Replica
from adam_async.runtime.timeline import Timeline
from transport import Identity, Link, Message, Request

ANSWER_BYTES = 8 << 20
"""Maximum size of the images of an answer of several groups, in bytes; the worker asks again for more."""

ANSWER_GROUPS = 64
"""Maximum number of groups of one answer: their description must fit into a frame's meta."""

UNREAD_BYTES = 1 << 16
"""Maximum number of unsent bytes of a link to which groups are sent: with more bytes, the worker has not read
the last answer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A question of a worker, until its answer."""

    request: Request
    event: LeaseAsked | GroupsReported
    """The event that enters the ledger for the question."""
    rows: tuple[int, int] | None = None
    """Rows of the images that the worker needs; None: all."""


class Questions:
    """Questions of the workers of one data server."""

    def __init__(
        self,
        *,
        identity: Identity,
        waits: Waits,
        dataset: Dataset,
        producer: GroupProducer,
        ledger: LedgerService,
        timeline: Timeline | None,
    ) -> None:
        self._node = identity.node
        self._wait_s = min(waits.call_s / 2, MOST_WAIT_S)
        self._dataset = dataset
        self._image_bytes = prod(dataset.image_shape)
        self._height = dataset.image_shape[1]
        self._producer = producer
        self._ledger = ledger
        self._timeline = timeline
        self._run = ""
        self._group_images = self._most_groups = self._partitions = 1
        self.takers: Mapping[tuple[int, int, int], tuple[str, int]] = {}
        """The workers that may ask; see `question_checks.takers`."""
        self._open: dict[int, _Question] = {}
        """Open questions by number, the oldest first."""
        self._asking: WeakSet[Link] = WeakSet()
        """Links with an open question for groups."""
        self._number = first_question(identity.incarnation)

    def take_up(self, run: str, config: Config, *, partitions: int) -> None:
        """Serve the workers of a run; each replica has this many workers."""
        self._run, self._partitions = run, partitions
        self._group_images = config.images_per_group
        most = min(ANSWER_BYTES, self._producer.answer_bytes) // (self._group_images * self._image_bytes)
        self._most_groups = min(max(most, 1), ANSWER_GROUPS)

    def events(self) -> list[Event]:
        """Return the events of the open questions, the oldest first."""
        return [question.event for question in self._open.values()]

    def refuse_all(self, code: str, text: str) -> None:
        """Refuse the open questions."""
        for question in self._open.values():
            question.request.fail(code, text)
        self._open.clear()
        self._asking.clear()

    def leave(self, why: str) -> None:
        """Serve no run: refuse the open questions and all later ones, until the next run."""
        self._run = ""
        self.refuse_all("wrong-run", why)

    # --- in ----------------------------------------------------------------------------------

    def ask(self, request: Request, body: LeaseGroups | ReportGroups) -> bool:
        """Enter a question into the ledger, or refuse it; return whether it was entered.

        Raises:
            RemoteProtocolError: No worker can have finished the reported groups.
        """
        refused = self._refusal(request, body)
        if refused is not None:
            request.fail(*refused)
            return False
        self._number += 1
        name, replica = (self._node, self._number), Replica(body.replica)
        rows = None
        event: LeaseAsked | GroupsReported
        if isinstance(body, ReportGroups):
            event = GroupsReported(replica, body.replica_generation, body.partition, body.finished, name)
        else:
            self._asking.add(request.link)
            rows = None if body.rows == (0, self._height) else body.rows
            event = LeaseAsked(
                request=name,
                replica=replica,
                replica_generation=body.replica_generation,
                partition=body.partition,
                position=body.position,
                heard=body.heard,
                count=min(body.count, self._most_groups),
                wait_s=min(body.wait_s, self._wait_s),
            )
        self._open[self._number] = _Question(request, event, rows)
        self._ledger.enter(event)
        return True

    def _refusal(self, request: Request, body: LeaseGroups | ReportGroups) -> tuple[str, str] | None:
        """Return code and text of the refusal of a question; None if the ledger accepts it."""
        if body.run != self._run:
            return "wrong-run", f"this data server is on {self._run or 'no run'}, not on {body.run}"
        if not self._ledger.keeps:
            return "no-leases", f"{self._node} has no leases of run {self._run}"
        if text := taker_refusal(body, request.link.peer, self.takers):
            return "not-yours", text
        if isinstance(body, ReportGroups):
            self._check_report(body)
            return None
        refused = lease_refusal(body, partitions=self._partitions, height=self._height)
        if refused is not None:
            return refused
        link = request.link
        # Unread answers to a worker would otherwise fill the memory.
        if link in self._asking or link.statistics().unsent_bytes > UNREAD_BYTES:
            return "busy", "one question for groups at a time: read the answer to the last one first"
        return None

    def _check_report(self, body: ReportGroups) -> None:
        state, producer = self._ledger.state, self._producer
        # The producer has the groups of one epoch only, which may already be the next one.
        known = state.epoch == producer.epoch
        check_report(
            body,
            self._partitions,
            group_images=self._group_images,
            epoch=state.epoch if known else 0,
            groups=state.groups,
            count=producer.count,
        )

    # --- out ---------------------------------------------------------------------------------

    def answer(self, settled: Grant | GroupsReported) -> None:
        """Answer the question of a grant or a settled report, unless it belongs to another server."""
        name = settled.request
        question = self._open.pop(name[1], None) if name is not None and name[0] == self._node else None
        if question is None:
            return
        if isinstance(settled, GroupsReported):
            reply_or_fail(question.request, pack(Reported()))
            return
        size = self._size(sum(self._producer.count(number) for number, _ in settled.groups))
        if question.rows is not None:
            first, stop = question.rows
            size = size * (stop - first) // self._height
        # Memory is charged before the groups are made, so a full budget delays only them, and no other
        # question.
        question.request.charge(size, partial(self._gather, question, settled))

    def _gather(self, question: _Question, grant: Grant) -> None:
        """Wait for the groups of a grant."""
        numbers = [number for number, _ in grant.groups]
        if not numbers:
            self._send(question, grant)
        elif grant.epoch == self._producer.epoch:
            self._producer.when_ready(numbers, partial(self._send, question, grant))
        else:
            self._asking.discard(question.request.link)
            question.request.fail("epoch-over", f"epoch {grant.epoch} is over")

    def _send(self, question: _Question, grant: Grant) -> None:
        timeline, request = self._timeline, question.request
        begin = timeline.clock() if timeline is not None else 0.0
        leases: list[Lease] = []
        tensors: tuple[NDArray[Any], ...] = ()
        if grant.groups:
            count = self._producer.count
            leases = [
                Lease(grant.epoch, number, attempt, count(number), progress)
                for (number, attempt), progress in zip(grant.groups, grant.progress, strict=True)
            ]
            images, labels = self._producer.take([number for number, _ in grant.groups])
            tensors = _cut(images, labels, question.rows)
            if question.rows is not None:
                self._producer.watch(tensors[:-1])
        groups = Groups(leases=tuple(leases), last=grant.last, clock=grant.clock, end=grant.end)
        self._asking.discard(request.link)
        reply_or_fail(request, pack(groups, tensors))
        if timeline is not None and leases:
            timeline.leased(self._node, self._run, request.link.peer.node, leases, begin)

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
        """Return the size of this many images with their labels, in bytes."""
        return images * (self._image_bytes + self._dataset.test_labels.itemsize)


def _cut(
    images: tuple[NDArray[Any], ...], labels: NDArray[Any], rows: tuple[int, int] | None
) -> tuple[NDArray[Any], ...]:
    """Return the tensors of an answer from images (n, C, H, W); only rows are copied, not whole images."""
    if rows is None:
        return *images, labels
    first, stop = rows
    if first == stop:
        return (labels,)
    return *(np.ascontiguousarray(piece[:, :, first:stop]) for piece in images), labels


def first_question(incarnation: int) -> int:
    """Return the number below the first question of an incarnation.

    The ledger names a question by node and number, and a restarted server reads the answers to the questions
    of its earlier incarnation. Ranges of 2**24 numbers, one for each incarnation, keep the questions apart.
    """
    return incarnation % (1 << 28) << 24
