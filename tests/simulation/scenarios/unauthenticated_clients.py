"""Unauthenticated clients connect to a server, members break rules of the wire, and valid clients continue.

One machine serves three clients. The clients make calls with small and large arrays, some with buffers for
the answer, send messages without an answer, and make some invalid calls. Meanwhile two more machines connect
without the token, or prove it and break a rule (`hostile.py`), or send questions and never read. Faults cut
and reset the clients' links. The invariants: each answer belongs to its question. An unauthenticated client
is refused for the right reason, and a peer that breaks a rule loses its link for that rule. No valid client
loses a link for a rule. After the faults every client gets answers.

The valid clients use every kind of call and message, and follow the protocol.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulation.faults import Strike, strike_all
from tests.simulation.plan import Fault, Plan, draw_options, in_order
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Scenario, Violation, World, settle
from tests.simulation.scenarios import cluster
from tests.simulation.scenarios.cluster import TOKEN
from tests.simulation.scenarios.hostile import BREACHES, DEAF, FIRST, HANDSHAKES, MIB
from tests.simulation.scenarios.raw_wire import RawWire, dial_authenticated, dial_raw
from transport import (
    CallTimeout,
    DialFailed,
    HandshakeRejected,
    Identity,
    Link,
    LinkConfig,
    Message,
    ProtocolError,
    RemoteError,
    Request,
    RoleTable,
    TcpNetwork,
    TransportError,
    WouldBlock,
)
from transport.handshake import RECORD_BYTES, ClientHandshake
from transport.messages import Identity as Peer

ADDRESS, HOST, PORT = "tcp://server:1", "server", 1

RULES = RoleTable(
    {
        "echo": [("client", "server")],
        "echoed": [("server", "client")],
        "count": [("client", "server")],
        "note": [("client", "server"), ("server", "client")],
    }
)

KIB = 1 << 10
LINKS = LinkConfig(
    ping_every_s=0.5,
    dead_after_s=2.0,
    stalled_after_s=2.0,
    handshake_s=2.0,
    close_s=1.0,
    chunk_bytes=16 * KIB,
    high_water_bytes=64 * KIB,
    low_water_bytes=16 * KIB,
    inbox_messages=8,
    link_budget_bytes=256 * KIB,
    max_unauthenticated=8,
    max_requests=6,
)
"""Options of links with limits small enough that little traffic reaches all of them."""

CLIENTS = ("client-0", "client-1", "client-2")

SIZES = (0, 7, 500, 5_000, 20_000)
"""Sizes of an array, in numbers: none, one write, one frame, several frames."""

AT_ONCE = 8
"""Maximum number of a client's open questions: more than the server accepts."""

PAUSE_S = 0.06
"""Mean pause of a client between two questions, in seconds."""

ROOM_S = 5.0
"""Maximum time in seconds that a client waits for room on a link; a link without progress ends earlier."""


def network_of(node: Node, *, token: bytes | None = TOKEN, rules: RoleTable = RULES) -> TcpNetwork:
    """Make the network of one incarnation of a machine."""
    return cluster.network_of(node, token=token, rules=rules, links=LINKS)


