"""Regions: memory that one process writes and another one reads, on one host.

A region is a memfd: memory behind a descriptor, without a name in any file system, freed with its last
mapping. Its size is sealed, so that no access of a mapping can fail. All its pages are allocated before it is
used, so that a lack of memory is an error here and no signal later. Another seal keeps the pages, and lets
only the process that allocates a region map it to write.

The owner hands a region over once, over a socket of its own, and names it by a number from then on. There are
four kinds. A *block* belongs to one link: `Outbox.place` copies a payload into a free block, and the reader
returns the block by its number (`Outbox.freed`). Blocks have sizes of powers of two, as those of a
`BufferPool`, so a steady conversation allocates nothing. A *kept* region belongs to the program
(`Region.allocate`), which writes its arrays there: a request whose only tensor lies in one is not copied, on
any link, and the answer returns the memory. A *published* region belongs to a server, which places values
there: an answer of them is not copied. It is a *loan* of its range, which any number of peers may have at
once, and which the reader returns as it returns a block. The owner does not write there until then
(`Region.loans`), and never again if the link of a loan has ended before. A *common* region has two writers:
both ends change its values in place, so the seal of the pages is missing there, and the peer can change any
of them at any time.

A message over the socket orders the memory: the owner writes before it sends the frame that names the memory,
and writes again only after the frame that returns it. A reader believes neither.
"""

import errno
import fcntl
import mmap
import os
import resource
import socket
import struct
import weakref
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Any, Final, TypeVar

import numpy as np

from transport.config import MOST_SHARED_BYTES
from transport.errors import LinkBroken, RemoteProtocolError
from transport.frames import PLACE, PLACE_UNIT
from transport.tensors import Tensor, TensorSpec

SMALLEST_BLOCK: Final = 16 << 10
"""Size of the smallest block, in bytes."""

MOST_REGIONS: Final = 64
"""Number of regions that one side of a link may have at a time; each takes a descriptor on both sides."""

MOST_KEPT: Final = 32
"""Number of kept regions among them."""

MOST_KEPT_BYTES: Final = 1 << 30
"""Largest sum of the kept regions that one side of a link hands over, in bytes: address space of the peer."""

MOST_COMMON_BYTES: Final = 1 << 44
"""Largest sum of the common regions of one side of a link, in bytes: only a bound of the number, because the
owner has allocated the pages."""

MOST_PUBLISHED_BYTES: Final = 1 << 36
"""Largest sum of the published regions of one side of a link, in bytes: address space of the peer."""

MOST_LOANS: Final = 4096
"""Number of loans that the peer of a link may have at a time; further answers are copied."""

WAITING_BLOCKS: Final = 8
"""Number of returned blocks that do not wait for the next frame of this side."""

WAITING_BYTES: Final = 16 << 20
"""Bytes of returned blocks that do not wait for it."""

IDLE_S: Final = 10.0
"""Seconds without a payload after which a link drops its free blocks."""

_FUTURE_WRITE: Final = 0x10
"""A seal of Linux since 5.1, for which Python has no name: the region gets no further writer, and keeps its
pages."""

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _FUTURE_WRITE
"""Seals of every region, except that a common one has other writers."""

_SCM_PIDFD: Final = 4
"""Type of a control message with a descriptor that the kernel adds, if either end asks for it."""

_HANDOVER: Final = Struct("<IQB")
"""Number, size and kind of a region."""
_BLOCK, _KEPT, _COMMON, PUBLISHED = range(4)
_NUMBER: Final = Struct("<I")
_LOAN: Final = Struct("<Q")
"""Number of a region, and above its 32 bits the start of the range, in units of `PLACE_UNIT`; see `PLACE`."""
_MOST_NUMBER: Final = (1 << 32) - 1
_MOST_BYTES: Final = (MOST_SHARED_BYTES, MOST_KEPT_BYTES, MOST_COMMON_BYTES, MOST_PUBLISHED_BYTES)
_MOST_HANDOVER: Final = _HANDOVER.size + _NUMBER.size * MOST_REGIONS
_UINT8 = np.dtype(np.uint8)
_Mapping = TypeVar("_Mapping", bound=mmap.mmap)

