"""The other workers of a replica: links to all of them, and blocks in both directions.

Theory of operation
-------------------
Of two workers, the worker with the lower part number connects to the other worker. Both workers begin with a
`Greet`. A `Greet` has the replica generation and the number of received blocks, after which sending continues
(`reliable_stream.py`). A worker of another generation gets no answer, so all messages of an earlier
generation are refused.

Blocks that become ready in one iteration of the loop share one message, even those of different groups. The
engine gets received blocks at once. A message with blocks also confirms the blocks of the other direction.
After `CONFIRM_BLOCKS` received blocks without a reply, a message without blocks confirms them.

A worker that only sends, for example because its layers are frozen, could train far ahead of a slower worker.
So each worker reports how many groups it has begun, and begins at most a *lead* more groups than each worker
to which it sends. The lead bounds the number of waiting groups on every worker.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import RoleDied
from adam_async.messages import Block, Blocks, Greet, check_tensor, pack, unpack
from adam_async.model.partition.network import Partition
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.counts import PeerWorkerCounts
from adam_async.runtime.callbacks import Callbacks
from adam_async.runtime.channel import Channel, Endpoint
from adam_async.runtime.clock import Within
from adam_async.worker.reliable_stream import Parcel, ReceivingStream, SendingStream
from transport import (
    DialFailed,
    Identity,
    Link,
    LinkBroken,
    LinkClosed,
    Message,
    RemoteProtocolError,
    TransportError,
    WouldBlock,
)

logger = logging.getLogger(__name__)

BLOCKS = 64
"""Maximum number of blocks in one message; their description must fit into a frame's meta."""

MESSAGE_BYTES = 32 << 20
"""Maximum total size of a message's tensors, in bytes; a single tensor may be larger."""

MOST_BEGUN = 1 << 16
"""Maximum number of groups that the other side may begin from one message to the next."""

CONFIRM_BLOCKS = 32
"""Number of unconfirmed blocks after which a separate message confirms them."""

REPORT_SHARE = 4
"""How often a receiver of blocks reports its begun groups per *lead*."""

ROOM_S = 0.005
"""Pause in seconds before the next attempt to send if the other side does not read fast enough."""

OnBlocks = Callable[[Sequence[tuple[Block, NDArray[Any]]]], None]
"""Function that takes the blocks of one message."""


