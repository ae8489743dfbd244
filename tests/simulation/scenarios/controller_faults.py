"""All kinds of faults of a group of controllers and its clients, and how they are drawn."""

import asyncio
import math

from tests.simulation.faults import Strike
from tests.simulation.plan import Fault
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import World
from tests.simulation.scenarios.controller_group import ControllerGroup
from tests.simulation.scenarios.disk_faults import DiskFaults
from tests.simulation.scenarios.machine_faults import MachineFaults, Targets
from tests.simulation.scenarios.wire_faults import WIRE_KINDS, WireFaults

KINDS = (
    "crash",
    "wipe",
    "rot",
    "kill",
    "stop",
    "freeze",
    "slow",
    "clock",
    *WIRE_KINDS,
    "slow-disk",
    "disk-error",
    "disk-full",
    "restart-all",
    "crash-user",
)

COSTS_A_DISK = ("wipe", "rot")
"""Kinds of faults that wait until all other controllers are members of the group with their disks."""


def draw_fault(
    dice: RandomStream, kind: str, *, at_s: float, controllers: list[str], users: list[str]
) -> Fault:
    """Draw a fault of one kind. A fault without targets affects the leader, or with `restart-all` all
    controllers."""
    targets: tuple[str, ...] = () if dice.chance(0.5) else (dice.choose(controllers),)
    lasts_s, amount = dice.between(0.2, 2.0), 0.0
    match kind:
        case "crash" | "kill" | "stop" | "restart-all":
            lasts_s = dice.between(0.05, 1.5)
            targets = () if kind == "restart-all" else targets
        case "wipe" | "rot":
            targets, amount = (dice.choose(controllers),), float(kind == "rot" and dice.below(2))
        case "freeze":
            lasts_s = dice.between(0.3, 3.0)
        case "slow":
            amount = dice.choose([0.0002, 0.002, 0.005])
        case "clock":
            lasts_s, amount = dice.between(1.0, 8.0), dice.between(0.8, 1.25)
        case "cut" | "cut-one-way" | "reset":
            ends = [dice.choose(controllers)]
            ends.append(dice.choose([name for name in [*controllers, *users] if name not in ends]))
            dice.shuffle(ends)
            client = [name for name in ends if name in users]  # the client may talk only to the leader
            reverse = bool(client) and ends[0] not in users
            targets, amount = tuple(client or ends), float(dice.below(2) + 2 * reverse)
            lasts_s = 0.0 if kind == "reset" else dice.between(0.2, 3.0)
        case "narrow" | "break-off":
            targets, lasts_s = (dice.choose([*controllers, *users]),), dice.between(0.2, 3.0)
            sizes = [1000.0, 5000.0, 30000.0] if kind == "narrow" else [300.0, 1000.0, 3000.0]
            amount = dice.choose(sizes)
        case "isolate":
            lasts_s, amount = dice.between(0.5, 3.0), float(dice.below(3))
        case "lose-answers":
            targets, lasts_s = (dice.choose(users),), dice.between(0.1, 0.8)
        case "slow-disk":
            amount = dice.choose([0.02, 0.1, 0.5])
        case "disk-error" | "disk-full":
            lasts_s = dice.between(0.05, 0.5)
        case "crash-user":
            targets, lasts_s = (dice.choose(users),), dice.choose([0.2, 1.0, 5.0])
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


def strikes_of(
    world: World, group: ControllerGroup, over: asyncio.Event, *, patience_s: float = math.inf
) -> dict[str, Strike]:
    """Return by kind, for `faults.strike_all`, the faults of a group and its clients.

    Args:
        over: Event that is set when the time of faults ends; after that no fault is undone.
        patience_s: Longest extension of a fault without an effect, in seconds.
    """
    targets = Targets(world, group, over, patience_s=patience_s)
    return {**MachineFaults(targets).strikes, **WireFaults(targets).strikes, **DiskFaults(targets).strikes}
