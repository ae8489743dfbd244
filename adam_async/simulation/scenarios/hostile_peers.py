"""Peers that hold the keys of a role and send every message with every bad field.

A *hostile peer* proves a role that may talk to its target, and sends messages that differ from valid ones in
one place (`bad_fields.py`), in an order and a number that the seed draws: one after the other, many at once,
or as messages that get no answer. Other peers read no answers, hold silent sockets, or set records of others.

After each of them the target runs and answers an honest question within `PROBE_S`; no handler has failed;
and no message that can never be right was answered as if it were.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from adam_async.messages import (
    GetMap,
    GetStatistics,
    Pull,
    ReadTest,
    pack,
    role_table,
)
from adam_async.simulation.dice import Dice
from adam_async.simulation.faults import Strike, check_noticed, is_running
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault
from adam_async.simulation.scenario import Ledger, Violation
from adam_async.simulation.scenarios.bad_fields import BadMessage, bad_messages
from adam_async.simulation.scenarios.hostile import request_frame
from adam_async.simulation.scenarios.raw_wire import dial_raw
from adam_async.simulation.scenarios.training_cluster import (
    CONTROLLERS,
    LENDERS,
    SERVERS,
    TOKEN,
    WORKERS,
    TrainingCluster,
    network_of,
)
from adam_async.simulation.scenarios.valid_messages import Facts, valid_messages
from transport import (
    CallTimeout,
    HandshakeRejected,
    Identity,
    Link,
    LocalProtocolError,
    Message,
    RemoteError,
    TransportError,
    WouldBlock,
)
from transport.handshake import ClientHandshake

HOSTILES = ("hostile-0", "hostile-1", "hostile-2")
"""Machines of the hostile peers."""

PROBER = "prober"
"""Machine of the driver that asks honest questions."""

TARGETS: Mapping[str, tuple[str, ...]] = {
    "ps": SERVERS,
    "data": LENDERS,
    "worker": WORKERS,
    "controller": tuple(CONTROLLERS),
}
"""Machines by role."""

SENDERS: Mapping[str, tuple[str, ...]] = {
    "ps": ("worker", "worker", "driver"),
    "data": ("worker", "driver", "data"),
    "worker": ("worker", "driver", "ps", "data"),
    "controller": ("worker", "driver", "data", "ps"),
}
"""Roles that hostile peers prove to a target. Controllers trust each other's keys."""

ONE_WAY = ("Greet", "Blocks", "Agree")
"""Messages that get no answer."""

ANSWER_S, PROBE_S, READY_S, STRIKE_S = 3.0, 2.0, 60.0, 60.0
"""Seconds: for the answer to a bad message, for that to an honest question with its dial, for a target to be
in a run, and for all that one hostile peer does."""

AT_ONCE = 24
"""Bad messages under way together in a burst."""

NEVER_RIGHT = (
    "nan",
    "inf",
    "-inf",
    "2**63",
    "below",
    "above",
    "missing",
    "type-text",
    "type-number",
    "repeated",
    "torn",
    "noise",
    "deep",
    "large",
    "unknown-tag",
    "wrong-run",
)
"""Names of bad values that no receiver may answer as if they were right."""


