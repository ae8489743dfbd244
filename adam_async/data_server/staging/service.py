"""The shell of a staging: a data server's copy of a shared source, made together with other servers.

Theory of operation
-------------------
A stager is a role without a membership: no server has data to join with yet. So all servers have the same
list of their addresses. The stager listens at its address in the list. A few tasks read its own files from
the source, and a few more copy the other files, round by round. `Staging` has the order of the files, and the
substitutes of lost servers. `staged` returns when the copy is whole.

The stager answers the other servers until its block ends, even while its process serves images from the copy.
A request for a file that is not copied yet waits for it, up to a limit. Requests name files by number, and
each server's own manifest turns a number into a path: no text from a peer becomes a name or a size.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adam_async.controller.role import Role, RoleSettings, reply_when_room
from adam_async.data_server.staging.files import PIECE_BYTES, Copy, Found, Source, WrongBytes, find
from adam_async.data_server.staging.peer import (
    FILE_TEXT_BYTES,
    LISTED,
    NotYet,
    Patience,
    Peer,
    PeerFailed,
    PeerLost,
    PeerRefused,
    damaged,
)
from adam_async.data_server.staging.plan import Staging, Step
from adam_async.errors import BindFailed, DataError, counted, failing_as, first_cause
from adam_async.messages import Body, FilePart, ManifestPart, ReadFile, ReadManifest, pack, text_tensor
from adam_async.run.config import Waits
from adam_async.run.counts import Counts
from adam_async.runtime.disk import Disk
from transport import Identity, Network, RemoteProtocolError, Request

logger = logging.getLogger(__name__)

READERS = 2
"""Number of files that a server reads from the source at once."""

COPIES = 4
"""Number of files that a server copies at once."""

LONGEST_WAIT_S = 60.0
"""Maximum wait of a question for a missing file, in seconds."""

OpenDisk = Callable[[str], Disk]


class StagingCounts(msgspec.Struct, kw_only=True):
    """A staging's numbers of files and bytes, by origin."""

    files: int
    kept_files: int
    """Number of files that an earlier start has left in the copy."""
    source_files: int = 0
    """Number of files read from the source."""
    source_bytes: int = 0
    copied_files: int = 0
    """Number of files copied from other servers."""
    copied_bytes: int = 0
    retried: int = 0
    """Number of attempts that were repeated after a failure."""


class StagerCounts(Counts, kw_only=True):
    """Counts of one server of a staging."""

    staging: StagingCounts


