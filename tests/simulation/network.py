"""A network of simulated hosts, behind `create_connection` and `create_server` of a `SimulatedLoop`.

Each pair of hosts has two wires, one per direction. Each wire has its conditions: a latency drawn for each
piece, a bandwidth, and a window. A cut wire delays data, as TCP does by sending again; a repair delivers the
data, or resets the connections instead. The name of a host is its address.

Each connection has its own latency, jitter and bandwidth, so the order between connections is random.
"""

import asyncio
import errno
import itertools
import zlib
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from tests.simulation.connection import Address, End
from tests.simulation.host import Host
from tests.simulation.loop import SimulatedLoop
from tests.simulation.wire import Conditions, Wire
from transport.slow import Path, PathConditions

CONNECT_S = 127.0
"""Time limit of a connection attempt, in seconds: the default of Linux."""

RETRY_S = 1.0
"""Time after which TCP repeats a message to a machine without power, in seconds."""

UNDAMAGED_BYTES = 256
"""Size of the largest piece without bit flips, in bytes: damage in a handshake would end its client."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("", "0.0.0.0", "::")
FIRST_PORT = 49152

MakeProtocol = Callable[..., asyncio.BaseProtocol]
"""Makes a protocol; for a connection within a host, it gets that end's shared memory."""


class Listener(asyncio.AbstractServer):
    """An open port: the server and its only socket in one object."""

    def __init__(
        self, network: "SimulatedNetwork", host: Host, address: Address, make: MakeProtocol, serving: bool
    ) -> None:
        self.host = host
        self.local = address[0] in LOOPBACK
        self.serving = serving
        self._network = network
        self._address = address
        self._make = make
        self._context = copy_context()

    @property
    def sockets(self) -> tuple["Listener", ...]:
        """The only socket, which is this listener itself."""
        return (self,)

    def getsockname(self) -> Address:
        """Return name and port."""
        return self._address

    def get_loop(self) -> SimulatedLoop:
        return self._network.loop

    def is_serving(self) -> bool:
        return self.serving

    async def start_serving(self) -> None:
        self.serving = True

    async def serve_forever(self) -> None:
        self.serving = True
        await self._network.loop.create_future()

    def close(self) -> None:
        """Refuse new connections. Existing connections stay open."""
        self.serving = False
        self._network.close_listener(self)

    async def wait_closed(self) -> None:
        """Return at once: as in Python 3.11, connections stay open."""

    def accept(self, wire: Wire, number: int) -> End:
        """Make the server's end of a new connection; the loop calls the server's code when the host runs."""
        address = (self.host.name, self._address[1])
        end = End(self._network, self.host, wire, address, number=number, context=self._context.copy())
        self._network.loop.call_soon(self._greet, end, context=self._context)
        return end

    def _greet(self, end: End) -> None:
        if self.serving:
            end.begin(self._make() if end.side is None else self._make(end.side))
        else:
            end.drop()


