"""Pure: one conversation over a byte stream, without the stream.

Received bytes go through `decoder`. Messages of one frame are sent at once, large messages through a queue
here. A large message is sent chunk by chunk, each after the stream has taken the previous one, and frames of
other messages pass in between. At most one large message is in progress; the others wait in order. Messages
sent with ``ordered`` must not overtake, so they wait in the queue as well.

The owner sets ``last_heard`` when bytes arrive, calls `tick` at `next_deadline`, and carries out the returned
effects. Times are absolute seconds on the caller's clock. The deadline does not move with every byte, so
`tick` may find nothing due.

`CallTable` has the requests of one side that wait for an answer. Replies match by id and may come in any
order. An answer changes no timer and no heap. With the usual few different time-outs, the table is scanned
about once per time-out.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

from transport.config import LinkConfig
from transport.decoder import FrameDecoder, Memory
from transport.errors import LinkBroken, TransportError
from transport.frames import (
    CHECKED,
    CHECKSUM_BYTES,
    CHUNK,
    MORE,
    PING,
    PLACED,
    PRELUDE_BYTES,
    REQUEST,
    checksum,
    head,
    pack_meta,
)
from transport.messages import Message
from transport.tensors import ALIGNMENT, LENT, Tensor, TensorSpec, lay_out, raw_bytes, watched

OnAnswer = Callable[[Message | TransportError], None]
"""Callback for a request's reply, or for the error that replaces it."""


class Call(NamedTuple):
    """One unanswered request, and the callback for its answer or an error."""

    on_answer: OnAnswer
    message_type: str
    timeout_s: float
    deadline: float


make_call = partial(tuple.__new__, Call)
"""Constructor of a Call from a tuple, which skips the interpreted ``__new__`` of a named tuple."""


class CallTable:
    """Outstanding calls by request id. Ids count from 1 and are never reused.

    Attributes:
        waiting: The unanswered requests, by id; the owner adds and removes them.
        next_id: Compiled function that returns the next request's id, because every request calls it.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Call] = {}
        self.next_id: Callable[[], int] = count(1).__next__

    def expire(self, *, now: float) -> list[tuple[int, Call]]:
        """Remove and return the requests whose deadline has passed."""
        late = [(request_id, call) for request_id, call in self.waiting.items() if call.deadline <= now]
        for request_id, _ in late:
            del self.waiting[request_id]
        return late

    def drain(self) -> list[tuple[int, Call]]:
        """Remove and return all requests, oldest first."""
        calls = list(self.waiting.items())
        self.waiting.clear()
        return calls

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None without requests."""
        return min([call.deadline for call in self.waiting.values()], default=None)


Buffer = bytes | memoryview
PlacePayload = Callable[[Sequence[Buffer], int, bool], bytes]
"""Places a payload of a number of bytes, of a request or not, in shared memory; returns its packed `PLACE`,
or no bytes if there is no room."""

