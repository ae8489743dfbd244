"""A group of controllers on simulated machines, with its invariants' checkers; the base of its runs."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from adam_async.controller.bootstrap import name_of
from adam_async.controller.consensus import Core, DamagedLog, Effect, Event, Persist, Role, Settings
from adam_async.controller.consensus.records import LogFileRecord
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.log_file import NAME, LogFile
from adam_async.controller.permissions import Attempt, Refusal
from adam_async.controller.replicated_state import MAX_SESSIONS, ReplicatedState
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.errors import ConfigError
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from tests.simulation.checkers.commits import Commits, Progress, Terms
from tests.simulation.checkers.histories import Histories
from tests.simulation.checkers.maps import Maps
from tests.simulation.plan import Plan, Setting
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Program, Violation, World
from tests.simulation.scenarios import cluster
from transport import Identity, LinkConfig, TcpNetwork

FOLDER = Path("/data")
FILE = FOLDER / NAME

WAITS = Waits(grace_s=1.0)
LINKS = LinkConfig(ping_every_s=1.5, dead_after_s=3.0, stalled_after_s=2.5, handshake_s=2.0, close_s=0.5)

ANSWER_S = 10.0
"""Time limit of an answer of a healed core, in seconds."""


def draw_settings(dice: RandomStream, *, sessions: int) -> dict[str, Setting]:
    """Draw the settings of a group: mostly three controllers, with sizes small enough to reach the limits.

    Args:
        dice: A random stream only for this call.
        sessions: Least number of sessions with which all clients get answers.
    """
    return {
        "controllers": dice.choose([3, 3, 3, 3, 3, 3, 3, 5]),
        "heartbeat_s": dice.choose([0.1, 0.3, 0.3, 0.3, 0.3, 0.3]),  # the shipped value, 0.1, takes longer
        "snapshot_entries": dice.choose([8, 40, 150, 1000]),
        "message_bytes": dice.choose([1, 1000, 1 << 20]),
        "chunk_bytes": dice.choose([300, 4000, 256 << 10]),
        "window": dice.choose([1, 4, 64]),
        "catch_up": dice.choose([1, 64]),
        "sessions": dice.choose([sessions, MAX_SESSIONS]),
    }


def permit_all(attempt: Attempt, cluster: ClusterMap) -> Refusal | None:
    """Accept all requests, because the clients of this consensus test set keys of other nodes."""
    return None


def network_of(node: Node) -> TcpNetwork:
    """Make the network of one incarnation of a machine."""
    return cluster.network_of(node, links=LINKS)


class ControllerGroup:
    """The controllers of a run, over all their incarnations.

    Args:
        settings: Settings from `draw_settings`.

    Attributes:
        cores: Core of each controller, from its newest incarnation with a core.
        writes: Number of each controller's `Persist` effects.
        proven: Length in bytes of each controller's file before its last durable record: damage before this
            position must be noticed.
        damaged: Controllers with a damaged file that was not replaced.
        rotten: Controllers whose disk is damaged and will be lost.
        refused: Controllers of `rotten` that refused to start with the damage.
    """

    def __init__(self, world: World, settings: dict[str, Setting], ledger: Ledger) -> None:
        names = [f"controller-{number + 1}" for number in range(int(settings["controllers"]))]
        self.world = world
        self.addresses = {name: f"tcp://{name}:7000" for name in names}
        self.cores: dict[str, Core] = {}
        self.running: dict[str, Controller] = {}
        self.writes: Counter[str] = Counter()
        self.proven: Counter[str] = Counter()
        self.damaged: set[str] = set()
        self.rotten: set[str] = set()
        self.refused: set[str] = set()
        self.terms, self.commits, self.maps = Terms(), Commits(), Maps()
        self.histories = Histories(lambda: world.now)
        self.progress = Progress(lambda: world.now, ANSWER_S)
        self._ledger = ledger
        self._dice = world.dice.fork("controllers")
        self._snapshot_entries = int(settings["snapshot_entries"])
        self._sessions = int(settings["sessions"])
        self._settings = Settings(
            heartbeat_s=float(settings["heartbeat_s"]),
            election_s=0.8,
            message_bytes=int(settings["message_bytes"]),
            chunk_bytes=int(settings["chunk_bytes"]),
            window=int(settings["window"]),
            catch_up=int(settings["catch_up"]),
        )

    def start(self) -> None:
        """Start all controllers."""
        for name in self.addresses:
            self.world.node(name).start(self._serve, time=self._dice.between(0.0, 1e6))

    def restart(self, name: str, *, empty_disk: bool = False) -> None:
        """Restart a controller, with another time on its clock."""
        self.world.node(name).restart(time=self._dice.between(0.0, 1e6), empty_disk=empty_disk)

    def forget(self, name: str) -> None:
        """Forget a controller whose disk is lost: the group is unsettled until its next core."""
        del self.cores[name]
        self.proven[name] = 0
        self.damaged.discard(name)

    async def _serve(self, node: Node) -> None:
        def observe(
            core: Core, replicated_state: ReplicatedState, event: Event | None, effects: Sequence[Effect]
        ) -> None:
            self._saw(node.name, core, replicated_state, event, effects)

        controller = Controller(
            RoleSettings(
                network=network_of(node),
                address=self.addresses[node.name],
                identity=Identity(role="controller", node=node.name, incarnation=node.incarnation),
                waits=WAITS,
            ),
            ConsensusSetup(
                entropy=node.entropy,
                file=_WatchedLog(self, node),
                settings=self._settings,
                snapshot_entries=self._snapshot_entries,
                observe=observe,
            ),
            permits=permit_all,
            peers=self.addresses,
            most_sessions=self._sessions,
        )
        self.running[node.name] = controller
        try:
            async with controller:
                await asyncio.Event().wait()
        except* (OSError, ConfigError):
            if not self.disk_is_bad(node.name):
                raise
        except* DamagedLog:
            if node.name not in self.rotten:
                raise
            self.refused.add(node.name)

    def disk_is_bad(self, name: str) -> bool:
        """Return whether the disk of a controller fails or is full."""
        node = self.world.node(name)
        return node.disk_conditions.fail > 0 or node.disk_model.used_bytes >= node.disk_model.capacity_bytes

    def _saw(
        self,
        name: str,
        core: Core,
        replicated_state: ReplicatedState,
        event: Event | None,
        effects: Sequence[Effect],
    ) -> None:
        self.cores[name] = core
        for effect in effects:
            if type(effect) is Persist:
                self.writes[name] += 1
        led = len(self.terms.leaders)
        self.terms.saw(core, event, effects)
        core.check_invariants()
        self.commits.saw(core, replicated_state, event, effects)
        self.maps.saw(replicated_state)
        if len(self.terms.leaders) > led:
            self._ledger.leader_changes = led
            self._ledger.note("leader", name, f"leads in term {core.term}")

    # --- state -------------------------------------------------------------------------------

    @property
    def leader(self) -> str:
        """The running leader of the latest term; empty without one."""
        led = [
            (core.term, name)
            for name, core in self.cores.items()
            if core.role is Role.LEADER and self.world.node(name).host.up and not self.is_new(name)
        ]
        return max(led)[1] if led else ""

    def is_new(self, name: str) -> bool:
        """Return whether a controller's incarnation has no core yet."""
        return self.running[name].group.term == 0

    @property
    def is_settled(self) -> bool:
        """Whether all controllers are members of the group with their present disks, in every known log."""
        if self.rotten or len(self.cores) < len(self.addresses) or self.commits.last < 2:
            return False  # a founder that loses its disk before the first commit founds the group again
        mine = {core.me for core in self.cores.values()}
        return not any(self.is_new(name) for name in self.addresses) and all(
            set(voters) == mine for voters in self.memberships()
        )

    def memberships(self) -> list[tuple[str, ...]]:
        """Return the voters of all memberships that may be in force."""
        found = []
        for core in self.cores.values():
            log = core.log
            later = [entry.members for entry in log.run(core.commit + 1, log.last_index)]
            members = [log.members_at(core.commit), *later]
            found += [each.voters for each in members if each is not None and each.voters]
        return found

    def majority(self, dice: RandomStream) -> list[str]:
        """Choose a minimal set of controllers with a majority in all memberships that may be in force."""
        chosen = list(self.addresses)
        dice.shuffle(chosen)
        memberships = self.memberships()
        for name in list(chosen):
            left = [self.cores[other].me for other in chosen if other != name and other in self.cores]
            if memberships and all(2 * len(set(voters) & set(left)) > len(voters) for voters in memberships):
                chosen.remove(name)
        return sorted(chosen)

    def check_equal(self) -> str:
        """Return a difference between the controllers; empty if all have committed the same entries and are
        voters."""
        commits = {name: core.commit for name, core in self.cores.items()}
        if len(set(commits.values())) > 1 or len(commits) < len(self.addresses):
            return f"not all have applied the same: {commits}"
        lost = [me for core in self.cores.values() for me in core.members.all if me not in self._mine()]
        if lost:
            return f"{name_of(lost[0])} is a member of the group with a lost disk"
        outside = [me for core in self.cores.values() for me in self._mine() if me not in core.members.voters]
        return f"{name_of(outside[0])} is no voter of the group" if outside else ""

    def _mine(self) -> list[str]:
        return [core.me for core in self.cores.values()]

    def check_end(self) -> None:
        """Check that all answers agree and a controller has led. Raises Violation."""
        self.histories.check()
        self._ledger.counts["lost nodes"] = self.maps.lost
        self._ledger.counts["entries"] = self.commits.last
        if not self.terms.leaders:
            raise Violation("I15", "no controller ever led")


