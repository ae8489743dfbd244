"""Links over a stream: TCP, or a Unix socket between processes of one host (`shared.py`).

Writing. Each write to a transport is a system call, even on uvloop, and costs as much as all other parts of a
small call. So a callback sends the small frames of one iteration of the loop in one write. Three cases need
no callback: handlers' answers during a delivery are sent at its end, a call is sent at once if no other call
is outstanding, and a frame whose payload lies in shared memory goes past the transport at once, so that the
peer can begin. Payloads above ``gather_bytes`` are never joined: the kernel takes them from the caller's
arrays. The link writes chunks of large messages while the transport takes them; once writing pauses, the rest
waits for `resume_writing`.

Reading. The decoder returns the memory for the next bytes, so nearly all of them arrive in their final place.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable

from transport.budget import Budget
from transport.config import LinkConfig
from transport.decoder import Memory
from transport.errors import LinkBroken, LinkClosed, RemoteProtocolError, TransportError
from transport.frames import CLOSE, ERROR, PING, PONG, REPLY, REQUEST, Frame, head
from transport.intake import frame_cost
from transport.link import Link
from transport.messages import Identity, Message, RoleTable
from transport.protocol import Buffer, Conversation, GiveUp, take
from transport.sockets import checks_payloads, descriptor_of, write_now
from transport.tensors import LENT, Release

TURN_BYTES = 64 << 10
"""Bytes of small frames above which the link writes them at once, even within an iteration of the loop."""

_PONG_FRAME = head(PONG, 0, b"", 0)


class StreamLink(Link, asyncio.BufferedProtocol):
    """A link over an established, authenticated connection."""

    takes_lent = True
    _returned: Collection[int] = ()
    """Blocks of shared memory to return to the peer with the next frame."""
    get_buffer: Callable[[int], memoryview]  # type: ignore[assignment]
    _detach: Callable[[int], None]  # type: ignore[assignment]
    __slots__ = (
        "_arriving",
        "_backlog",
        "_conversation",
        "_decoder",
        "_delivering",
        "_descriptor",
        "_detach",
        "_gathers",
        "_gone",
        "_is_held",
        "_kept",
        "_pong_owed",
        "_reading",
        "_transport",
        "_turn",
        "_turn_bytes",
        "_written_bytes",
        "get_buffer",
    )

    def __init__(
        self,
        identity: Identity,
        peer: Identity,
        transport: asyncio.Transport,
        *,
        config: LinkConfig,
        rules: RoleTable,
        memory: Memory,
        budget: Budget,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(identity, peer, config=config, rules=rules, budget=budget, loop=loop)
        self._transport = transport
        self._conversation = Conversation(
            config, memory, now=loop.time(), checked=checks_payloads(config, transport)
        )
        self._decoder = self._conversation.decoder
        # Slots, because every read and every answer calls them, and a method of the link would add a call.
        self.get_buffer = self._decoder.get_buffer
        self._detach = self._decoder.forget
        self._into = self._decoder.registered
        self._writing = True
        self._descriptor = descriptor_of(transport)
        """Descriptor to which large frames are written past the transport; -1 for none."""
        self._is_held = False
        self._reading = True
        self._delivering = False
        self._pong_owed = False
        self._arriving = 0
        self._kept = 0
        self._backlog: deque[Frame] = deque()
        self._written_bytes = 0
        self._gone = loop.create_future()
        # Before Python 3.12 asyncio's writelines joins the buffers, which copies every payload.
        self._gathers = sys.version_info >= (3, 12) or type(loop).__module__.startswith("uvloop")
        self._turn: list[bytes] = []
        self._turn_bytes = 0
        if config.socket_buffer_bytes:  # a small buffer of the kernel needs no larger buffer in front
            transport.set_write_buffer_limits(high=config.socket_buffer_bytes)
        self._arm(self._conversation.next_deadline())

    # Writing

    def _transmit(
        self, kind: int, request_id: int, message: Message, release: Release | None, ordered: bool
    ) -> None:
        # The short path, if no large message is in progress: one frame in one buffer, and no order to keep.
        conversation = self._conversation
        small = None if conversation.queued_bytes else conversation.encode_small(kind, request_id, message)
        if small is None:
            payload_bytes, frame_bytes = self._transmit_large(kind, request_id, message, release, ordered)
        else:
            frame, payload_bytes, frame_bytes = small
            # Shared memory has the payload, so the peer can work on it while others follow.
            if len(frame) < payload_bytes:
                self._write([frame], len(frame))
            # A lone call has no other frame to share a write with, so it does not wait for the callback.
            elif kind == REQUEST and not (self._turn or self._calls.waiting or self._delivering):
                if self._returned:
                    frame = self._freed_frame() + frame
                self._written_bytes += len(frame)
                self._transport.write(frame)
            else:
                self._write_small(frame)
            if release is not None and release is not LENT:
                release()  # the frame holds a copy
        # The type of an ERROR is a code, not a row of the role table.
        if kind != ERROR:
            self._count_out(message.type, payload_bytes, frame_bytes)
        if not self._writing and REPLY <= kind <= ERROR:
            self._note_owed(payload_bytes + frame_bytes)

    def _transmit_large(
        self, kind: int, request_id: int, message: Message, release: Release | None, ordered: bool
    ) -> tuple[int, int]:
        """Send a message that is large, or may have to wait for one; return its payload and other bytes."""
        conversation = self._conversation
        # With an empty queue the message was too large for `encode_small`.
        encode = conversation.encode if conversation.queued_bytes else conversation.encode_large
        outgoing = encode(kind, request_id, message, release)
        # A whole frame passes a large message in progress, unless the caller requires its order.
        lent = release is LENT
        if outgoing.rest or (ordered and conversation.queuing):
            conversation.queue(outgoing)
            self._pump(lent)
            if lent and conversation.queuing:
                outgoing.copy()
        else:
            self._write(outgoing.buffers, outgoing.size_bytes, lent)
        return outgoing.payload_bytes, outgoing.frame_bytes

    def _write_small(self, frame: bytes) -> None:
        """Write a frame together with the others of this iteration of the loop; see the module."""
        turn = self._turn
        # During a delivery `_deliver_all` flushes, and the first frame of a turn has set the callback.
        if not turn and not self._delivering:
            self._loop.call_soon(self._flush)
        turn.append(frame)
        self._turn_bytes += len(frame)
        if self._turn_bytes > TURN_BYTES:
            self._flush()

    def _freed_frame(self) -> bytes:
        """Return the frame that returns the blocks of `_returned`."""
        raise NotImplementedError  # a link over TCP has none

    def _waiting_frames(self) -> bytes:
        """Take the frames that wait for `_flush`, and return them as one."""
        turn, self._turn, self._turn_bytes = self._turn, [], 0
        if self._returned:
            turn.append(self._freed_frame())
        return b"".join(turn)

    def _flush(self) -> None:
        if self._turn or self._returned:
            frame = self._waiting_frames()
            self._written_bytes += len(frame)
            try:
                self._transport.write(frame)
            except Exception as error:  # called by the loop: a lost frame must end the link
                self._defect("writing", error)

    def _write(self, buffers: list[Buffer], size: int, lent: bool = False) -> None:
        """Write the buffers of a frame after all earlier frames.

        The transport gets the bytes that the kernel does not take now; with ``lent``, a copy of them.
        """
        if self._turn or self._returned:
            earlier = self._waiting_frames()
            buffers, size = [earlier, *buffers], size + len(earlier)
        self._written_bytes += size
        transport = self._transport
        # The descriptor of a closing transport may soon be that of another connection.
        is_closing = transport.is_closing()
        is_free = not (is_closing or transport.get_write_buffer_size())
        taken = write_now(self._descriptor, buffers) if is_free else 0
        if taken == size:
            return
        rest = deque(buffers)
        take(rest, taken, [])
        unsent = map(bytes, rest) if lent else rest
        # On a closing transport asyncio's writelines fails (CPython issue 136234), and write drops the bytes.
        if self._gathers and not is_closing:
            transport.writelines(unsent)
        else:
            for buffer in unsent:
                transport.write(buffer)

    def _pump(self, lent: bool = False) -> None:
        """Write queued frames as long as the transport accepts them; for ``lent`` see `_write`."""
        while self._writing and not self._is_held:
            buffers = self._conversation.next_frame()
            if not buffers:
                break
            self._write(buffers, sum(map(len, buffers)), lent)

    def hold_large(self, is_held: bool) -> None:
        self._is_held = is_held
        self._pump()

    def pause_writing(self) -> None:
        self._writing = False

    def resume_writing(self) -> None:
        self._writing = True
        try:
            if self._pong_owed:
                self._pong_owed = False
                self._write_small(_PONG_FRAME)
            self._pump()
            unsent = self.unsent_bytes
            # Without another pause of writing the loop does not call this method again: wake the senders now.
            if self._room and (self._writing or unsent <= self._config.low_water_bytes):
                self._wake_senders()
            if self._owed:
                self._note_owed()
        except Exception as error:  # a link without its error would let senders wait for ever
            self._defect("writing", error)

    @property
    def unsent_bytes(self) -> int:
        return self._conversation.queued_bytes + self._transport.get_write_buffer_size()

    def _over_water(self, message: Message | None, ordered: bool) -> bool:
        if self._writing:  # the transport accepts all sent bytes
            return False
        unsent = self._transport.get_write_buffer_size()
        # A message that may pass the queue of large messages need not wait for it.
        if (
            ordered
            or message is None
            or sum([tensor.nbytes for tensor in message.tensors]) > self._config.chunk_bytes
        ):
            unsent += self._conversation.queued_bytes
        return unsent >= self._config.high_water_bytes

    # Reading

    def buffer_updated(self, nbytes: int) -> None:
        # The peer may still send after the end: read on to its CLOSE, but deliver nothing.
        if self._error is not None:
            self._read_to_the_end(nbytes)
            return
        self.turn += 1
        self._conversation.last_heard = self._loop.time()
        try:
            frames = self._decoder.updated(nbytes)
        except (RemoteProtocolError, LinkBroken) as error:
            self._give_up(error)
            return
        except Exception as error:
            self._defect("decoding", error)
            return
        if self._arriving or not frames:
            self._note_arriving()
        if frames:
            self._deliver_all(frames)
        # No frame is complete, but a part of a large message was charged.
        elif self._account.held_bytes > self._unchecked:
            self._intake.look()

    def _deliver_all(self, frames: Iterable[Frame]) -> None:
        """Deliver decoded frames, except those after a pause."""
        # Answers that handlers give inline leave in one write, once all frames of a read are delivered. If
        # frames of this iteration wait, their callback is set already and sends the answers, too.
        self._delivering = not self._turn
        try:
            for frame in frames:
                # A handler may have reached a limit, because one read can contain many frames.
                if self._intake.reason:
                    cost = frame_cost(frame.payload_bytes, frame.frame_bytes)
                    self._account.charge(cost)
                    self._kept += cost
                    self._backlog.append(frame)
                elif frame.kind < CLOSE:
                    self._deliver(frame)
                else:
                    self._control(frame)
                    if self._error is not None:
                        break
        except RemoteProtocolError as error:
            self._give_up(error)
        except Exception as error:
            self._defect("delivery", error)
        finally:
            if self._delivering:
                self._delivering = False
                if self._turn:
                    self._flush()

    def _control(self, frame: Frame) -> None:
        if frame.kind == PING:
            if self._writing:
                self._write_small(_PONG_FRAME)
            else:
                self._pong_owed = True  # one pong answers all pings that come until the queue has room
        elif frame.kind == CLOSE:
            self._on_close()
        elif frame.kind != PONG:
            self._deliver(frame)

    def _on_close(self) -> None:
        self._finish(LinkClosed(f"{self.peer} closed the link"))
        self._conversation.drop_queue()
        self._transport.close()

    def _read_to_the_end(self, nbytes: int) -> None:
        """Read after this side's CLOSE until the peer's CLOSE, then close the connection.

        If this side closed the connection while bytes from the peer are unread, the kernel would reset it,
        and the peer would lose the bytes that it has not read yet.
        """
        try:
            peer_closed = any(frame.kind == CLOSE for frame in self._decoder.updated(nbytes))
        except (RemoteProtocolError, LinkBroken):  # a CLOSE behind invalid bytes cannot be found
            peer_closed = True
        if peer_closed:
            self._transport.close()

    def _pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._conversation.pause()
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        backlog, self._backlog = self._backlog, deque()
        self._account.release(self._kept)
        self._kept = 0
        self._deliver_all(backlog)
        # The delivery may have paused reading again, or ended the link.
        if not self._intake.reason and self._error is None and not self._reading:
            self._reading = True
            self._conversation.resume(now=self._loop.time())
            self._transport.resume_reading()

    def _note_arriving(self) -> None:
        """Charge for the arrived part of a large message."""
        arriving = self._decoder.arriving_bytes
        if arriving > self._arriving:
            self._account.charge(arriving - self._arriving)
        elif arriving < self._arriving:
            self._account.release(self._arriving - arriving)
        self._arriving = arriving

    def _arriving_bytes(self) -> int:
        return self._arriving + self._kept

    def _bytes_moved(self) -> int:
        return self._decoder.bytes_moved

    def _tick(self, now: float) -> float:
        """Carry out the due effects of the conversation, and return its next deadline on the loop's clock."""
        if self._owed:
            self._note_owed()
        unsent = self.unsent_bytes
        effects = self._conversation.tick(
            now=now,
            unsent_bytes=unsent,
            sent_bytes=self._written_bytes - self._transport.get_write_buffer_size(),
        )
        for effect in effects:
            if isinstance(effect, GiveUp):
                self._give_up(effect.error)
            else:
                self._write_small(effect.frame)
        return self._conversation.next_deadline()

    # The end

    def _finish(self, error: TransportError) -> bool:
        # The account is released here, because the peer may take seconds to answer the CLOSE of this side.
        self._decoder.discard()
        return super()._finish(error)

    def _give_up(self, error: TransportError) -> None:
        self._finish(error)
        self._conversation.drop_queue()
        self._transport.abort()

    def abort(self) -> None:
        self._give_up(LinkClosed("this side aborted the link"))

    async def aclose(self) -> None:
        first = self._finish(LinkClosed("this side closed the link"))
        try:
            async with asyncio.timeout(self._config.close_s):
                if first:
                    await self._send_close()
                # Shielded, because a cancelled caller must not cancel the future that other callers await.
                await asyncio.shield(self._gone)
        except TimeoutError:
            pass
        finally:
            if not self._gone.done():
                self._conversation.drop_queue()
                self._transport.abort()
        await asyncio.shield(self._gone)

    async def _send_close(self) -> None:
        self.hold_large(False)
        while self._conversation.queuing and not self._gone.done():
            await self._wait_room()
        if not self._transport.is_closing():
            close = self._conversation.encode(CLOSE, 0, Message(type="closed"))
            self._write(close.buffers, close.size_bytes)
            self._flush()
            # The peer's CLOSE came during a pause, or may still come, and a paused link would never read it.
            if any(frame.kind == CLOSE for frame in self._backlog):
                self._transport.close()
            elif not self._reading:
                self._reading = True
                self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def _deliver_last(self) -> None:
        """Deliver frames that arrived before the end, except requests, whose answers cannot be sent."""
        backlog, self._backlog = self._backlog, deque()
        try:
            for frame in backlog:
                if self._error is None and frame.kind < CLOSE and frame.kind != REQUEST:
                    self._deliver(frame)
        except RemoteProtocolError as error:
            self._finish(error)

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self._deliver_last()
            self._finish(LinkBroken(f"connection to {self.peer} lost: {exc or 'the peer hung up'}"))
            # The callback of `_flush` is pending, and a closed transport may refuse writes.
            self._turn.clear()
            self._turn_bytes = 0
            self._conversation.drop_queue()
            self._wake_senders()
        finally:  # `aclose` waits for this
            self._decoder.drop()
            self._account.close()
            if not self._gone.done():
                self._gone.set_result(None)
