"""One of a staging's other servers: its link, requests to it, and its loss after a silence.

A request has a deadline. A missed deadline drops the link, so a hanging server does not block this server;
the next request connects again. A server is abandoned (`PeerLost`) if it is unreachable for `join_s`, or for
`back_s` after a first contact, or if it misses several deadlines in a row. A server that answers without the
file gets more time while it makes progress.
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
from adam_async.messages.body import MOST_MANIFEST_BYTES
from adam_async.runtime.channel import Channel, Endpoint
from transport import DialFailed, HandshakeRejected, Link, Message, RemoteError, RetrySchedule, TransportError

FILE_TEXT_BYTES = 256
"""Assumed text size of an entry in the list of files, in bytes, before the text is made."""

LISTED = 2000
"""Maximum number of a manifest's files in one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Deadlines of a staging, in seconds, and numbers of attempts."""

    join_s: float = 60.0
    """Maximum time until the first contact with a server; after this time, other servers read the files of
    that server."""
    back_s: float = 10.0
    """Maximum time to reach a server again after a first contact."""
    wait_s: float = 10.0
    """Time after which a server answers that it lacks a file; the asking server then repeats the request."""
    answer_s: float = 10.0
    """Time for an answer beyond the wait for a missing file."""
    stall_s: float = 300.0
    """Time without progress after which an answering server is abandoned."""
    read_s: float = 30.0
    """Maximum time for reading one piece of a source file."""
    tries: int = 3
    """Maximum number of attempts at a read or a request."""


class PeerLost(Exception):
    """The loss of a server of the staging, with its reason."""


class PeerFailed(Exception):
    """A failed request for a file, with the reason."""


class PeerRefused(Exception):
    """A server refused a file, with the reason."""


class NotYet(Exception):
    """A server does not have the file yet, and the request was not to wait."""


class Peer:
    """One other server of the staging."""

    def __init__(
        self,
        number: int,
        address: str,
        *,
        plan: Staging,
        endpoint: Endpoint,
        patience: Patience,
        clock: Callable[[], float],
    ) -> None:
        self.number = number
        self.address = address
        self._channel = Channel(
            endpoint,
            peer=f"server {number}",
            address=address,
            peer_role="data",
            patience_s=patience.join_s,
            pauses=RetrySchedule(),
            clock=clock,
        )
        self.was_reached = False
        """Whether this peer has answered at least once."""
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
        """Note a request from the peer to this server: the peer is reachable now.

        Args:
            differs: Whether the peer stages another source.
        """
        self._differs = self._differs or differs
        self._called.set()

    async def look(self) -> None:
        """Connect once, and compare both sources.

        Raises:
            PeerLost, PeerFailed, PeerRefused: The server is unreachable, or does not answer correctly.
            DataError: The server stages another source.
        """
        await self._reach(self._patience.answer_s, RetrySchedule(attempts=1))

    async def connect(self) -> None:
        """Try to connect until the peer answers: at growing intervals, and at each request from the peer. For
        errors see `look`."""
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
        """Close the link, if any, after its last messages are sent."""
        await self._channel.aclose()

    async def pieces(
        self, file: int, *, patient: bool, on_checksum: Callable[[str], None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield a file piece by piece, when the server has it, after a call of `on_checksum`.

        Raises:
            PeerLost, PeerFailed, PeerRefused: The server does not send the file.
            NotYet: The server does not have the file yet, and `patient` is false.
            DataError: The server stages another source.
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
        link = await self._reach(self._patience.back_s if self.was_reached else self._patience.join_s, None)
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
        """Note that the server does not have a file yet, and its progress."""
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
            # A server that misses a deadline may hang for ever, so drop the link. Other requests on the link
            # fail with it, and do not count as further silence.
            if link is self._channel.link:
                self._channel.drop()
                self._silences += 1
            if self._silences >= self._patience.tries:
                raise PeerLost(str(error)) from None
            raise PeerFailed(str(error)) from None
        self._silences = 0
        return reply

    async def _reach(self, timeout_s: float, retry: RetrySchedule | None) -> Link:
        """Return the link; make a new one if necessary."""
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
            self.was_reached = True
            return link

    async def _compare(self, link: Link) -> None:
        """Compare the server's number and source with this server's list and source."""
        plan = self._plan
        theirs, _ = await self._manifest(link, 0, 0)
        if (theirs.server, theirs.servers) != (self.number, plan.servers):
            raise DataError(
                f"{self.address} is server {theirs.server} of {theirs.servers} in its own list, "
                f"and {self.number} of {plan.servers} here; give all servers the same list in the same order"
            )
        if theirs.digest != plan.digest:
            try:
                difference = await self._difference(link)
            except (PeerLost, PeerFailed, PeerRefused) as error:
                difference = f"it did not send its list of files ({error})"
            raise self._other_source(difference)
        if theirs.yours > 0:
            plan.holder(self.number)

    def _check_same(self) -> None:
        """Raise if the server left because, as it reported, its source differs."""
        if self._differs:
            raise self._other_source("it has left before it sent its list of files")

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
    """Return the error of a copy with another checksum."""
    return WrongBytes(f"its checksum is {checksum[:12]}..., expected {expected[:12]}...")