class HostilePeers:
    """All hostile peers of a run.

    Args:
        world: Where the machines are.
        cluster: The cluster that trains meanwhile.
        ledger: Counts what became of bad messages.

    Attributes:
        strikes: By kind, for `faults.strike_all`.
    """

    def __init__(self, world: World, cluster: TrainingCluster, ledger: Ledger) -> None:
        self.strikes: dict[str, Strike] = dict.fromkeys(KINDS, self._strike)
        self._world = world
        self._cluster = cluster
        self._ledger = ledger
        for name in (*HOSTILES, PROBER):
            world.node(name).start(_idle)

    async def _strike(self, world: World, fault: Fault) -> None:
        """Do what a fault says, then ask its target an honest question.

        Raises:
            Missed: Nothing was sent.
            Violation: The target was harmed.
        """
        hostile, target = fault.targets
        await self._in_a_run(target)
        node = world.nodes[hostile]
        peer = _Peer(self, node, target, world.dice.fork(str(fault)), int(fault.amount))
        task = world.loop.spawn(KINDS[fault.kind](peer), f"{hostile}/{fault.kind}", node.host.context.copy())
        done, _ = await asyncio.wait([task], timeout=STRIKE_S)
        if not done:
            task.cancel()
            raise Violation("hostile peers get an end", f"{fault}: goes on after {STRIKE_S:g} s")
        noticed = task.result()
        await self.probe(target)
        check_noticed(noticed)

    async def _in_a_run(self, target: str) -> None:
        """Wait until a role is in a run."""
        by = self._world.now + READY_S
        while not self._is_ready(target):
            if self._world.now > by:
                raise Violation("every role lives", f"{target} is in no run for {READY_S:g} s")
            await asyncio.sleep(0.05)

    def _is_ready(self, target: str) -> bool:
        cluster, node = self._cluster, self._world.nodes[target]
        if not is_running(node) or cluster.map.epoch is None:
            return False
        if target in SERVERS:
            server = cluster.servers.get(target)
            return server is not None and server.state is not None
        return target in CONTROLLERS or target in cluster.map.nodes

    # --- what is seen ------------------------------------------------------------------------

    async def probe(self, target: str) -> None:
        """Ask a role an honest question, as a driver would: dial, prove the role, ask.

        Raises:
            Violation: There is no answer within `PROBE_S`.
        """
        node = self._world.nodes[PROBER]
        task = self._world.loop.spawn(self._ask(node, target), f"probe-{target}", node.host.context.copy())
        done, _ = await asyncio.wait([task], timeout=PROBE_S)
        if not done:
            task.cancel()
        error = task.exception() if done else TimeoutError()
        if not is_running(self._world.nodes[target]):
            raise Violation("every role lives", f"{target} has ended")
        if error is not None:
            text = f"{target} did not answer an honest driver in {PROBE_S:g} s: {error!r}"
            raise Violation("honest peers are answered", text)
        self._ledger.operations += 1

    async def _ask(self, node: Node, target: str) -> None:
        identity = Identity(role="driver", node=PROBER, incarnation=1)
        async with network_of(node).connect(self.address(target), identity, timeout_s=PROBE_S) as link:
            await link.call(pack(GetStatistics(run="")), timeout_s=PROBE_S)

    def address(self, target: str) -> str:
        """Where a role listens."""
        return CONTROLLERS.get(target) or self._cluster.map.nodes[target].address

    def count(self, what: str) -> None:
        """Count what became of a message."""
        self._ledger.counts[what] += 1

    def facts(self, target: str, *, session: int, node: str, role: str) -> Facts:
        """What is true now for a peer that is about to send something to a target."""
        cluster, controllers = self._cluster.map, self._cluster.controllers
        server = self._cluster.servers.get(target)
        state = server.state if server is not None else None
        shards = list(state.shards.values())[:2] if state is not None else []
        leader = controllers.get(self._cluster.leader) or next(iter(controllers.values()))
        run, epoch, lending = cluster.run, cluster.epoch, cluster.lending
        assert run is not None
        return Facts(
            run=run.id,
            generation=cluster.generation,
            shards=tuple(int(shard.spec.id) for shard in shards) or (0, 1),
            sizes=tuple(shard.spec.size for shard in shards) or (4, 4),
            dtype=str(shards[0].values.dtype) if shards else "float32",
            session=session,
            others_session=self._cluster.newest_session,
            replica=REPLICA,
            others_replica=0,
            life=cluster.life(0),
            epoch=epoch.number if epoch is not None else 1,
            clock=1,
            group=leader.machine.group,
            core_term=leader.group.term,
            version=cluster.version,
            node=node,
            address=f"tcp://{node}:1",
            lending_term=lending.term if lending is not None else 1,
        )


REPLICA = 99
"""That hostile peers speak for; no run has it."""


