"""Faults of the network among controllers and their clients: cuts, low bandwidth, broken connections.

Each fault lasts until its time is over and it had an effect: data waits at a cut, a new connection is narrow,
or a connection broke.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from tests.simulation.faults import Strike, check_noticed, waits
from tests.simulation.network import SimulatedNetwork
from tests.simulation.plan import Fault
from tests.simulation.scenario import World
from tests.simulation.scenarios.machine_faults import Targets
from tests.simulation.wire import Conditions, Wire

WIRE_KINDS = ("cut", "cut-one-way", "isolate", "reset", "narrow", "break-off", "lose-answers")
"""Kinds of faults of the network."""

Pair = tuple[str, str]
"""A direction: from one machine to another."""


class WireFaults:
    """Carries out faults of the network.

    Attributes:
        strikes: Faults by kind, for `faults.strike_all`.
    """

    def __init__(self, targets: Targets) -> None:
        self.strikes: dict[str, Strike] = {
            "cut": self._cut,
            "cut-one-way": self._cut_one_way,
            "isolate": self._isolate,
            "reset": self._reset,
            "lose-answers": self._lose_answers,
            "narrow": self._narrow,
            "break-off": self._break_off,
        }
        self._targets = targets
        self._addresses = targets.group.addresses
        self._network = targets.world.network

    async def _cut(self, _: World, fault: Fault) -> None:
        await self._cut_between(fault, both)

    async def _cut_one_way(self, _: World, fault: Fault) -> None:
        """Cut one direction; with `amount` 2 or more, the opposite one."""
        await self._cut_between(fault, lambda *pair: [pair if fault.amount < 2 else pair[::-1]])

    async def _cut_between(self, fault: Fault, directions: Callable[[str, str], list[Pair]]) -> None:
        """Cut the wires between two machines; for a client, also those to each later leader in turn."""
        pairs: dict[Pair, None] = {}

        def cut() -> None:
            pair = self._targets.pair(fault)
            pairs.update(dict.fromkeys(directions(*pair) if pair is not None else ()))
            self._cut_all(pairs)

        await self._cut_while(fault, cut, pairs, reset=fault.amount % 2 > 0)

    async def _isolate(self, world: World, fault: Fault) -> None:
        """Cut all wires of a controller; with `amount` 2, only those to other controllers."""
        node = await self._targets.target(fault)
        others = self._addresses if fault.amount == 2 else world.nodes
        pairs = [pair for name in others if name != node.name for pair in both(node.name, name)]
        await self._cut_while(fault, lambda: self._cut_all(pairs), pairs, reset=fault.amount == 1)

    async def _lose_answers(self, _: World, fault: Fault) -> None:
        """Lose the answers to a client, but not its questions."""
        (user,) = fault.targets
        pairs = [(name, user) for name in self._addresses]
        await self._cut_while(fault, lambda: self._cut_all(pairs), pairs, reset=True)

    def _cut_all(self, pairs: Iterable[Pair]) -> None:
        for source, target in pairs:
            self._network.cut(source, target, both=False)

    async def _cut_while(
        self, fault: Fault, cut: Callable[[], None], pairs: Collection[Pair], *, reset: bool
    ) -> None:
        noticed = await self._hold(fault, cut, lambda: waits(self._targets.world, pairs))
        if not self._targets.over.is_set():
            for source, target in pairs:
                self._network.heal(source, target, both=False, reset=reset)
        check_noticed(noticed)

    async def _reset(self, _: World, fault: Fault) -> None:
        def reset() -> bool:
            pair = self._targets.pair(fault)
            return pair is not None and self._network.reset(*pair)

        check_noticed(await self._targets.until(reset))

    async def _narrow(self, _: World, fault: Fault) -> None:
        """Limit the bandwidth to `amount` bytes per second; existing connections are reset."""
        for one, other in self._ways(fault):
            self._network.reset(one, other)
        await self._limit(
            fault, lambda usual: replace(usual, bytes_per_s=fault.amount), lambda wire: wire.made
        )

    async def _break_off(self, _: World, fault: Fault) -> None:
        """Reset each connection, new or existing, after `amount` bytes."""
        most = int(fault.amount)
        await self._limit(
            fault, lambda usual: replace(usual, reset_after_bytes=most), lambda wire: wire.broken
        )

    def _ways(self, fault: Fault) -> list[Pair]:
        """Return the paths from the target of a fault to all other controllers."""
        (one,) = fault.targets
        return [(one, name) for name in self._addresses if name != one]

    async def _limit(
        self, fault: Fault, limited: Callable[[Conditions], Conditions], count: Callable[[Wire], int]
    ) -> None:
        """Change the conditions of both directions; the change has an effect as soon as `count` grows."""
        ways = self._ways(fault)
        wires = [self._network.wire(*pair) for way in ways for pair in both(*way)]
        before = sum(map(count, wires))

        def limit() -> None:
            for wire in wires:
                wire.conditions = limited(self._network.conditions)

        noticed = await self._hold(fault, limit, lambda: sum(map(count, wires)) > before)
        if not self._targets.over.is_set():
            for one, other in ways:
                widen(self._network, one, other)
        check_noticed(noticed)

    async def _hold(self, fault: Fault, put: Callable[[], None], noticed: Callable[[], bool]) -> bool:
        """Apply `put` until the time of a fault is over and the fault had an effect.

        Returns whether the fault had an effect.

        The end of another fault at the same wires may undo this fault, so `put` is applied repeatedly.
        """
        put()
        await self._targets.lasts(fault.lasts_s)

        def is_noticed() -> bool:
            if noticed():
                return True
            put()
            return False

        return await self._targets.until(is_noticed)


def both(one: str, other: str) -> list[Pair]:
    """Return both directions between two machines."""
    return [(one, other), (other, one)]


def widen(network: SimulatedNetwork, one: str, other: str) -> None:
    """Restore the conditions of wires; reset narrow connections, which keep their bandwidth."""
    wires = [network.wire(*pair) for pair in both(one, other)]
    if any(wire.conditions.bytes_per_s != network.conditions.bytes_per_s for wire in wires):
        network.reset(one, other)
    for wire in wires:
        wire.conditions = network.conditions