class TransportClients:
    """The server and its clients.

    Attributes:
        ended: Broken rule for which each peer's last link ended; empty if it ended without one.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.answered = dict.fromkeys(CLIENTS, 0)
        self.ended: dict[str, str] = {}
        self._world = world
        self._ledger = ledger
        world.node(HOST).start(self._serve)
        for name in CLIENTS:
            world.node(name).start(self._ask)

    async def _serve(self, node: Node) -> None:
        identity = Identity(role="server", node=HOST, incarnation=node.incarnation)

        async def on_link(link: Link) -> None:
            """Answer the questions of a client, and return its notes, until the link ends."""
            name = link.peer.node
            async with asyncio.TaskGroup() as group:
                tasks: dict[asyncio.Task[None], None] = {}

                def begin(request: Request) -> None:
                    """Start the answer to one question."""
                    _check_question(request)
                    tasks[group.create_task(_answer(request), name=f"answer-{name}")] = None

                link.observe(self._count)
                link.serve(begin)
                try:
                    while True:
                        note = await link.receive()
                        await link.send(note)
                        await asyncio.sleep(0.01)
                except ProtocolError as error:
                    self._lost(name, error.rule)
                except TransportError:
                    self.ended[name] = ""
                for task in tasks:
                    task.cancel()

        async with network_of(node).listen(ADDRESS, identity, on_link):
            await asyncio.Event().wait()

    def _count(self, out: bool, message_type: str, payload_bytes: int, frame_bytes: int) -> None:
        self._ledger.counts["said" if out else "heard"] += 1

    def _lost(self, name: str, rule: str) -> None:
        if name in CLIENTS:
            raise Violation("correct clients stay", f"{name} lost its link for the rule {rule!r}")
        self.ended[name] = rule

    async def _ask(self, node: Node) -> None:
        identity = Identity(role="client", node=node.name, incarnation=node.incarnation)
        network, dice = network_of(node), self._world.dice.fork(node.name)
        while True:
            try:
                async with network.connect(ADDRESS, identity, timeout_s=10.0) as link:
                    while True:
                        await self._one(link, dice)
                        self.answered[node.name] += 1
                        self._ledger.operations += 1
                        await asyncio.sleep(dice.around(PAUSE_S))
            except RemoteError as error:
                if error.code != "busy":
                    raise
                self._ledger.counts["busy"] += 1
            except ProtocolError as error:
                raise Violation("correct clients stay", f"{node.name}: {error}") from None
            except (TransportError, DialFailed):
                await asyncio.sleep(0.1)

    async def _one(self, link: Link, dice: RandomStream) -> None:
        """Send one question of a random kind, and check the answer."""
        numbers = tuple(np.arange(dice.choose(SIZES), dtype=np.float32) for _ in range(1 + dice.below(2)))
        question = _numbered("echo", dice.below(1000), numbers)
        match dice.below(8):
            case 0:
                into = [np.empty_like(one) for one in numbers]
                _check(question, await link.call(question, timeout_s=4.0, into=into))
            case 2:
                few = dice.chance(0.3)
                carried = numbers[:1] if few else ()
                count = 1 + dice.below(6 if few else 20)
                notes = [_numbered("note", n, carried) for n in range(count)]
                for note in notes:
                    await _with_room(link.send(note))
                for note in notes:
                    _check(note, await link.receive())
            case 3:
                await self._at_once(link, numbers)
            case 4:
                await self._ask_and_listen(link, question)
            case 5:
                await _ask_without_answer(link)
            case _:
                try:
                    _check(question, await link.call(question, timeout_s=dice.choose([0.01, 4.0])))
                except CallTimeout:
                    self._ledger.counts["too late"] += 1

    async def _at_once(self, link: Link, numbers: tuple[NDArray[Any], ...]) -> None:
        """Send questions without waiting, until the link accepts no more."""
        questions = [_numbered("echo", n, numbers) for n in range(AT_ONCE)]
        calls: list[asyncio.Future[Message]] = []
        try:
            for question in questions:
                calls.append(link.call_nowait(question, timeout_s=4.0))  # noqa: PERF401 - keep the calls before an error
        except WouldBlock:
            self._ledger.counts["full"] += 1
            await _with_room(link.wait_writable())
            try:
                _check(questions[0], await link.call(questions[0], timeout_s=4.0))
            except CallTimeout:
                self._ledger.counts["too late"] += 1
        for question, call in zip(questions, calls, strict=False):
            _check(question, await call)

    async def _ask_and_listen(self, link: Link, question: Message) -> None:
        """Ask with a callback for the answer, and one for the release of the question's arrays."""
        answer: asyncio.Future[Message | TransportError] = asyncio.get_running_loop().create_future()

        fails = (
            _number_of(question) % 5 == 0 and sum(one.nbytes for one in question.tensors) > LINKS.chunk_bytes
        )

        def release() -> None:
            self._ledger.counts["let go"] += 1
            if fails:
                raise RuntimeError("the callback for released arrays failed: the link must go on")

        await _with_room(link.wait_writable())
        link.ask(question, answer.set_result, timeout_s=4.0, release=release)
        came = await answer
        if isinstance(came, TransportError):
            raise came
        _check(question, came)


