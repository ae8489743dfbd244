"""Regions: memory that one process writes and another one reads, on one host.

A region is a memfd: memory behind a descriptor, without a name in any file system, freed with its last
mapping. Its size is sealed, so that no access of a mapping can fail. All its pages are allocated before it is
used, so that a lack of memory is an error here and no signal later. Another seal keeps the pages, and lets
only the process that allocates a region map it to write.

The owner hands a region over once, over a socket of its own (`Handover`), and names it by a number from then
on. It owns the memory as a set of *blocks*: `Outbox.place` copies a payload into a free block, and the reader
returns the block by its number (`Outbox.freed`). Blocks have sizes of powers of two, as those of a
`BufferPool`, so a steady conversation allocates nothing.

A message over the socket orders the memory: the owner writes a block before it sends the frame that names it,
and writes it again only after the frame that returns it.
"""

import fcntl
import mmap
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from struct import Struct
from typing import Final

import numpy as np

from transport.errors import LinkBroken, RemoteProtocolError
from transport.tensors import Tensor, TensorSpec

SMALLEST_BLOCK: Final = 16 << 10
"""Size of the smallest block, in bytes."""

MOST_SHARED_BYTES: Final = 128 << 20
"""Largest sum of the regions that one side of a link hands over, in bytes."""

MOST_REGIONS: Final = 64
"""Number of regions that one side of a link may have at a time; each takes a descriptor on both sides."""

WAITING_BLOCKS: Final = 8
"""Number of returned blocks that do not wait for the next frame of this side."""

WAITING_BYTES: Final = 16 << 20
"""Bytes of returned blocks that do not wait for it."""

_FUTURE_WRITE: Final = 0x10
"""A seal of Linux since 5.1, for which Python has no name: the region gets no further writer, and keeps its
pages."""

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _FUTURE_WRITE
"""Seals of every region."""

_SCM_PIDFD: Final = 4
"""Type of a control message with a descriptor that the kernel adds, if either end asks for it."""

_HANDOVER: Final = Struct("<IQ")
_NUMBER: Final = Struct("<I")
_MOST_NUMBER: Final = (1 << 32) - 1
_MOST_HANDOVER: Final = _HANDOVER.size + _NUMBER.size * MOST_REGIONS
_UINT8 = np.dtype(np.uint8)


def shared_memory(nbytes: int) -> tuple[int, mmap.mmap]:
    """Allocate a region: its descriptor, which the caller closes, and its memory to write.

    Raises:
        OSError: There is no memory, or no descriptor, or the kernel is older than Linux 5.1.
    """
    descriptor = os.memfd_create("adam-async", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nbytes)
        memory = mmap.mmap(descriptor, nbytes)
        np.frombuffer(memory, _UINT8).fill(0)  # allocated pages count as holes until they are written
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


@contextmanager
def closing_descriptor(descriptor: int) -> Iterator[None]:
    """Close a descriptor at the end of a block."""
    try:
        yield
    finally:
        os.close(descriptor)


def send_descriptor(sock: socket.socket, packet: bytes, descriptor: int) -> None:
    """Send a packet with a descriptor, without waiting."""
    # The flag, because the peer may have a copy of this socket, and make it wait.
    packed = struct.pack("i", descriptor)
    sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)], socket.MSG_DONTWAIT)


def receive_descriptors(sock: socket.socket, most_bytes: int) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors, at most two, without waiting; the caller closes them.

    Raises:
        OSError: There is no packet.
        LinkBroken: This process has no free descriptor.
    """
    packet, controls, flags, _ = sock.recvmsg(
        most_bytes, socket.CMSG_LEN(8), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    )
    descriptors = [
        number
        for _, kind, packed in controls
        if kind in (socket.SCM_RIGHTS, _SCM_PIDFD)
        for (number,) in struct.iter_unpack("i", packed)
    ]
    if flags & socket.MSG_CTRUNC and not descriptors:
        raise LinkBroken("no descriptor is free for a region of the peer")
    return packet, descriptors


def mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a region of the peer, to read.

    Raises:
        RemoteProtocolError: The descriptor is no sealed region of that size, or lacks pages.
        LinkBroken: This process can map no more memory.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        whole = os.lseek(descriptor, 0, os.SEEK_HOLE) if size else 0
    except OSError as fault:
        raise RemoteProtocolError("region", f"a descriptor is no region: {fault}") from None
    # Without the seals the peer could shorten the region, and a read behind its end would end this process.
    # Or it could free pages, and a read would allocate them for this process, as a read of a hole does.
    if seals & SEALS != SEALS or not 0 < nbytes == size == whole:
        text = f"a region of {nbytes} bytes has {size}, {whole} before a hole, and seals {seals:#x}"
        raise RemoteProtocolError("region", text)
    try:
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ)
    except OSError as fault:
        raise LinkBroken(f"a region of {nbytes} bytes of the peer cannot be mapped: {fault}") from None


class Allowance:
    """Bytes that the regions of all links of a process may have together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    @property
    def left_bytes(self) -> int:
        """Bytes that are left."""
        return self.limit_bytes - self.held_bytes

    def take(self, nbytes: int) -> bool:
        """Take a number of bytes if they are left; a negative number gives bytes back."""
        if nbytes > self.left_bytes:
            return False
        self.held_bytes += nbytes
        return True


