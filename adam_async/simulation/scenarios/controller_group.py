"""Some controllers on simulated machines, with those who watch over them."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from adam_async.controller.bootstrap import name_of
from adam_async.controller.consensus import Core, DamagedLog, Effect, Event, Persist, Role, Settings
from adam_async.controller.consensus.records import Record
from adam_async.controller.log_file import NAME, LogFile
from adam_async.controller.permissions import Attempt, Refusal
from adam_async.controller.replicated_state import MAX_SESSIONS, ReplicatedState
from adam_async.controller.service import Controller
from adam_async.errors import ConfigError
from adam_async.messages import role_table
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.runtime.random_streams import Dice
from adam_async.simulation.checkers.commits import Commits
from adam_async.simulation.checkers.histories import Histories
from adam_async.simulation.checkers.maps import Maps
from adam_async.simulation.checkers.progress import Progress
from adam_async.simulation.checkers.terms import Terms
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Setting
from adam_async.simulation.scenario import Ledger, Violation
from transport import BufferPool, Identity, LinkConfig, TcpNetwork

TOKEN = b"a token of the simulated cluster"
FOLDER = Path("/data")
FILE = FOLDER / NAME

WAITS = Waits(grace_s=1.0)
LINKS = LinkConfig(ping_every_s=1.5, dead_after_s=3.0, stalled_after_s=2.5, handshake_s=2.0, close_s=0.5)

ANSWER_S = 10.0
"""So soon everybody who asks a core that is well has an answer."""


def draw_settings(dice: Dice, *, sessions: int) -> dict[str, Setting]:
    """Draw the settings of a group: mostly three controllers, with sizes so small that limits are met.

    Args:
        dice: A stream that nothing else uses.
        sessions: The fewest with which all clients can be answered.
    """
    return {
        "controllers": dice.choose([3, 3, 3, 3, 3, 3, 3, 5]),
        "heartbeat_s": dice.choose([0.1, 0.3, 0.3, 0.3, 0.3, 0.3]),  # 0.1, as shipped, takes longer
        "snapshot_entries": dice.choose([8, 40, 150, 1000]),
        "message_bytes": dice.choose([1, 1000, 1 << 20]),
        "chunk_bytes": dice.choose([300, 4000, 256 << 10]),
        "window": dice.choose([1, 4, 64]),
        "catch_up": dice.choose([1, 64]),
        "sessions": dice.choose([sessions, MAX_SESSIONS]),
    }


def permit_all(attempt: Attempt, cluster: ClusterMap) -> Refusal | None:
    """Refuse nothing: the clients of this test of consensus set keys of other nodes."""
    return None


def network_of(node: Node) -> TcpNetwork:
    """Make the network of one life of a machine."""
    return TcpNetwork(token=TOKEN, entropy=node.entropy, rules=role_table(), config=LINKS, pool=BufferPool())


class ControllerGroup:
    """The controllers of a run, over all their lives.

    Args:
        world: Where they run.
        settings: As `draw_settings` draws them.
        ledger: Told who leads.

    Attributes:
        addresses: Of all controllers, by name.
        cores: Of each controller its core, in the last life that had one.
        running: Of each controller its last life.
        writes: How often each was told to write something down.
        proven: Of each the bytes of its file behind which others were kept: damage there must be noticed.
        damaged: Those whose file was damaged, and not written anew.
        rotten: Those who are about to lose their disk by it.
        refused: Those among them who refused to start with it.
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
        """Start all of them."""
        for name in self.addresses:
            self.world.node(name).start(self._serve, time=self._dice.between(0.0, 1e6))

    def restart(self, name: str, *, empty_disk: bool = False) -> None:
        """Start one again that is down; its clock shows something else."""
        self.world.node(name).restart(time=self._dice.between(0.0, 1e6), empty_disk=empty_disk)

    def forget(self, name: str) -> None:
        """The disk of a controller is lost: nothing is settled until its next life has a core."""
        del self.cores[name]
        self.proven[name] = 0
        self.damaged.discard(name)

    async def _serve(self, node: Node) -> None:
        def observe(
            core: Core, machine: ReplicatedState, event: Event | None, effects: Sequence[Effect]
        ) -> None:
            self._saw(node.name, core, machine, event, effects)

        controller = Controller(
            permits=permit_all,
            network=network_of(node),
            address=self.addresses[node.name],
            identity=Identity(role="controller", node=node.name, incarnation=node.life),
            waits=WAITS,
            peers=self.addresses,
            file=_WatchedLog(self, node),
            entropy=node.entropy,
            settings=self._settings,
            snapshot_entries=self._snapshot_entries,
            most_sessions=self._sessions,
            observe=observe,
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
        """Whether the disk of a controller fails what it is asked."""
        node = self.world.node(name)
        return node.disk_conditions.fail > 0 or node.disk_model.used_bytes >= node.disk_model.capacity_bytes

    def _saw(
        self, name: str, core: Core, machine: ReplicatedState, event: Event | None, effects: Sequence[Effect]
    ) -> None:
        self.cores[name] = core
        for effect in effects:
            if type(effect) is Persist:
                self.writes[name] += 1
        led = len(self.terms.leaders)
        self.terms.saw(core, event, effects)
        core.check_invariants()
        self.commits.saw(core, machine, event, effects)
        self.maps.saw(machine)
        if len(self.terms.leaders) > led:
            self._ledger.leader_changes = led
            self._ledger.note("leader", name, f"leads in term {core.term}")

    # --- how they stand ----------------------------------------------------------------------

    @property
    def leader(self) -> str:
        """Who leads, in the latest term; empty if nobody that runs does."""
        led = [
            (core.term, name)
            for name, core in self.cores.items()
            if core.role is Role.LEADER and self.world.node(name).host.up and not self.is_new(name)
        ]
        return max(led)[1] if led else ""

    def is_new(self, name: str) -> bool:
        """Whether a controller began a life that has no core yet."""
        return self.running[name].group.term == 0

    @property
    def is_settled(self) -> bool:
        """Whether all belong to the group with the disks that they have, as far as anybody knows."""
        if self.rotten or len(self.cores) < len(self.addresses) or self.commits.last < 2:
            return False  # a founder that loses its disk before anything was committed founds it again
        mine = {core.me for core in self.cores.values()}
        return not any(self.is_new(name) for name in self.addresses) and all(
            set(voters) == mine for voters in self.memberships()
        )

    def memberships(self) -> list[tuple[str, ...]]:
        """The voters of all memberships that may be in force."""
        found = []
        for core in self.cores.values():
            log = core.log
            later = [entry.members for entry in log.run(core.commit + 1, log.last_index)]
            members = [log.members_at(core.commit), *later]
            found += [each.voters for each in members if each is not None and each.voters]
        return found

    def majority(self, dice: Dice) -> list[str]:
        """Choose a smallest set of controllers that is a majority in all memberships that may be in force."""
        chosen = list(self.addresses)
        dice.shuffle(chosen)
        memberships = self.memberships()
        for name in list(chosen):
            left = [self.cores[other].me for other in chosen if other != name and other in self.cores]
            if memberships and all(2 * len(set(voters) & set(left)) > len(voters) for voters in memberships):
                chosen.remove(name)
        return sorted(chosen)

    def check_equal(self) -> str:
        """Say which controller is behind the others; nothing if all have applied the same."""
        commits = {name: core.commit for name, core in self.cores.items()}
        if len(set(commits.values())) > 1 or len(commits) < len(self.addresses):
            return f"not all have applied the same: {commits}"
        strangers = [me for core in self.cores.values() for me in core.members.all if me not in self._mine()]
        if strangers:
            return f"{name_of(strangers[0])} belongs to the group with a disk that is gone"
        outside = [me for core in self.cores.values() for me in self._mine() if me not in core.members.voters]
        return f"{name_of(outside[0])} is no voter of the group" if outside else ""

    def _mine(self) -> list[str]:
        return [core.me for core in self.cores.values()]

    def check_end(self) -> None:
        """See that everything that was answered agrees. Raises Violation."""
        self.histories.check()
        self._ledger.counts["lost nodes"] = self.maps.lost
        self._ledger.counts["entries"] = self.commits.last
        if not self.terms.leaders:
            raise Violation("I15", "nobody ever led")


class _WatchedLog(LogFile):
    """The file of one life, of which it is known what of it is certainly kept."""

    def __init__(self, group: ControllerGroup, node: Node) -> None:
        super().__init__(node.open_disk(), FOLDER)
        self._group = group
        self._node = node

    async def append(self, batches: Sequence[tuple[Record, ...]]) -> None:
        try:
            kept = len(self._node.disk_model.file(FILE).data)
        except FileNotFoundError:
            kept = 0
        await super().append(batches)
        self._group.proven[self._node.name] = kept

    async def begin_anew(self, records: tuple[Record, ...]) -> None:
        self._group.proven[self._node.name] = 0
        self._group.damaged.discard(self._node.name)
        await super().begin_anew(records)
