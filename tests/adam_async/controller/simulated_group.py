"""Controllers on simulated machines, and a client that asks one of them, message by message."""

import asyncio
from pathlib import Path

from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.log_file import LogFile
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.messages import (
    CompareAndSet,
    GetMap,
    MapState,
    OpenSession,
    SessionOpened,
    WatchMap,
    pack,
    read_text_tensor,
    role_table,
    text_tensor,
    unpack,
    unpack_any,
)
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.map_changes import Change
from tests.simulation.scenario import simulate
from tests.simulation.scenarios.controller_group import permit_all
from tests.simulation.wire import Conditions
from transport import BufferPool, Identity, LinkConfig, TcpNetwork

WAITS = Waits(dial_s=5.0, call_s=5.0, grace_s=2.0)
SHORT = LinkConfig(ping_every_s=0.5, dead_after_s=2.0, stalled_after_s=2.0, handshake_s=2.0, close_s=1.0)
FOLDER = Path("/var/controller")
NEAR = Conditions(delay_s=0.001, jitter_s=0.002)
CALL_S = 10.0


def network_of(node):
    return TcpNetwork(
        token=b"a token of tests", entropy=node.entropy, rules=role_table(), config=SHORT, pool=BufferPool()
    )


def record(number=0, *, role="worker", incarnation=5):
    return {"role": role, "address": "local://x", "incarnation": incarnation, "info": {"number": number}}


class Client:
    """Asks one controller."""

    def __init__(self, link):
        self.link = link
        self.session = self.number = 0

    async def ask(self, body, tensors=(), *, timeout_s=CALL_S):
        answer = await self.link.call(pack(body, tensors), timeout_s=timeout_s)
        return unpack_any(answer), answer

    async def open(self):
        answer = await self.link.call(pack(OpenSession()), timeout_s=CALL_S)
        self.session = unpack(answer, SessionOpened).session
        return self

    async def set(self, key, expected, value, *, after=-1, group="", number=None):
        """Returns the answer's body."""
        if number is None:
            self.number = number = self.number + 1
        question = CompareAndSet(
            key=key, expected=expected, session=self.session, number=number, after=after, group=group
        )
        return (await self.ask(question, [text_tensor(value)]))[0]

    async def map(self):
        """The whole map, and of which group."""
        body, answer = await self.ask(GetMap())
        return read_text_tensor(answer, ClusterMap, 1 << 24), body.group

    async def watch(self, after, group, *, wait_s=5.0):
        """The versions that came, or the whole map."""
        body, answer = await self.ask(WatchMap(after=after, group=group, wait_s=wait_s))
        if isinstance(body, MapState):
            return read_text_tensor(answer, ClusterMap, 1 << 24)
        return [change.version for change in read_text_tensor(answer, list[Change], 1 << 24)]


class Trio:
    """Three controllers with a folder each, or as many as there are names for."""

    def __init__(self, world, *, count=3, with_files=True, permits=permit_all, **options):
        self.world = world
        self.peers = {
            f"controller-{number}": f"tcp://controller-{number}:7" for number in range(1, count + 1)
        }
        self.running = {}
        self.leave = {}
        self._with_files = with_files
        self._permits = permits
        self._options = options

    def start(self, *names, may_fail=False):
        for name in names or self.peers:
            self.world.node(name).start(self._serve, may_fail=may_fail)

    async def _serve(self, node):
        file = LogFile(node.open_disk(), FOLDER) if self._with_files else None
        controller = Controller(
            RoleSettings(
                network=network_of(node),
                address=self.peers[node.name],
                identity=Identity(role="controller", node=node.name, incarnation=node.incarnation),
                waits=WAITS,
            ),
            ConsensusSetup(entropy=node.entropy, file=file, **self._options),
            permits=self._permits,
            peers=self.peers,
        )
        self.running[node.name] = controller
        self.leave[node.name] = leave = asyncio.Event()
        try:
            async with controller:
                await leave.wait()
        finally:
            if self.running.get(node.name) is controller:
                del self.running[node.name]

    def node(self, name):
        return self.world.node(name)

    def crash(self, *names):
        """Take the power from these, or all."""
        for name in names or self.peers:
            self.running.pop(name, None)
            self.node(name).crash()

    async def restart(self, *names, **options):
        """Start these again, or all, and wait until they run."""
        for name in names or self.peers:
            self.node(name).restart(**options)
        await self.until(lambda: all(name in self.running for name in names or self.peers), "not all run")

    def kill(self, name):
        self.running.pop(name)
        self.node(name).kill()

    @property
    def leaders(self):
        return [name for name, it in self.running.items() if it.group.leads]

    @property
    def terms(self):
        return {name: it.group.term for name, it in self.running.items()}

    def others(self, name):
        return [other for other in self.peers if other != name]

    async def until(self, condition, what, *, seconds=10.0):
        begun = self.world.now
        while not condition():
            assert self.world.now < begun + seconds, f"{what}: {self.statistics()}"
            await asyncio.sleep(0.005)
        return self.world.now - begun

    async def led_without(self, name):
        """Wait until another one leads, whatever that one believes; returns its name."""
        others = set(self.others(name))
        await self.until(lambda: others & set(self.leaders), "nobody else leads")
        return (others & set(self.leaders)).pop()

    async def led(self, *, by=None, seconds=10.0):
        """Wait for a leader whom all that run know; returns its name."""

        def known():
            leaders = {it.group.leader for it in self.running.values()}
            return len(leaders) == 1 and len(self.leaders) == 1 and (by is None or self.leaders[0] in by)

        await self.until(known, "nobody leads", seconds=seconds)
        return self.leaders[0]

    async def settled(self):
        """Wait until all run as voters; returns who leads."""
        await self.until(
            lambda: (
                len(self.running) == len(self.peers)
                and all(
                    len(it.group.statistics().voters or ()) == len(self.peers) for it in self.running.values()
                )
            ),
            "not all belong to the group",
            seconds=20.0,
        )
        return await self.led()

    def statistics(self):
        return {name: it.group.statistics() for name, it in self.running.items()}

    async def client(self, name, *, role="worker", node="client", incarnation=1, machine=""):
        """A client on a machine of its own, linked to one controller. Its link lives as long as the run."""
        machine = self.world.node(machine or node)
        made = asyncio.get_running_loop().create_future()

        async def program(machine):
            identity = Identity(role=role, node=node, incarnation=incarnation)
            made.set_result(await network_of(machine).dial(self.peers[name], identity))
            await asyncio.Event().wait()

        if machine.host.up:
            machine.kill()
        machine.start(program)
        return Client(await made)


def simulated(scenario, *, seed=1, conditions=NEAR, may_fail=False, **options):
    """Run a scenario that is given its controllers, already started; `may_fail`: they may raise."""

    async def play(world):
        trio = Trio(world, **options)
        trio.start(may_fail=may_fail)
        return await scenario(trio)

    return simulate(play, seed=seed, conditions=conditions).result