class _Block:
    """A region of the outbox, and the list to which it returns."""

    __slots__ = ("free", "memory", "number", "size")

    def __init__(self, number: int, size: int, memory: mmap.mmap, free: "list[_Block]") -> None:
        self.number = number
        self.size = size
        self.memory = memoryview(memory)
        self.free = free


class Outbox:
    """The regions of this side of a link.

    Args:
        side: Socket for the handover.
        limit_bytes: Bytes of all regions together.
        allowance: Bytes of the regions of all links.
    """

    def __init__(self, side: socket.socket, limit_bytes: int, allowance: Allowance) -> None:
        self._side = side
        self._limit_bytes = min(limit_bytes, MOST_SHARED_BYTES)
        self._allowance = allowance
        self._blocks: dict[int, _Block] = {}
        self._free: dict[int, list[_Block]] = {}
        self._taken: set[int] = set()
        self._last = 0
        self.held_bytes = 0
        """Bytes of all regions."""

    def place(self, parts: Sequence[bytes | memoryview], total: int) -> int:
        """Copy a payload into a free block, and return the number of its region.

        Returns 0 if no block is free and none can be made; then the payload travels otherwise.
        """
        size = max(SMALLEST_BLOCK, 1 << (total - 1).bit_length())
        free = self._free.get(size)
        block = free.pop() if free else self._make(size)
        if block is None:
            return 0
        self._taken.add(block.number)
        memory, at = block.memory, 0
        for part in parts:
            memory[at : at + len(part)] = part
            at += len(part)
        return block.number

    def _make(self, size: int) -> _Block | None:
        """Allocate a block and hand it over, in place of all free ones if the limits leave no room."""
        replaced: list[_Block] = []
        room = min(self._limit_bytes - self.held_bytes, self._allowance.left_bytes)
        if size > room or len(self._blocks) >= MOST_REGIONS:
            replaced = [block for free in self._free.values() for block in free]
        more = size - sum([block.size for block in replaced])
        is_one_too_many = len(self._blocks) - len(replaced) >= MOST_REGIONS
        number = self._last + 1
        if more > room or is_one_too_many or number > _MOST_NUMBER or not self._allowance.take(more):
            return None
        try:
            descriptor, memory = shared_memory(size)
            with closing_descriptor(descriptor):
                numbers = [_NUMBER.pack(block.number) for block in replaced]
                send_descriptor(self._side, b"".join([_HANDOVER.pack(number, size), *numbers]), descriptor)
        except OSError:
            # No memory or descriptor is free, or the peer has not taken the handovers before, or has ended.
            self._allowance.take(-more)
            return None
        self._last = number
        for old in replaced:
            del self._blocks[old.number]
            old.free.clear()
        block = self._blocks[number] = _Block(number, size, memory, self._free.setdefault(size, []))
        self.held_bytes += more
        return block

    def freed(self, packed: bytes) -> None:
        """Take back blocks, by their packed numbers.

        Raises:
            RemoteProtocolError: The peer returns a block that it does not have.
        """
        try:
            numbers = [number for (number,) in _NUMBER.iter_unpack(packed)]
        except struct.error:
            raise RemoteProtocolError("freed", f"{len(packed)} bytes are no numbers of blocks") from None
        for number in numbers:
            if number not in self._taken:
                raise RemoteProtocolError("freed", f"block {number} was not lent")
            self._taken.remove(number)
            block = self._blocks[number]
            block.free.append(block)

    def close(self) -> None:
        """Drop all regions, because the link has ended."""
        self._blocks.clear()
        self._free.clear()
        self._taken.clear()
        self._allowance.take(-self.held_bytes)
        self.held_bytes = 0