def _numbered(name: str, number: int, tensors: tuple[NDArray[Any], ...]) -> Message:
    return Message(type=name, meta=str(number).encode(), tensors=tensors)


def _number_of(message: Message) -> int:
    return int(message.meta)


async def _with_room(wait: Awaitable[None]) -> None:
    """Wait for room on a link.

    Raises:
        Violation: Neither room nor the link's end came within `ROOM_S`.
    """
    try:
        async with asyncio.timeout(ROOM_S):
            await wait
    except TimeoutError:
        raise Violation("all are answered", f"a link gave no room for {ROOM_S:g} s") from None


async def _answer(request: Request) -> None:
    """Answer an `echo` with its content; refuse a `count` after a pause."""
    message = request.message
    if message.type == "echo":
        request.reply(Message(type="echoed", meta=message.meta, tensors=message.tensors))
        return
    await asyncio.sleep(0.2)
    request.fail("late", "nothing is counted here")


def _check_question(request: Request) -> None:
    """Raise ValueError for a negative number of items: the server's error must reach the client."""
    if request.message.type == "count" and _number_of(request.message) < 0:
        raise ValueError("the number of items must not be negative")


async def _ask_without_answer(link: Link) -> None:
    """Send a question at which the server fails, and one that it refuses; the link stays open."""
    for items, code in ((-1, "internal"), (1, "late")):
        try:
            await link.call(_numbered("count", items, ()), timeout_s=4.0)
        except RemoteError as error:
            if error.code != code:
                raise
        else:
            raise Violation("answers fit", "a question was answered that the server refuses")


def _check(question: Message, reply: Message) -> None:
    same = reply.meta == question.meta and all(map(np.array_equal, question.tensors, reply.tensors))
    if not same or len(question.tensors) != len(reply.tensors):
        raise Violation("answers fit", f"{question!r} was answered with {reply!r}")


OTHER_TOKEN = b"a token of some other cluster"

GHOSTS = RoleTable({"note": [("ghost", "server")]})
"""Rules of a client with a role that the server does not know."""

MACHINES = ("stranger-0", "stranger-1")
"""Machines of the unauthenticated clients."""

JOINER = "joiner"
"""Machine of the member that joins during a flood."""

STRIKE_S, SETTLED_S, TURNED_S = 20.0, 20.0, 12.0
"""Times in seconds: latest start of a fault, time limit for recovery, and longest stay of a bad client."""

FLOOD = LINKS.max_unauthenticated + 4
"""Number of simultaneous connections in a flood; a new one replaces each that closes."""

FLOODED_S, JOIN_S = 0.3, 2.0
"""Duration of a flood before a member joins, and time limit until the member has joined, in seconds."""

REFUSAL = 5
"""Kind of a refusal, among the records of a handshake."""

CHALLENGED = "record 2"
"""Reply of a server that continues with a handshake."""

LINK_KINDS = ("cut", "cut-one-way", "reset")
GUISES = ("guise-token", "guise-no-token", "guise-role")
"""Kinds of clients that run the shipped code with a wrong token or role."""

KINDS_HERE = (*HANDSHAKES, "knock-crowd", "knock-flood", *GUISES, *BREACHES, "breach-half", "breach-deaf")


def draw_plan(dice: RandomStream) -> Plan:
    """Draw each kind of bad client and fault once, and some more."""
    kinds = [*UNAUTHENTICATED.kinds, *(dice.choose(UNAUTHENTICATED.kinds) for _ in range(dice.below(4)))]
    return Plan(options=draw_options(dice, {}), faults=in_order([_draw_fault(dice, kind) for kind in kinds]))


