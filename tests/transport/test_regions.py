"""Shared memory of two sides: blocks go round, limits hold, and no word of a peer is believed."""

import ctypes
import fcntl
import gc
import mmap
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from transport import LinkBroken, RemoteProtocolError, regions
from transport.config import MOST_SHARED_BYTES
from transport.frames import PLACE
from transport.regions import (
    IDLE_S,
    MOST_KEPT,
    MOST_KEPT_BYTES,
    MOST_REGIONS,
    SEALS,
    SMALLEST_BLOCK,
    WAITING_BLOCKS,
    WAITING_BYTES,
    Allowance,
    Inbox,
    Outbox,
    Region,
    Side,
    as_one,
    region_of,
    shared_memory,
)
from transport.tensors import TensorSpec

MIB = 1 << 20
SO_PASSPIDFD = 76
FLOATS = np.dtype(np.float32)


class Sides:
    """An outbox and the inbox of its peer."""

    def __init__(self, limit_bytes: int = 64 * MIB) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (ours, theirs):
            each.setblocking(False)
        self.ours, self.theirs = ours, theirs
        self.allowance = Allowance(256 * MIB)
        self.outbox = Outbox(Side(ours), limit_bytes, self.allowance)
        self.calls = 0
        self.inbox = Inbox(Side(theirs), self.note)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.outbox.close()
        self.inbox.close()
        self.ours.close()
        self.theirs.close()

    def note(self) -> None:
        self.calls += 1

    def place(self, parts: Sequence[bytes | memoryview], total: int) -> int:
        """Place a payload of a request; returns the number of its region, 0 without one."""
        place = self.outbox.place(parts, total)
        return int(PLACE.unpack(place)[0]) if place else 0

    def move(self, payload: bytes) -> int:
        """Place a payload, read it, and return its block to the outbox; returns the number of the block."""
        number = self.place([payload], len(payload))
        assert bytes(self.inbox.take(number, 0, len(payload))) == payload
        self.inbox.give_back(number, len(payload))
        self.outbox.freed(self.inbox.take_returned())
        return number

    def hand_over(self, packed: bytes, *descriptors: int) -> None:
        socket.send_fds(self.ours, [packed], list(descriptors))


@pytest.fixture
def small() -> Iterator[Sides]:
    with Sides(limit_bytes=2 * MIB) as made:
        yield made