Memory = mmap.mmap | memoryview
"""Memory of a region; a view only in the simulator."""


def shared_memory(
    nbytes: int, kind: type[_Mapping], seals: int = SEALS, name: str = "adam-async"
) -> tuple[int, _Mapping]:
    """Allocate a region: its descriptor, which the caller closes, and its memory to write.

    Args:
        name: Name that ``/proc`` shows.

    Raises:
        OSError: There is no memory, or no descriptor, or the kernel is older than Linux 5.1.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nbytes)
        memory = kind(descriptor, nbytes)
        np.frombuffer(memory, _UINT8).fill(0)  # allocated pages count as holes until they are written
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


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


class Region(mmap.mmap):
    """Memory of this process that its links hand over; `allocate` makes it.

    It is freed with the last array and the last mapping. A forked child has the same memory, and must not
    write there.
    """

    descriptor: int
    address: int
    kind: int
    loans: Counter[tuple[int, int]]
    """Number of the loans of each range, by its first byte and the byte after it; of a published region."""
    is_lost: bool
    """Whether a link has ended with loans of a published region, so that they are never returned."""
    _spans: tuple[list[int], list[int]] | None
    """Starts and ends of the lent bytes, in order and apart; None after a change of `loans`."""

    @classmethod
    def allocate(cls, nbytes: int, *, is_common: bool = False, is_published: bool = False) -> Tensor:
        """Return writable bytes of zeros, in a new region, as an array; a link finds the region by its base.

        Args:
            is_common: Whether a peer that gets the region may write there, too; see `SharedLink.hand_over`.
            is_published: Whether answers are lent from the region.

        Raises:
            OSError: There is no memory, or no descriptor, or the system has no such memory. Of a published
                region also: half of the descriptors are in use; the others are for links.
        """
        if is_published and _free_descriptor() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            raise OSError(errno.EMFILE, "half of the descriptors are in use, and links need the others")
        # The last seal, so that no holder of a common region can close it to those that come later.
        common = SEALS & ~_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        name = "adam-async-values" if is_published else "adam-async"
        descriptor, region = shared_memory(nbytes, cls, common if is_common else SEALS, name)
        weakref.finalize(region, os.close, descriptor)
        array: Tensor = np.ndarray((nbytes,), _UINT8, region)
        region.descriptor, region.address = descriptor, _address(array)
        region.kind = _COMMON if is_common else PUBLISHED if is_published else _KEPT
        region.loans, region.is_lost, region._spans = Counter(), False, None
        return array

    def is_lent(self, start: int, stop: int) -> bool:
        """Return whether a byte of a range of a published region is lent."""
        # A search, because a server asks for each of its shards, and readers may keep thousands of ranges.
        starts, ends = self._spans = self._spans or _united(self.loans)
        at = bisect_right(ends, start)
        return at < len(starts) and starts[at] < stop

    def lend(self, lent: tuple[int, int]) -> None:
        """Begin a loan of a range: its first byte, and the byte after it."""
        if lent not in self.loans:
            self._spans = None
        self.loans[lent] += 1

    def give_back(self, lent: tuple[int, int]) -> None:
        """End a loan."""
        self.loans[lent] -= 1
        if not self.loans[lent]:
            del self.loans[lent]
            self._spans = None


def _free_descriptor() -> int:
    """Return the lowest number that no descriptor has."""
    found = os.memfd_create("adam-async", os.MFD_CLOEXEC)
    os.close(found)
    return found


def _united(ranges: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the starts and the ends of the bytes that ranges have, in order."""
    starts: list[int] = []
    ends: list[int] = []
    for start, end in sorted(ranges):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    return starts, ends


