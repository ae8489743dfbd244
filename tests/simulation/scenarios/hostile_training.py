"""A whole cluster learns digits while hostile peers send every message with every bad field.

Every role runs on its own machine, as in `training`. No machine fails: all faults are hostile peers
(`hostile_peers.py`). In addition to the conditions of `training`: no role ends or restarts, the run ends in
time with the right counts, the shards have the groups that its epochs count and no others, epochs advance,
the model learns, every value is finite, and the cluster map stays small.
"""

import asyncio

import msgspec
import numpy as np

from adam_async.run.result import RunResult
from tests.simulation.faults import strike_all
from tests.simulation.plan import Fault, Plan, draw_options, in_order
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Scenario, Violation, World
from tests.simulation.scenarios.cluster import LINKS
from tests.simulation.scenarios.group_watch import GroupWatch
from tests.simulation.scenarios.hostile_members import ATTACKS
from tests.simulation.scenarios.hostile_peers import HOSTILES, KINDS, TARGETS, HostilePeers
from tests.simulation.scenarios.store_clients import PUSHED
from tests.simulation.scenarios.training import (
    LEAST_OPERATIONS,
    SETTLE_S,
    TRAINING,
    check_result,
    draw_stores,
    new_clients,
    run_result,
)
from tests.simulation.scenarios.training_cluster import TrainingCluster, images
from tests.simulation.scenarios.training_setups import draw_setup, setup_of

BEGUN_S, STRIKE_S = 0.5, 8.0
"""Earliest and latest start of a hostile peer, in seconds."""

SETTINGS = ("resumed", "late_s", "profiled")
"""Settings of `training` that stay off here: no run is resumed, no worker joins late, no role records a
profile."""

MOST_MAP_BYTES = 1 << 20
"""Maximum size of the cluster map despite hostile peers, in bytes of JSON text."""

MOST_HELD_BYTES, LEFT_BYTES = 6 << 20, 256 << 10
"""Maximum number of bytes that a machine holds for its peers: during the run, with three hostile links of 1
MiB each, and after the run, with only valid links."""

GIVEN_BACK_S = 12.0
"""Time until all questions of deaf peers are over, in seconds: up to 500 questions, about 125 at a time, 2 s
each."""

CHECK_S = 0.5
"""Interval between two checks of values, memory and the map, in seconds."""


def draw_plan(dice: RandomStream) -> Plan:
    """Draw each kind of hostile peer once and some more, the options of the run, and its conditions."""
    kinds = [*KINDS, *(dice.choose([*KINDS]) for _ in range(2 + dice.below(4)))]
    drawn = draw_setup(dice.fork("setup"), TRAINING) | draw_stores(dice.fork("stores"))
    settings = {name: value for name, value in drawn.items() if name not in SETTINGS}
    if "resumed" in drawn:
        settings.pop("checkpoint_every", None)
    faults = in_order([_draw_fault(dice, kind) for kind in kinds])
    return Plan(options=draw_options(dice, settings), faults=faults)


def _draw_fault(dice: RandomStream, kind: str) -> Fault:
    role = kind.removeprefix("bad-") if kind.startswith("bad-") else dice.choose([*TARGETS])
    role = {
        **dict.fromkeys(("steal", *ATTACKS), "controller"),
        "speak": "ps",
        "split": "ps",
        "forge": "ps",
    }.get(kind, role)
    amount = 40 + dice.below(200)
    if kind == "deaf":
        amount = 100 + dice.below(400)
    elif kind == "sockets":
        amount = LINKS.max_unauthenticated + dice.below(100)
    targets = (dice.choose(HOSTILES), dice.choose(TARGETS[role]))
    return Fault(
        at_s=round(dice.between(BEGUN_S, STRIKE_S), 3), kind=kind, targets=targets, amount=float(amount)
    )


class _Run:
    """One run."""

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        self.plan = plan
        self.world = world
        self.ledger = ledger
        self.cluster = TrainingCluster(world, setup_of(plan.options.settings, TRAINING), ledger)
        self.peers = HostilePeers(world, self.cluster, ledger)
        self.clients = new_clients(world, self.cluster, ledger)
        self.groups = GroupWatch(world, self.cluster, ledger, only_groups=False)

    async def run(self) -> None:
        """Train beside hostile peers, and check values and memory after the run."""
        async with asyncio.TaskGroup() as group:
            watches = [
                group.create_task(self.cluster.watch(), name="watch"),
                group.create_task(self._watch(), name="watch values"),
                group.create_task(self.groups.watch(), name="groups"),
            ]
            await strike_all(self.world, self.plan.faults, self.ledger, own=self.peers.strikes)
            result = await run_result(self.cluster)
            await self.clients.stop()
            await asyncio.sleep(SETTLE_S)
            await self._wait_for_memory()
            for watch in watches:
                watch.cancel()
        self._check(result)

    async def _wait_for_memory(self) -> None:
        """Wait at most `GIVEN_BACK_S` until roles hold little for their peers.

        A role that stopped reading from a deaf peer notices its link's end late, because it answers the open
        questions first, some at a time.
        """
        for _ in range(int(GIVEN_BACK_S / CHECK_S)):
            if not self._holders():
                return
            await asyncio.sleep(CHECK_S)

    def _holders(self) -> list[str]:
        """Return the roles that hold more than `LEFT_BYTES`, with their budgets."""
        networks = self.cluster.networks.items()
        return [f"{name}: {net.budget!r}" for name, net in networks if net.budget.held_bytes > LEFT_BYTES]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self.check()

    def check(self) -> None:
        """Check that no role has ended, values are finite, and memory and the map are small.

        Raises:
            Violation: A condition is false.
        """
        if self.ledger.counts["started again"]:
            ended = [span for span in self.ledger.spans if span.kind == "ended"]
            raise Violation("every role lives", f"{ended[-1].node} ended: {ended[-1].text}")
        for name, server in self.cluster.servers.items():
            for shard in server.state.shards.values() if server.state is not None else ():
                if not np.isfinite(shard.values).all():
                    raise Violation("values are finite", f"{name}: {shard!r}")
        for name, network in self.cluster.networks.items():
            budget = network.budget
            if budget.held_bytes > MOST_HELD_BYTES:
                raise Violation("memory is bounded", f"{name}: {budget!r}")
        if (size := len(msgspec.json.encode(self.cluster.map))) > MOST_MAP_BYTES:
            raise Violation("the map stays small", f"it has {size} bytes")

    def _check(self, result: RunResult) -> None:
        self.check()
        if holders := self._holders():
            raise Violation("memory is given back", f"after the run, {holders[0]}")
        self.groups.check_end()
        operations = self.ledger.operations
        check_result(self.cluster, result, self.ledger)
        self.ledger.operations += operations


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Carry out a plan."""
    images()
    await _Run(world, plan, ledger).run()


HOSTILE = Scenario(
    name="hostile",
    about="a cluster learns digits while peers with the keys of a role send every bad field of every message",
    kinds=tuple(KINDS),
    least_operations=LEAST_OPERATIONS,
    limit_s=400.0,
    marks=("refused", "links closed", "said without an answer", "forged groups", PUSHED),
    plan=draw_plan,
    run=run,
)
