"""One of the other servers of a staging: reached, asked, and given up once it stays silent.

A question has a deadline. One that is missed drops the link, so that whatever hangs there does not hang here;
the next question dials again. A server that could not be reached for `join_s`, or for `back_s` once it had
been there, or that missed deadline after deadline, is given up (`PeerLost`). One that answers but has not got
the file is waited for, as long as it moves.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import numpy as np

from adam_async.data_server.staging.files import PIECE_BYTES, WrongBytes
from adam_async.data_server.staging.plan import File, Staging, first_difference
from adam_async.errors import DataError
from adam_async.messages import (
    Body,
    FilePart,
    ManifestPart,
    ReadFile,
    ReadManifest,
    check_tensor,
    pack,
    read_text_tensor,
    unpack,
)
from adam_async.messages.sizes import MOST_MANIFEST_BYTES
from adam_async.runtime.channel import Channel
from adam_async.runtime.traffic import Traffic
from transport import (
    DialFailed,
    HandshakeRejected,
    Identity,
    Link,
    Message,
    Network,
    RemoteError,
    RetrySchedule,
    TransportError,
)

FILE_TEXT_BYTES = 256
"""Bytes of text charged in advance for an entry of the list of files."""

LISTED = 2000
"""Files of a manifest that one answer holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Deadlines of a staging, in seconds, and how often things are tried."""

    join_s: float = 60.0
    """A server that has not been met yet may come this late; then others read what belongs to it."""
    back_s: float = 10.0
    """The same for one that has been met."""
    wait_s: float = 10.0
    """A server that has not got a file yet answers after this long, and is asked again."""
    answer_s: float = 10.0
    """An answer, beyond that."""
    stall_s: float = 300.0
    """A server that answers but has staged nothing more for this long is given up."""
    read_s: float = 30.0
    """One piece of a file of the source."""
    tries: int = 3
    """Times that a read or a question is tried."""


class PeerLost(Exception):
    """A server of the staging is not asked any more; the message says why."""


class PeerFailed(Exception):
    """A server did not give a file this time; the message says why."""


class PeerRefused(Exception):
    """A server will not give a file at all; the message says why."""


class NotYet(Exception):
    """A server that was asked without patience has not got the file."""


class Peer:
    """One of the other servers.

    Args:
        number: Its number.
        address: Where it listens.
        plan: What this server knows of the staging.
        network: How it is reached.
        identity: This server's.
        patience: Deadlines.
        traffic: Where its links are counted.
        clock: Seconds of the loop.
    """

    def __init__(
        self,
        number: int,
        address: str,
        *,
        plan: Staging,
        network: Network,
        identity: Identity,
        patience: Patience,
        traffic: Traffic,
        clock: Callable[[], float],
    ) -> None:
        self.number = number
        self.address = address
        self._channel = Channel(
            peer=f"server {number}",
            address=address,
            network=network,
            identity=identity,
            peer_role="data",
            traffic=traffic,
            patience_s=patience.join_s,
            pauses=RetrySchedule(),
            clock=clock,
        )
        self.met = False
        """Whether it has been talked to."""
        self._plan = plan
        self._patience = patience
        self._clock = clock
        self._dialling = asyncio.Lock()
        self._called = asyncio.Event()
        self._differs = False
        self._silences = 0
        self._progress = -1
        self._moved = 0.0

    def called(self, *, differs: bool) -> None:
        """Take in that it has called here: it can be reached now. `differs`: it stages something else."""
        self._differs = self._differs or differs
        self._called.set()

    async def look(self) -> None:
        """Try once to reach it, and compare what there is to stage.

        Raises:
            PeerLost, PeerFailed, PeerRefused: It is not there, or not in order.
            DataError: It stages something else.
        """
        await self._reach(self._patience.answer_s, RetrySchedule(attempts=1))

    async def meet(self) -> None:
        """Look again and again, and whenever it calls here, until it is there. Raises as `look` does."""
        self._channel.progressed()
        while True:
            self._called.clear()
            try:
                return await self.look()
            except PeerLost:
                if self._channel.left_s <= 0 or self._plan.gone(self.number):
                    raise
            await self._channel.pause(self._called)

    async def aclose(self) -> None:
        """End the link, if there is one, after its last messages have left."""
        await self._channel.aclose()

    async def pieces(
        self, file: int, *, patient: bool, on_checksum: Callable[[str], None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield a file piece by piece, once it is there, and tell its checksum before the first.

        Raises:
            PeerLost, PeerFailed, PeerRefused: It does not give it.
            NotYet: It has not got it, and this is not patient.
            DataError: It stages something else.
        """
        size, offset = self._plan.files[file].size, 0
        while True:
            part, piece = await self._part(file, offset, size, patient)
            if not part.checksum:
                if not patient:
                    raise NotYet
                self._wait_on(part.progress)
                continue
            if offset == 0:
                on_checksum(part.checksum)
            if piece:
                yield piece
            offset += len(piece)
            if offset >= size:
                return

    async def _part(self, file: int, offset: int, size: int, patient: bool) -> tuple[FilePart, bytes]:
        wait_s = self._patience.wait_s if patient else 0.0
        question = ReadFile(digest=self._plan.digest, file=file, offset=offset, wait_s=wait_s)
        link = await self._reach(self._patience.back_s if self.met else self._patience.join_s, None)
        reply = await self._ask(link, question, wait_s)
        part = unpack(reply, FilePart)
        length = min(PIECE_BYTES, size - offset) if part.checksum else 0
        if not length and not reply.tensors:
            return part, b""
        if len(reply.tensors) != 1:
            raise PeerFailed("it sent no bytes with a piece")
        check_tensor(reply.tensors[0], "piece of a file", (length,), np.dtype(np.uint8))
        return part, reply.tensors[0].tobytes()

    def _wait_on(self, progress: int) -> None:
        """Take in that it has not got a file yet, and how far it is."""
        now = self._clock()
        if progress != self._progress:
            self._progress, self._moved = progress, now
        elif now - self._moved >= self._patience.stall_s:
            raise PeerLost(f"it has staged nothing for {self._patience.stall_s:g} s")

    async def _ask(self, link: Link, question: Body, wait_s: float) -> Message:
        try:
            reply = await link.call(pack(question), timeout_s=wait_s + self._patience.answer_s)
        except RemoteError as error:
            self._silences = 0
            raise PeerRefused(error.text) from None
        except TransportError as error:
            self._check_same()
            # Whoever misses a deadline may be stuck for good: the link goes. What else waited on it fails
            # with it, and is no silence of its own.
            if link is self._channel.link:
                self._channel.drop()
                self._silences += 1
            if self._silences >= self._patience.tries:
                raise PeerLost(str(error)) from None
            raise PeerFailed(str(error)) from None
        self._silences = 0
        return reply

    async def _reach(self, timeout_s: float, retry: RetrySchedule | None) -> Link:
        """Return the link, or make one."""
        async with self._dialling:
            if self._plan.gone(self.number):
                raise PeerLost("it was given up")
            channel = self._channel
            if channel.link is not None and not channel.link.closed:
                return channel.link
            try:
                link = await channel.dial(timeout_s, retry=retry)
            except (DialFailed, HandshakeRejected) as error:
                self._check_same()
                raise PeerLost(str(error)) from None
            except TransportError as error:
                raise PeerLost(f"{self.address} answers, but not as a data server: {error}") from None
            try:
                await self._compare(link)
            except BaseException:
                channel.drop()
                raise
            self.met = True
            return link

    async def _compare(self, link: Link) -> None:
        """Check that it is the server we take it for, and stages what we stage."""
        plan = self._plan
        told, _ = await self._manifest(link, 0, 0)
        if (told.server, told.servers) != (self.number, plan.servers):
            raise DataError(
                f"{self.address} is server {told.server} of {told.servers} in its own list, "
                f"and {self.number} of {plan.servers} here; give all servers the same list in the same order"
            )
        if told.digest != plan.digest:
            try:
                difference = await self._difference(link)
            except (PeerLost, PeerFailed, PeerRefused) as error:
                difference = f"it did not say which files ({error})"
            raise self._other_source(difference)
        if told.yours > 0:
            plan.ledger_replica(self.number)

    def _check_same(self) -> None:
        """Raise if it has said itself that it stages something else; it will have left for that reason."""
        if self._differs:
            raise self._other_source("it has left before it said which files")

    def _other_source(self, difference: str) -> DataError:
        return DataError(
            f"{self.address} has another source: {difference}; all servers must see the same files"
        )

    async def _difference(self, link: Link) -> str:
        first = 0
        while True:
            _, theirs = await self._manifest(link, first, LISTED)
            ours = self._plan.files[first : first + LISTED]
            difference = first_difference(ours, theirs)
            if difference is not None:
                return difference
            if not ours:
                return "its list changes"
            first += LISTED

    async def _manifest(self, link: Link, first: int, count: int) -> tuple[ManifestPart, list[File]]:
        plan = self._plan
        question = ReadManifest(
            server=plan.server, servers=plan.servers, digest=plan.digest, first=first, count=count
        )
        reply = await self._ask(link, question, 0.0)
        return unpack(reply, ManifestPart), read_text_tensor(reply, list[File], MOST_MANIFEST_BYTES)


def damaged(checksum: str, expected: str) -> WrongBytes:
    """What is raised when a copy is not what was sent."""
    return WrongBytes(f"its checksum is {checksum[:12]}..., expected {expected[:12]}...")
