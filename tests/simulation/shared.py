"""Links in shared memory within a simulated host: Unix sockets beside the listeners, and simulated regions.

The product's own `regions.py` and `shared.py` run over a `SimulatedSide`, which replaces a packet socket and
the kernel's memory. Machines of one name in `SimulatedNetwork.together` count as processes of one host.

Writer and reader of a region each have separate memory. A piece of the stream takes along a copy of all
earlier changes; the reader sees these once the piece has arrived, and not before. So a read that no frame
orders finds old bytes. With each arrival the reader may also see some lines of the cache that were written
later, in a drawn order: a block that is written while it is read is found out, too.
"""

import errno
import zlib
from asyncio import get_running_loop
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulation.connection import Address
from tests.simulation.host import HOST, Host
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import LOOPBACK, Listener, SimulatedNetwork
from transport.errors import LinkBroken
from transport.regions import Memory, Region, Side, mapped, region_of
from transport.tensors import Tensor
from transport.unix import UnixListener, UnixSockets

LINE_BYTES = 64
"""Size of a line of the cache, in bytes: the unit in which writes become visible."""

LEAKS = 0.25
"""Share of the arrivals with which lines written later become visible."""

NO_MEMORY, NO_DESCRIPTOR, REFUSED = 0.05, 0.002, 0.1
"""Share of the allocations for which a host has no memory; of the handovers for which the reader has no free
descriptor; and of the dials that find no Unix socket, and use TCP."""

_UINT8 = np.dtype(np.uint8)


class _Region:
    """A region: the memory of its writer, and the memory of its reader."""

    def __init__(self, written: Any) -> None:
        self.written: NDArray[np.uint8] = np.frombuffer(written, _UINT8)
        self.sent = np.zeros(len(self.written), _UINT8)
        """Bytes of the writer at the last piece of the stream: none yet of a region of the program."""
        # Memory of the kernel: an array there stays the base of its slices, which a lent array must be.
        self.read = Region.allocate(len(self.written))
        found = region_of(self.read.data)
        assert found is not None
        self.mapped = mapped(found[0].descriptor, len(self.written))
        """Memory of the reader."""

    def changed(self) -> NDArray[np.uint8] | None:
        """Return the present bytes of the writer, if they have changed since the last call."""
        if np.array_equal(self.written, self.sent):
            return None
        self.sent = self.written.copy()
        return self.sent


class SimulatedSide(Side):
    """One end of the handover of regions.

    Args:
        network: The network with the dice.

    Attributes:
        peer: The other end.
    """

    def __init__(self, network: SimulatedNetwork) -> None:
        self._loop = network.loop
        self._dice = network.loop.dice("shared").fork(str(next(network.sides)))
        self._known: dict[int, _Region] = {}
        """Regions of both ends by descriptor, which is a number of this object alone."""
        self._packets: list[tuple[bytes, int]] = []
        self._owned: list[_Region] = []
        self.peer = self

    def allocate(self, nbytes: int) -> tuple[int, Memory]:
        if self._dice.chance(NO_MEMORY):
            raise OSError(errno.ENOMEM, "this host has no memory")
        memory = bytearray(nbytes)
        return self._note(memory), memoryview(memory)

    def _note(self, memory: Any) -> int:
        region = _Region(memory)
        self._owned.append(region)
        number = -len(self._owned)
        self.peer._known[number] = region
        return number

    def publish(self, nbytes: int) -> Tensor:
        if self._dice.chance(NO_MEMORY):
            raise OSError(errno.ENOMEM, "this host has no memory")
        return super().publish(nbytes)

    def send(self, packet: bytes, descriptor: int) -> None:
        if descriptor >= 0:  # of a region of the program, in memory of the kernel
            descriptor = self._note(mapped(descriptor, int.from_bytes(packet[4:12], "little")))
        self.peer._packets.append((packet, descriptor))

    def receive(self, most_bytes: int) -> tuple[bytes, list[int]]:
        if not self._packets:
            raise BlockingIOError(errno.EAGAIN, "no region was handed over")
        packet, descriptor = self._packets.pop(0)
        if self._dice.chance(NO_DESCRIPTOR):
            raise LinkBroken("no descriptor is free for a region of the peer")
        return packet, [descriptor]

    def map(self, descriptor: int, nbytes: int, *, is_common: bool) -> Memory:
        if is_common:
            raise LinkBroken("a simulated host has no common regions")
        return self._known.pop(descriptor).mapped

    def release(self, descriptor: int) -> None:
        pass

    def close(self) -> None:
        self._owned.clear()

    def departs(self) -> Callable[[], None]:
        """Return the effect of a piece of the stream that leaves now on the memory of its receiver."""
        changes = [(each, new) for each in self._owned if (new := each.changed()) is not None]
        for _, new in changes:
            self._loop.note(f"memory {zlib.crc32(new.data)}")

        def arrived() -> None:
            for region, new in changes:
                region.read[:] = new
            if self._owned and self._dice.chance(LEAKS):
                region = self._dice.choose(self._owned)
                first = self._dice.below(-(-len(region.read) // LINE_BYTES)) * LINE_BYTES
                later = slice(first, first + LINE_BYTES * (1 + self._dice.below(64)))
                region.read[later] = region.written[later]

        return arrived


async def _dial(host: str, port: int) -> tuple[Any, Side]:
    """Connect to the Unix socket beside a listener. Raises OSError: there is none, or the dice refuse it."""
    network, caller = _of_caller()
    target = caller.name if host in LOOPBACK else host
    listener = network.listener_at(target, (host, -port))
    is_there = listener is not None and network.is_up(target)
    if not is_there or not network.shares(caller.name) or network.dice.chance(REFUSED):
        raise OSError(errno.ECONNREFUSED, f"no process of this host offers shared memory at {host}:{port}")
    assert listener is not None
    end = network.make_connection(caller, listener)
    ours, theirs = SimulatedSide(network), SimulatedSide(network)
    ours.peer, theirs.peer = theirs, ours
    end.side, end.peer.side = ours, theirs
    return end, ours


def _of_caller() -> tuple[SimulatedNetwork, Host]:
    """Return the network, and the host whose code runs."""
    loop = get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    assert isinstance(loop.network, SimulatedNetwork)
    return loop.network, HOST.get(loop.outside)


class _Beside(UnixListener):
    """The Unix sockets beside one listener, until `close`."""

    def __init__(self, greet: Callable[..., Any], *_: object) -> None:
        self._make = greet
        self._open: list[Listener] = []

    def listen(self, addresses: Iterable[Address]) -> None:
        """Listen beside listeners of the running host."""
        network, owner = _of_caller()
        for host, port in addresses if network.shares(owner.name) else ():
            listener = Listener(network, owner, (host, -port), self._make, True)
            self._open.append(network.add_listener(listener))

    def close(self) -> None:
        """Accept no further connection."""
        for listener in self._open:
            listener.close()


UNIX_SOCKETS = UnixSockets(dial=_dial, listener=_Beside)
"""The Unix sockets of a simulated host."""