def _address(array: Tensor) -> int:
    return int(array.__array_interface__["data"][0])


class Side:
    """A socket of packets beside the stream of a link, by which its regions are handed over.

    Args:
        sock: Connected socket, which does not block.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def allocate(self, nbytes: int) -> tuple[int, Memory]:
        """See `shared_memory`."""
        return shared_memory(nbytes, mmap.mmap)

    def publish(self, nbytes: int) -> Tensor:
        """Allocate a published region, on any thread; see `Region.allocate`."""
        return Region.allocate(nbytes, is_published=True)

    def send(self, packet: bytes, descriptor: int) -> None:
        """See `send_descriptor`."""
        send_descriptor(self._sock, packet, descriptor)

    def receive(self, most_bytes: int) -> tuple[bytes, list[int]]:
        """See `receive_descriptors`."""
        try:
            return receive_descriptors(self._sock, most_bytes)
        except ConnectionResetError:
            # The peer has ended with unread handovers of this side. Its own ones are still there.
            return receive_descriptors(self._sock, most_bytes)

    def map(self, descriptor: int, nbytes: int, *, is_common: bool) -> Memory:
        """See `mapped`."""
        return mapped(descriptor, nbytes, is_common=is_common)

    def release(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def region_of(payload: bytes | memoryview) -> tuple[Region, int] | None:
    """Return the region with a payload, and the index of its first byte; None for other memory."""
    owner = array = getattr(payload, "obj", None)
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, Region) or not isinstance(array, np.ndarray):
        return None
    return owner, _address(array) - owner.address


def has_place(payload: bytes | memoryview, start: int) -> bool:
    """Return whether a frame can name the start of a payload in a region: its peer reads aligned values."""
    array = getattr(payload, "obj", None)
    is_aligned = isinstance(array, np.ndarray) and array.flags.aligned and start % PLACE_UNIT == 0
    return is_aligned and start // PLACE_UNIT <= _MOST_NUMBER


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return flat arrays of one type that lie one after the other in one region of the peer as one array.

    The array keeps all of them, and with them their loans. Returns None for other arrays.
    """
    owner: object = parts[0]
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, mmap.mmap):
        return None
    end = begin = _address(parts[0])
    for part in parts:
        base: object = part
        while isinstance(base, np.ndarray):
            base = base.base
        if base is not owner or _address(part) != end:
            return None
        end += part.nbytes
    whole = _Whole(((end - begin) // parts[0].itemsize,), parts[0].dtype, owner, begin - _start_of(owner))
    whole.parts = tuple(parts)
    return whole.view(np.ndarray)


class _Whole(np.ndarray[Any, Any]):
    """Array that keeps others: of another class than its views, so that NumPy keeps it as their base."""

    parts: tuple[Tensor, ...]


def _start_of(memory: Memory) -> int:
    return _address(np.frombuffer(memory, _UINT8))


def mapped(descriptor: int, nbytes: int, *, is_common: bool = False) -> mmap.mmap:
    """Map a region of the peer, to read; a common one also to write.

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
    needed = SEALS & ~_FUTURE_WRITE if is_common else SEALS
    if seals & needed != needed or not 0 < nbytes == size == whole:
        text = f"a region of {nbytes} bytes has {size}, {whole} before a hole, and seals {seals:#x}"
        raise RemoteProtocolError("region", text)
    try:
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_WRITE if is_common else mmap.ACCESS_READ)
    except OSError as fault:
        raise LinkBroken(f"a region of {nbytes} bytes of the peer cannot be mapped: {fault}") from None


class Allowance:
    """Bytes that the blocks of all links of a process may have together."""

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


def _numbers_in(packed: bytes, form: Struct = _NUMBER) -> list[int]:
    if len(packed) % form.size:
        raise RemoteProtocolError("blocks", f"{len(packed)} bytes are no numbers of blocks")
    return [number for (number,) in form.iter_unpack(packed)]


class _Block:
    """A region of the outbox, and the list to which it returns."""

    __slots__ = ("free", "memory", "number", "size")

    def __init__(self, number: int, size: int, memory: Memory, free: "list[_Block]") -> None:
        self.number = number
        self.size = size
        self.memory = memoryview(memory)
        self.free = free


class Outbox:
    """The regions of this side of a link.

    Args:
        side: Way of the handover.
        limit_bytes: Bytes of all blocks together.
        allowance: Bytes of the blocks of all links.
        copied_bytes: Smallest payload that is copied into a block.
    """

    def __init__(self, side: Side, limit_bytes: int, allowance: Allowance, copied_bytes: int = 0) -> None:
        self._side = side
        self._copied_bytes = copied_bytes
        self._limit_bytes = limit_bytes
        self._allowance = allowance
        self._blocks: dict[int, _Block] = {}
        self._free: dict[int, list[_Block]] = {}
        self._taken: set[int] = set()
        self._loans: dict[int, tuple[Region, list[int]]] = {}
        """Regions of the loans, and the numbers of their bytes, below 0 and in order, by those of `_LOAN`."""
        self._lent = 0
        """Number of loans."""
        self._kept: dict[int, tuple[weakref.ref[Region], int, int]] = {}
        """Regions that are no blocks, with their sizes and kinds, by number."""
        self._last = 0
        self._has_placed = False
        self._idle_since = 0.0
        self.held_bytes = 0
        """Bytes of all blocks."""

    def place(self, parts: Sequence[bytes | memoryview], total: int, is_request: bool = True) -> bytes:
        """Return the packed `PLACE` of a payload: where the program wrote it, or a copy in a free block.

        Returns no bytes if no block is free and none can be made, or the payload is too small for a copy;
        then it travels otherwise. In a kept region only a request is used where it is: its sender knows by
        the answer that it may write there again.
        """
        found = region_of(parts[0]) if len(parts) == 1 else None
        if found is not None and found[0].kind == (_KEPT if is_request else PUBLISHED):
            region, start = found
            is_one_too_many = not is_request and self._lent >= MOST_LOANS
            number = 0 if is_one_too_many or not has_place(parts[0], start) else self.number_of(region)
            if number and not is_request:
                region.lend((start, start + total))
                self._lent += 1
                place = number | start // PLACE_UNIT << 32
                insort(self._loans.setdefault(place, (region, []))[1], -total)
            if number:
                return PLACE.pack(number, start // PLACE_UNIT)
        if total < self._copied_bytes:
            return b""
        size = max(SMALLEST_BLOCK, 1 << (total - 1).bit_length())
        free = self._free.get(size)
        block = free.pop() if free else self._make(size)
        if block is None:
            return b""
        self._taken.add(block.number)
        self._has_placed = True
        memory, at = block.memory, 0
        for part in parts:
            memory[at : at + len(part)] = part
            at += len(part)
        return PLACE.pack(block.number, 0)

    def number_of(self, region: Region) -> int:
        """Return the number of a region that is no block; 0 if it cannot be handed over at its first use."""
        for number, (known, _, _) in self._kept.items():
            if known() is region:
                return number
        live = {number: each for number, each in self._kept.items() if each[0]() is not None}
        size, number = len(region), self._last + 1
        is_full = len(live) >= MOST_KEPT or len(live) + len(self._blocks) >= MOST_REGIONS
        same = [each[1] for each in live.values() if each[2] == region.kind]
        if is_full or number > _MOST_NUMBER or sum(same, size) > _MOST_BYTES[region.kind]:
            return 0
        try:
            self._hand_over(number, size, region.kind, [*self._kept.keys() - live], region.descriptor)
        except OSError:  # the peer has not taken the handovers before, or has ended
            return 0
        self._kept = live | {number: (weakref.ref(region), size, region.kind)}
        self._last = number
        return number

    def may_lend(self, region: Region) -> bool:
        """Return whether the peer may get a further loan of a published region."""
        return self._lent < MOST_LOANS and self.number_of(region) > 0

    def _hand_over(self, number: int, size: int, kind: int, replaced: Sequence[int], descriptor: int) -> None:
        packed = b"".join([_HANDOVER.pack(number, size, kind), *map(_NUMBER.pack, replaced)])
        self._side.send(packed, descriptor)

    def _make(self, size: int) -> _Block | None:
        """Allocate a block and hand it over, in place of all free ones if the limits leave no room."""
        replaced: list[_Block] = []
        room = min(self._limit_bytes - self.held_bytes, self._allowance.left_bytes)
        count = len(self._blocks) + len(self._kept)
        if size > room or count >= MOST_REGIONS:
            replaced = [block for free in self._free.values() for block in free]
        more = size - sum([block.size for block in replaced])
        is_one_too_many = count - len(replaced) >= MOST_REGIONS
        number = self._last + 1
        if more > room or is_one_too_many or number > _MOST_NUMBER or not self._allowance.take(more):
            return None
        try:
            descriptor, memory = self._side.allocate(size)
            try:
                self._hand_over(number, size, _BLOCK, [block.number for block in replaced], descriptor)
            finally:
                self._side.release(descriptor)
        except OSError:
            # No memory or descriptor is free, or the peer has not taken the handovers before, or has ended.
            self._allowance.take(-more)
            return None
        self._last = number
        self._forget(replaced)
        block = self._blocks[number] = _Block(number, size, memory, self._free.setdefault(size, []))
        self.held_bytes += more
        return block

    def freed(self, packed: bytes) -> None:
        """Take back blocks and loans, by their packed places.

        Raises:
            RemoteProtocolError: The peer returns a block or a loan that it does not have.
        """
        for number in _numbers_in(packed, _LOAN):
            if number in self._loans:
                # The place does not say which one: the longest stays to the last.
                (region, sizes), start = self._loans[number], (number >> 32) * PLACE_UNIT
                region.give_back((start, start - sizes.pop()))
                self._lent -= 1
                if not sizes:
                    del self._loans[number]
                continue
            if number not in self._taken:
                raise RemoteProtocolError("freed", f"block {number} was not lent")
            self._taken.remove(number)
            block = self._blocks[number]
            block.free.append(block)

    def drop_idle(self, now: float) -> bytes:
        """Drop regions that have been freed, and the free blocks if no payload was placed for `IDLE_S`.

        Returns their packed numbers. No frame that names one may wait for the stream.
        """
        numbers = [number for number, (region, _, _) in self._kept.items() if region() is None]
        for number in numbers:
            del self._kept[number]
        if self._has_placed:
            self._has_placed, self._idle_since = False, now
        idle = [block for free in self._free.values() for block in free]
        if idle and now >= self._idle_since + IDLE_S:
            self._forget(idle)
            nbytes = sum([block.size for block in idle])
            self.held_bytes -= nbytes
            self._allowance.take(-nbytes)
            numbers += [block.number for block in idle]
        return b"".join(map(_NUMBER.pack, numbers))

    def _forget(self, blocks: Sequence[_Block]) -> None:
        for block in blocks:
            del self._blocks[block.number]
            block.free.clear()

    def close(self) -> None:
        """Drop all regions, because the link has ended."""
        for region, _ in self._loans.values():
            region.is_lost = True  # the peer may read on
        self._loans.clear()
        self._blocks.clear()
        for free in self._free.values():
            free.clear()  # each block knows its list
        self._free.clear()
        self._taken.clear()
        self._kept.clear()
        self._allowance.take(-self.held_bytes)
        self.held_bytes = 0


class Inbox:
    """The regions of the peer.

    Args:
        side: Way of the handover.
        many: Called if many returned blocks wait, or blocks with much memory.

    Attributes:
        returned: Blocks and loans that this side has read, and has not reported yet, see `_LOAN`. Any thread
            may add one.
        returned_bytes: About their bytes.
    """

    def __init__(self, side: Side, many: Callable[[], object]) -> None:
        self._side = side
        self._many = many
        self._regions: dict[int, Memory] = {}
        self._kept: set[int] = set()
        self._common: set[int] = set()
        self._published: set[int] = set()
        self._lent: dict[object, weakref.ref[Tensor]] = {}
        self._read: set[int] = set()
        self._unread: dict[int, tuple[Memory, int]] = {}
        """Kept regions with frames that are taken and not delivered, and the number of these frames. Their
        owner may have dropped them: a program may give a request up, and free its memory."""
        self.returned: deque[int] = deque()
        self.returned_bytes = 0

    def take(self, number: int, start: int, total: int, *, is_reply: bool = True) -> memoryview:
        """Return bytes of a region that a frame names, to read; a block until `give_back` or `lend`.

        Args:
            is_reply: Whether the frame is a reply; only these are loans.

        Raises:
            RemoteProtocolError: The region is too short, or was not handed over, or is a block in use.
            LinkBroken: This process lacks memory or descriptors.
        """
        region = self._known(number)
        if number in self._common:
            raise RemoteProtocolError("region", f"a payload in the common region {number}")
        if number in self._published and not is_reply:
            raise RemoteProtocolError("region", f"no reply, and a payload in the published region {number}")
        if number in self._read:
            raise RemoteProtocolError("region", f"block {number} comes again before it was returned")
        is_kept = number in self._kept
        is_block = not is_kept and number not in self._published
        if not 0 < total <= len(region) - start or (start and is_block):
            raise RemoteProtocolError("region", f"{total} bytes from {start} on in a region of {len(region)}")
        if is_block:
            self._read.add(number)
        elif is_kept:
            self._unread[number] = region, self._unread.get(number, (region, 0))[1] + 1
        return memoryview(region)[start : start + total]

    def _known(self, number: int) -> Memory:
        """Return a region that was handed over, after the handovers before it."""
        handovers = 0
        while (region := self._regions.get(number)) is None:
            # A peer with more of them on their way would keep this side here.
            if handovers == MOST_REGIONS:
                raise RemoteProtocolError("region", f"region {number} was not handed over")
            handovers += 1
            self._receive()
        return region

    def whole(self, number: int, *, is_common: bool) -> Tensor:
        """Return the bytes of a region that a message named; they outlive the link.

        Args:
            is_common: Whether the region has to be a common one, which is writable; else a kept one. The
                owner of a common region can free its pages, so that a read allocates them for this process.

        Raises:
            RemoteProtocolError: The region is of another kind, or was not handed over.
            LinkBroken: This process lacks memory or descriptors.
        """
        region = self._known(number)
        if number not in (self._common if is_common else self._kept):
            kind = "common" if is_common else "kept"
            raise RemoteProtocolError("region", f"region {number} is no {kind} one")
        array: Tensor = np.ndarray((len(region),), _UINT8, region)
        return array

    def give_back(self, number: int, total: int, start: int = 0) -> None:
        """Return a block or loan of which this side has a copy; a kept region needs no return."""
        if self._delivered(number) is not None:
            return
        self._gone(number | start // PLACE_UNIT << 32, total)
        if len(self.returned) >= WAITING_BLOCKS or self.returned_bytes >= WAITING_BYTES:
            self._many()

    def _delivered(self, number: int) -> Memory | None:
        """Note that a frame with memory of a region is delivered; return the region if it is a kept one."""
        region, count = self._unread.pop(number, (None, 0))
        if region is not None and count > 1:
            self._unread[number] = region, count - 1
        return region

    def _gone(self, place: int, total: int) -> None:
        """Note on any thread that nothing reads a block or a loan."""
        self.returned.append(place)
        self.returned_bytes += total

    def lend(self, number: int, start: int, specs: Sequence[TensorSpec], total: int) -> tuple[Tensor, ...]:
        """Return read-only views of taken memory; a block or loan is returned with the last of them."""
        kept, key, place = self._delivered(number), object(), number | start // PLACE_UNIT << 32
        region = self._regions[number] if kept is None else kept

        def gone(reference: object) -> None:  # on any thread
            if self._lent.pop(key, None) is not None:  # else the link has ended
                self._gone(place, total)

        if len(specs) == 1:
            whole: Tensor = np.ndarray(specs[0].shape, specs[0].dtype, region, start)
            tensors: tuple[Tensor, ...] = (whole,)
        else:
            whole = np.ndarray((total,), _UINT8, region, start)
            tensors = tuple([np.ndarray(shape, dtype, whole, offset) for dtype, shape, offset, _ in specs])
        if kept is None:
            self._lent[key] = weakref.ref(whole, gone)
        return tensors

    def _receive(self) -> None:
        """Take the next handover.

        The owner sends it before the first frame that names the region, so it is there.
        """
        descriptors: list[int] = []
        try:
            packed, descriptors = self._side.receive(_MOST_HANDOVER)
            if len(descriptors) != 1 or len(packed) < _HANDOVER.size:
                raise RemoteProtocolError(
                    "region", f"a handover of {len(packed)} bytes has {len(descriptors)} descriptors"
                )
            number, nbytes, kind = _HANDOVER.unpack_from(packed)
            self._forget(_numbers_in(packed[_HANDOVER.size :]))
            is_known = number in self._regions or number in self._unread
            if is_known or len(self._regions) >= MOST_REGIONS or kind > PUBLISHED:
                raise RemoteProtocolError("region", f"region {number} of kind {kind} is one too many")
            kinds = (self._kept, self._common, self._published)
            blocks = self._regions.keys() - self._kept - self._common - self._published
            same = kinds[kind - 1] if kind else blocks
            held, most = sum([len(self._regions[each]) for each in same]), _MOST_BYTES[kind]
            if nbytes > most - held:
                raise RemoteProtocolError("region", f"{held + nbytes} bytes of regions, {most} are allowed")
            self._regions[number] = self._side.map(descriptors[0], nbytes, is_common=kind == _COMMON)
            if kind != _BLOCK:
                kinds[kind - 1].add(number)
        except OSError as fault:
            raise RemoteProtocolError("region", f"a region was not handed over: {fault}") from None
        finally:
            for descriptor in descriptors:
                self._side.release(descriptor)

    def dropped(self, packed: bytes) -> None:
        """Forget regions that the peer drops, by their packed numbers; lent views stay valid.

        Raises:
            RemoteProtocolError: This side does not have a region, or reads it.
            LinkBroken: This process lacks memory or descriptors.
        """
        numbers = _numbers_in(packed)
        for number in numbers:
            self._known(number)  # no frame has named it if its payload took the stream in the end
        self._forget(numbers)

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._regions.pop(number, None) is None or number in self._read:
                raise RemoteProtocolError("region", f"region {number} is dropped, and was not free")
            for kind in (self._kept, self._common, self._published):
                kind.discard(number)

    def take_returned(self, most: int = MOST_LOANS) -> bytes:
        """Return the packed places of up to `most` returned blocks and loans, and forget these."""
        self.returned_bytes = 0
        # Not another deque in its place: a thread might add to the old one.
        numbers = [self.returned.popleft() for _ in range(min(len(self.returned), most))]
        self._read.difference_update(numbers)
        return b"".join(map(_LOAN.pack, numbers))

    def close(self) -> None:
        """Drop all regions, because the link has ended; lent views stay valid."""
        self._regions.clear()
        self._unread.clear()
        self._lent.clear()
        self.returned.clear()  # a write that is still due must find none