class SimulatedNetwork:
    """All hosts and the wires between them.

    Args:
        loop: The loop, whose `network` becomes this one.
    """

    def __init__(self, loop: SimulatedLoop, conditions: Conditions | None = None) -> None:
        self.loop = loop
        self.dice = loop.dice("network")
        self.conditions = conditions or Conditions()
        self._hosts: dict[str, Host] = {}
        self._dark: dict[str, None] = {}
        self._wires: dict[tuple[str, str], Wire] = {}
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._ports: dict[str, itertools.count[int]] = {}
        self._ends: dict[End, None] = {}
        self._damaged: dict[End, float] = {}  # time at which a damaged piece left for each end
        self._missed: dict[End, None] = {}
        self._numbers = itertools.count(1)
        self.together = "none"
        """Machines that are processes of one host; see `Options.together`."""
        self.sides = itertools.count(1)
        loop.network = self
        self.attach(loop.outside)

    # --- hosts -------------------------------------------------------------------------------

    def attach(self, host: Host) -> None:
        """Make a host reachable by its name, in place of an earlier host that is down."""
        self._hosts[host.name] = host
        self._dark.pop(host.name, None)
        for end in [end for end in self._missed if end.host.name == host.name]:
            del self._missed[end]
            self.loop.at(self.loop.now + self.dice.around(RETRY_S), end.reset_peer)

    def is_up(self, name: str) -> bool:
        """Return whether a machine of that name has power."""
        return name in self._hosts and name not in self._dark

    def vanish(self, host: Host) -> None:
        """Cut the power of a machine, which sends nothing from now on."""
        self._dark[host.name] = None
        self._listeners = {
            key: listener for key, listener in self._listeners.items() if listener.host is not host
        }
        self._ends = {end: None for end in self._ends if end.host is not host}

    def kill(self, host: Host) -> None:
        """Kill a program: its kernel closes its connections, and refuses new ones."""
        self._listeners = {
            key: listener for key, listener in self._listeners.items() if listener.host is not host
        }
        for end in [end for end in self._ends if end.host is host]:
            end.close_socket()

    # --- faults ------------------------------------------------------------------------------

    def wire(self, source: str, target: str) -> Wire:
        """Return the direction from one host to another."""
        wire = self._wires.get((source, target))
        if wire is None:
            wire = self._wires[source, target] = Wire(self.conditions)
        return wire

    def cut(self, source: str, target: str, *, both: bool = True) -> None:
        """Block all data from one host to another and, with `both`, also in the other direction."""
        for wire in self._both(source, target, both):
            wire.cut = True

    def heal(self, source: str, target: str, *, both: bool = True, reset: bool = False) -> None:
        """Undo a cut. Delayed data arrives after the usual time; `reset` first resets all connections between
        the hosts."""
        if reset:
            self.reset(source, target)
        for wire in self._both(source, target, both):
            wire.cut = False
            waiting, wire.waiting = wire.waiting, []
            for go_on in waiting:
                go_on()

    def heal_all(self, *, reset: bool = False) -> None:
        """Undo all cuts."""
        for source, target in [pair for pair, wire in self._wires.items() if wire.cut]:
            self.heal(source, target, both=False, reset=reset)

    def reset(self, source: str, target: str) -> bool:
        """Reset all connections between two hosts. Returns whether any existed."""
        names = {source, target}
        ends = [end for end in self._ends if {end.host.name, end.peer.host.name} == names]
        for end in ends:
            end.reset()
        return bool(ends)

    def break_off(self, end: End) -> None:
        """Reset a connection at both ends, because it has carried `reset_after_bytes`."""
        self.wire(end.host.name, end.peer.host.name).broken += 1
        end.reset()
        end.peer.reset()

    def damaged(self, end: End, wire: Wire, payload: bytes) -> bytes:
        """Return a piece for an end with one bit flipped; a piece of at most `UNDAMAGED_BYTES` stays
        unchanged."""
        if len(payload) <= UNDAMAGED_BYTES:
            return payload
        wire.damages -= 1
        self._damaged[end] = self.loop.now
        bit = self.dice.below(8 * len(payload))
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)

    def unnoticed_damage(self, *, after_s: float) -> End | None:
        """Return an end that is still open ``after_s`` seconds after a damaged piece was sent to it, or None.

        The time begins anew after the end's host was frozen.
        """
        for end, at in list(self._damaged.items()):
            if end not in self._ends or end.shut:
                del self._damaged[end]
            elif end.host.frozen:
                self._damaged[end] = self.loop.now
            elif self.loop.now > at + after_s:
                return end
        return None

    def _both(self, source: str, target: str, both: bool) -> list[Wire]:
        return [self.wire(source, target), *([self.wire(target, source)] if both else [])]

    # --- used by ends and listeners ----------------------------------------------------------

    def send(self, wire: Wire, path: Path, count: int, arrive: Callable[..., object], *args: Any) -> None:
        """Deliver a piece at the other side of a wire, after earlier pieces on its path."""
        if wire.cut:
            wire.waiting.append(lambda: self.send(wire, path, count, arrive, *args))
        else:
            self.loop.at(path.arrival(now=self.loop.now, nbytes=count), arrive, *args)

    def acknowledge(self, wire: Wire, arrive: Callable[[int], object], count: int) -> None:
        """Report a number of read bytes to the sender, without delay unless the wire to the sender is cut."""
        if wire.cut:
            wire.waiting.append(lambda: arrive(count))
        else:
            arrive(count)

    def forget(self, end: End) -> None:
        """Drop a closed end."""
        self._ends.pop(end, None)

    def miss(self, end: End) -> None:
        """Note a piece for a machine that is down.

        TCP repeats the piece, and a restarted machine resets its connection.
        """
        self._missed[end] = None

    def close_listener(self, listener: Listener) -> None:
        """Drop a closed listener."""
        key = (listener.host.name, listener.getsockname()[1])
        if self._listeners.get(key) is listener:
            del self._listeners[key]

    # --- used by the loop --------------------------------------------------------------------

    async def listen(
        self, owner: Host, make_protocol: MakeProtocol, host: str, port: int, *, start_serving: bool
    ) -> Listener:
        """Open a port of a host; port 0 chooses one.

        Raises:
            OSError: The port is taken, or the name belongs to another host.
        """
        if host not in (owner.name, *LOOPBACK, *EVERYWHERE):
            raise OSError(errno.EADDRNOTAVAIL, f"{owner.name} cannot listen as {host}")
        ports = self._ports.setdefault(owner.name, itertools.count(FIRST_PORT))
        port = port or next(ports)
        if (owner.name, port) in self._listeners:
            raise OSError(errno.EADDRINUSE, f"port {port} of {owner.name} is taken")
        return self.add_listener(Listener(self, owner, (host, port), make_protocol, start_serving))

    def add_listener(self, listener: Listener) -> Listener:
        """Make a listener reachable, and return it."""
        self._listeners[listener.host.name, listener.getsockname()[1]] = listener
        return listener

    def shares(self, name: str) -> bool:
        """Return whether a machine is a process of the host with links in shared memory."""
        return self.together == "all" or (self.together == "some" and zlib.crc32(name.encode()) % 2 > 0)

    async def connect(
        self, caller: Host, make_protocol: MakeProtocol, host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect to a port of a host. A cancelled call leaves only what a kernel would leave.

        Raises:
            OSError: The host is unknown, refuses, or does not answer in `CONNECT_S`.
        """
        target = caller.name if host in LOOPBACK else host
        if target not in self._hosts:
            raise OSError(f"no host is called {host}")
        answer: asyncio.Future[End] = self.loop.create_future()
        attempt = _Attempt(self, caller, target, (host, port), answer)
        attempt.connect()
        try:
            async with asyncio.timeout(CONNECT_S):
                end = await answer
        except TimeoutError:
            raise TimeoutError(errno.ETIMEDOUT, f"{host} port {port} does not answer") from None
        return await self.begin(end, make_protocol)

    async def begin(
        self, end: End, make_protocol: MakeProtocol
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect a new protocol to the caller's end of a connection."""
        protocol = make_protocol()
        made: asyncio.Future[None] = self.loop.create_future()
        self.loop.call_soon(_begin, end, protocol, made)
        try:
            await made
        except BaseException:
            end.abort()
            raise
        return end, protocol

    def listener_at(self, target: str, address: Address) -> Listener | None:
        """Return the listener that answers at an address, or None."""
        listener = self._listeners.get((target, address[1]))
        local = address[0] in LOOPBACK
        if listener is None or not listener.serving or (listener.local and not local):
            return None
        return listener

    def make_connection(self, caller: Host, listener: Listener) -> End:
        """Join two new ends; return the caller's."""
        number = next(self._numbers)
        name = listener.host.name
        server = listener.accept(self.wire(name, caller.name), number)
        port = next(self._ports.setdefault(caller.name, itertools.count(FIRST_PORT)))
        address, context = (caller.name, port), copy_context()
        wire = self.wire(caller.name, name)
        wire.made += 1
        client = End(self, caller, wire, address, number=number, context=context)
        client.join(server)
        self._ends |= {client: None, server: None}
        return client


def _begin(end: End, protocol: asyncio.BaseProtocol, made: "asyncio.Future[None]") -> None:
    end.begin(protocol)
    if not made.done():
        made.set_result(None)


class _Attempt:
    """A connection attempt: a request, repeated while the target has no power, and an answer; each may be
    late."""

    def __init__(
        self,
        network: SimulatedNetwork,
        caller: Host,
        target: str,
        address: Address,
        answer: "asyncio.Future[End]",
    ) -> None:
        self._network = network
        self._caller = caller
        self._target = target
        self._address = address
        self._answer = answer
        self._there = network.wire(caller.name, target)
        self._back = network.wire(target, caller.name)
        self._context = copy_context()

    def _path(self, wire: Wire) -> Path:
        conditions = PathConditions(delay_s=wire.conditions.delay_s, jitter_s=wire.conditions.jitter_s)
        return Path(conditions, self._network.dice)

    def connect(self) -> None:
        """Send the request, unless the caller has an answer or has stopped waiting."""
        if not self._answer.done():
            self._network.send(self._there, self._path(self._there), 0, self._connected)

    def _connected(self) -> None:
        network, conditions = self._network, self._there.conditions
        if self._answer.done():
            return
        if not network.is_up(self._target):
            network.loop.at(network.loop.now + RETRY_S, self.connect)
            return
        listener = network.listener_at(self._target, self._address)
        if listener is None or network.dice.chance(conditions.refuse):
            network.send(self._back, self._path(self._back), 0, self._refused)
            return
        end = self._context.run(network.make_connection, self._caller, listener)
        if network.dice.chance(conditions.duplicate):
            phantom = self._context.run(network.make_connection, self._caller, listener)
            phantom.shut = True
            network.forget(phantom)
        network.send(self._back, self._path(self._back), 0, self._answered, end)

    def _refused(self) -> None:
        if self._caller.up and not self._answer.done():
            text = f"{self._address[0]} port {self._address[1]} refuses connections"
            self._answer.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, text))

    def _answered(self, end: End) -> None:
        if not self._caller.up:
            return
        if self._answer.done():
            end.drop()
        else:
            self._answer.set_result(end)
