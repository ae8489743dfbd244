"""Simulated servers of stores whose shards have several copies, and observations of them from outside.

Three controllers with a disk each and four parameter servers. Checkers follow every map and every entry that
a copy applies; the states of copies are compared at intervals.
"""

import asyncio
from collections.abc import Sequence

from adam_async.controller.consensus import Core, Effect, Event
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.log_file import LogFile
from adam_async.controller.replicated_state import ReplicatedState
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.driver.training_rules import PROGRAM_KINDS
from adam_async.parameter_server.bundle_copy import BundleCopy
from adam_async.parameter_server.log_entries import Part
from adam_async.parameter_server.service import ParameterServer
from adam_async.replication.log import Entry
from adam_async.run.bundle_record import BundleRecord, Member
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.simulation.checkers.bundles import Bundles
from adam_async.simulation.checkers.maps import Maps
from adam_async.simulation.faults import is_running
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.scenario import Ledger, Violation
from adam_async.simulation.scenarios.training_cluster import (
    CONTROLLERS,
    FOLDER,
    network_of,
    process_memory,
)
from transport import BufferPool, Identity

SERVERS = ("ps-0", "ps-1", "ps-2", "ps-3")

WAITS = Waits(dial_s=20.0, call_s=5.0, answer_s=0.5, patience_s=60.0, clock_s=60.0, prepare_s=60.0)

CHECK_S = 0.1
"""Interval between two comparisons of all copies, in seconds."""

FAILOVERS = "failovers with a push in flight"
CATCH_UPS = "catch-ups under load"
SUCCESSIVE = "successive losses"
EVENTS = (FAILOVERS, CATCH_UPS, SUCCESSIVE)
"""Counts of the events of bundles; a seed counts with one of them."""


