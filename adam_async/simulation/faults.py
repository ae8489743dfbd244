"""Faults of a plan are done to the machines of a world, and undone.

Each fault waits until no other one is at its targets any more. So every fault of a plan is done, however
they overlap, and taking one out of a plan makes no other one impossible.

A fault struck only if somebody could notice it: power that was taken from a program that ran, a cut at which
something waits, a machine that had something to do while it stood still. One that nobody has noticed when its
time is over lasts until somebody does, for `PATIENCE_S`; then it has missed.

    async with asyncio.TaskGroup() as group:
        group.create_task(strike_all(world, plan.faults, ledger), name="faults")
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenario import Ledger, Violation

PATIENCE_S = 5.0
"""So much longer a fault of the network lasts that nobody has noticed."""

STEP_S = 0.05

NOBODY = "the plan"
"""Where a trace shows faults that name no machine, such as those that strike whoever leads."""

Strike = Callable[[World, Fault], Awaitable[None]]
"""Does a fault, waits as long as it lasts, and undoes it. Raises Missed then if nobody could notice it."""


class Missed(Exception):
    """A fault was done and undone, and nobody could notice it."""


def check_noticed(noticed: bool) -> None:
    """See that a fault that is undone was noticed by anybody.

    Raises:
        Missed: It was not.
    """
    if not noticed:
        raise Missed


def is_running(node: Node) -> bool:
    """Whether a machine has power, and its program has not ended."""
    return node.host.up and node.task is not None and not node.task.done()


async def strike_all(
    world: World, faults: tuple[Fault, ...], ledger: Ledger, *, own: Mapping[str, Strike] | None = None
) -> None:
    """Do all faults of a plan at their times. Returns when the last one is undone.

    Args:
        world: Whose machines.
        faults: The plan's.
        ledger: Told of each fault that struck, or missed.
        own: Kinds of the scenario's own, beside `KINDS`.

    Raises:
        Violation: A fault is of no known kind, or for a machine that never ran.
    """
    kinds = {**KINDS, **(own or {})}
    locks: dict[str, asyncio.Lock] = {}
    async with asyncio.TaskGroup() as group:
        for number, fault in enumerate(faults):
            strike = kinds.get(fault.kind)
            if strike is None:
                raise Violation("plan", f"{fault.kind!r} is no kind of fault: known are {', '.join(kinds)}")
            name = "~".join(sorted(fault.targets))
            lock = locks.setdefault(name, asyncio.Lock())
            group.create_task(_strike(world, fault, strike, lock, ledger), name=f"fault-{number}")


async def _strike(world: World, fault: Fault, strike: Strike, lock: asyncio.Lock, ledger: Ledger) -> None:
    await asyncio.sleep(max(0.0, fault.at_s - world.now))
    async with lock:
        unknown = [name for name in fault.targets if name not in world.nodes]
        if unknown:
            raise Violation("plan", f"{fault}: there is no machine {unknown[0]}")
        begun = world.now
        try:
            await strike(world, fault)
        except Missed:
            ledger.missed(fault)
            return
        ledger.fired(fault)
        for name in fault.targets or (NOBODY,):
            ledger.span(fault.kind, name, str(fault), begun)


def _node(world: World, fault: Fault) -> Node:
    return world.nodes[_targets(fault, 1)[0]]


def _targets(fault: Fault, count: int) -> tuple[str, ...]:
    if len(fault.targets) != count:
        raise Violation("plan", f"{fault}: this kind takes {count} machines, not {len(fault.targets)}")
    return fault.targets


async def crash(world: World, fault: Fault) -> None:
    """Take a machine's power away; with `amount` 1 it comes back with an empty disk."""
    node = _node(world, fault)
    ran = is_running(node)
    node.crash()
    await asyncio.sleep(fault.lasts_s)
    node.restart(empty_disk=fault.amount > 0)
    check_noticed(ran)


async def kill(world: World, fault: Fault) -> None:
    """Kill a machine's program, and start it again."""
    node = _node(world, fault)
    ran = is_running(node)
    node.kill()
    await asyncio.sleep(fault.lasts_s)
    node.restart()
    check_noticed(ran)