class _WatchedLog(LogFile):
    """One incarnation's log file; it notes in `proven` the length that is certainly durable."""

    def __init__(self, group: ControllerGroup, node: Node) -> None:
        super().__init__(node.open_disk(), FOLDER)
        self._group = group
        self._node = node

    async def append(self, batches: Sequence[tuple[LogFileRecord, ...]]) -> None:
        try:
            kept = len(self._node.disk_model.file(FILE).data)
        except FileNotFoundError:
            kept = 0
        await super().append(batches)
        self._group.proven[self._node.name] = kept

    async def begin_anew(self, records: tuple[LogFileRecord, ...]) -> None:
        self._group.proven[self._node.name] = 0
        self._group.damaged.discard(self._node.name)
        await super().begin_anew(records)


MARKS = (
    "a controller was sent a whole state",
    "a watcher was sent the whole map again",
    "controller.busy",
    "controller.history.short",
    "controller.log.late",
    "controller.message.twice",
    "controller.snapshot.early",
)
"""Marks in the code of controllers that their scenarios must reach."""

UNDER_WAY = "leadership was lost with a question under way"
"""Mark of the scenarios whose leaders run long enough to reach it."""


class ControllerRun:
    """One run with a group of controllers.

    Args:
        plan: Plan with the settings of a `ControllerGroup` and of the scenario.

    Attributes:
        dice: Random stream for choices of the scenario.
    """

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        self.world = world
        self.plan = plan
        self.ledger = ledger
        self.settings = plan.options.settings
        self.group = ControllerGroup(world, self.settings, ledger)
        self.dice = world.dice.fork("story")

    def start(self, programs: Mapping[str, Program]) -> None:
        """Start all controllers, and the programs of clients by machine."""
        self.group.start()
        for name, program in programs.items():
            self.world.node(name).start(program)

    def addresses(self) -> list[str]:
        """Return the addresses of all controllers in random order."""
        addresses = list(self.group.addresses.values())
        self.dice.shuffle(addresses)
        return addresses
