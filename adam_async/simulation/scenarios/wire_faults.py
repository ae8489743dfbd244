"""What can happen between controllers and their clients: wires are cut, narrow, and break connections.

Each fault lasts until its time is over and somebody has noticed it: something waits at a cut, a connection
was made that is narrow, or one broke.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from adam_async.simulation.faults import Strike, check_noticed, waits
from adam_async.simulation.network import SimulatedNetwork
from adam_async.simulation.nodes import World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenarios.fault_targets import Targets
from adam_async.simulation.wire import Conditions, Wire

Pair = tuple[str, str]
"""A direction: from one machine to another."""


class WireFaults:
    """Does them.

    Attributes:
        strikes: By kind, for `faults.strike_all`.
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
        """With `amount` 2 or more, the way back."""
        await self._cut_between(fault, lambda *pair: [pair if fault.amount < 2 else pair[::-1]])

    async def _cut_between(self, fault: Fault, directions: Callable[[str, str], list[Pair]]) -> None:
        """Cut two machines off from each other; a client also from those who lead before it notices."""
        pairs: dict[Pair, None] = {}

        def cut() -> None:
            pair = self._targets.pair(fault)
            pairs.update(dict.fromkeys(directions(*pair) if pair is not None else ()))
            self._cut_all(pairs)

        await self._cut_while(fault, cut, pairs, reset=fault.amount % 2 > 0)

    async def _isolate(self, world: World, fault: Fault) -> None:
        """Cut a controller off from everybody; with `amount` 2, from the other controllers."""
        node = await self._targets.target(fault)
        others = self._addresses if fault.amount == 2 else world.nodes
        pairs = [pair for name in others if name != node.name for pair in both(node.name, name)]
        await self._cut_while(fault, lambda: self._cut_all(pairs), pairs, reset=fault.amount == 1)

    async def _lose_answers(self, _: World, fault: Fault) -> None:
        """What a client asks is done, and the answer is lost."""
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
        """Let so many bytes pass in a second; what was connected before has to connect again."""
        for one, other in self._ways(fault):
            self._network.reset(one, other)
        await self._limit(
            fault, lambda usual: replace(usual, bytes_per_s=fault.amount), lambda wire: wire.made
        )

    async def _break_off(self, _: World, fault: Fault) -> None:
        """Break each connection that has carried so many bytes, old ones among them."""
        most = int(fault.amount)
        await self._limit(
            fault, lambda usual: replace(usual, reset_after_bytes=most), lambda wire: wire.broken
        )

    def _ways(self, fault: Fault) -> list[Pair]:
        """From the machine that a fault is for to all controllers but itself."""
        (one,) = fault.targets
        return [(one, name) for name in self._addresses if name != one]

    async def _limit(
        self, fault: Fault, limited: Callable[[Conditions], Conditions], count: Callable[[Wire], int]
    ) -> None:
        """Change the conditions of both directions; that is noticed when what is counted grows."""
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
        """Keep something as `put` makes it until its time is over and it was noticed. Returns whether it was.

        Another fault may have ended at the same wires meanwhile, and undone this one: then it begins again.
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
    """Both directions between two machines."""
    return [(one, other), (other, one)]


def widen(network: SimulatedNetwork, one: str, other: str) -> None:
    """Let wires be as they were; narrow connections, which stay what they are, give way to others."""
    wires = [network.wire(*pair) for pair in both(one, other)]
    if any(wire.conditions.bytes_per_s != network.conditions.bytes_per_s for wire in wires):
        network.reset(one, other)
    for wire in wires:
        wire.conditions = network.conditions
