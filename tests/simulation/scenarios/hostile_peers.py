"""Peers that hold the keys of a role and send every message with every bad field.

A *hostile peer* proves a role that may talk to its target, and sends messages that differ from valid ones in
one place (`bad_fields.py`). The seed draws the order and number of messages. The peer sends them one after
the other, many at once, or without waiting for answers. Other peers read no answers, keep silent sockets
open, or try to set other roles' records.

After each hostile peer the target still runs and answers a valid question within `PROBE_S`. No handler fails,
and no target accepts a message that is never valid.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import msgspec

from adam_async.controller.leader_connection import unpack_answer
from adam_async.errors import DeadlineExceeded
from adam_async.messages import (
    ROLES,
    TABLE,
    CompareAndSet,
    GetMap,
    GetStatistics,
    OpenSession,
    Pull,
    Pushed,
    ReadTest,
    SessionOpened,
    pack,
    role_table,
    unpack,
)
from adam_async.run.cluster_map import ClusterMap, EpochRecord, NodeRecord
from adam_async.run.training_program import ProgramRecord
from tests.simulation.faults import Strike, check_noticed, is_running
from tests.simulation.plan import Fault
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Violation, World
from tests.simulation.scenarios.bad_fields import (
    BadMessage,
    bad_messages,
    is_never_right,
    is_poison,
    must_be_refused,
    numbered,
)
from tests.simulation.scenarios.cluster import CONTROLLERS, LINKS, TOKEN, network_of
from tests.simulation.scenarios.hostile import request_frame
from tests.simulation.scenarios.hostile_facts import facts_of, next_clock, next_push
from tests.simulation.scenarios.hostile_groups import forge_groups
from tests.simulation.scenarios.hostile_members import ATTACKS, HostileMembers, new_map_client
from tests.simulation.scenarios.hostile_splits import split_tables
from tests.simulation.scenarios.raw_wire import dial_authenticated, dial_raw
from tests.simulation.scenarios.training_cluster import DATA_SERVERS, SERVERS, WORKERS, TrainingCluster
from tests.simulation.scenarios.valid_messages import valid_messages
from transport import (
    CallTimeout,
    HandshakeRejected,
    Identity,
    Link,
    LocalProtocolError,
    Message,
    ProtocolError,
    RemoteError,
    RoleKeys,
    TransportError,
    WouldBlock,
)
from transport.handshake import ClientHandshake
from transport.keys import derive

HOSTILES = ("hostile-0", "hostile-1", "hostile-2")
"""Machines of the hostile peers."""

PROBER = "prober"
"""Machine of the driver that asks valid questions."""

TARGETS: Mapping[str, tuple[str, ...]] = {
    "ps": SERVERS,
    "data": DATA_SERVERS,
    "worker": WORKERS,
    "controller": tuple(CONTROLLERS),
}
"""Machines by role."""

SENDERS: Mapping[str, tuple[str, ...]] = {
    "ps": ("worker", "worker", "driver", "client", "client", "reader"),
    "data": ("worker", "driver", "data"),
    "worker": ("worker", "driver", "ps", "data"),
    "controller": ("worker", "driver", "data", "ps", "controller", "client", "reader"),
}
"""Roles that hostile peers prove to a target. A hostile `controller` is in no group of controllers, because
members of a group trust each other."""

ONE_WAY = ("Greet", "Blocks", "Agree")
"""Types of messages without an answer."""

ONLY_SERVE = ("ps", "data")
"""Roles that take only requests from these peers, and no messages without an answer."""

ANSWER_S, PROBE_S, READY_S, STRIKE_S = 3.0, 2.0, 60.0, 60.0
"""Time limits in seconds: for the answer to a bad message, for the dial and answer of a valid question, for
the wait until a target is in a run, and for all actions of one hostile peer."""

LEADER_SHARE = 0.8
"""Share of the controllers' hostile peers that attack the leader."""

STOLEN = 6
"""Number of records that one hostile peer tries to set."""

SPLIT_ROUNDS = 5
"""How often a hostile peer looks for shards that share tables, and pushes to them apart."""

FORGE_ROUNDS = 3
"""Number of times that a hostile peer sends each forged message."""

MOST_PUSHES = 20
"""Maximum number of pushes that a hostile peer makes in the sessions of workers or clients."""