class PushCluster:
    """Controllers and servers of a run, over all their incarnations.

    Args:
        copies: Number of copies of each shard.

    Attributes:
        controllers: Running controllers, by name.
        servers: Newest incarnation of each server, by name.
        disturbed: Servers that a fault strikes now.
        open_pushes: Number of pushes without an answer.
        acknowledged: Number of answered pushes.
    """

    def __init__(self, world: World, ledger: Ledger, *, copies: int) -> None:
        self.controllers: dict[str, Controller] = {}
        self.servers: dict[str, ParameterServer] = {}
        self.disturbed: set[str] = set()
        self.open_pushes = self.acknowledged = 0
        self.map = ClusterMap()
        self._world = world
        self._ledger = ledger
        self._copies = copies
        self._maps, self._bundles = Maps(), Bundles()
        self._incarnations: dict[str, int] = {}
        self._term = 0
        self._losses: dict[str, int] = {}
        """Members that each bundle has lost since it last had all copies in sync."""
        self._joining: dict[tuple[str, Member], int] = {}
        """Number of answered pushes when a member began to join, by key of the bundle."""
        self.was_whole: set[str] = set()
        """Keys of the bundles that had all copies in sync once."""
        for name in CONTROLLERS:
            world.node(name).start(self._run_controller)
        for name in SERVERS:
            world.node(name).start(self._run_server)

    # --- roles -------------------------------------------------------------------------------

    async def _run_controller(self, node: Node) -> None:
        settings = RoleSettings(
            network=network_of(node),
            address=CONTROLLERS[node.name],
            identity=Identity(role="controller", node=node.name, incarnation=node.incarnation),
            waits=WAITS,
        )
        setup = ConsensusSetup(
            entropy=node.entropy, file=LogFile(node.open_disk(), FOLDER), observe=self._saw_state
        )
        controller = Controller(settings, setup, kinds=PROGRAM_KINDS, peers=CONTROLLERS)
        async with controller:
            self.controllers[node.name] = controller
            await asyncio.Event().wait()

    async def _run_server(self, node: Node) -> None:
        incarnation = int.from_bytes(node.entropy(7), "little")
        settings = RoleSettings(
            network=network_of(node),
            address=f"tcp://{node.name}:1",
            identity=Identity(role="ps", node=node.name, incarnation=incarnation),
            waits=WAITS,
            controller=",".join(CONTROLLERS.values()),
            process_memory=process_memory,
        )
        server = ParameterServer(settings, buffers=BufferPool(), observe=self._applies)
        self.servers[node.name], self._incarnations[node.name] = server, incarnation
        async with server:
            await asyncio.Event().wait()

    # --- observations ------------------------------------------------------------------------

    def _applies(self, copy: BundleCopy, entry: Entry, parts: Sequence[Part]) -> None:
        self._bundles.applies(copy, entry, parts)

    def _saw_state(
        self, core: Core, replicated_state: ReplicatedState, event: Event | None, effects: Sequence[Effect]
    ) -> None:
        self._maps.saw(replicated_state)
        newest = replicated_state.map
        if newest.version <= self.map.version:
            return
        before, self.map = self.map, newest
        for key, bundle in newest.bundles.items():
            was = before.bundles.get(key)
            if was is not bundle:
                self._saw_bundle(key, was, bundle)

    def _saw_bundle(self, key: str, was: BundleRecord | None, bundle: BundleRecord) -> None:
        counts, home = self._ledger.counts, key.rpartition("/")[2]
        if was is None or was.store != bundle.store:
            was = BundleRecord(store=bundle.store)
        for member in set(bundle.joining) - set(was.joining):
            self._joining[key, member] = self.acknowledged
        for member in set(bundle.in_sync) - set(was.in_sync):
            begun = self._joining.pop((key, member), self.acknowledged)
            if key in self.was_whole and self.acknowledged > begun:
                counts[CATCH_UPS] += 1
        lost = set(was.in_sync) - set(bundle.in_sync)
        if len(bundle.in_sync) >= self._copies:
            self.was_whole.add(key)
            self._losses[key] = 0
        elif lost and key in self.was_whole:
            self._losses[key] = self._losses.get(key, 0) + len(lost)
            if self._losses[key] == 2:
                counts[SUCCESSIVE] += 1
        if was.in_sync and not bundle.in_sync:
            self._check_loss(key, was)
        if was.primary is not None and bundle.primary != was.primary:
            if was.primary in lost and self.open_pushes:
                counts[FAILOVERS] += 1
            new = bundle.primary[0] if bundle.primary is not None else "none"
            self._ledger.note("bundle", home, f"generation {bundle.generation}: {was.primary[0]} -> {new}")

    def _check_loss(self, key: str, was: BundleRecord) -> None:
        """Check that a bundle without members in sync has lost them all. Raises Violation."""
        self._ledger.counts["bundles lost"] += 1
        well = [member for member in was.in_sync if self.is_well(member)]
        if well:
            raise Violation("a store fails without copies only", f"{key} is lost, and {well[0]} is well")

    async def watch(self) -> None:
        """Compare the copies at intervals, and note the leaders of the controllers."""
        while True:
            await asyncio.sleep(CHECK_S)
            self._note_leader()
            self.compare()
            self._ledger.counts["copies compared"] = self._bundles.compared
            self._ledger.counts["entries applied"] = self._bundles.applied

    def compare(self) -> None:
        """Compare the copies at the same position. Raises Violation."""
        for name, server in self.servers.items():
            if is_running(self._world.node(name)):
                for served in server.served.values():
                    if served.copy is not None:
                        self._bundles.compare(served.copy)

    def _note_leader(self) -> None:
        name = self.leader
        term = self.controllers[name].group.term if name else 0
        if term > self._term:
            self._ledger.leader_changes += self._term > 0
            self._term = term

    @property
    def leader(self) -> str:
        """Running leader of the newest term; empty without one."""
        led = [(it.group.term, name) for name, it in self.controllers.items() if it.group.leads]
        return max(led, default=(0, ""))[1]

    def is_well(self, member: Member) -> bool:
        """Whether an incarnation of a server runs, and no fault strikes it."""
        name, incarnation = member
        return (
            name not in self.disturbed
            and is_running(self._world.node(name))
            and self._incarnations.get(name) == incarnation
        )

    def runs(self, member: Member) -> bool:
        """Whether an incarnation of a server has its memory still."""
        return is_running(self._world.node(member[0])) and self._incarnations.get(member[0]) == member[1]

    def can_spare(self, name: str) -> bool:
        """Whether each bundle has a member in sync that is well beside a server's, so that it may be lost."""
        for bundle in self.map.bundles.values():
            others = [member for member in bundle.in_sync if member[0] != name]
            if len(others) == len(bundle.in_sync):
                continue
            if not others or not all(map(self.is_well, others)):
                return False
        return bool(self.map.bundles)

    def lacking(self) -> str:
        """Return which bundles lack copies in sync on running servers; empty if none does."""
        found = [] if self.map.bundles else ["there is no bundle"]
        for key, bundle in sorted(self.map.bundles.items()):
            members = [member for member in bundle.in_sync if self.runs(member)]
            if len(members) < self._copies or len(members) < len(bundle.in_sync):
                nodes = ", ".join(node for node, _ in bundle.in_sync)
                found.append(f"{key} has {nodes or 'no member'} of {self._copies} copies in sync")
        return "; ".join(found)
