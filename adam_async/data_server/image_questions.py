"""Questions for images to a data server: groups of an epoch for workers, and test images for drivers.

The images of a group depend only on the run, the epoch and the number, so any data server answers any worker,
and a lost data server loses nothing. An answer leaves as soon as its link has room and the producer has made
the groups; a slow reader delays no other worker.
"""

from functools import partial
from math import prod
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from adam_async.controller.role import reply_or_fail, reply_when_room
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.group_producer import GroupProducer
from adam_async.data_server.order import EpochOrders
from adam_async.data_server.questions import Takers, busy_refusal
from adam_async.messages import Groups, ReadGroups, ReadTest, TestImages, pack
from transport import Link, Message, RemoteProtocolError, Request

ANSWER_BYTES = 8 << 20
"""Maximum size of the images of an answer of several groups, in bytes; the worker asks again for more."""


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
        """Serve no run, until the next one: refuse the waiting questions and all later ones."""
        self._run = ""
        early, self._early = self._early, []
        for request, _ in early:
            self._fail(request, "wrong-run", why)

    # --- groups ------------------------------------------------------------------------------

    def read_groups(self, request: Request, body: ReadGroups) -> None:
        """Send groups as soon as the link has room and they are made; refuse groups of an ended epoch."""
        if refused := self._refusal(request, body):
            request.fail(*refused)
            return
        self._asking.add(request.link)
        self._answer(request, body)

    def map_changed(self, known: Takers) -> None:
        """Answer the questions that have waited for a newer map, which has these workers."""
        self._takers = known
        early, self._early = self._early, []
        for request, body in early:
            self._answer(request, body)

    def link_closed(self) -> None:
        """Drop the waiting questions of closed links, which no link's budget counts any more."""
        self._early = [(request, body) for request, body in self._early if request.is_open]
        self._producer.drop_closed()

    def _refusal(self, request: Request, body: ReadGroups) -> tuple[str, str] | None:
        """Return code and text of the refusal of a question; None for an acceptable question."""
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
        # Memory is charged before the groups are made, so a full budget delays only them, and no other
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