HELD_S = 0.3
"""Pause between two writes to a socket without a handshake, in seconds."""

AT_ONCE = 24
"""Number of bad messages in progress together in a burst."""


class HostilePeers:
    """All hostile peers of a run.

    Attributes:
        strikes: Faults by kind, for `faults.strike_all`.
        cluster: The attacked cluster.
        counts: Counts of the messages' outcomes.
    """

    def __init__(self, world: World, cluster: TrainingCluster, ledger: Ledger) -> None:
        self.strikes: dict[str, Strike] = dict.fromkeys(KINDS, self._strike)
        self._world = world
        self.cluster = cluster
        self.counts = ledger.counts
        self._ledger = ledger
        for name in (*HOSTILES, PROBER):
            world.node(name).start(_idle)

    async def _strike(self, world: World, fault: Fault) -> None:
        """Carry out a fault, then ask its target a valid question.

        Raises:
            Missed: The peer sent nothing, or opened too few sockets.
            Violation: The target failed.
        """
        hostile, target = fault.targets
        await self.in_a_run(target)
        node = world.nodes[hostile]
        peer = _Peer(self, node, target, world.dice.fork(str(fault)), fault)
        task = world.loop.spawn(KINDS[fault.kind](peer), f"{hostile}/{fault.kind}", node.host.context.copy())
        done, _ = await asyncio.wait([task], timeout=STRIKE_S)
        if not done:
            task.cancel()
            raise Violation("hostile peers get an end", f"{fault}: goes on after {STRIKE_S:g} s")
        noticed = task.result()
        await self.probe(target)
        check_noticed(noticed)

    async def in_a_run(self, target: str) -> None:
        """Wait until a role is in a run.

        Raises:
            Violation: The role is in no run for `READY_S`.
        """
        by = self._world.now + READY_S
        while not self._is_ready(target):
            if self._world.now > by:
                raise Violation("every role lives", f"{target} is in no run for {READY_S:g} s")
            await asyncio.sleep(0.05)

    def _is_ready(self, target: str) -> bool:
        cluster, node = self.cluster, self._world.nodes[target]
        if not is_running(node) or cluster.map.epoch is None:
            return False
        if target in SERVERS:
            server = cluster.servers.get(target)
            return server is not None and server.state is not None
        return target in CONTROLLERS or target in cluster.map.nodes

    # --- observations ------------------------------------------------------------------------

    async def probe(self, target: str) -> None:
        """Ask a role a valid question, as a driver would: dial, prove the role, ask.

        Raises:
            Violation: The role has ended, or no answer came within `PROBE_S`.
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
            text = f"{target} did not answer a valid driver in {PROBE_S:g} s: {error!r}"
            raise Violation("correct peers are answered", text)
        self._ledger.operations += 1

    async def _ask(self, node: Node, target: str) -> None:
        identity = Identity(role="driver", node=PROBER, incarnation=1)
        async with network_of(node).connect(
            self.cluster.address(target), identity, timeout_s=PROBE_S
        ) as link:
            await link.call(pack(GetStatistics(run="")), timeout_s=PROBE_S)


RULES = role_table()


class _Peer:
    """One hostile peer, for the duration of one fault."""

    def __init__(
        self, peers: HostilePeers, node: Node, target: str, dice: RandomStream, fault: Fault
    ) -> None:
        self._probe = peers.probe
        self._cluster = peers.cluster
        self._counts = peers.counts
        self._node = node
        self._target = target
        self._dice = dice
        self._amount = int(fault.amount)
        self._kind = fault.kind
        self._role = next(role for role, names in TARGETS.items() if target in names)
        self._as = dice.choose(SENDERS[self._role])
        self._network = network_of(node, token=_keys_of(self._as))
        self._session = int.from_bytes(node.entropy(7), "little")
        self._sent = 0

    def _identity(self) -> Identity:
        return Identity(role=self._as, node=self._node.name, incarnation=self._session)

    async def _dial(self) -> Link:
        return await self._network.dial(
            self._cluster.address(self._target), self._identity(), timeout_s=STRIKE_S / 2
        )

    async def _draw(self) -> list[BadMessage]:
        """Draw bad messages that may travel to the target."""
        map_session = await self._open_session() if self._role == "controller" else 1
        facts = facts_of(self._cluster, self._target, sender=self._identity(), map_session=map_session)
        pair = (self._as, self._role)
        examples = [one for one in valid_messages(facts) if pair in TABLE[type(one.body)]]
        found = [bad for bad in bad_messages(examples, meant=facts.meant()) if not is_poison(bad)]
        self._dice.shuffle(found)
        return [numbered(bad, number) for number, bad in enumerate(found[: self._amount], 1)]

    async def _open_session(self) -> int:
        """Return a session for numbered questions, which only the leader can open; 1 if none opened."""
        if self._dice.chance(LEADER_SHARE):
            self._target = self._cluster.leader or self._target
        link = await self._dial()
        try:
            opened = await link.call(pack(OpenSession()), timeout_s=ANSWER_S)
            return unpack(opened, SessionOpened).session
        except (RemoteError, CallTimeout, TransportError):
            return 1
        finally:
            link.abort()

    # --- bad fields --------------------------------------------------------------------------

    async def send_bad_fields(self) -> bool:
        """Send bad messages one after the other. Returns whether any left."""
        link = await self._dial()
        for bad in await self._draw():
            if link.closed:
                link = await self._dial()
            await self._send(link, bad)
        link.abort()
        return self._sent > 0

    async def burst(self) -> bool:
        """Send bad messages many at a time."""
        found = await self._draw()
        while found:
            now, found = found[:AT_ONCE], found[AT_ONCE:]
            link = await self._dial()
            async with asyncio.TaskGroup() as group:
                for bad in now:
                    group.create_task(self._send(link, bad), name=f"{self._node.name}/{bad.name}")
            link.abort()
        return self._sent > 0

    async def _send(self, link: Link, bad: BadMessage) -> None:
        """Send a bad message, and check its outcome."""
        try:
            self._sent += 1
            if bad.message.type in ONE_WAY:
                await link.send(bad.message)
                self._counts["said without an answer"] += 1
                return
            answer = await link.call(bad.message, timeout_s=ANSWER_S)
        except RemoteError as error:
            self._counts["refused"] += 1
            if error.code == "internal":
                text = f"{self._target} failed at {bad.name} of a {self._as}: {error}"
                raise Violation("no handler fails", text) from None
        except CallTimeout:
            self._counts["unanswered"] += 1
            if must_be_refused(bad):
                text = f"{self._target} kept {bad.name} of a {self._as} without an answer"
                raise Violation("bad fields are refused", text) from None
        except LocalProtocolError:
            self._sent -= 1
        except TransportError:
            self._counts["links closed"] += 1
        else:
            if bad.message.type == CompareAndSet.__name__ and not unpack_answer(answer).done:
                self._counts["refused"] += 1
                return
            self._counts["answered"] += 1
            if is_never_right(bad):
                text = f"{self._target} answered {bad.name} of a {self._as} with {answer!r}"
                raise Violation("bad fields are refused", text)

    async def send_one_way(self) -> bool:
        """Send messages without waiting for answers, then close the link."""
        found = await self._draw()
        if found and self._role in ONLY_SERVE:
            await self._send_one(found[0])
        link = await self._dial()
        for bad in found:
            if link.closed:
                self._counts["links closed"] += 1
                link = await self._dial()
            with suppress(WouldBlock, LocalProtocolError, TransportError):
                link.send_nowait(bad.message)
                self._sent += 1
        await asyncio.sleep(self._dice.between(0.0, 0.5))
        link.abort()
        return self._sent > 0

    async def _send_one(self, bad: BadMessage) -> None:
        """Send a message without an answer to a role that takes only requests; check that the link ends."""
        link = await self._dial()
        try:
            link.send_nowait(bad.message)
        except LocalProtocolError:
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                await link.wait_closed()
        except TimeoutError:
            text = f"{self._target} kept its link after the message {bad.name} of a {self._as}"
            raise Violation("a link that only serves takes no messages", text) from None
        finally:
            link.abort()

    # --- records and roles -------------------------------------------------------------------

    async def set_records_of_others(self) -> bool:
        """Try to set records of other roles in the map, each at its current version."""
        client = new_map_client(self._cluster, self._node, self._identity())
        for key, record in self._stolen(self._cluster.map)[:STOLEN]:
            self._sent += 1
            try:
                outcome = await client.compare_and_set(key, record.changed, record, timeout_s=ANSWER_S)
                if outcome.done:
                    raise Violation("records belong to their roles", f"a {self._as} has set {key}")
            except RemoteError:
                self._counts["records refused"] += 1
            except (TransportError, DeadlineExceeded):
                self._counts["links closed"] += 1
        client.close()
        return self._sent > 0

    def _stolen(self, cluster: ClusterMap) -> list[tuple[str, NodeRecord | ProgramRecord | EpochRecord]]:
        """Return keys that this role may not set, with values to try; first its own key, with a new role."""
        change = msgspec.structs.replace
        found: list[tuple[str, NodeRecord | ProgramRecord | EpochRecord]] = [
            (f"nodes/{name}", change(record, failed="stolen"))
            for name, record in cluster.nodes.items()
            if name != self._node.name
        ]
        if cluster.run is not None and self._as != "driver":
            found.append(("run", change(cluster.run, phase="failed", reason="stolen")))
        if cluster.epoch is not None and not cluster.epoch.ended:
            found.append(("epoch", change(cluster.epoch, ended=True)))
        self._dice.shuffle(found)
        membership = NodeRecord(role="", address=f"tcp://{self._node.name}:1", incarnation=self._session)
        own = cluster.nodes.get(self._node.name, membership)
        other = "worker" if self._as == "ps" else "ps"
        return [(f"nodes/{self._node.name}", change(own, role=other)), *found]

    async def claim_other_roles(self) -> bool:
        """Claim other roles than the role of the keys."""
        keys = _keys_of(self._as)
        for role in ROLES:
            if role != self._as and RULES.may_talk(role, self._role):
                await self._claim(role, RoleKeys(role, keys.keys))
        return self._sent > 0

    async def _claim(self, role: str, keys: RoleKeys) -> None:
        while True:
            wire = await dial_raw(*self._host_and_port())
            identity = Identity(role=role, node=self._node.name, incarnation=self._session)
            handshake = ClientHandshake(identity, token=keys, entropy=self._node.entropy, rules=RULES)
            try:
                self._sent += 1
                await wire.prove(handshake)
                raise Violation("keys prove one role", f"{self._target} takes a {self._as} for a {role}")
            except HandshakeRejected as error:
                if error.code == "token":
                    self._counts["claims refused"] += 1
                    return
            except (ConnectionError, ProtocolError):
                self._counts["links closed"] += 1
            finally:
                wire.close()
            await asyncio.sleep(0.2)

    async def push_for_others(self) -> bool:
        """Push in the session of a training worker or a store's client, under its next number."""
        self._as = self._dice.choose(["worker", "client"])
        self._network = network_of(self._node, token=_keys_of(self._as))
        for _ in range(MOST_PUSHES):
            push, zeros = next_push(
                self._cluster.servers[self._target], self._cluster.map, by_client=self._as == "client"
            )
            if push is None:
                await asyncio.sleep(HELD_S)
                continue
            self._sent += 1
            link = await self._dial()
            try:
                pushed = unpack(await link.call(pack(push, [zeros]), timeout_s=ANSWER_S), Pushed)
                text = f"{self._target} answered a push of another peer in session {push.session:x}: {pushed}"
                raise Violation("sessions belong to their workers", text)
            except (TransportError, CallTimeout):
                self._counts["pushes refused"] += 1
            finally:
                link.abort()
        return self._sent > 0

    async def attack_map(self) -> bool:
        """Abuse names, addresses or shares of the cluster map; see `hostile_members`."""
        return await ATTACKS[self._kind](HostileMembers(self._cluster, self._counts, self._node, self._dice))

    async def split_tables(self) -> bool:
        """Invent sessions, and push to some of a message's shards apart."""
        self._as = self._dice.choose(["worker", "client"])
        self._network = network_of(self._node, token=_keys_of(self._as))
        for _ in range(SPLIT_ROUNDS):
            served = self._cluster.servers[self._target].served.values()
            states = [each.state for each in served if bool(each.store.program) == (self._as == "worker")]
            first = 1 + self._dice.below(1 << 50)
            self._sent += 1 + await split_tables(self._dial, states, first, ANSWER_S)
            await asyncio.sleep(HELD_S)
        return self._sent > 0

    async def forge_groups(self) -> bool:
        """Name groups of images in pushes that may have none; see `hostile_groups`."""
        rounds = 0
        for _ in range(MOST_PUSHES):
            self._as = self._dice.choose(["worker", "worker", "client"])
            self._network = network_of(self._node, token=_keys_of(self._as))
            served = self._cluster.servers[self._target].served.values()
            states = [each.state for each in served if bool(each.store.program) == (self._as == "worker")]
            first, epoch = 1 + self._dice.below(1 << 50), self._cluster.map.epoch
            # None between two epochs, or if the server has no shard of these stores.
            sent = await forge_groups(self._dial, states, epoch, first=first, answer_s=ANSWER_S)
            self._sent, rounds = self._sent + sent, rounds + (sent > 0)
            if rounds == FORGE_ROUNDS:
                break
            await asyncio.sleep(HELD_S)
        self._counts["forged groups"] += self._sent
        return self._sent > 0

    # --- sockets -----------------------------------------------------------------------------

    async def hold_sockets(self) -> bool:
        """Keep sockets open that send nothing, too little or noise; dial each again when it closes.

        During the attack the target admits valid peers.
        """
        async with asyncio.TaskGroup() as group:
            holds = [
                group.create_task(self._hold_socket(number), name=f"{self._node.name}/socket-{number}")
                for number in range(self._amount)
            ]
            await asyncio.sleep(HELD_S)
            for _ in range(3):
                await self._probe(self._target)
            for hold in holds:
                hold.cancel()
        return self._sent > LINKS.max_unauthenticated

    async def _hold_socket(self, number: int) -> None:
        data = (b"", b"T", b"GET / HTTP/1.1\r\n")[number % 3]
        while True:
            wire = await dial_raw(*self._host_and_port())
            self._sent += 1
            try:
                while not wire.over:
                    wire.send(data)
                    await asyncio.sleep(HELD_S)
            finally:
                wire.close()

    async def read_nothing(self) -> bool:
        """Ask for large answers and read no answer."""
        host, port = self._host_and_port()
        self._as = "driver"

        def handshake() -> ClientHandshake:
            return ClientHandshake(
                self._identity(), token=_keys_of("driver"), entropy=self._node.entropy, rules=RULES
            )

        wire = await dial_authenticated(host, port, handshake, pause_s=0.2)
        wire.stop_reading()
        for number in range(1, self._amount + 1):
            wire.send(request_frame(number, self._large()))
        await self._probe(self._target)
        await asyncio.sleep(self._dice.between(0.5, 4.0))
        wire.close()
        return True

    def _large(self) -> Message:
        """Return a question with a large answer."""
        facts = facts_of(self._cluster, self._target, sender=self._identity(), map_session=1)
        if self._role == "ps":
            clock, shards = next_clock(self._cluster.servers[self._target])
            pull = Pull(
                store=facts.run, generation=facts.generation, shards=shards, clock=clock, wait_s=PROBE_S
            )
            return pack(pull)
        if self._role == "data":
            return pack(ReadTest(start=0, stop=360))
        if self._role == "controller":
            return pack(GetMap())
        return pack(GetStatistics(run=facts.run))

    def _host_and_port(self) -> tuple[str, int]:
        host, port = self._cluster.address(self._target).removeprefix("tcp://").split(":")
        return host, int(port)


def _keys_of(role: str) -> RoleKeys:
    return derive(TOKEN, role, ROLES, RULES)


async def _idle(node: Node) -> None:
    await asyncio.Event().wait()


KINDS: Mapping[str, Callable[[_Peer], Awaitable[bool]]] = {
    **{f"bad-{role}": _Peer.send_bad_fields for role in TARGETS},
    "burst": _Peer.burst,
    "one-way": _Peer.send_one_way,
    "steal": _Peer.set_records_of_others,
    "claim": _Peer.claim_other_roles,
    "speak": _Peer.push_for_others,
    "split": _Peer.split_tables,
    "forge": _Peer.forge_groups,
    "sockets": _Peer.hold_sockets,
    "deaf": _Peer.read_nothing,
    **dict.fromkeys(ATTACKS, _Peer.attack_map),
}
"""Actions of a hostile peer by kind of fault."""