@pytest.fixture
def sides() -> Iterator[Sides]:
    with Sides() as made:
        yield made


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def memfd(nbytes: int, seals: int = SEALS, *, pages: bool = True) -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        if pages:
            os.pwrite(descriptor, bytes(nbytes), 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_steady_conversation_uses_one_block_and_allocates_nothing(sides: Sides) -> None:
    numbers = {sides.move(bytes([value]) * MIB) for value in range(50)}
    assert numbers == {1}
    assert sides.outbox.held_bytes == sides.allowance.held_bytes == MIB


def test_parts_are_joined_and_blocks_have_sizes_of_powers_of_two(sides: Sides) -> None:
    number = sides.place([b"ab", memoryview(b"cd"), b"e"], 5)
    assert bytes(sides.inbox.take(number, 0, 5)) == b"abcde"
    assert sides.outbox.held_bytes == SMALLEST_BLOCK
    sides.place([bytes(SMALLEST_BLOCK + 1)], SMALLEST_BLOCK + 1)
    assert sides.outbox.held_bytes == 3 * SMALLEST_BLOCK


def test_a_block_that_is_read_is_not_written(sides: Sides) -> None:
    first = sides.place([b"1" * MIB], MIB)
    second = sides.place([b"2" * MIB], MIB)
    assert first != second
    assert bytes(sides.inbox.take(first, 0, MIB)) == b"1" * MIB
    assert bytes(sides.inbox.take(second, 0, MIB)) == b"2" * MIB


def test_without_a_free_block_at_the_limit_nothing_is_placed(small: Sides) -> None:
    assert all(small.place([bytes(MIB)], MIB) for _ in range(2))
    assert small.place([bytes(MIB)], MIB) == 0
    assert small.outbox.held_bytes == 2 * MIB


def test_free_blocks_of_another_size_make_room(small: Sides) -> None:
    taken = [small.place([bytes(MIB)], MIB) for _ in range(2)]
    for number in taken:
        small.inbox.take(number, 0, MIB)
        small.inbox.give_back(number, MIB)
    small.outbox.freed(small.inbox.take_returned())
    large = small.place([b"x" * 2 * MIB], 2 * MIB)
    assert bytes(small.inbox.take(large, 0, 2 * MIB)) == b"x" * 2 * MIB
    assert small.outbox.held_bytes == small.allowance.held_bytes == 2 * MIB
    with pytest.raises(RemoteProtocolError, match="region"):  # the peer has dropped them too
        small.inbox.take(taken[0], 0, 1)


def test_the_links_of_a_process_share_one_allowance(sides: Sides, small: Sides) -> None:
    allowance = Allowance(3 * MIB)
    one, two = [Outbox(Side(each.ours), 64 * MIB, allowance) for each in (sides, small)]
    assert one.place([bytes(2 * MIB)], 2 * MIB)
    assert two.place([bytes(2 * MIB)], 2 * MIB) == b""
    one.close()
    assert allowance.held_bytes == 0
    assert two.place([bytes(2 * MIB)], 2 * MIB)


def test_free_blocks_make_room_if_the_allowance_is_used_up(sides: Sides) -> None:
    sides.allowance.limit_bytes = 2 * MIB
    sides.move(bytes(2 * MIB))
    assert sides.move(bytes(MIB)) == 2
    assert sides.outbox.held_bytes == sides.allowance.held_bytes == MIB


def test_after_the_last_number_of_a_block_payloads_take_the_stream(sides: Sides) -> None:
    sides.outbox._last = (1 << 32) - 2
    assert sides.place([b"x"], 1) == (1 << 32) - 1
    assert sides.place([b"x"], 1) == 0


def test_the_number_of_regions_is_bounded(sides: Sides) -> None:
    placed = [sides.place([b"x"], 1) for _ in range(MOST_REGIONS)]
    assert all(placed)
    assert sides.place([b"x"], 1) == 0
    for number in placed:
        sides.inbox.take(number, 0, 1)


def test_a_view_returns_its_block_with_its_last_slice_on_any_thread(sides: Sides) -> None:
    values = np.arange(1000, dtype=np.float32)
    number = sides.place([values.tobytes()], values.nbytes)
    sides.inbox.take(number, 0, values.nbytes)
    (view,) = sides.inbox.lend(number, 0, [TensorSpec(FLOATS, (1000,), 0, 4000)], 4000)
    np.testing.assert_array_equal(view, values)
    assert not view.flags.writeable
    held = [view[500:]]
    del view
    gc.collect()
    assert not sides.inbox.returned
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert list(sides.inbox.returned) == [number]
    sides.outbox.freed(sides.inbox.take_returned())
    assert sides.place([b"x" * 4000], 4000) == number


def test_several_tensors_of_a_block_return_it_together(sides: Sides) -> None:
    payload = np.arange(32, dtype=np.float32).tobytes()
    number = sides.place([payload], 128)
    sides.inbox.take(number, 0, 128)
    specs = [TensorSpec(FLOATS, (16,), 0, 64), TensorSpec(FLOATS, (4, 4), 64, 64)]
    first, second = sides.inbox.lend(number, 0, specs, 128)
    np.testing.assert_array_equal(second, np.arange(16, 32, dtype=np.float32).reshape(4, 4))
    del first
    gc.collect()
    assert not sides.inbox.returned
    del second
    gc.collect()
    assert list(sides.inbox.returned) == [number]


def test_views_outlive_both_sides(sides: Sides) -> None:
    number = sides.place([b"\1" * MIB], MIB)
    sides.inbox.take(number, 0, MIB)
    (view,) = sides.inbox.lend(number, 0, [TensorSpec(np.dtype(np.uint8), (MIB,), 0, MIB)], MIB)
    sides.outbox.close()
    sides.inbox.close()
    assert view.all()


@pytest.mark.parametrize("size", [SMALLEST_BLOCK, WAITING_BYTES // 2])
def test_many_returned_blocks_or_bytes_do_not_wait(sides: Sides, size: int) -> None:
    waiting = min(WAITING_BLOCKS, WAITING_BYTES // size)
    numbers = [sides.place([bytes(size)], size) for _ in range(waiting)]
    for number in numbers[:-1]:
        sides.inbox.take(number, 0, size)
        sides.inbox.give_back(number, size)
    assert sides.calls == 0
    sides.inbox.take(numbers[-1], 0, size)
    sides.inbox.give_back(numbers[-1], size)
    assert sides.calls == 1


def test_arrays_in_a_region_of_the_program_are_not_copied(sides: Sides) -> None:
    memory = Region.allocate(MIB)
    values = memory[4096:].view(np.float32).reshape(-1, 16)
    values[:] = 7
    place = sides.outbox.place([values.data.cast("B")], values.nbytes)
    assert PLACE.unpack(place) == (1, 4096 // 4)
    assert sides.outbox.held_bytes == 0
    seen = sides.inbox.take(1, 4096, values.nbytes)
    (view,) = sides.inbox.lend(1, 4096, [TensorSpec(FLOATS, values.shape, 0, values.nbytes)], values.nbytes)
    assert (view == 7).all()
    values[:] = 8
    assert (view == 8).all()
    assert not view.flags.writeable
    assert np.frombuffer(seen, np.float32)[0] == 8
    sides.inbox.take(1, 4096, values.nbytes)
    sides.inbox.give_back(1, values.nbytes)
    del view
    gc.collect()
    assert not sides.inbox.returned
    assert bytes(sides.inbox.take(1, 0, 4)) == bytes(4)


def test_a_region_of_the_program_is_handed_over_once_on_each_link(sides: Sides, small: Sides) -> None:
    part = Region.allocate(MIB)[64:128].data
    for each in (sides, small):
        assert {each.place([part], 64) for _ in range(20)} == {1}
        each.inbox.take(1, 64, 64)


@pytest.mark.parametrize("is_published", [False, True])
def test_values_of_any_size_can_follow_one_another_in_a_region(sides: Sides, is_published: bool) -> None:
    memory = Region.allocate(MIB, is_published=is_published).view(FLOATS)
    for start in (1, 15, 1061, 65_537):
        part = memory[start : start + 50_000].view(np.uint8)
        place = sides.outbox.place([part.data], part.nbytes, not is_published)
        assert PLACE.unpack(place) == (1, start)
        assert len(sides.inbox.take(1, 4 * start, part.nbytes)) == part.nbytes
    assert not sides.outbox.held_bytes


@pytest.mark.parametrize("case", ["unaligned", "half", "answer", "two parts", "another memory"])
def test_other_payloads_are_copied_into_a_block(sides: Sides, case: str) -> None:
    memory = Region.allocate(MIB) if case != "another memory" else np.zeros(MIB, np.uint8)
    part = memory[1:65].data if case == "unaligned" else memory[:64].data
    if case == "half":
        part = memory[4:68].view(np.float64).data.cast("B")
    parts = [part, part] if case == "two parts" else [part]
    sides.outbox.place(parts, 64 * len(parts), case != "answer")
    assert sides.outbox.held_bytes == SMALLEST_BLOCK


def test_a_freed_region_of_the_program_leaves_both_sides(sides: Sides) -> None:
    before = open_descriptors()
    for number in range(1, 3 * MOST_REGIONS):
        memory = Region.allocate(4096)
        memory[:] = number % 251
        assert sides.place([memory.data], 4096) == number
        assert sides.inbox.take(number, 0, 4096)[0] == number % 251
        assert len(sides.inbox._regions) <= 2
    del memory
    sides.inbox.close()
    gc.collect()
    assert open_descriptors() == before


def test_a_dropped_region_that_is_still_read_keeps_its_number(sides: Sides) -> None:
    memory = Region.allocate(4096)
    number = sides.place([memory.data], 4096)
    sides.inbox.take(number, 0, 4096)
    sides.inbox.dropped(struct.pack("<I", number))
    with memfd(8192) as descriptor:
        sides.hand_over(struct.pack("<IQB", number, 8192, 0), descriptor)
        with pytest.raises(RemoteProtocolError, match="region 1 of kind 0 is one too many"):
            sides.inbox.take(number, 0, 8192)


def test_a_region_outlives_its_program_at_the_reader(sides: Sides) -> None:
    memory = Region.allocate(4096)
    memory[:] = 9
    number = sides.place([memory.data], 4096)
    view = sides.inbox.take(number, 0, 4096)
    del memory
    gc.collect()
    sides.outbox.close()
    sides.inbox.close()
    assert bytes(view) == b"\x09" * 4096


def test_regions_of_the_program_beyond_the_limits_are_copied(sides: Sides) -> None:
    kept = [Region.allocate(4096) for _ in range(MOST_KEPT)]
    assert all(sides.place([each.data], 4096) for each in kept)
    one_more = Region.allocate(4096)
    assert sides.place([one_more.data], 4096)
    assert sides.outbox.held_bytes == SMALLEST_BLOCK
    for number in range(1, MOST_KEPT + 2):
        sides.inbox.take(number, 0, 4096)


def test_free_blocks_of_an_idle_side_are_dropped_at_both(sides: Sides) -> None:
    number, other = sides.place([bytes(MIB)], MIB), sides.place([bytes(MIB)], MIB)
    kept = Region.allocate(4096)
    sides.place([kept.data], 4096)
    for each, size in ((number, MIB), (other, MIB), (3, 4096)):
        sides.inbox.take(each, 0, size)
    sides.inbox.give_back(number, MIB)
    sides.outbox.freed(sides.inbox.take_returned())
    assert sides.outbox.drop_idle(100.0) == b""
    assert sides.outbox.drop_idle(100.0 + IDLE_S - 1) == b""
    idle = sides.outbox.drop_idle(100.0 + IDLE_S)
    assert idle == struct.pack("<I", number)
    sides.inbox.dropped(idle)
    assert sides.outbox.held_bytes == sides.allowance.held_bytes == MIB
    assert sides.inbox._regions.keys() == {other, 3}
    assert sides.place([bytes(MIB)], MIB) == 4
    sides.inbox.take(4, 0, MIB)
    sides.inbox.give_back(4, MIB)
    sides.outbox.freed(sides.inbox.take_returned())
    assert sides.outbox.drop_idle(200.0) == b"", "it placed a payload since the last check"
    assert sides.outbox.drop_idle(200.0 + IDLE_S) == struct.pack("<I", 4)


@pytest.mark.parametrize("packed", [b"x", struct.pack("<I", 9), struct.pack("<I", 1)])
def test_only_free_regions_are_dropped(sides: Sides, packed: bytes) -> None:
    sides.inbox.take(sides.place([b"x"], 1), 0, 1)
    with pytest.raises(RemoteProtocolError, match=r"was not free|not handed over|no numbers"):
        sides.inbox.dropped(packed)


def test_blocks_have_no_payloads_in_their_middle(sides: Sides) -> None:
    number = sides.place([bytes(256)], 256)
    with pytest.raises(RemoteProtocolError, match="64 bytes from 64 on"):
        sides.inbox.take(number, 64, 64)


def test_a_region_has_no_payload_beyond_its_end(sides: Sides) -> None:
    memory = Region.allocate(4096)
    sides.place([memory.data], 4096)
    sides.inbox.take(1, 4032, 64)
    for start, total in ((4032, 65), (4096, 1), (1 << 37, 64), (0, 0)):
        with pytest.raises(RemoteProtocolError, match="in a region of 4096"):
            sides.inbox.take(1, start, total)


def test_a_forked_child_closes_its_copy_of_a_region(sides: Sides) -> None:
    memory = Region.allocate(4096)
    child = os.fork()
    if child == 0:
        memory[0] = 5
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert memory[0] == 5  # as each shared mapping
    assert sides.place([memory.data], 4096) == 1
    assert sides.inbox.take(1, 0, 4096)[0] == 5


def test_nothing_is_left_after_a_thousand_conversations() -> None:
    gc.collect()
    before = open_descriptors()
    for _ in range(1000):
        with Sides() as sides:
            sides.move(bytes(SMALLEST_BLOCK))
    del sides
    gc.collect()
    assert open_descriptors() == before


def test_no_other_process_may_shorten_or_write_a_region() -> None:
    descriptor, memory = shared_memory(SMALLEST_BLOCK, mmap.mmap)
    try:
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(descriptor, 1)
        with pytest.raises(OSError, match="not permitted"):
            mmap.mmap(descriptor, SMALLEST_BLOCK)
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(descriptor, b"x", 0)
        memory[:1] = b"x"
        # Another process of the same user can open it there.
        with Path(f"/proc/self/fd/{descriptor}").open("r+b", buffering=0) as opened:
            assert opened.read(1) == b"x"
            with pytest.raises(OSError, match="not permitted"):
                opened.write(b"y")
    finally:
        os.close(descriptor)


def test_without_descriptors_or_memory_nothing_is_placed(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert sides.place([b"x"], 1) == 0
    assert sides.allowance.held_bytes == 0
    monkeypatch.undo()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_descriptors()
    assert sides.place([b"x"], 1) == 0
    assert open_descriptors() == before
    monkeypatch.undo()
    assert sides.place([b"x"], 1)


LACKS = """
import resource, sys
from tests.transport.test_regions import MIB, Sides, open_descriptors

with Sides() as sides:
    sides.move(bytes(MIB))
    payload, before = bytes(32 * MIB), open_descriptors()
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 16 * MIB, unlimited[1]))
    assert sides.place([payload], len(payload)) == 0
    assert open_descriptors() == before
    assert sides.move(bytes(MIB)) == 1
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    assert sides.place([payload], len(payload)) > 1
"""

TINY = """
import ctypes, sys
from transport import Region

libc = ctypes.CDLL(None)
if libc.unshare(0x20000) or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=4k"):  # mounts of its own
    sys.exit(77)
Region.allocate(8 << 20)[:] = 1
"""


@pytest.mark.parametrize("script", [LACKS, TINY], ids=["no address space", "a small /dev/shm"])
def test_a_process_without_memory_places_nothing_and_needs_no_file_system(script: str) -> None:
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    if ran.returncode == 77:
        pytest.skip("no mounts of its own")
    assert ran.returncode == 0, ran.stderr


def test_nothing_is_placed_for_a_peer_that_has_ended(sides: Sides) -> None:
    sides.theirs.close()
    assert sides.place([b"x"], 1) == 0
    assert sides.allowance.held_bytes == sides.outbox.held_bytes == 0


def handover(number: int, nbytes: int, *replaced: int, kept: bool = False) -> bytes:
    return struct.pack(f"<IQ?{len(replaced)}I", number, nbytes, kept, *replaced)


@pytest.mark.parametrize(
    ("packed", "size", "seals", "text"),
    [
        (handover(1, 4096), 4096, 0, "seals"),
        (handover(1, 4096), 4096, SEALS & ~fcntl.F_SEAL_SHRINK, "seals"),
        (handover(1, 4096), 4096, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, "seals"),
        (handover(1, 8192), 4096, SEALS, "has 4096"),
        (handover(1, 0), 0, SEALS, "has 0"),
        (handover(1, 4096, 7), 4096, SEALS, "was not free"),
        (handover(1, MOST_SHARED_BYTES + 1), 4096, SEALS, "are allowed"),
        (handover(1, MOST_KEPT_BYTES + 1, kept=True), 4096, SEALS, "are allowed"),
        (handover(1, 4096, kept=True), 4096, 0, "seals"),
        (b"short", 4096, SEALS, "handover of 5 bytes"),
        (handover(1, 4096) + b"?", 4096, SEALS, "1 bytes are no numbers"),
    ],
)
def test_a_false_handover_is_refused(sides: Sides, packed: bytes, size: int, seals: int, text: str) -> None:
    before = open_descriptors()
    with memfd(size, seals) as descriptor:
        sides.hand_over(packed, descriptor)
    with pytest.raises(RemoteProtocolError, match=text):
        sides.inbox.take(1, 0, 1)
    assert open_descriptors() == before


@pytest.mark.parametrize("behind", [0, MIB])
def test_a_region_without_pages_is_refused(sides: Sides, behind: int) -> None:
    with memfd(MIB, 0, pages=False) as descriptor:
        if behind:  # pages behind the end count as those of the file
            kept = ctypes.CDLL(None).fallocate(descriptor, 1, ctypes.c_long(MIB), ctypes.c_long(behind))
            assert kept == 0
            assert os.fstat(descriptor).st_blocks * 512 == MIB
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        sides.hand_over(handover(1, MIB), descriptor)
    with pytest.raises(RemoteProtocolError, match=", 0 before a hole"):
        sides.inbox.take(1, 0, 1)


def test_a_side_that_its_peer_makes_wait_does_not_wait(sides: Sides) -> None:
    sides.theirs.setblocking(True)  # the peer may have a copy of the descriptor
    waker = threading.Timer(1.0, sides.ours.send, [b"x"])
    waker.start()
    with pytest.raises(RemoteProtocolError, match="temporarily unavailable"):
        sides.inbox.take(1, 0, 1)
    waker.cancel()
    waker.join()


def test_a_descriptor_that_the_kernel_adds_is_closed(sides: Sides) -> None:
    before = open_descriptors()
    try:
        sides.theirs.setsockopt(socket.SOL_SOCKET, SO_PASSPIDFD, 1)
    except OSError as error:
        pytest.skip(f"this kernel adds no descriptors: {error}")
    sides.hand_over(handover(1, 4096))
    with pytest.raises(RemoteProtocolError, match="region"):
        sides.inbox.take(1, 0, 1)
    assert open_descriptors() == before


def test_handovers_without_end_do_not_keep_the_receiver(sides: Sides) -> None:
    with memfd(4096) as descriptor:
        sides.hand_over(handover(1, 4096), descriptor)
        for number in range(1, MOST_REGIONS + 1):
            sides.hand_over(handover(number + 1, 4096, number), descriptor)
    with pytest.raises(RemoteProtocolError, match="region 999 was not handed over"):
        sides.inbox.take(999, 0, 1)


def test_a_handover_arrives_from_a_peer_that_ended_without_reading_its_side(sides: Sides) -> None:
    number = sides.place([b"\7" * 100], 100)
    sides.theirs.send(b"a handover that the peer does not read")
    sides.ours.close()
    assert bytes(sides.inbox.take(number, 0, 100)) == b"\7" * 100


def test_a_descriptor_that_is_no_region_is_refused(sides: Sides) -> None:
    for descriptor in (os.open("/dev/zero", os.O_RDONLY), os.open(__file__, os.O_RDONLY)):
        sides.hand_over(handover(1, 4096), descriptor)
        os.close(descriptor)
        with pytest.raises(RemoteProtocolError, match="no region"):
            sides.inbox.take(1, 0, 1)


def test_a_handover_has_one_descriptor(sides: Sides) -> None:
    sides.hand_over(handover(1, 4096))
    with pytest.raises(RemoteProtocolError, match="0 descriptors"):
        sides.inbox.take(1, 0, 1)
    before = open_descriptors()
    with memfd(4096) as one, memfd(4096) as two:
        sides.hand_over(handover(1, 4096), one, two)
    with pytest.raises(RemoteProtocolError, match="2 descriptors"):
        sides.inbox.take(1, 0, 1)
    assert open_descriptors() == before


def test_a_block_is_used_as_it_was_handed_over(sides: Sides) -> None:
    with pytest.raises(RemoteProtocolError, match="not handed over"):
        sides.inbox.take(1, 0, 1)
    number = sides.place([bytes(100)], 100)
    for total in (0, SMALLEST_BLOCK + 1, 1 << 40):
        with pytest.raises(RemoteProtocolError, match="in a region of"):
            sides.inbox.take(number, 0, total)
    sides.inbox.take(number, 0, 100)
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="before it was returned"):
            sides.inbox.take(number, 0, 100)
        sides.inbox.give_back(number, 100)  # the peer may use it once it has the number
    sides.inbox.take_returned()
    sides.inbox.take(number, 0, 100)


@pytest.mark.parametrize(
    "packed",
    [
        b"x",
        struct.pack("<I", 1),
        *(struct.pack("<Q", each) for each in (0, 9, 1 | 1 << 32)),
        struct.pack("<QQ", 1, 1),
    ],
)
def test_only_lent_blocks_are_returned_and_once(sides: Sides, packed: bytes) -> None:
    assert sides.place([b"x"], 1) == 1
    with pytest.raises(RemoteProtocolError, match=r"freed|no numbers"):
        sides.outbox.freed(packed)


def test_without_memory_to_map_a_region_the_link_breaks(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = sides.place([b"x"], 1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("transport.regions.mmap.mmap", refuse)
    with pytest.raises(LinkBroken, match="cannot be mapped"):
        sides.inbox.take(number, 0, 1)


def test_both_sides_write_a_common_region_and_it_outlives_the_link(sides: Sides) -> None:
    memory = Region.allocate(3 * MIB, is_common=True)
    found = region_of(memory.data)
    assert found is not None
    number = sides.outbox.number_of(found[0])
    assert sides.outbox.number_of(found[0]) == number
    theirs = sides.inbox.whole(number, is_common=True)
    memory[5], theirs[-1] = 7, 9
    assert (theirs[5], memory[-1], len(theirs)) == (7, 9, 3 * MIB)
    sides.inbox.close()
    theirs[6] = 8
    assert memory[6] == 8


def test_a_common_region_may_be_larger_than_all_kept_ones(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "MOST_KEPT_BYTES", MIB)
    memory = Region.allocate(2 * MIB, is_common=True)
    found = region_of(memory.data)
    assert found is not None
    assert len(sides.inbox.whole(sides.outbox.number_of(found[0]), is_common=True)) == 2 * MIB


def test_a_payload_in_common_memory_travels_as_a_copy(sides: Sides) -> None:
    memory = Region.allocate(MIB, is_common=True)
    number = sides.place([memory.data], MIB)
    memory[0] = 1
    assert bytes(sides.inbox.take(number, 0, MIB)) == bytes(MIB)


def test_a_common_region_is_no_place_of_a_payload_and_no_other_one_is_common(sides: Sides) -> None:
    memory = Region.allocate(MIB, is_common=True)
    found = region_of(memory.data)
    assert found is not None
    number, other = sides.outbox.number_of(found[0]), sides.place([bytes(MIB)], MIB)
    with pytest.raises(RemoteProtocolError, match="a payload in the common region"):
        sides.inbox.take(number, 0, MIB)
    for named, is_common in ((other, True), (other, False), (number, False)):
        with pytest.raises(RemoteProtocolError, match=f"region {named} is no (common|kept) one"):
            sides.inbox.whole(named, is_common=is_common)
    with pytest.raises(RemoteProtocolError, match="was not handed over"):
        sides.inbox.whole(90, is_common=True)


def test_no_holder_of_a_common_region_closes_it_to_those_that_come_later(sides: Sides) -> None:
    memory = Region.allocate(MIB, is_common=True)
    found = region_of(memory.data)
    assert found is not None
    with pytest.raises(PermissionError):
        fcntl.fcntl(found[0].descriptor, fcntl.F_ADD_SEALS, regions._FUTURE_WRITE)
    assert sides.inbox.whole(sides.outbox.number_of(found[0]), is_common=True).flags.writeable


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK])
def test_a_common_region_that_may_shrink_is_not_mapped(sides: Sides, seals: int) -> None:
    with memfd(MIB, seals) as descriptor:
        sides.hand_over(struct.pack("<IQB", 1, MIB, 2), descriptor)
        with pytest.raises(RemoteProtocolError, match="seals"):
            sides.inbox.whole(1, is_common=True)


def published(nbytes: int = MIB) -> tuple[NDArray[Any], Region]:
    memory = Region.allocate(nbytes, is_published=True)
    found = region_of(memory.data)
    assert found is not None
    return memory, found[0]


def lend(sides: Sides, part: NDArray[Any], start: int) -> NDArray[Any]:
    """Send a part of a published region as an answer, and return the view of the reader."""
    number, unit = PLACE.unpack(sides.outbox.place([part.data], part.nbytes, False))
    assert unit * 4 == start
    sides.inbox.take(number, start, part.nbytes)
    (view,) = sides.inbox.lend(
        number, start, [TensorSpec(FLOATS, (part.nbytes // 4,), 0, part.nbytes)], part.nbytes
    )
    return view


def test_a_published_range_is_lent_until_its_last_reader_returns_it(sides: Sides, small: Sides) -> None:
    memory, region = published()
    memory[:] = 1
    views = [lend(each, memory[4096:8192], 4096) for each in (sides, sides, small)]
    assert sides.outbox.held_bytes == 0
    assert region.loans == {(4096, 8192): 3}
    assert region.is_lent(8191, 9000)
    assert not region.is_lent(8192, 9000)
    assert not region.is_lent(0, 4096)
    for left in (2, 1, 0):
        view = views.pop()
        assert not view.flags.writeable
        part = view[5:]
        del view
        assert not small.inbox.returned
        del part
        for each in (sides, small):
            each.outbox.freed(each.inbox.take_returned())
        assert region.loans == ({(4096, 8192): left} if left else {})
    assert not region.is_lost


def test_published_regions_leave_half_of_the_descriptors_to_links() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    memory: list[NDArray[Any]] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * lowest + 4, hard))
    try:
        with pytest.raises(OSError, match="half of the descriptors"):
            while True:
                memory.append(published(4096)[0])
        Region.allocate(4096)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert memory


def test_lent_bytes_are_searched_among_the_ranges_of_many_loans(monkeypatch: pytest.MonkeyPatch) -> None:
    _, region = published()
    dice, calls, united = np.random.default_rng(1), 0, regions._united

    def counted(ranges: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
        nonlocal calls
        calls += 1
        return united(ranges)

    monkeypatch.setattr(regions, "_united", counted)
    lent = [
        (int(start), int(start + size)) for start, size in zip(*dice.integers(1, 90, (2, 8)), strict=True)
    ]
    changes = [(change, each) for change in (region.lend, region.give_back) for each in lent * 2]
    for change, each in changes:
        change(each)
        for start in range(200):
            for stop in (start + 1, start + 7):
                expected = any(first < stop and start < end for first, end in region.loans)
                assert region.is_lent(start, stop) == expected
    assert calls <= 2 * len(lent)
    assert not region.loans


def test_a_loan_of_an_ended_link_is_never_returned(sides: Sides) -> None:
    memory, region = published()
    view = lend(sides, memory[:4096], 0)
    sides.outbox.close()
    sides.inbox.close()
    assert region.is_lost
    assert region.is_lent(0, 1)
    memory[4096:] = 7
    assert not view.any()


def test_a_copied_loan_is_returned_at_its_place(sides: Sides) -> None:
    memory, region = published()
    number, _ = PLACE.unpack(sides.outbox.place([memory[128:256].data], 128, False))
    sides.inbox.take(number, 128, 128)
    sides.inbox.give_back(number, 128, 128)
    sides.outbox.freed(sides.inbox.take_returned())
    assert not region.loans


@pytest.mark.parametrize("at", [0, 64, 1 << 20])
def test_a_loan_is_returned_once_and_at_its_place(sides: Sides, at: int) -> None:
    memory, _ = published()
    number, _ = PLACE.unpack(sides.outbox.place([memory[64:128].data], 64, False))
    packed = struct.pack("<Q", number | at // 4 << 32)
    if at == 64:
        sides.outbox.freed(packed)
    with pytest.raises(RemoteProtocolError, match="freed"):
        sides.outbox.freed(packed)


@pytest.mark.parametrize(("start", "total"), [(MIB, 64), (MIB - 64, 65), (0, MIB + 1), (0, 0)])
def test_a_loan_outside_of_its_region_ends_the_link(sides: Sides, start: int, total: int) -> None:
    memory, _ = published()
    number, _ = PLACE.unpack(sides.outbox.place([memory[:64].data], 64, False))
    with pytest.raises(RemoteProtocolError, match="in a region of"):
        sides.inbox.take(number, start, total)


def test_a_request_from_a_published_region_and_an_answer_from_a_kept_one_are_copied(sides: Sides) -> None:
    memory, region = published()
    kept = Region.allocate(MIB)
    assert sides.outbox.place([memory.data], MIB)
    assert sides.outbox.place([kept.data], MIB, False)
    assert sides.outbox.held_bytes == 2 * MIB
    assert not region.loans


def test_neighbours_in_a_region_are_one_array_which_keeps_their_loans(sides: Sides) -> None:
    memory, region = published()
    memory.view(np.float32)[:] = np.arange(MIB // 4)
    views = [lend(sides, memory[start : start + 4096], start) for start in (4096, 8192, 12288)]
    assert as_one([views[0], views[2]]) is None
    assert as_one([views[1], views[0]]) is None
    assert as_one([views[0], np.ones(4, np.float32)]) is None
    assert as_one([np.ones(4, np.float32)]) is None
    whole = as_one([views[0][16:], *views[1:]])
    assert whole is not None
    assert type(whole) is np.ndarray
    assert not whole.flags.writeable
    np.testing.assert_array_equal(whole, np.arange(1024 + 16, 4096))
    part = whole.reshape(-1, 16)[3]
    views.clear()
    del whole
    assert not sides.inbox.returned
    assert region.is_lent(4096, 16384)
    del part
    sides.outbox.freed(sides.inbox.take_returned())
    assert not region.loans


@pytest.mark.parametrize("order", [(4096, 128), (128, 4096)])
def test_the_longest_of_several_loans_from_one_start_ends_last(sides: Sides, order: tuple[int, int]) -> None:
    memory, region = published()
    views = {size: lend(sides, memory[64 : 64 + size], 64) for size in order}
    for size, is_lent in ((128, True), (4096, False)):
        del views[size]
        gc.collect()
        sides.outbox.freed(sides.inbox.take_returned())
        assert region.is_lent(4000, 4096) == is_lent
    assert not region.loans


def test_a_reader_that_keeps_every_loan_gets_copies_after_many(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.regions.MOST_LOANS", 3)
    memory, region = published()
    views = [lend(sides, memory[:4096], 0) for _ in range(3)]
    assert not sides.outbox.may_lend(region)
    sides.outbox.place([memory[:4096].data], 4096, False)
    assert sides.outbox.held_bytes > 0
    assert region.loans == {(0, 4096): 3}
    views.pop()
    sides.outbox.freed(sides.inbox.take_returned())
    assert sides.outbox.may_lend(region)


def test_a_request_in_a_published_region_ends_the_link(sides: Sides) -> None:
    memory, _ = published()
    number, _ = PLACE.unpack(sides.outbox.place([memory[:64].data], 64, False))
    with pytest.raises(RemoteProtocolError, match="no reply"):
        sides.inbox.take(number, 0, 64, is_reply=False)


@pytest.mark.parametrize("is_published", [True, False])
def test_a_region_that_its_program_has_freed_is_dropped_at_both(sides: Sides, is_published: bool) -> None:
    memory = Region.allocate(MIB, is_published=is_published)
    number, _ = PLACE.unpack(sides.outbox.place([memory.data], MIB, not is_published))
    sides.inbox.take(number, 0, MIB)
    sides.inbox.give_back(number, MIB)
    assert sides.outbox.drop_idle(0.0) == b""
    sides.outbox.freed(sides.inbox.take_returned())
    del memory
    gc.collect()
    packed = sides.outbox.drop_idle(0.0)
    assert packed == struct.pack("<I", number)
    sides.inbox.dropped(packed)
    assert not sides.inbox._regions
    assert sides.outbox.drop_idle(0.0) == b""


def test_free_blocks_of_an_ended_link_are_freed_at_once(sides: Sides) -> None:
    sides.move(bytes(MIB))
    (block,) = sides.outbox._blocks.values()
    memory = weakref.ref(block.memory.obj)
    del block
    gc.disable()
    try:
        sides.outbox.close()
        assert memory() is None
    finally:
        gc.enable()