class Inbox:
    """The regions of the peer.

    Args:
        side: Socket for the handover.
        many: Called if many returned blocks wait, or blocks with much memory.

    Attributes:
        returned: Numbers of the blocks that this side has read, and has not reported yet. Any thread may add
            one.
        returned_bytes: About their bytes.
    """

    def __init__(self, side: socket.socket, many: Callable[[], object]) -> None:
        self._side = side
        self._many = many
        self._regions: dict[int, mmap.mmap] = {}
        self._lent: dict[int, weakref.ref[Tensor]] = {}
        self._read: set[int] = set()
        self._held_bytes = 0
        self.returned: deque[int] = deque()
        self.returned_bytes = 0

    def take(self, number: int, total: int) -> memoryview:
        """Return the first bytes of a block that a frame names, to read, until `give_back` or `lend`.

        Raises:
            RemoteProtocolError: The block is too short, or in use, or was not handed over.
            LinkBroken: This process lacks memory or descriptors.
        """
        handovers = 0
        while (region := self._regions.get(number)) is None:
            # A peer with more of them on their way would keep this side here.
            if handovers == MOST_REGIONS:
                raise RemoteProtocolError("region", f"block {number} was not handed over")
            handovers += 1
            self._receive()
        if number in self._read:
            raise RemoteProtocolError("region", f"block {number} comes again before it was returned")
        if not 0 < total <= len(region):
            raise RemoteProtocolError("region", f"{total} bytes in a block of {len(region)}")
        self._read.add(number)
        return memoryview(region)[:total]

    def give_back(self, number: int, total: int) -> None:
        """Return a block of which this side has a copy."""
        self._gone(number, total)
        if len(self.returned) >= WAITING_BLOCKS or self.returned_bytes >= WAITING_BYTES:
            self._many()

    def _gone(self, number: int, total: int) -> None:
        """Note on any thread that nothing reads a block."""
        self.returned.append(number)
        self.returned_bytes += total

    def lend(self, number: int, specs: Sequence[TensorSpec], total: int) -> tuple[Tensor, ...]:
        """Return read-only views of a taken block; the block is returned with the last of them."""
        region = self._regions[number]

        def gone(reference: object) -> None:  # on any thread
            self._lent.pop(number, None)
            self._gone(number, total)

        if len(specs) == 1:
            whole: Tensor = np.ndarray(specs[0].shape, specs[0].dtype, region)
            tensors: tuple[Tensor, ...] = (whole,)
        else:
            whole = np.ndarray((total,), _UINT8, region)
            tensors = tuple([np.ndarray(shape, dtype, whole, offset) for dtype, shape, offset, _ in specs])
        self._lent[number] = weakref.ref(whole, gone)
        return tensors

    def _receive(self) -> None:
        """Take the next handover.

        The owner sends it before the first frame that names the region, so it is there.
        """
        descriptors: list[int] = []
        try:
            try:
                packed, descriptors = receive_descriptors(self._side, _MOST_HANDOVER)
            except ConnectionResetError:
                # The peer has ended with unread handovers of this side. Its own ones are still there.
                packed, descriptors = receive_descriptors(self._side, _MOST_HANDOVER)
            if len(descriptors) != 1 or len(packed) < _HANDOVER.size or len(packed) % _NUMBER.size:
                raise RemoteProtocolError(
                    "region", f"a handover of {len(packed)} bytes has {len(descriptors)} descriptors"
                )
            number, nbytes = _HANDOVER.unpack_from(packed)
            for (old,) in _NUMBER.iter_unpack(packed[_HANDOVER.size :]):
                gone = self._regions.pop(old, None)
                if gone is None or old in self._read:
                    raise RemoteProtocolError("region", f"block {old} is replaced, and was not free")
                self._held_bytes -= len(gone)
            if number in self._regions or len(self._regions) >= MOST_REGIONS:
                raise RemoteProtocolError("region", f"block {number} is one too many")
            if nbytes > MOST_SHARED_BYTES - self._held_bytes:
                raise RemoteProtocolError(
                    "region", f"{self._held_bytes + nbytes} bytes of regions, {MOST_SHARED_BYTES} are allowed"
                )
            self._regions[number] = mapped(descriptors[0], nbytes)
            self._held_bytes += nbytes
        except OSError as fault:
            raise RemoteProtocolError("region", f"a region was not handed over: {fault}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def take_returned(self) -> bytes:
        """Return the packed numbers of the returned blocks, and forget them."""
        self.returned_bytes = 0
        # Not another deque in its place: a thread might add to the old one.
        numbers = [self.returned.popleft() for _ in range(len(self.returned))]
        self._read.difference_update(numbers)
        return b"".join(map(_NUMBER.pack, numbers))

    def close(self) -> None:
        """Drop all regions, because the link has ended; lent views stay valid."""
        self._regions.clear()
        self._lent.clear()
        self.returned.clear()  # a write that is still due must find none