async def freeze(world: World, fault: Fault) -> None:
    """Let a machine stand still."""
    node = _node(world, fault)
    node.freeze()
    await asyncio.sleep(fault.lasts_s)
    held = bool(node.host.held)
    node.thaw()
    check_noticed(held)


async def slow(world: World, fault: Fault) -> None:
    """Let each step of a machine's code cost `amount` seconds."""
    node = _node(world, fault)
    host = node.host
    node.slow(fault.amount)
    await asyncio.sleep(fault.lasts_s)
    ran = is_running(node) and node.host is host
    node.slow(0.0)
    check_noticed(ran)


async def clock(world: World, fault: Fault) -> None:
    """Let a machine's clock run at the rate `amount`."""
    node = _node(world, fault)
    host = node.host
    node.set_clock(rate=fault.amount)
    await asyncio.sleep(fault.lasts_s)
    ran = is_running(node) and node.host is host
    node.set_clock(rate=1.0)
    check_noticed(ran)


async def cut(world: World, fault: Fault) -> None:
    """Cut two machines off from each other; with `amount` 1 healing resets their connections."""
    source, target = _targets(fault, 2)
    await _cut(world, fault, [(source, target), (target, source)])


async def cut_one_way(world: World, fault: Fault) -> None:
    """Let nothing pass from the first machine to the second; the other direction goes on."""
    source, target = _targets(fault, 2)
    await _cut(world, fault, [(source, target)])


async def isolate(world: World, fault: Fault) -> None:
    """Cut a machine off from all others."""
    (name,) = _targets(fault, 1)
    others = [other for other in world.nodes if other != name]
    await _cut(world, fault, [pair for other in others for pair in ((name, other), (other, name))])


async def _cut(world: World, fault: Fault, pairs: list[tuple[str, str]]) -> None:
    network = world.network
    for source, target in pairs:
        network.cut(source, target, both=False)
    await asyncio.sleep(fault.lasts_s)
    noticed = await _until(world, lambda: waits(world, pairs))
    for source, target in pairs:
        network.heal(source, target, both=False, reset=fault.amount > 0)
    check_noticed(noticed)


async def _until(world: World, happened: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Wait for something, for ``patience_s`` at most. Returns whether it happened."""
    until = world.now + patience_s
    while not happened():
        if world.now > until:
            return False
        await asyncio.sleep(STEP_S)
    return True


def waits(world: World, pairs: Iterable[tuple[str, str]]) -> bool:
    """Whether anything waits for one of these directions of the network, which are cut."""
    return any(world.network.wire(source, target).waiting for source, target in pairs)


async def reset(world: World, fault: Fault) -> None:
    """Reset all connections between two machines, as soon as there are any."""
    source, target = _targets(fault, 2)
    check_noticed(await _until(world, lambda: world.network.reset(source, target)))


async def damage(world: World, fault: Fault) -> None:
    """Flip a bit of the next large piece between two machines."""
    source, target = _targets(fault, 2)
    await damage_between(world, [(source, target), (target, source)])


async def damage_between(
    world: World, pairs: list[tuple[str, str]], *, patience_s: float = PATIENCE_S
) -> None:
    """Flip a bit of the next large piece in any of these directions, possibly of one in each.

    Raises:
        Missed: No such piece came for ``patience_s``.
    """
    wires = [world.network.wire(*pair) for pair in pairs]
    for wire in wires:
        wire.damages = 1
    noticed = await _until(world, lambda: not all(wire.damages for wire in wires), patience_s)
    for wire in wires:
        wire.damages = 0
    check_noticed(noticed)


KINDS: dict[str, Strike] = {
    "crash": crash,
    "kill": kill,
    "freeze": freeze,
    "slow": slow,
    "clock": clock,
    "cut": cut,
    "cut-one-way": cut_one_way,
    "isolate": isolate,
    "reset": reset,
    "damage": damage,
}
