"""Faults of a plan are done to the machines of a world, and undone.

Each fault waits until no other one is at its targets any more. So every fault of a plan strikes, however
they overlap, and taking one out of a plan makes no other one impossible.

    async with asyncio.TaskGroup() as group:
        group.create_task(strike_all(world, plan.faults, ledger), name="faults")
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenario import Ledger, Violation

NOBODY = "the plan"
"""Where a trace shows faults that name no machine, such as those that strike whoever leads."""

Strike = Callable[[World, Fault], Awaitable[None]]
"""Does a fault, waits as long as it lasts, and undoes it."""


async def strike_all(
    world: World, faults: tuple[Fault, ...], ledger: Ledger, *, own: Mapping[str, Strike] | None = None
) -> None:
    """Do all faults of a plan at their times. Returns when the last one is undone.

    Args:
        world: Whose machines.
        faults: The plan's.
        ledger: Told of each fault that struck.
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
        await strike(world, fault)
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
    node.crash()
    await asyncio.sleep(fault.lasts_s)
    node.restart(empty_disk=fault.amount > 0)


async def kill(world: World, fault: Fault) -> None:
    """Kill a machine's program, and start it again."""
    node = _node(world, fault)
    node.kill()
    await asyncio.sleep(fault.lasts_s)
    node.restart()


async def freeze(world: World, fault: Fault) -> None:
    """Let a machine stand still."""
    node = _node(world, fault)
    node.freeze()
    await asyncio.sleep(fault.lasts_s)
    node.thaw()


async def slow(world: World, fault: Fault) -> None:
    """Let each step of a machine's code cost `amount` seconds."""
    node = _node(world, fault)
    node.slow(fault.amount)
    await asyncio.sleep(fault.lasts_s)
    node.slow(0.0)


async def clock(world: World, fault: Fault) -> None:
    """Let a machine's clock run at the rate `amount`."""
    node = _node(world, fault)
    node.set_clock(rate=fault.amount)
    await asyncio.sleep(fault.lasts_s)
    node.set_clock(rate=1.0)


async def cut(world: World, fault: Fault) -> None:
    """Cut two machines off from each other; with `amount` 1 healing resets their connections."""
    await _cut(world, fault, both=True)


async def cut_one_way(world: World, fault: Fault) -> None:
    """Let nothing pass from the first machine to the second; the other direction goes on."""
    await _cut(world, fault, both=False)


async def _cut(world: World, fault: Fault, *, both: bool) -> None:
    source, target = _targets(fault, 2)
    world.network.cut(source, target, both=both)
    await asyncio.sleep(fault.lasts_s)
    world.network.heal(source, target, both=both, reset=fault.amount > 0)


async def isolate(world: World, fault: Fault) -> None:
    """Cut a machine off from all others."""
    (name,) = _targets(fault, 1)
    world.network.isolate(name)
    await asyncio.sleep(fault.lasts_s)
    for other in world.nodes:
        if other != name:
            world.network.heal(name, other, reset=fault.amount > 0)


async def reset(world: World, fault: Fault) -> None:
    """Reset all connections between two machines."""
    source, target = _targets(fault, 2)
    world.network.reset(source, target)


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
}
