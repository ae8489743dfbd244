"""The other workers of a replica: links to all of them, and blocks that go both ways.

Theory of operation
-------------------
Of two workers the one with the lower part dials. Either side begins with a `Greet` that says for which life
of the replica it speaks and how many blocks it has: sending goes on behind those (`block_stream.py`). A
worker of another life is not talked to, so what an earlier life still says is refused as a whole.

Blocks that become ready in one turn of the loop leave in one message, whatever groups they belong to; what
arrives is handed to the engine at once. Confirmations ride on the blocks of the other way; where nothing
goes that way for `CONFIRM_BLOCKS`, a message without blocks brings them.

A worker that sends and gets nothing back, such as one whose layers are all frozen, could run away from one
that is slower. So each says how many groups it has begun, and nobody begins a group that is more than a
*lead* ahead of a worker that it sends to: so many groups wait anywhere, and no more.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import DeadlineExceeded, RoleDied
from adam_async.messages import Block, Blocks, Greet, check_tensor, pack, unpack
from adam_async.model.partition.network import Partition
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.runtime.callbacks import Callbacks
from adam_async.runtime.channel import Channel
from adam_async.runtime.traffic import Traffic
from adam_async.worker.reliable_stream import Parcel, ReceivingStream, SendingStream
from transport import (
    DialFailed,
    Identity,
    Link,
    LinkBroken,
    LinkClosed,
    Message,
    Network,
    RemoteProtocolError,
    TransportError,
    WouldBlock,
)

logger = logging.getLogger(__name__)

BLOCKS = 64
"""Blocks of one message at most; what describes them must fit into a frame's meta."""

MESSAGE_BYTES = 32 << 20
"""Their tensors at most, unless it is a single one."""

MOST_BEGUN = 1 << 16
"""Maximum number of groups that the other side begins between two messages."""

CONFIRM_BLOCKS = 32
"""After so many blocks that nothing was said behind, they are confirmed by a message of their own."""

TELL_SHARE = 4
"""Who sends to us hears that often of the groups that we begin, while he goes through his lead."""

ROOM_S = 0.005
"""When the other side does not read fast enough, it is tried again after this long."""

OnBlocks = Callable[[Sequence[tuple[Block, NDArray[Any]]]], None]
"""Takes what came in one message."""