_PADDING = bytes(ALIGNMENT)
_PING_FRAME = head(PING, 0, b"", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPing:
    """Write this frame: the peer has been silent for ``ping_every_s``."""

    frame: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Close the link at once, for this reason."""

    error: LinkBroken


class Outgoing:
    """An encoded message: the buffers of its first frame, and the payload that follows in chunks.

    Attributes:
        buffers: Buffers of the next frame to write.
        size_bytes: Bytes of ``buffers``.
        payload_bytes: Tensor bytes of the whole message.
        frame_bytes: All other bytes that the whole message has on the wire.
        rest: Payload that follows in chunks.
        rest_bytes: Length of the rest.
    """

    __slots__ = ("buffers", "frame_bytes", "payload_bytes", "rest", "rest_bytes", "size_bytes")

    def __init__(self, buffers: list[Buffer], size_bytes: int, payload_bytes: int, frame_bytes: int) -> None:
        self.buffers = buffers
        self.size_bytes = size_bytes
        self.payload_bytes = payload_bytes
        self.frame_bytes = frame_bytes
        self.rest: deque[Buffer] | None = None
        self.rest_bytes = 0

    def copy(self) -> None:
        """Copy all unsent bytes, because the sender may change its arrays."""
        self.buffers = [*map(bytes, self.buffers)]
        self.rest = deque(map(bytes, self.rest or ()))


class Conversation:
    """State of one established conversation: its decoder, its queue and its deadlines.

    Args:
        config: Limits and waiting times.
        memory: Lends memory for received payloads.
        now: Time of its start, in seconds.
        checked: Whether sent payloads carry a checksum.
    """

    def __init__(self, config: LinkConfig, memory: Memory, *, now: float, checked: bool = False) -> None:
        self.config = config
        self._checked = checked
        self._gather_bytes = min(config.gather_bytes, config.chunk_bytes)
        self._placed_bytes = min(config.lend_bytes, config.place_bytes)
        self.decoder = FrameDecoder(config, memory)
        self.place: PlacePayload | None = None
        """Places a payload in shared memory; None on other links."""
        self.queued_bytes = 0
        """Bytes in the queue of large messages, without those in the stream's own buffer."""
        self._queue: deque[Outgoing] = deque()
        self.last_heard = now
        """Time in seconds of the last arrived bytes; the owner sets it."""
        self._reading = True
        self._progress = 0
        self._progress_at: float | None = None
        self._lacking = 0
        self._lacking_at: float | None = None
        self._ping_at = now + config.ping_every_s

    # Sending

    def encode_small(self, kind: int, request_id: int, message: Message) -> tuple[bytes, int, int] | None:
        """Encode a message that fits into one write; return its frame, and its numbers of tensor and other
        bytes.

        Returns None for a payload over ``gather_bytes``, which only `encode_large` can encode, unless shared
        memory has it.

        Raises:
            LocalProtocolError: No frame can hold the message.
        """
        config, tensors = self.config, message.tensors
        if not tensors:
            frame = head(kind, request_id, pack_meta(message, b"", config.max_meta_bytes), 0)
            return frame, 0, len(frame)
        described, specs, total, tensor_bytes, plain = lay_out(tensors, config.max_message_bytes)
        # A large message must not pass one that waits for the stream.
        may_pass = total <= config.chunk_bytes or not self._queue
        if self.place is not None and total >= self._placed_bytes and may_pass:
            meta = pack_meta(message, described, config.max_meta_bytes)
            place = self.place(payload_parts(specs, tensors), total, kind == REQUEST)
            if place:
                frame = head(kind, request_id, meta + place, 0, PLACED)
                return frame, tensor_bytes, len(frame)
        if total > self._gather_bytes:
            return None
        payload = tensors if plain else payload_parts(specs, tensors)
        meta, flags = pack_meta(message, described, config.max_meta_bytes), 0
        if self._checked and total:
            meta, flags = _with_checksum(meta, 0, payload)
        frame = head(kind, request_id, meta, total, flags, payload)
        return frame, tensor_bytes, len(frame) - tensor_bytes

    def encode(
        self, kind: int, request_id: int, message: Message, release: Callable[[], object] | None = None
    ) -> Outgoing:
        """Encode a message.

        A payload up to ``gather_bytes`` is copied, and ``release`` is called before the method returns. A
        larger payload stays in the caller's arrays until the stream has taken it.

        Raises:
            LocalProtocolError: No frame has room for the message; nothing was queued or released.
        """
        small = self.encode_small(kind, request_id, message)
        if small is not None:
            frame, tensor_bytes, frame_bytes = small
            if release is not None:
                release()
            return Outgoing([frame], len(frame), tensor_bytes, frame_bytes)
        return self.encode_large(kind, request_id, message, release)

    def encode_large(
        self, kind: int, request_id: int, message: Message, release: Callable[[], object] | None = None
    ) -> Outgoing:
        """Encode a message whose payload is over ``gather_bytes``; see `encode`."""
        tensors = message.tensors
        described, specs, total, tensor_bytes, _ = lay_out(tensors, self.config.max_message_bytes)
        meta = pack_meta(message, described, self.config.max_meta_bytes)
        if release is not None and release is not LENT:
            tensors = watched(tensors, release)
        payload = deque(payload_parts(specs, tensors))
        first_bytes = min(total, self.config.chunk_bytes)
        rest_bytes = total - first_bytes
        buffers = self._frame(kind, request_id, meta, payload, first_bytes, MORE if rest_bytes else 0)
        head_bytes = len(buffers[0])
        chunk_head_bytes = PRELUDE_BYTES + (CHECKSUM_BYTES if self._checked else 0)
        overhead = head_bytes + total - tensor_bytes
        overhead += -(-rest_bytes // self.config.chunk_bytes) * chunk_head_bytes
        outgoing = Outgoing(buffers, head_bytes + first_bytes, tensor_bytes, overhead)
        if rest_bytes:
            outgoing.rest = payload
            outgoing.rest_bytes = rest_bytes
        return outgoing

    def _frame(
        self, kind: int, request_id: int, meta: bytes, payload: deque[Buffer], size: int, flags: int
    ) -> list[Buffer]:
        """Remove ``size`` bytes from the front of a payload, and return the buffers of a frame with them."""
        taken: list[Buffer] = []
        take(payload, size, taken)
        if self._checked:
            meta, flags = _with_checksum(meta, flags, taken)
        return [head(kind, request_id, meta, size, flags), *taken]

    def queue(self, outgoing: Outgoing) -> None:
        """Queue a message that is large or must not overtake a large one."""
        self._queue.append(outgoing)
        self.queued_bytes += outgoing.size_bytes + outgoing.rest_bytes

    def next_frame(self) -> list[Buffer]:
        """Take the buffers of the next queued frame; empty if nothing is queued."""
        if not self._queue:
            return []
        outgoing = self._queue[0]
        buffers = outgoing.buffers
        self.queued_bytes -= outgoing.size_bytes
        if outgoing.rest:
            left = outgoing.rest_bytes
            size = min(left, self.config.chunk_bytes)
            outgoing.rest_bytes = left - size
            more = MORE if left > size else 0
            outgoing.buffers = self._frame(CHUNK, 0, b"", outgoing.rest, size, more)
            outgoing.size_bytes = size
        else:
            self._queue.popleft()
        return buffers

    @property
    def queuing(self) -> bool:
        """Whether the queue has a frame."""
        return bool(self._queue)

    def drop_queue(self) -> None:
        """Release all queued arrays, because the stream has ended."""
        self._queue.clear()
        self.queued_bytes = 0

    # Keepalive

    def pause(self) -> None:
        """Record that this side stops reading: the peer's silence has no meaning until `resume`."""
        self._reading = False
        self._lacking_at = None

    def resume(self, *, now: float) -> None:
        """Note that this side reads again."""
        self._reading = True
        self.last_heard = now

    def tick(self, *, now: float, unsent_bytes: int, sent_bytes: int) -> list[SendPing | GiveUp]:
        """Check for silence and stalls, and return the effects.

        Args:
            now: The time, in seconds.
            unsent_bytes: Bytes queued here or in the stream that the kernel has not taken.
            sent_bytes: Bytes the kernel has taken since the conversation began.
        """
        # The same sums as in `next_deadline`: a difference could round to a time before the deadline.
        config, last_heard = self.config, self.last_heard
        if self._reading and now >= last_heard + config.dead_after_s:
            silent_s = now - last_heard
            return [GiveUp(error=LinkBroken(f"the peer sent nothing for {silent_s:.1f} s"))]
        if unsent_bytes == 0:
            self._progress_at = None
        elif self._progress_at is None or sent_bytes != self._progress:
            self._progress_at = now
        elif now >= self._progress_at + config.stalled_after_s:
            stalled_s = now - self._progress_at
            return [
                GiveUp(
                    error=LinkBroken(
                        f"the peer took none of {unsent_bytes} waiting bytes for {stalled_s:.1f} s"
                    )
                )
            ]
        stuck = self._stuck(now)
        if stuck is not None:
            return [stuck]
        self._progress = sent_bytes
        self._ping_at = now + config.ping_every_s
        if self._reading:
            if now >= last_heard + config.ping_every_s:
                return [SendPing(frame=_PING_FRAME)]
            self._ping_at = last_heard + config.ping_every_s
        return []

    def _stuck(self, now: float) -> GiveUp | None:
        """End the link of a peer that stops in the middle of a message, even if it sends other frames."""
        lacking = self.decoder.lacking_bytes if self._reading else 0
        if not lacking:
            self._lacking_at = None
        elif self._lacking_at is None or lacking != self._lacking:
            self._lacking, self._lacking_at = lacking, now
        elif now >= self._lacking_at + self.config.stalled_after_s:
            stuck_s = now - self._lacking_at
            text = f"the last {lacking} bytes of a message did not come for {stuck_s:.1f} s"
            return GiveUp(error=LinkBroken(text))
        return None

    def next_deadline(self) -> float:
        """Return the next time at which `tick` may return an effect."""
        deadline = self._ping_at
        if self._reading:
            deadline = min(deadline, self.last_heard + self.config.dead_after_s)
        for since in (self._progress_at, self._lacking_at):
            if since is not None:
                deadline = min(deadline, since + self.config.stalled_after_s)
        return deadline


def payload_parts(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> list[Buffer]:
    """List a payload's bytes without copying: the tensors, and the padding between them."""
    if len(specs) == 1:
        return [raw_bytes(tensors[0])] if specs[0].nbytes else []
    parts: list[Buffer] = []
    end = 0
    for spec, tensor in zip(specs, tensors, strict=True):
        if spec.offset > end:
            parts.append(_PADDING[: spec.offset - end])
        if spec.nbytes:
            parts.append(raw_bytes(tensor))
        end = spec.offset + spec.nbytes
    return parts


def _with_checksum(
    meta: bytes, flags: int, payload: Iterable[bytes | memoryview | Tensor]
) -> tuple[bytes, int]:
    """Add the checksum of a frame's payload to its meta and flags."""
    return meta + checksum(payload).to_bytes(CHECKSUM_BYTES, "little"), flags | CHECKED


def take(payload: deque[Buffer], size: int, into: list[Buffer]) -> None:
    """Without copying, move ``size`` bytes from the front of ``payload`` to the end of ``into``."""
    while size:
        buffer = payload.popleft()
        if len(buffer) > size:
            payload.appendleft(buffer[size:])
            buffer = buffer[:size]
        into.append(buffer)
        size -= len(buffer)