def _draw_fault(dice: RandomStream, kind: str) -> Fault:
    at_s, lasts_s, amount = dice.between(1.0, STRIKE_S), 0.0, 0.0
    targets: tuple[str, ...] = (dice.choose(MACHINES),)
    if kind in LINK_KINDS:
        ends = [dice.choose(CLIENTS), HOST]
        dice.shuffle(ends)
        targets = (ends[0], ends[1])
        if kind != "reset":
            lasts_s, amount = dice.between(1.0, 5.0), float(dice.below(2))
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


def _reply_code(reply: bytes) -> str:
    """Return a refusal's code, or another record's kind; empty without a reply."""
    if 0 < len(reply) < RECORD_BYTES:
        return f"{len(reply)} bytes"
    if reply and reply[10] != REFUSAL:
        return f"record {reply[10]}"
    return reply[12:28].rstrip(b"\0").decode()


class _Run:
    """One run."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.world = world
        self.ledger = ledger
        self.breakers = self.joined = 0
        self.clients = TransportClients(world, ledger)
        for name in (*MACHINES, JOINER):
            world.node(name).start(self._idle)

    # --- bad clients ---------------------------------------------------------------------------

    async def _idle(self, node: Node) -> None:
        await asyncio.Event().wait()

    async def strike(self, world: World, fault: Fault) -> None:
        """Run a bad client until the server refuses it."""
        node = world.nodes[fault.targets[0]]
        kind = fault.kind
        if kind in HANDSHAKES:
            work = self._connect(node, kind)
        elif kind == "knock-crowd":
            work = self._crowd(node)
        elif kind == "knock-flood":
            work = self._flood(node)
        elif kind in GUISES:
            work = self._in_guise(node, kind)
        else:
            self.breakers += 1
            work = self._break_rule(node, kind, f"breaker-{self.breakers}")
        task = world.loop.spawn(work, f"{node.name}/{kind}", node.host.context.copy())
        done, _ = await asyncio.wait([task], timeout=TURNED_S)
        if not done:
            task.cancel()
            raise Violation(
                "unauthenticated clients are refused", f"{kind}: still there after {TURNED_S:g} s"
            )
        task.result()

    async def _connect(self, node: Node, kind: str) -> None:
        wire = await dial_raw(HOST, PORT)
        wire.send(HANDSHAKES[kind].data)
        code = _reply_code(await wire.until(RECORD_BYTES))
        if kind == "knock-proof" and code == CHALLENGED:
            code = _reply_code(await wire.until(RECORD_BYTES))
        self._check_code(kind, code, HANDSHAKES[kind].code)
        if await wire.until(1):
            raise Violation("unauthenticated clients are refused", f"{kind}: got more bytes after {code!r}")
        wire.close()

    def _check_code(self, kind: str, code: str, expected: str) -> None:
        if code != expected:
            raise Violation("unauthenticated clients are refused", f"{kind}: got {code!r}, not {expected!r}")
        self.ledger.counts["refused" if code else "hung up on"] += 1

    async def _crowd(self, node: Node) -> None:
        wires = [await dial_raw(HOST, PORT) for _ in range(2 * LINKS.max_unauthenticated)]
        codes = [_reply_code(await wire.until(RECORD_BYTES)) for wire in wires]
        if "crowded" not in codes or set(codes) - {"crowded", "late"}:
            raise Violation("unauthenticated clients are refused", f"a crowd got {codes}")
        for wire in wires:
            wire.close()

    async def _flood(self, node: Node) -> None:
        """Open connections without a proof repeatedly, until a member has joined during the flood."""
        joiner = self.world.nodes[JOINER]
        async with asyncio.TaskGroup() as group:
            floods = [
                group.create_task(
                    self._renew(HANDSHAKES[kind].data[:RECORD_BYTES]), name=f"{node.name}/{kind}"
                )
                for kind in ("knock-silent", "knock-half", "knock-proof")
                for _ in range(FLOOD // 3)
            ]
            await asyncio.sleep(FLOODED_S)
            await self.world.loop.spawn(self._join(joiner), f"{JOINER}/join", joiner.host.context.copy())
            for flood in floods:
                flood.cancel()

    async def _renew(self, data: bytes) -> None:
        while True:
            wire = await dial_raw(HOST, PORT)
            try:
                wire.send(data)
                await wire.until(MIB)  # its end
            finally:
                wire.close()

    async def _join(self, node: Node) -> None:
        self.joined += 1
        identity = Identity(role="client", node=f"{JOINER}-{self.joined}", incarnation=1)
        try:
            async with network_of(node).connect(ADDRESS, identity, timeout_s=JOIN_S):
                self.ledger.counts["joined beside a flood"] += 1
        except DialFailed as error:
            raise Violation("members join beside a flood", str(error)) from None

    async def _in_guise(self, node: Node, kind: str) -> None:
        token = {"guise-token": OTHER_TOKEN, "guise-no-token": None}.get(kind, TOKEN)
        ghost = kind == "guise-role"
        network = network_of(node, token=token, rules=GHOSTS if ghost else RULES)
        identity = Identity(role="ghost" if ghost else "client", node=node.name, incarnation=1)
        try:
            async with network.connect(ADDRESS, identity, timeout_s=TURNED_S / 2):
                raise Violation("unauthenticated clients are refused", f"{kind}: was admitted")
        except HandshakeRejected as error:
            self._check_code(kind, error.code, "role" if ghost else "token")

    async def _break_rule(self, node: Node, kind: str, name: str) -> None:
        """Prove the token, break a rule, and check that the link ends for that rule."""
        peer = Peer(role="client", node=name, incarnation=1)

        def handshake() -> ClientHandshake:
            return ClientHandshake(peer, token=TOKEN, entropy=node.entropy, rules=RULES)

        wire = await dial_authenticated(HOST, PORT, handshake, pause_s=0.5)
        await self._send_breach(wire, kind, name)

    async def _send_breach(self, wire: RawWire, kind: str, name: str) -> None:
        rule = ""
        if kind == "breach-deaf":
            wire.stop_reading()
            wire.send(DEAF)
        elif kind == "breach-half":
            wire.send(FIRST)
            await asyncio.sleep(0.5)
            wire.close()
        else:
            rule = BREACHES[kind].rule
            wire.send(BREACHES[kind].data)
        while True:
            await asyncio.sleep(0.05)
            if name in self.clients.ended:
                break
        if self.clients.ended[name] != rule:
            raise Violation(
                "who breaks a rule is shown out",
                f"{kind} lost its link for {self.clients.ended[name]!r}, not {rule!r}",
            )
        self.ledger.counts["shown out"] += 1
        wire.close()

    # --- the end -------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Check that every client gets a further answer."""
        answered = self.clients.answered
        before = dict(answered)

        def unanswered() -> str:
            return ", ".join(name for name in CLIENTS if answered[name] == before[name])

        await settle(self.world, unanswered, within_s=SETTLED_S, invariant="all are answered")


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Carry out a plan."""
    current = _Run(world, ledger)
    own: dict[str, Strike] = dict.fromkeys(KINDS_HERE, current.strike)
    await strike_all(world, plan.faults, ledger, own=own)
    await asyncio.sleep(max(0.0, STRIKE_S - world.now))
    await current.settle()


UNAUTHENTICATED = Scenario(
    name="strangers",
    about="unauthenticated clients connect, members break rules of the wire, and valid clients get answers",
    kinds=(*KINDS_HERE, *LINK_KINDS),
    least_operations=200,
    limit_s=300.0,
    marks=("busy", "full", "hung up on", "joined beside a flood", "let go", "too late"),
    plan=draw_plan,
    run=run,
)
