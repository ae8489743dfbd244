"""A worker's reader of images: it asks the data servers of its run for leased groups.

The images of a group are the same on all data servers. A reader stays with one server, which makes groups
ahead for it. If this server is lost, or owes an answer for several times the usual time, the reader asks the
next server for the same groups. The reader then stays with the server that answers first. So any number of
servers may be lost if one is ready or joins in time.

The reader refuses answers beyond the limits of groups in its run (`GroupLimits`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import RoleFailed
from adam_async.messages import Groups, Lease, ReadGroups, pack, unpack
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.runtime.channel import Channel, Endpoint
from transport import Link, LocalProtocolError, Message, RemoteProtocolError, TransportError


@dataclass(slots=True, kw_only=True)
class GroupLimits:
    """The sizes of groups, images and labels in one run."""

    images: int
    """Number of images in each group; an epoch's last group may have fewer."""
    shape: tuple[int, ...]
    """Shape (C, H, W) of the requested image rows; without rows there are only labels."""
    classes: int
    epochs: int
    """Number of epochs in the run."""
    validation: int = 0
    """Number of training images that the run holds back."""
    train_images: int = 0
    """Number of training images; 0 until a data server is in the map."""

    def map_changed(self, cluster: ClusterMap) -> None:
        """Take the size of the data set from the cluster map."""
        server = cluster.dealing or next(iter(cluster.live("data")), "")
        if server:
            self.train_images = int(cluster.nodes[server].info.get("train_images", self.train_images))

    def images_of(self, number: int) -> int:
        """Return the number of images in a group; 0 if no epoch has the group."""
        return max(min(self.images, self.train_images - self.validation - number * self.images), 0)

    def check_leases(self, leases: Sequence[Lease]) -> None:
        """Check that the run can have these groups.

        Raises:
            RemoteProtocolError: The run has no such group; the error names it.
        """
        for lease in leases:
            if not lease.images or lease.images != self.images_of(lease.number):
                text = f"group {lease.number} has {self.images_of(lease.number)} images, not {lease.images}"
                raise RemoteProtocolError("groups", text)
            if not 1 <= lease.epoch <= self.epochs:
                raise RemoteProtocolError("groups", f"the run has no epoch {lease.epoch}")

    def check_tensors(self, tensors: Sequence[NDArray[Any]]) -> None:
        """Check images (n, C, H, W) uint8, in any number of pieces, and labels (n,) int64.

        Raises:
            RemoteProtocolError: The run has no such images or labels; the error names the wrong part.
        """
        for piece in tensors[:-1]:
            self._check_images(piece)
        for labels in tensors[-1:]:
            self._check_labels(labels)

    def _check_images(self, images: NDArray[Any]) -> None:
        # Not by their size alone: a model refuses other axes, which would end its worker.
        if images.dtype != np.uint8 or images.shape[1:] != self.shape:
            text = f"images are {images.dtype} of shape {images.shape[1:]}, expected uint8 of {self.shape}"
            raise RemoteProtocolError("groups", text)

    def _check_labels(self, labels: NDArray[Any]) -> None:
        if labels.ndim != 1 or labels.dtype != np.int64:
            text = f"labels are {labels.dtype} of shape {labels.shape}, expected one int64 for each image"
            raise RemoteProtocolError("groups", text)
        if len(labels) and not 0 <= labels.min() <= labels.max() < self.classes:
            text = f"labels go from {labels.min()} to {labels.max()}, expected 0 to {self.classes - 1}"
            raise RemoteProtocolError("groups", text)


logger = logging.getLogger(__name__)

DIAL_S = 1.0
"""Deadline in seconds of a dial, after which the reader tries another server."""

OWED_S = 0.5
"""Minimum time in seconds for which a server owes an answer before the reader asks another one, too."""

USUAL_TIMES = 4
"""Multiple of the usual answer time after which the reader asks another server, too."""

NEWEST = 1 / 8
"""Weight of the newest answer in the usual time of an answer."""

Images = tuple[NDArray[Any] | None, NDArray[Any]]
"""Requested rows of a group's images (n, C, H, W), None if only labels were requested; and labels (n,)."""