class Stager(Role):
    """One server of a staging, until its block ends.

    Args:
        held: Checksums of the files that an earlier start has left in the copy.
        open_disk: Opens a disk by name, to read the source with.
    """

    def __init__(
        self,
        settings: RoleSettings,
        *,
        peers: Sequence[str],
        server: int,
        found: Found,
        copy: Copy,
        held: Mapping[int, str],
        open_disk: OpenDisk,
        patience: Patience,
    ) -> None:
        super().__init__(settings)
        self.plan = Staging(found.files, server=server, servers=len(peers), tries=patience.tries)
        for file, checksum in held.items():
            self.plan.hold(file, checksum)
        self.data = copy.folder / found.files[0].path if found.single else copy.folder
        """Path of the copy to load, after the staging."""
        self._found = found
        self._copy = copy
        self._addresses = tuple(peers)
        self._patience = patience
        self._source = Source(
            found.root, lambda: open_disk("source"), readers=READERS, read_s=patience.read_s
        )
        self._peers: dict[int, Peer] = {}
        self._looking = len(peers) - 1
        self._news = asyncio.Event()
        self._done = asyncio.Event()
        self._parked: dict[int, list[asyncio.Event]] = {}
        self._progress = 0
        self.counts = StagingCounts(files=len(found.files), kept_files=len(held))
        """Numbers of files and bytes by origin so far, and of retries."""

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        for number, address in enumerate(self._addresses):
            if number != self.plan.server:
                self._peers[number] = Peer(
                    number,
                    address,
                    plan=self.plan,
                    endpoint=self._endpoint,
                    patience=self._patience,
                    clock=self._loop.time,
                )
        return {"stage": self._stage()}

    async def staged(self) -> None:
        """Wait until this server has every file.

        If no server can provide a file, a `DataError` ends the block.
        """
        await self._done.wait()

    # --- getting files -----------------------------------------------------------------------

    async def _stage(self) -> None:
        async with AsyncExitStack() as stack:
            for peer in self._peers.values():
                stack.push_async_callback(peer.aclose)
            if not self.plan.complete:
                await self._get_all()
        self._done.set()
        logger.info("%s: %s", self._identity.node, self.summary())

    async def _get_all(self) -> None:
        name = self._identity.node
        async with self._source, asyncio.TaskGroup() as peers_group:
            reaching = [
                peers_group.create_task(self._reach(peer), name=f"{name}/reach-{peer.number}")
                for peer in self._peers.values()
            ]
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_own(), name=f"{name}/own")
                group.create_task(self._copy_rounds(), name=f"{name}/rounds")
            for task in reaching:
                task.cancel()

    async def _reach(self, peer: Peer) -> None:
        """Try once to reach a server; then wait until it is reached or lost."""
        try:
            await peer.look()
        except (PeerLost, PeerFailed, PeerRefused, RemoteProtocolError):
            logger.info("%s: %s cannot be reached yet", self._identity.node, peer.address)
        finally:
            self._looking -= 1
            self._peers_changed()
        try:
            await peer.connect()
        except (PeerLost, PeerFailed, PeerRefused, RemoteProtocolError) as error:
            self._lose(peer.number, str(error))
        self._peers_changed()

    def _peers_changed(self) -> None:
        """Wake the tasks that wait for changes of servers."""
        self._news.set()
        self._news = asyncio.Event()

    def _lose(self, server: int, why: str) -> None:
        if not self.plan.gone(server):
            logger.warning(
                "%s: server %d of the staging, %s, is lost (%s); others read its files",
                self._identity.node,
                server,
                self._addresses[server],
                why,
            )
            self.plan.lost(server, why)
            self._peers_changed()

    async def _read_own(self) -> None:
        """Get the files of this server, after one attempt to reach each of the others."""
        while self._looking:
            await self._news.wait()
        await self._lanes(self.plan.missing_of(self.plan.server), READERS)

    async def _copy_rounds(self) -> None:
        """Get the files of the other servers, round by round."""
        while self.plan.rounds():
            reached = [number for number, peer in self._peers.items() if peer.was_reached]
            owner = self.plan.next_round(reached)
            if owner is None:
                await self._news.wait()
            else:
                await self._lanes(self.plan.missing_of(owner), COPIES)

    async def _lanes(self, files: Iterable[int], lanes: int) -> None:
        waiting = deque(files)

        async def lane() -> None:
            while waiting:
                await self._get(waiting.popleft())

        async with asyncio.TaskGroup() as group:
            for number in range(min(lanes, len(waiting))):
                group.create_task(lane(), name=f"{self._identity.node}/lane-{number}")

    async def _get(self, file: int) -> None:
        """Get one file from the source or a peer."""
        while self.plan.checksum(file) is None:
            step = self.plan.where(file)
            if step is None:
                self._wake(file)
                path = self._found.root / self._found.files[file].path
                raise DataError(f"{path} cannot be staged: {self.plan.why(file)}")
            try:
                await self._get_by(file, step)
            except NotYet:
                self.plan.looked(file, step.server)
            except PeerLost as error:
                self._lose(step.server, str(error))
            except PeerRefused as error:
                self.plan.refused(file, step.server, str(error))
            except (PeerFailed, WrongBytes, RemoteProtocolError) as error:
                self._again(file, step.server, str(error))

    def _again(self, file: int, server: int, why: str) -> None:
        self.counts.retried += 1
        self.plan.failed(file, server, why)
        if not self.plan.readable(file):
            self._wake(file)
        logger.info(
            "%s: %s from server %d failed: %s", self._identity.node, self.plan.files[file].path, server, why
        )

    async def _get_by(self, file: int, step: Step) -> None:
        size, expected = self.plan.files[file].size, ""
        if step.server == self.plan.server:
            pieces = _readable(self._source.pieces(self.plan.files[file]))
        else:

            def on_checksum(checksum: str) -> None:
                nonlocal expected
                expected = checksum

            pieces = self._peers[step.server].pieces(file, patient=step.patient, on_checksum=on_checksum)
        with failing_as(DataError, f"{self._copy.folder} cannot be written"):
            async with contextlib.aclosing(pieces):
                checksum = await self._copy.write(file, self._counted(pieces))
            if expected and checksum != expected:
                raise damaged(checksum, expected)
            await self._copy.keep(file, checksum)
        if step.server == self.plan.server:
            self.counts.source_files += 1
            self.counts.source_bytes += size
        else:
            self.counts.copied_files += 1
            self.counts.copied_bytes += size
        self.plan.hold(file, checksum)
        self._wake(file)

    async def _counted(self, pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            self._progress += len(piece)
            yield piece

    # --- sending files -----------------------------------------------------------------------

    def _wake(self, file: int) -> None:
        """Answer the waiting questions for a file, with a piece or a refusal."""
        for parked in self._parked.pop(file, []):
            parked.set()

    def _answer(self, request: Request, body: Body) -> None:
        plan = self.plan
        if isinstance(body, ReadManifest):
            asker = self._peers.get(body.server)
            if asker is not None:
                asker.called(differs=body.digest != plan.digest)
            yours = 0 if asker is None else plan.held_of(body.server)
            part = ManifestPart(server=plan.server, servers=plan.servers, digest=plan.digest, yours=yours)
            files = plan.files[body.first : body.first + min(body.count, LISTED)]
            nbytes = FILE_TEXT_BYTES * len(files)
            reply_when_room(request, nbytes, lambda: pack(part, [text_tensor(files)]))
        elif not isinstance(body, ReadFile):
            super()._answer(request, body)
        elif body.digest != plan.digest:
            request.fail("other-files", f"{self._identity.node} stages another list of files")
        elif body.file >= len(plan.files) or body.offset > plan.files[body.file].size:
            request.fail("no-such-piece", f"there is no byte {body.offset} of a file {body.file}")
        else:
            self._spawn("send", self._send(request, body))

    async def _send(self, request: Request, body: ReadFile) -> None:
        """Send a piece, now or after its file has arrived."""
        plan = self.plan
        if plan.checksum(body.file) is None and plan.readable(body.file):
            parked = asyncio.Event()
            waiting = self._parked.setdefault(body.file, [])
            waiting.append(parked)
            try:
                async with asyncio.timeout(min(body.wait_s, LONGEST_WAIT_S)):
                    await parked.wait()
            except TimeoutError:
                waiting.remove(parked)
        checksum = plan.checksum(body.file)
        if checksum is not None:
            size = min(PIECE_BYTES, plan.files[body.file].size - body.offset)
            request.charge(size, lambda: self._spawn("send", self._send_piece(request, body, checksum)))
        elif plan.readable(body.file):
            request.reply(pack(FilePart(checksum="", progress=self._progress)))
        else:
            request.fail("unreadable", f"{self._identity.node} cannot read that file: {plan.why(body.file)}")

    async def _send_piece(self, request: Request, body: ReadFile, checksum: str) -> None:
        try:
            piece = await self._copy.read(body.file, body.offset)
        except OSError as error:
            request.fail("unreadable", f"{self._identity.node} has lost its copy: {error.strerror or error}")
            return
        tensors = [np.frombuffer(piece, np.uint8)] if piece else []
        request.reply(pack(FilePart(checksum=checksum, progress=self._progress), tensors))

    # --- statistics --------------------------------------------------------------------------

    def statistics(self) -> StagerCounts:
        """Return the statistics of the role, with the counts of the staging."""
        return self._with_common(StagerCounts(staging=self.counts))

    def summary(self) -> str:
        """Return the counts as a sentence."""
        counts = self.counts
        return (
            f"staged {counted(counts.files, 'file')} of {self._found.root} into {self._copy.folder}: "
            f"{counts.source_files} read from there ({counts.source_bytes / 1e6:.1f} MB), "
            f"{counts.copied_files} copied from other servers ({counts.copied_bytes / 1e6:.1f} MB), "
            f"{counts.kept_files} already here, {counts.retried} retries"
        )


async def _readable(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield pieces of the source; an error becomes `PeerFailed`, which causes a retry, here or at a peer."""
    async with contextlib.aclosing(pieces):
        try:
            async for piece in pieces:
                yield piece
        except OSError as error:
            raise PeerFailed(error.strerror or str(error)) from None


@asynccontextmanager
async def staging(
    source: Path,
    folder: Path,
    *,
    peers: Sequence[str],
    network: Network,
    identity: Identity,
    disk: Disk,
    open_disk: OpenDisk,
    patience: Patience | None = None,
) -> AsyncIterator[Stager]:
    """Take part in a staging, as the first of `peers` whose address this machine can listen on.

    Args:
        folder: Folder of the copy, either empty or from an earlier start. The folder is locked until the end
            of the block.

    Raises:
        DataError: Source or folder is unusable, or another server has locked the folder; or, in an exception
            group, the staging cannot continue.
        BindFailed: None of the addresses is free on this machine.
        BindRefused: Other machines could reach the address, and there is no token.
    """
    here, there = await disk.run(folder.resolve), await disk.run(source.resolve)
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise DataError(
            f"{folder} and {source} are one folder, or one is in the other: stage into a folder elsewhere"
        )
    found = await find(source, disk)
    copy = Copy(folder, found, disk, start=identity.incarnation)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(copy.hold())
        held = await copy.take_up()
        refused = ""
        for server, address in enumerate(peers):
            stager = Stager(
                RoleSettings(network=network, address=address, identity=identity, waits=Waits()),
                peers=peers,
                server=server,
                found=found,
                copy=copy,
                held=held,
                open_disk=open_disk,
                patience=patience or Patience(),
            )
            try:
                await stack.enter_async_context(stager)
            except (OSError, ExceptionGroup) as error:
                cause = first_cause(error)
                if not isinstance(cause, OSError):
                    raise
                refused = cause.strerror or str(cause)
                continue
            yield stager
            return
        raise BindFailed(f"any of {', '.join(peers)}", refused.split("): ")[-1])