class Neighbour:
    """One of the other workers, over one link after the other.

    Args:
        part: Which part of the model it has.
        node: Its node id.
        address: Where it listens.
        expects: Shape, but for the images, of what crosses from there, by number of the crossing.
        dtype: Of all of it.
        group_images: Function from the number of a group to its number of images; 0 if no epoch has it.
        lead: Groups that who sends may be ahead of who receives.
        heeded: Whether we send to it, and so wait until it has begun enough groups.
        on_blocks: Takes what arrives.
        on_progress: Called when it has begun more groups.
        on_linked: Called when there is a link to it.
        callbacks: Runs the sending callbacks in a later iteration of the loop.
    """

    def __init__(
        self,
        *,
        part: int,
        node: str,
        address: str,
        expects: Mapping[int, Callable[[int], tuple[int, ...]]],
        dtype: np.dtype[Any],
        group_images: Callable[[int], int],
        lead: int,
        heeded: bool,
        on_blocks: OnBlocks,
        on_progress: Callable[[], None],
        on_linked: Callable[[], None],
        callbacks: Callbacks,
    ) -> None:
        self.part, self.node, self.address = part, node, address
        self._expects = expects
        self._dtype = dtype
        self._group_images = group_images
        self._lead, self._heeded = lead, heeded
        self._tell_every = max(1, lead // TELL_SHARE)
        self._on_blocks = on_blocks
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._on_progress = on_progress
        self._on_linked = on_linked
        self._callbacks = callbacks
        self._sending = SendingStream()
        self._receiving = ReceivingStream()
        self._told = 0
        """Blocks that the other side knows us to have."""
        self._begun = 0
        """Groups that we have begun; then those that the other side knows of, and those that it has begun."""
        self._told_begun = 0
        self._has_begun = 0
        self._link: Link | None = None
        self._flushing = False
        self.links = 0
        self.messages = 0

    @property
    def received(self) -> int:
        """Blocks that we have from it."""
        return self._receiving.received

    def put(self, parcel: Parcel) -> None:
        """Send a block with whatever else becomes ready in this turn of the loop. Never waits."""
        self._sending.add(parcel)
        self._flush_soon()

    @property
    def keeps_up(self) -> bool:
        """Whether we may begin one more group, as far as it is concerned."""
        return not self._heeded or self._begun - self._has_begun < self._lead

    def begin(self) -> None:
        """We have begun one more group. Never waits."""
        self._begun += 1
        if self._owes_word:
            self._flush_soon()

    @property
    def _owes_word(self) -> bool:
        """Whether the other side must hear of us, even if there is no block to say."""
        if self.received - self._told >= CONFIRM_BLOCKS:
            return True
        return self._begun - self._told_begun >= self._tell_every and bool(self._expects)

    def _flush_soon(self) -> None:
        if not self._flushing and self._link is not None:
            self._flushing = True
            self._callbacks.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        link = self._link
        while link is not None and not link.closed and (self._sending.waiting or self._owes_word):
            if not self._say(link):
                return

    def _say(self, link: Link) -> bool:
        """Say the next blocks; False if the other side does not read fast enough, and we are told later."""
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
        self._told, self._told_begun = self.received, self._begun
        return True

    async def converse(self, link: Link, greet: Greet) -> None:
        """Send and receive on a link whose other side has greeted us, until it ends.

        Raises:
            RemoteProtocolError: The other side does not keep to the rules.
            TransportError: The link is over.
        """
        if self._link is not None:
            self._link.abort()  # it is over, and we have not noticed yet
        self._sending.resume(greet.received)
        self._hear(greet.begun)
        self._link = link
        self.links += 1
        self._on_linked()
        self._flush_soon()
        try:
            while True:
                self._take(await link.receive())
        finally:
            if self._link is link:
                self._link = None

    def hello(self, ours: Greet) -> Greet:
        """What we say first on a new link: `ours`, and what we have of the other side."""
        self._told, self._told_begun = self.received, self._begun
        return msgspec.structs.replace(ours, received=self.received, begun=self._begun)

    def close(self) -> None:
        """This life of the replica is over."""
        if self._link is not None:
            self._link.abort()

    def _take(self, message: Message) -> None:
        body = unpack(message, Blocks)
        if len(body.blocks) != len(message.tensors):
            raise RemoteProtocolError(
                "blocks", f"{len(body.blocks)} blocks with {len(message.tensors)} tensors"
            )
        self._sending.confirm(body.received)
        self._hear(body.begun)
        if body.blocks:
            arrived = tuple(zip(body.blocks, message.tensors, strict=True))
            for block, tensor in arrived:
                self._check(block, tensor)
            known = self._receiving.accept(body.first, len(arrived))
            self._on_blocks(arrived[known:])
        if self._owes_word:
            self._flush_soon()

    def _hear(self, begun: int) -> None:
        if begun > self._has_begun + MOST_BEGUN:
            raise RemoteProtocolError(
                "blocks", f"{begun} groups begun, and {self._has_begun} a moment before"
            )
        if begun > self._has_begun:
            self._has_begun = begun
            self._on_progress()

    def _check(self, block: Block, tensor: NDArray[Any]) -> None:
        images = self._group_images(block.number)
        shape = self._shapes.get((block.crossing, images))
        if shape == tensor.shape and tensor.dtype == self._dtype:
            return  # as most do
        expected = self._expects.get(block.crossing)
        if expected is None:
            raise RemoteProtocolError(
                "blocks", f"crossing {block.crossing} does not lead here from {self.node}"
            )
        if not images:
            raise RemoteProtocolError("blocks", f"no epoch has a group {block.number}")
        check_tensor(tensor, f"crossing {block.crossing}", expected(images), self._dtype)
        self._shapes[block.crossing, images] = tensor.shape

    def statistics(self) -> dict[str, int]:
        """How the talk went."""
        return {
            "links": self.links,
            "messages": self.messages,
            "blocks_received": self.received,
            "blocks_duplicate": self._receiving.duplicates,
            "blocks_said_again": self._sending.said_again,
            "blocks_unconfirmed": self._sending.unconfirmed,
        }


def _let_go(parcels: list[Parcel]) -> None:
    for parcel in parcels:
        parcel.let_go()


class Neighbours:
    """All other workers of the replica.

    Args:
        network: How to reach them.
        identity: Who we are.
        greet: What we say first; its counts are filled in.
        cluster: Who the others are, and where.
        partition: Our part.
        group_images: As in `Neighbour`.
        lead: Groups that who sends may be ahead of who receives.
        on_blocks: Takes what arrives.
        waits: Deadlines.
        traffic: Where the links are counted.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        *,
        network: Network,
        identity: Identity,
        greet: Greet,
        cluster: ClusterMap,
        partition: Partition,
        group_images: Callable[[int], int],
        lead: int,
        on_blocks: OnBlocks,
        waits: Waits,
        traffic: Traffic,
    ) -> None:
        self._network = network
        self._identity = identity
        self._greet = greet
        self._waits = waits
        self._traffic = traffic
        self._callbacks = Callbacks(identity.node)
        self._progress, self._linked = asyncio.Event(), asyncio.Event()
        self._others: dict[int, Neighbour] = {}
        for part, node in enumerate(cluster.members(greet.replica)):
            if part != partition.worker:
                expects = {
                    c.number: partial(partition.wire_shape, c) for c in partition.incoming if c.source == part
                }
                self._others[part] = Neighbour(
                    part=part,
                    node=node,
                    address=cluster.nodes[node].address,
                    expects=expects,
                    dtype=partition.network.dtype,
                    group_images=group_images,
                    lead=lead,
                    heeded=any(crossing.target == part for crossing in partition.outgoing),
                    on_blocks=on_blocks,
                    on_progress=self._progress.set,
                    on_linked=self._linked.set,
                    callbacks=self._callbacks,
                )

    def put(self, part: int, parcel: Parcel) -> None:
        """Send a block to the worker with a part. Never waits."""
        self._others[part].put(parcel)

    def begin(self) -> None:
        """We have begun one more group. Never waits."""
        for other in self._others.values():
            other.begin()

    @property
    def keep_up(self) -> bool:
        """Whether we may begin one more group, as far as those are concerned that we send to."""
        return all(other.keeps_up for other in self._others.values())

    async def wait_linked(self) -> None:
        """Wait until we have talked to each of them. Cancelling it loses nothing.

        Raises:
            DeadlineExceeded: One is not to be reached for `waits.patience_s`; names it.
        """
        try:
            async with asyncio.timeout(self._waits.patience_s):
                while not all(other.links for other in self._others.values()):
                    self._linked.clear()
                    await self._linked.wait()
        except TimeoutError:
            late = ", ".join(other.node for other in self._others.values() if not other.links)
            raise DeadlineExceeded(f"a link to {late}", self._waits.patience_s) from None

    async def wait_progress(self) -> None:
        """Wait until one of them has begun another group. Cancelling it loses nothing.

        Raises:
            DeadlineExceeded: None has for `waits.clock_s`.
        """
        late = ", ".join(other.node for other in self._others.values() if not other.keeps_up)
        self._progress.clear()
        try:
            async with asyncio.timeout(self._waits.clock_s):
                await self._progress.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{late} to begin another group", self._waits.clock_s) from None

    async def run(self) -> None:
        """Keep a link to each worker with a higher part until cancelled; the others dial us.

        Raises:
            RoleDied: One of them could not be reached for `patience_s`.
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

    async def _keep(self, other: Neighbour) -> None:
        channel = Channel(
            peer=other.node,
            address=other.address,
            network=self._network,
            identity=self._identity,
            peer_role="worker",
            traffic=self._traffic,
            patience_s=self._waits.patience_s,
        )
        channel.renew()
        while channel.left_s > 0:
            try:
                link = await channel.dial()
            except DialFailed as error:
                raise RoleDied(channel.peer, str(error)) from error
            try:
                known = await self._dialled(link, other)
            finally:
                channel.drop()
            if known:
                channel.progressed()
            else:
                await channel.pause()
        raise RoleDied(channel.peer, f"it talked to us no more for {self._waits.patience_s:g} s")

    async def _dialled(self, link: Link, other: Neighbour) -> bool:
        """Talk on a link that we dialled; returns whether the other side was of our life."""
        known = False
        try:
            self._say_hello(link, other)
            async with asyncio.timeout(self._waits.call_s):
                answer = unpack(await link.receive(), Greet)
            if not self.knows(answer, link.peer):
                return False
            known = True
            await other.converse(link, answer)
        except RemoteProtocolError as error:
            logger.warning("%s does not keep to the rules: %s", other.node, error)
            known = False
        except (TransportError, TimeoutError) as error:
            logger.info("link to %s ended: %s", other.node, error)
        return known

    def knows(self, greet: Greet, peer: Identity) -> bool:
        """Whether a peer is the known worker of its part, in this life of this replica."""
        ours, other = self._greet, self._others.get(greet.partition)
        if other is None or other.node != peer.node:
            return False
        return (greet.run, greet.replica, greet.replica_generation) == (
            ours.run,
            ours.replica,
            ours.replica_generation,
        )

    async def welcome(self, link: Link, greet: Greet) -> None:
        """Talk on a link that another worker, whom we know, has dialled; until it ends."""
        other = self._others[greet.partition]
        try:
            self._say_hello(link, other)
            await other.converse(link, greet)
        except TransportError as error:
            logger.info("link to %s ended: %s", other.node, error)

    def _say_hello(self, link: Link, other: Neighbour) -> None:
        link.send_nowait(pack(other.hello(self._greet)))

    def statistics(self) -> dict[str, Any]:
        """By node, how the talk went."""
        return {other.node: other.statistics() for other in self._others.values()}