class ExpectedBlocks:
    """The blocks that another worker may send.

    Args:
        shapes: By crossing, functions from a number of images to a block's shape.
        dtype: Type of all blocks.
        group_images: Function from a group's number to its number of images; 0 if no epoch has the group.
    """

    def __init__(
        self,
        shapes: Mapping[int, Callable[[int], tuple[int, ...]]],
        dtype: np.dtype[Any],
        group_images: Callable[[int], int],
    ) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._group_images = group_images
        self._checked: dict[tuple[int, int], tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        """Return whether the other worker sends blocks here."""
        return bool(self._shapes)

    def check(self, block: Block, tensor: NDArray[Any], node: str) -> None:
        """Check the shape and type of a block from a node.

        Raises:
            RemoteProtocolError: The node may not send this block.
        """
        images = self._group_images(block.number)
        shape = self._checked.get((block.crossing, images))
        if shape == tensor.shape and tensor.dtype == self._dtype:
            return  # an earlier check of the shape: the common case
        expected = self._shapes.get(block.crossing)
        if expected is None:
            raise RemoteProtocolError("blocks", f"crossing {block.crossing} does not lead here from {node}")
        if not images:
            raise RemoteProtocolError("blocks", f"no epoch has a group {block.number}")
        check_tensor(tensor, f"crossing {block.crossing}", expected(images), self._dtype)
        self._checked[block.crossing, images] = tensor.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWorkerEvents:
    """Functions that take the events of another worker."""

    blocks: OnBlocks
    """Function that takes received blocks."""
    progress: Callable[[], None]
    """Function that is called when the other worker has begun more groups."""
    linked: Callable[[], None]
    """Function that is called when a link to the other worker exists."""


class PeerWorker:
    """Another worker of the replica, over successive links.

    Args:
        part: Part of the model on the other worker.
        node: Node id of the other worker.
        address: Address of the other worker.
        expected: Blocks that the other worker may send.
        lead: Maximum number of groups by which a sender is ahead of a receiver.
        heeded: Whether this worker sends to the other worker, and so waits until that worker has begun enough
            groups.
        events: Functions that take the events.
        callbacks: Runs the sending callbacks in a later iteration of the loop.
    """

    def __init__(
        self,
        *,
        part: int,
        node: str,
        address: str,
        expected: ExpectedBlocks,
        lead: int,
        heeded: bool,
        events: PeerWorkerEvents,
        callbacks: Callbacks,
    ) -> None:
        self.part, self.node, self.address = part, node, address
        self._expected = expected
        self._lead, self._heeded = lead, heeded
        self._report_every = max(1, lead // REPORT_SHARE)
        self._events = events
        self._callbacks = callbacks
        self._sending = SendingStream()
        self._receiving = ReceivingStream()
        self._confirmed = 0
        """Number of received blocks in the last message to the other side."""
        self._begun = 0
        """Number of groups begun here."""
        self._reported_begun = 0
        """Number of groups begun here, in the last message to the other side."""
        self._has_begun = 0
        """Number of groups begun on the other side."""
        self._link: Link | None = None
        self._flushing = False
        self.links = 0
        self.messages = 0

    @property
    def received(self) -> int:
        """Number of blocks received from the other worker."""
        return self._receiving.received

    def put(self, parcel: Parcel) -> None:
        """Send a block in one message with the other blocks of this iteration of the loop. Never waits."""
        self._sending.add(parcel)
        self._flush_soon()

    @property
    def keeps_up(self) -> bool:
        """Whether the other side permits the start of one more group here."""
        return not self._heeded or self._begun - self._has_begun < self._lead

    def begin(self) -> None:
        """Count one more group begun here. Never waits."""
        self._begun += 1
        if self._owes_report:
            self._flush_soon()

    @property
    def _owes_report(self) -> bool:
        """Whether the other side needs a message, even without a block."""
        if self.received - self._confirmed >= CONFIRM_BLOCKS:
            return True
        return self._begun - self._reported_begun >= self._report_every and bool(self._expected)

    def _flush_soon(self) -> None:
        if not self._flushing and self._link is not None:
            self._flushing = True
            self._callbacks.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        link = self._link
        while link is not None and not link.closed and (self._sending.waiting or self._owes_report):
            if not self._send(link):
                return

    def _send(self, link: Link) -> bool:
        """Send the next blocks; return False if the link has ended, or does not accept them yet."""
        first, parcels = self._sending.take(BLOCKS, MESSAGE_BYTES)
        for parcel in parcels:
            parcel.hold()
        blocks = tuple([parcel.block for parcel in parcels])
        body = Blocks(first=first, blocks=blocks, received=self.received, begun=self._begun)
        message = pack(body, [parcel.tensor for parcel in parcels])
        try:
            link.send_nowait(message, partial(_let_go, parcels) if parcels else None, ordered=True)
        except (WouldBlock, LinkBroken, LinkClosed) as error:
            _let_go(parcels)
            self._sending.put_back(parcels)
            if isinstance(error, WouldBlock):
                self._flushing = True
                self._callbacks.call_later(ROOM_S, self._flush)
            return False
        self.messages += 1
        self._confirmed, self._reported_begun = self.received, self._begun
        return True

    async def converse(self, link: Link, greet: Greet) -> None:
        """Send and receive on a link, after the other side's `Greet`, until it ends.

        Raises:
            RemoteProtocolError: The other side breaks a rule.
            TransportError: The link has ended.
        """
        if self._link is not None:
            self._link.abort()  # the link has ended on the other side, and this side has not noticed yet
        self._sending.resume(greet.received)
        self._note_begun(greet.begun)
        self._link = link
        self.links += 1
        self._events.linked()
        self._flush_soon()
        try:
            while True:
                self._take(await link.receive())
        finally:
            if self._link is link:
                self._link = None

    def hello(self, ours: Greet) -> Greet:
        """Return the first message on a new link: `ours` with the present counts."""
        self._confirmed, self._reported_begun = self.received, self._begun
        return msgspec.structs.replace(ours, received=self.received, begun=self._begun)

    def close(self) -> None:
        """End the link, at the end of this replica generation."""
        if self._link is not None:
            self._link.abort()

    def _take(self, message: Message) -> None:
        body = unpack(message, Blocks)
        if len(body.blocks) != len(message.tensors):
            raise RemoteProtocolError(
                "blocks", f"{len(body.blocks)} blocks with {len(message.tensors)} tensors"
            )
        self._sending.confirm(body.received)
        self._note_begun(body.begun)
        if body.blocks:
            arrived = tuple(zip(body.blocks, message.tensors, strict=True))
            for block, tensor in arrived:
                self._expected.check(block, tensor, self.node)
            known = self._receiving.accept(body.first, len(arrived))
            self._events.blocks(arrived[known:])
        if self._owes_report:
            self._flush_soon()

    def _note_begun(self, begun: int) -> None:
        if begun > self._has_begun + MOST_BEGUN:
            raise RemoteProtocolError(
                "blocks", f"{begun} groups begun, and {self._has_begun} a moment before"
            )
        if begun > self._has_begun:
            self._has_begun = begun
            self._events.progress()

    def statistics(self) -> PeerWorkerCounts:
        """Return the counts of links, messages and blocks."""
        return PeerWorkerCounts(
            links=self.links,
            messages=self.messages,
            blocks_received=self.received,
            blocks_duplicate=self._receiving.duplicates,
            blocks_resent=self._sending.resent,
            blocks_unconfirmed=self._sending.unconfirmed,
        )


def _let_go(parcels: list[Parcel]) -> None:
    for parcel in parcels:
        parcel.let_go()


class PeerWorkers:
    """All other workers of the replica.

    Args:
        endpoint: This worker.
        greet: First message on a link; its counts are filled in.
        cluster: Map with the other workers.
        partition: This worker's part.
        group_images: See `ExpectedBlocks`.
        lead: See `PeerWorker`.
        on_blocks: Takes received blocks.
        waits: Deadlines.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        greet: Greet,
        cluster: ClusterMap,
        partition: Partition,
        group_images: Callable[[int], int],
        lead: int,
        on_blocks: OnBlocks,
        waits: Waits,
    ) -> None:
        self._endpoint = endpoint
        self._identity = endpoint.identity
        self._greet = greet
        self._waits = waits
        self._callbacks = Callbacks(self._identity.node)
        self._progress, self._linked = asyncio.Event(), asyncio.Event()
        events = PeerWorkerEvents(blocks=on_blocks, progress=self._progress.set, linked=self._linked.set)
        self._others: dict[int, PeerWorker] = {}
        for part, node in enumerate(cluster.members(greet.replica)):
            if part != partition.worker:
                shapes = {
                    c.number: partial(partition.wire_shape, c) for c in partition.incoming if c.source == part
                }
                self._others[part] = PeerWorker(
                    part=part,
                    node=node,
                    address=cluster.nodes[node].address,
                    expected=ExpectedBlocks(shapes, partition.network.dtype, group_images),
                    lead=lead,
                    heeded=any(crossing.target == part for crossing in partition.outgoing),
                    events=events,
                    callbacks=self._callbacks,
                )

    def put(self, part: int, parcel: Parcel) -> None:
        """Send a block to the worker of a part. Never waits."""
        self._others[part].put(parcel)

    def begin(self) -> None:
        """Count one more group begun here. Never waits."""
        for other in self._others.values():
            other.begin()

    @property
    def keep_up(self) -> bool:
        """Whether all receivers of this worker's blocks permit the start of one more group."""
        return all(other.keeps_up for other in self._others.values())

    async def wait_linked(self) -> None:
        """Wait until each other worker has had a link. Cancelling it loses nothing.

        Raises:
            DeadlineExceeded: A worker had no link for `waits.patience_s`; the error names the worker.
        """

        def late() -> str:
            """Name the workers without a link."""
            return f"a link to {', '.join(each.node for each in self._others.values() if not each.links)}"

        async with Within(self._waits.patience_s, late):
            while not all(other.links for other in self._others.values()):
                self._linked.clear()
                await self._linked.wait()

    async def wait_progress(self) -> None:
        """Wait until another worker has begun a further group. Cancelling it loses nothing.

        Raises:
            DeadlineExceeded: No other worker began a group for `waits.clock_s`.
        """
        late = ", ".join(other.node for other in self._others.values() if not other.keeps_up)
        self._progress.clear()
        async with Within(self._waits.clock_s, f"{late} to begin another group"):
            await self._progress.wait()

    async def run(self) -> None:
        """Keep links to workers with higher parts until cancelled; workers with lower parts connect here.

        Raises:
            RoleDied: A worker was unreachable for `patience_s`.
            Exception: An error in a callback that sends.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for part, other in self._others.items():
                    if part > self._greet.partition:
                        group.create_task(self._keep(other), name=f"{self._identity.node}/to-{other.node}")
                await self._callbacks.failure()
        finally:
            for other in self._others.values():
                other.close()

    async def _keep(self, other: PeerWorker) -> None:
        channel = Channel(
            self._endpoint,
            peer=other.node,
            address=other.address,
            peer_role="worker",
            patience_s=self._waits.patience_s,
        )
        channel.renew()
        while channel.left_s > 0:
            try:
                link = await channel.dial()
            except DialFailed as error:
                raise RoleDied(channel.peer, str(error)) from error
            except TransportError as error:  # the address belongs to another role, or to no role
                logger.info("%s cannot be dialled at %s: %s", other.node, channel.address, error)
                await channel.pause()
                continue
            try:
                known = await self._dialled(link, other)
            finally:
                channel.drop()
            if known:
                channel.progressed()
            else:
                await channel.pause()
        raise RoleDied(channel.peer, f"it did not answer for {self._waits.patience_s:g} s")

    async def _dialled(self, link: Link, other: PeerWorker) -> bool:
        """Use a dialled link; return whether the other side has the same replica generation, and broke no
        rule."""
        known = False
        try:
            self._send_greet(link, other)
            async with asyncio.timeout(self._waits.call_s):
                answer = unpack(await link.receive(), Greet)
            if not self.knows(answer, link.peer):
                return False
            known = True
            await other.converse(link, answer)
        except RemoteProtocolError as error:
            logger.warning("%s broke a rule: %s", other.node, error)
            known = False
        except (TransportError, TimeoutError) as error:
            logger.info("link to %s ended: %s", other.node, error)
        return known

    def knows(self, greet: Greet, peer: Identity) -> bool:
        """Return whether a peer is the known worker of its part in this replica generation."""
        ours, other = self._greet, self._others.get(greet.partition)
        if other is None or other.node != peer.node:
            return False
        return (greet.run, greet.replica, greet.replica_generation) == (
            ours.run,
            ours.replica,
            ours.replica_generation,
        )

    async def welcome(self, link: Link, greet: Greet) -> None:
        """Use a link that another known worker has dialled, until it ends."""
        other = self._others[greet.partition]
        try:
            self._send_greet(link, other)
            await other.converse(link, greet)
        except TransportError as error:
            logger.info("link to %s ended: %s", other.node, error)

    def _send_greet(self, link: Link, other: PeerWorker) -> None:
        link.send_nowait(pack(other.hello(self._greet)))

    def statistics(self) -> dict[str, PeerWorkerCounts]:
        """Return the counts of each link, by node."""
        return {other.node: other.statistics() for other in self._others.values()}
