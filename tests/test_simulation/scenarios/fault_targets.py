"""Targets of faults: three controllers on simulated machines, with programs chosen by a test."""

import asyncio

from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, World
from tests.simulation.scenarios.controller_group import ControllerGroup, draw_settings
from tests.simulation.scenarios.machine_faults import Targets


def targets_in(world: World, *, patience_s: float) -> Targets:
    """Make the machines of a world, with a group of three controllers that are not started."""
    settings = {**draw_settings(RandomStream("0"), sessions=3), "controllers": 3}
    group = ControllerGroup(world, settings, Ledger(lambda: world.now))
    return Targets(world, group, asyncio.Event(), patience_s=patience_s)