class GroupReader:
    """Reads groups for one worker, one request at a time.

    Args:
        servers: Returns the addresses of the ready data servers, first the one to keep to. Call `map_changed`
            after a change.
        rows: See `DataClient`.
        owed_s: Minimum time in seconds before the reader asks another server.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        run: str,
        servers: Callable[[], Sequence[str]],
        rows: tuple[int, int] | None,
        limits: GroupLimits,
        waits: Waits,
        owed_s: float = OWED_S,
    ) -> None:
        self._node = endpoint.identity.node
        self._run = run
        self._servers = servers
        self._rows = rows
        self._limits = limits
        self._waits = waits
        self._owed_s = owed_s
        self._usual_s = 0.0
        self._channel, self._spare = (Channel(endpoint, peer="the data server", address="") for _ in range(2))
        self._addresses = tuple(servers())
        self._moved = 0
        """Number of times that the reader has gone on to the next server."""
        self._changed = asyncio.Event()

    def map_changed(self) -> None:
        """Follow the cluster map: leave servers that it no longer names as ready."""
        addresses = tuple(self._servers())
        if addresses == self._addresses:
            return
        self._addresses, self._moved = addresses, 0
        self._changed.set()
        for channel in (self._channel, self._spare):
            if channel.link is not None and channel.address not in addresses:
                channel.link.abort()

    def close(self) -> None:
        """End the links."""
        self._channel.drop()
        self._spare.drop()

    async def read(self, leases: Sequence[Lease], *, least: int) -> list[Images]:
        """Return the images and labels of the first of the requested groups in an epoch.

        Args:
            least: Minimum number of groups in the answer, if one answer has room for them.

        Raises:
            RoleFailed: For `patience_s`, the reader could not reach a data server, or got no correct answer.
        """
        message = pack(
            ReadGroups(
                run=self._run,
                epoch=leases[0].epoch,
                numbers=tuple([lease.number for lease in leases]),
                least=least,
                rows=self._rows,
            )
        )
        loop, until = asyncio.get_running_loop(), 0.0
        while True:
            self._changed.clear()
            if not self._addresses:
                # The run waits for a data server; the run's driver limits this wait.
                await self._changed.wait()
                until = 0.0
                continue
            try:
                return self._images(leases, await self._ask(message))
            except LocalProtocolError:
                raise  # no other link would take the message
            except TransportError as error:
                problem = error
            channel = self._channel
            logger.info("%s: %s sent no images: %s", self._node, channel, problem)
            channel.drop()
            self._moved += not self._changed.is_set()
            if not until:  # the first failure
                until = loop.time() + self._waits.patience_s
                channel.progressed()
            await channel.pause(self._changed)
            if loop.time() >= until:
                what = "a correct answer" if isinstance(problem, RemoteProtocolError) else "an answer"
                why = f"did not give {what} for {self._waits.patience_s:g} s: {problem}"
                raise RoleFailed(channel.peer, why)

    async def _ask(self, message: Message) -> Message:
        """Ask the reader's server and, after a while, also the next one; return the first answer."""
        loop, servers = asyncio.get_running_loop(), self._addresses
        begin = loop.time()
        link = await self._link(self._channel, servers[self._moved % len(servers)])
        call = link.call_nowait(message, timeout_s=self._waits.call_s)
        if len(servers) > 1:
            await asyncio.wait([call], timeout=max(self._owed_s, USUAL_TIMES * self._usual_s))
        if len(servers) == 1 or call.done():
            answer = await call
        else:
            another = servers[(self._moved + 1) % len(servers)]
            answer = await self._ask_another(call, another, message)
        self._usual_s += NEWEST * (loop.time() - begin - self._usual_s)
        return answer

    async def _ask_another(self, owed: "asyncio.Future[Message]", address: str, message: Message) -> Message:
        """Ask another server; return the first answer, and stay with the server that sent it."""
        try:
            async with asyncio.TaskGroup() as group:
                other = group.create_task(
                    self._spare_answer(address, message), name=f"{self._node}/other-images"
                )
                both: list[asyncio.Future[Any]] = [owed, other]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not other.done() and owed.exception() is None:
                    other.cancel()
                    return await owed
                answer = await other
            if answer is None:
                return await owed
            logger.info("%s reads groups from %s, because %s owes them", self._node, address, self._channel)
            self._channel, self._spare = self._spare, self._channel
            self._moved += 1
            return answer
        finally:
            self._spare.drop()

    async def _spare_answer(self, address: str, message: Message) -> Message | None:
        """Return the answer of another server; None if it sends no answer."""
        try:
            link = await self._link(self._spare, address)
            return await link.call(message, timeout_s=self._waits.call_s)
        except TransportError as error:
            logger.info("%s: %s sent no images: %s", self._node, self._spare, error)
            return None

    async def _link(self, channel: Channel, address: str) -> Link:
        """Return the channel's link to an address; dial if there is none."""
        link = channel.link
        if link is None or link.closed or channel.address != address:
            channel.drop()
            channel.address = address
            link = await channel.dial(DIAL_S)
        return link

    def _images(self, leases: Sequence[Lease], answer: Message) -> list[Images]:
        """Return the groups of an answer.

        Raises:
            RemoteProtocolError: The answer has other groups, or images that the run cannot have.
        """
        count = unpack(answer, Groups).count
        if not 1 <= count <= len(leases):
            raise RemoteProtocolError("groups", f"{count} groups answer a request for {len(leases)}")
        self._limits.check_tensors(answer.tensors)
        return _images_of(leases[:count], answer.tensors, labels_only=self._rows == (0, 0))


def _images_of(
    leases: Sequence[Lease], tensors: Sequence[NDArray[Any]], *, labels_only: bool
) -> list[Images]:
    """Cut the tensors of an answer into the images and labels of each lease; views.

    Raises:
        RemoteProtocolError: Images and labels do not match the leases' counts, or a group is in two tensors.
    """
    *pieces, labels = tensors or (None,)
    counts = [lease.images for lease in leases]
    ends, stops = list(accumulate(counts)), list(accumulate(map(len, pieces)))
    if labels is None or len(labels) != ends[-1] or bool(pieces) == labels_only:
        what = "labels" if labels_only else "images and as many labels"
        raise RemoteProtocolError("groups", f"a Groups needs {ends[-1]} {what}")
    parts = [labels[end - count : end] for count, end in zip(counts, ends, strict=True)]
    if labels_only:
        return [(None, part) for part in parts]
    if stops[-1] != ends[-1] or len(set(stops) & set(ends)) < len(stops):
        raise RemoteProtocolError("groups", f"a Groups needs {ends[-1]} images, whole groups in each tensor")
    images: list[NDArray[Any]] = []
    for piece, stop in zip(pieces, stops, strict=True):
        first, here = stop - len(piece), slice(len(images), ends.index(stop) + 1)
        groups = zip(counts[here], ends[here], strict=True)
        images += [piece[end - count - first : end - first] for count, end in groups]
    return list(zip(images, parts, strict=True))