class _Peer:
    """One hostile peer, for as long as one fault lasts."""

    def __init__(self, peers: HostilePeers, node: Node, target: str, dice: Dice, amount: int) -> None:
        self._peers = peers
        self._node = node
        self._target = target
        self._dice = dice
        self._amount = amount
        self._network = network_of(node)
        self._role = next(role for role, names in TARGETS.items() if target in names)
        self._as = dice.choose(SENDERS[self._role])
        self._session = int.from_bytes(node.entropy(7), "little")
        self._sent = 0

    def _identity(self) -> Identity:
        return Identity(role=self._as, node=self._node.name, incarnation=self._session)

    async def _dial(self) -> Link:
        return await self._network.dial(
            self._peers.address(self._target), self._identity(), timeout_s=STRIKE_S / 2
        )

    def _draw(self) -> list[BadMessage]:
        """Draw bad messages that may travel to the target."""
        facts = self._peers.facts(self._target, session=self._session, node=self._node.name, role=self._as)
        pair = (self._as, self._role)
        found = [
            bad
            for bad in bad_messages(valid_messages(facts), meant=facts.meant())
            if pair in bad.pairs and not _is_poison(bad)
        ]
        self._dice.shuffle(found)
        return found[: self._amount]

    # --- bad fields --------------------------------------------------------------------------

    async def say_bad_fields(self) -> bool:
        """Send bad messages one after the other. Returns whether any left."""
        link = await self._dial()
        for bad in self._draw():
            if link.closed:
                link = await self._dial()
            await self._say(link, bad)
        link.abort()
        return self._sent > 0

    async def burst(self) -> bool:
        """Send bad messages many at a time."""
        found = self._draw()
        while found:
            now, found = found[:AT_ONCE], found[AT_ONCE:]
            link = await self._dial()
            async with asyncio.TaskGroup() as group:
                for bad in now:
                    group.create_task(self._say(link, bad), name=f"{self._node.name}/{bad.name}")
            link.abort()
        return self._sent > 0

    async def _say(self, link: Link, bad: BadMessage) -> None:
        """Send a bad message, and see what comes of it."""
        try:
            self._sent += 1
            if bad.message.type in ONE_WAY:
                await link.send(bad.message)
                self._peers.count("said without an answer")
                return
            answer = await link.call(bad.message, timeout_s=ANSWER_S)
        except RemoteError as error:
            self._peers.count("refused")
            if error.code == "internal":
                text = f"{self._target} failed at {bad.name} of a {self._as}: {error}"
                raise Violation("no handler fails", text) from None
        except CallTimeout:
            self._peers.count("unanswered")
        except LocalProtocolError:
            self._sent -= 1
        except TransportError:
            self._peers.count("links closed")
        else:
            self._peers.count("answered")
            if _is_never_right(bad):
                text = f"{self._target} answered {bad.name} of a {self._as} with {answer!r}"
                raise Violation("bad fields are refused", text)

    async def say_one_way(self) -> bool:
        """Send messages without waiting, as ones that get no answer, then hang up."""
        link = await self._dial()
        for bad in self._draw():
            if link.closed:
                self._peers.count("links closed")
                link = await self._dial()
            with suppress(WouldBlock, LocalProtocolError, TransportError):
                link.send_nowait(bad.message)
                self._sent += 1
        await asyncio.sleep(self._dice.between(0.0, 0.5))
        link.abort()
        return self._sent > 0

    # --- sockets -----------------------------------------------------------------------------

    async def hold_sockets(self) -> bool:
        """Hold sockets that say nothing, too little or nonsense; meanwhile an honest peer is let in."""
        host, port = self._host_and_port()
        async with asyncio.TaskGroup() as group:
            dials = [
                group.create_task(dial_raw(host, port), name=f"{self._node.name}/socket-{number}")
                for number in range(self._amount)
            ]
        wires = [dial.result() for dial in dials]
        for number, wire in enumerate(wires):
            wire.say((b"", b"T", b"GET / HTTP/1.1\r\n")[number % 3])
        for _ in range(3):
            await self._peers.probe(self._target)
            for wire in wires[1::3]:
                if not wire.over:
                    wire.say(b"L")
        for wire in wires:
            wire.hang_up()
        return bool(wires)

    async def read_nothing(self) -> bool:
        """Ask for large answers and read none of them."""
        host, port = self._host_and_port()
        self._as = "driver"
        while True:
            wire = await dial_raw(host, port)
            handshake = ClientHandshake(
                self._identity(), token=TOKEN, entropy=self._node.entropy, rules=role_table()
            )
            try:
                await wire.prove(handshake)
                break
            except (HandshakeRejected, ConnectionError, ValueError):
                wire.hang_up()
                await asyncio.sleep(0.2)
        wire.stop_reading()
        for number in range(1, self._amount + 1):
            wire.say(request_frame(number, self._large()))
        await self._peers.probe(self._target)
        await asyncio.sleep(self._dice.between(0.5, 4.0))
        wire.hang_up()
        return True

    def _large(self) -> Message:
        """A question with a large answer."""
        facts = self._peers.facts(self._target, session=1, node=self._node.name, role="driver")
        if self._role == "ps":
            return pack(Pull(run=facts.run, generation=facts.generation, shards=facts.shards))
        if self._role == "data":
            return pack(ReadTest(start=0, stop=256))
        if self._role == "controller":
            return pack(GetMap())
        return pack(GetStatistics(run=facts.run))

    def _host_and_port(self) -> tuple[str, int]:
        host, port = self._peers.address(self._target).removeprefix("tcp://").split(":")
        return host, int(port)


def _is_poison(bad: BadMessage) -> bool:
    """Whether a message harms what is learnt and no bound forbids it: a worker may push large gradients."""
    return bad.message.type == "Push" and bad.value == "largest"


def _is_never_right(bad: BadMessage) -> bool:
    """Whether no receiver may answer a message as if it were right."""
    if bad.message.type == "GetStatistics" and bad.value == "wrong-run":
        return False  # a role answers a driver of any run: it may be the next one's
    return bad.value in NEVER_RIGHT


async def _idle(node: Node) -> None:
    await asyncio.Event().wait()


KINDS: Mapping[str, Callable[[_Peer], Awaitable[bool]]] = {
    **{f"bad-{role}": _Peer.say_bad_fields for role in TARGETS},
    "burst": _Peer.burst,
    "one-way": _Peer.say_one_way,
    "sockets": _Peer.hold_sockets,
    "deaf": _Peer.read_nothing,
}
"""What a hostile peer does, by kind of fault."""
