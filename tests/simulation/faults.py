"""Carries out the faults of a plan on the machines of a world, and undoes them.

Each fault waits until no other fault with the same targets is under way. Every fault of a plan is therefore
carried out, even if the times of faults overlap. The end of a fault may end another one that shares a target.

A fault counts only if its effect is noticeable: a crash of a running program, a cut that delays data, a
freeze of a machine with steps to run. A network fault without an effect lasts up to `PATIENCE_S` longer; if
it still has none, it counts as missed.

    async with asyncio.TaskGroup() as group:
        group.create_task(strike_all(world, plan.faults, ledger), name="faults")
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from tests.simulation.plan import Fault
from tests.simulation.scenario import Ledger, Node, Violation, World

PATIENCE_S = 5.0
"""Longest extension of an unnoticed network fault, in seconds."""

STEP_S = 0.05
"""Interval between two checks of a condition, in seconds."""

UNTARGETED = "the plan"
"""Row of the trace for faults without a machine, such as faults of the leader."""

Strike = Callable[[World, Fault], Awaitable[None]]
"""Function that begins a fault, waits for its duration, and undoes it. The function raises Missed if the
fault had no effect."""


class Missed(Exception):
    """The fault began and ended without a noticeable effect."""


def check_noticed(noticed: bool) -> None:
    """Check that a fault had an effect.

    Raises:
        Missed: The fault had no effect.
    """
    if not noticed:
        raise Missed


def is_running(node: Node) -> bool:
    """Return whether a machine has power, and its program has not ended."""
    return node.host.up and node.task is not None and not node.task.done()


async def strike_all(
    world: World, faults: tuple[Fault, ...], ledger: Ledger, *, own: Mapping[str, Strike] | None = None
) -> None:
    """Do all faults of a plan at their times. Returns when the last fault is undone.

    Args:
        ledger: Record of each fault that struck or missed.
        own: Kinds that only the scenario has, in addition to `KINDS`.

    Raises:
        Violation: A fault has an unknown kind or an unknown target.
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
        for name in fault.targets or (UNTARGETED,):
            ledger.span(fault.kind, name, str(fault), begun)


def _node(world: World, fault: Fault) -> Node:
    return world.nodes[_targets(fault, 1)[0]]


def _targets(fault: Fault, count: int) -> tuple[str, ...]:
    if len(fault.targets) != count:
        raise Violation("plan", f"{fault}: this kind takes {count} machines, not {len(fault.targets)}")
    return fault.targets


async def crash(world: World, fault: Fault) -> None:
    """Cut the power of a machine; with `amount` 1 it restarts with an empty disk."""
    node = _node(world, fault)
    ran = is_running(node)
    node.crash()
    await asyncio.sleep(fault.lasts_s)
    node.restart(empty_disk=fault.amount > 0)
    check_noticed(ran)


async def kill(world: World, fault: Fault) -> None:
    """Kill the program of a machine, and start it again."""
    node = _node(world, fault)
    ran = is_running(node)
    node.kill()
    await asyncio.sleep(fault.lasts_s)
    node.restart()
    check_noticed(ran)


async def freeze(world: World, fault: Fault) -> None:
    """Stop all code of a machine."""
    node = _node(world, fault)
    node.freeze()
    await asyncio.sleep(fault.lasts_s)
    waited = bool(node.host.waiting)
    node.thaw()
    check_noticed(waited)


async def slow(world: World, fault: Fault) -> None:
    """Let each step of a machine's code take `amount` seconds."""
    node = _node(world, fault)
    host = node.host
    node.slow(fault.amount)
    await asyncio.sleep(fault.lasts_s)
    ran = is_running(node) and node.host is host
    node.slow(0.0)
    check_noticed(ran)


async def cut(world: World, fault: Fault) -> None:
    """Cut the wires between two machines; with `amount` 1 healing resets their connections."""
    source, target = _targets(fault, 2)
    await _cut(world, fault, [(source, target), (target, source)])


async def cut_one_way(world: World, fault: Fault) -> None:
    """Cut the wire from the first machine to the second, but not the wire back."""
    source, target = _targets(fault, 2)
    await _cut(world, fault, [(source, target)])


async def isolate(world: World, fault: Fault) -> None:
    """Cut all wires of a machine."""
    (name,) = _targets(fault, 1)
    others = [other for other in world.nodes if other != name]
    await _cut(world, fault, [pair for other in others for pair in ((name, other), (other, name))])


async def _cut(world: World, fault: Fault, pairs: list[tuple[str, str]]) -> None:
    network = world.network
    for source, target in pairs:
        network.cut(source, target, both=False)
    await asyncio.sleep(fault.lasts_s)
    noticed = await until(world, lambda: waits(world, pairs))
    for source, target in pairs:
        network.heal(source, target, both=False, reset=fault.amount > 0)
    check_noticed(noticed)


async def until(
    world: World, happened: Callable[[], bool], limit_s: float = PATIENCE_S, step_s: float = STEP_S
) -> bool:
    """Wait for a condition, for `limit_s` at most. Returns whether the condition was reached."""
    by = world.now + limit_s
    while not happened():
        if world.now > by:
            return False
        await asyncio.sleep(step_s)
    return True


def waits(world: World, pairs: Iterable[tuple[str, str]]) -> bool:
    """Return whether data waits at one of these cut directions of the network."""
    return any(world.network.wire(source, target).waiting for source, target in pairs)


async def reset(world: World, fault: Fault) -> None:
    """Reset all connections between two machines, as soon as one exists."""
    source, target = _targets(fault, 2)
    check_noticed(await until(world, lambda: world.network.reset(source, target)))


async def damage_between(world: World, pairs: list[tuple[str, str]], *, patience_s: float) -> None:
    """Flip a bit of the next large piece in these directions, in at most one piece per direction.

    Raises:
        Missed: No large piece came within ``patience_s``.
    """
    wires = [world.network.wire(*pair) for pair in pairs]
    for wire in wires:
        wire.damages = 1
    noticed = await until(world, lambda: not all(wire.damages for wire in wires), patience_s)
    for wire in wires:
        wire.damages = 0
    check_noticed(noticed)


KINDS: dict[str, Strike] = {
    "crash": crash,
    "kill": kill,
    "freeze": freeze,
    "slow": slow,
    "cut": cut,
    "cut-one-way": cut_one_way,
    "isolate": isolate,
    "reset": reset,
}
