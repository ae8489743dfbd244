"""Strangers knock at a port of the cluster, members break the rules of the wire, and the others go on.

One machine serves, three ask: calls with small and large arrays, some of them into memory of their own,
streams, messages that nobody answers, and now and then what cannot be said or answered. Meanwhile two more
machines knock without the token, or are let in and say what nobody may say (`hostile.py`), or ask and never
read; and links of the honest are cut and reset.
What must hold: each answer is that of its question, each stream has no gap; who knocks is refused for the
right reason, and who breaks a rule loses the link for that rule; nobody honest loses one so; and when all is
over everybody is answered.
"""

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.simulation.dice import Dice
from adam_async.simulation.faults import Strike, strike_all
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault, Plan, draw_options, in_order
from adam_async.simulation.scenario import Ledger, Scenario, Violation
from adam_async.simulation.scenarios.hostile import BREACHES, DEAF, FIRST, KNOCKS
from transport import (
    BufferPool,
    CallTimeout,
    DialFailed,
    HandshakeRejected,
    Identity,
    Link,
    LinkConfig,
    LocalProtocolError,
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
TOKEN, OTHER_TOKEN = b"a token of the simulated cluster", b"a token of some other cluster"

RULES = RoleTable(
    {
        "echo": [("client", "server")],
        "echoed": [("server", "client")],
        "count": [("client", "server")],
        "item": [("server", "client")],
        "note": [("client", "server"), ("server", "client")],
    }
)
GHOSTS = RoleTable({"note": [("ghost", "server")]})
"""What those believe who have nothing to say here."""

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
    max_unsent_reply_bytes=256 * KIB,
    max_unauthenticated=8,
    max_requests=6,
)
"""Small, so that a little traffic comes to every limit."""

CLIENTS = ("client-0", "client-1", "client-2")
SERVED_FOREVER = "client-0"
"""Whose requests the link itself starts tasks for."""

STRANGERS = ("stranger-0", "stranger-1")

SIZES = (0, 7, 500, 5_000, 20_000)
"""Numbers in an array: none, one write, one frame, several frames."""

AT_ONCE = 8
"""Questions that one asks before the first answer has come, at most: more than the other side takes."""

CANNOT_TRAVEL: tuple[tuple[str, Any], ...] = (
    ("tensor-dtype", [1.0]),
    ("tensor-dtype", np.zeros(2, np.complex64)),
    ("tensor-layout", np.zeros((2, 2), np.float32)[:, :1]),
    ("tensor-dims", np.zeros((1,) * 9, np.float32)),
    ("message-size", np.empty(LINKS.max_message_bytes + 1, np.uint8)),
)
"""What is no array for the wire, and the rule by which our own side refuses it."""

STRIKE_S, SETTLED_S, TURNED_S = 20.0, 20.0, 12.0
"""Until when faults strike; so long after the last one all are answered; so long a stranger stays at most."""

REFUSAL = 5
"""Kind of the record that refuses."""

CHALLENGED = "record 2"
"""What is heard of a port that goes on with a handshake."""

AGAIN_S = 0.5
"""Pause of a stranger that was sent away because of others."""

PAUSE_S = 0.06
"""Mean pause of a client between two questions."""

LINK_KINDS = ("cut", "cut-one-way", "reset")
GUISES = ("guise-token", "guise-no-token", "guise-role")
"""Shipped code with what it should not have."""

KINDS_HERE = (*KNOCKS, "knock-crowd", *GUISES, *BREACHES, "breach-half", "breach-deaf")


def draw_plan(dice: Dice) -> Plan:
    """Draw each kind of stranger and fault once, and some more."""
    kinds = [*STRANGE.kinds, *(dice.choose(STRANGE.kinds) for _ in range(dice.below(4)))]
    return Plan(options=draw_options(dice, {}), faults=in_order([_draw_fault(dice, kind) for kind in kinds]))


def _draw_fault(dice: Dice, kind: str) -> Fault:
    at_s, lasts_s, amount = dice.between(1.0, STRIKE_S), 0.0, 0.0
    targets: tuple[str, ...] = (dice.choose(STRANGERS),)
    if kind in LINK_KINDS:
        ends = [dice.choose(CLIENTS), HOST]
        dice.shuffle(ends)
        targets = (ends[0], ends[1])
        if kind != "reset":
            lasts_s, amount = dice.between(1.0, 5.0), float(dice.below(2))
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


class _Wire(asyncio.Protocol):
    """A connection without any protocol: what came, and whether it is over."""

    def __init__(self) -> None:
        self.came = bytearray()
        self.over = self.was_reset = False
        self.news = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.came += data
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.over, self.was_reset = True, exc is not None
        self.news.set()

    def say(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    async def until(self, count: int) -> bytes:
        """Wait for so many bytes, or the end; return and forget them."""
        while len(self.came) < count and not self.over:
            self.news.clear()
            await self.news.wait()
        taken, self.came = bytes(self.came[:count]), self.came[count:]
        return taken

    async def record(self) -> bytes:
        """Wait for a record of a handshake. Raises ConnectionError if the end comes before it."""
        record = await self.until(RECORD_BYTES)
        if len(record) < RECORD_BYTES:
            raise ConnectionError("the port hung up")
        return record

    def hang_up(self) -> None:
        assert self.transport is not None
        self.transport.abort()


async def _dial() -> _Wire:
    """Connect, however often it takes."""
    while True:
        with suppress(OSError):
            _, wire = await asyncio.get_running_loop().create_connection(_Wire, HOST, PORT)
            return wire
        await asyncio.sleep(0.2)


def _told(heard: bytes) -> str:
    """What a port has said: the code of a refusal, or which other record; empty only if not a byte came."""
    if 0 < len(heard) < RECORD_BYTES:
        return f"{len(heard)} bytes"
    if heard and heard[10] != REFUSAL:
        return f"record {heard[10]}"
    return heard[12:28].rstrip(b"\0").decode()


class _Story:
    """One run."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.world = world
        self.ledger = ledger
        self.ended: dict[str, str] = {}
        """By breaker's name: the rule for which its link ended, empty if for none."""
        self.answered = dict.fromkeys(CLIENTS, 0)
        self.breakers = 0
        world.node(HOST).start(self._serve)
        for name in CLIENTS:
            world.node(name).start(self._ask)
        for name in STRANGERS:
            world.node(name).start(self._idle)

    def _network(self, node: Node, *, token: bytes | None = TOKEN, rules: RoleTable = RULES) -> TcpNetwork:
        return TcpNetwork(token=token, entropy=node.entropy, rules=rules, config=LINKS, pool=BufferPool())

    # --- the honest ----------------------------------------------------------------------------

    async def _serve(self, node: Node) -> None:
        identity = Identity(role="server", node=HOST, incarnation=node.life)

        async def on_link(link: Link) -> None:
            name = link.peer.node
            async with asyncio.TaskGroup() as group:
                tasks: dict[asyncio.Task[None], None] = {}

                def begin(request: Request) -> None:
                    _check_question(request)
                    tasks[group.create_task(_answer(request), name=f"answer-{name}")] = None

                link.observe(self._count)
                if name in SERVED_FOREVER:
                    tasks[group.create_task(link.serve_forever(_answer), name=f"serve-{name}")] = None
                else:
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

        async with self._network(node).listen(ADDRESS, identity, on_link):
            await asyncio.Event().wait()

    def _count(self, out: bool, message_type: str, payload_bytes: int, frame_bytes: int) -> None:
        self.ledger.counts["said" if out else "heard"] += 1

    def _lost(self, name: str, rule: str) -> None:
        if name in CLIENTS:
            raise Violation("the honest stay", f"{name} lost its link for the rule {rule!r}")
        self.ended[name] = rule

    async def _ask(self, node: Node) -> None:
        identity = Identity(role="client", node=node.name, incarnation=node.life)
        network, dice = self._network(node), self.world.dice.fork(node.name)
        while True:
            try:
                async with network.connect(ADDRESS, identity, timeout_s=10.0) as link:
                    while True:
                        await self._one(link, dice)
                        self.answered[node.name] += 1
                        self.ledger.operations += 1
                        await asyncio.sleep(dice.around(PAUSE_S))
            except RemoteError as error:
                if error.code != "busy":
                    raise
                self.ledger.counts["busy"] += 1
            except ProtocolError as error:
                raise Violation("the honest stay", f"{node.name}: {error}") from None
            except (TransportError, DialFailed):
                await asyncio.sleep(0.1)

    async def _one(self, link: Link, dice: Dice) -> None:
        """Ask one thing, in one of the ways there are, and look at the answer."""
        numbers = tuple(np.arange(dice.choose(SIZES), dtype=np.float32) for _ in range(1 + dice.below(2)))
        question = Message(type="echo", meta={"n": dice.below(1000)}, tensors=numbers)
        match dice.below(9):
            case 6:
                await _say_what_cannot_be_said(link, question)
            case 0:
                into = [np.empty_like(one) for one in numbers]
                _check(question, await link.call(question, timeout_s=4.0, into=into))
            case 1:
                items = dice.below(200)
                leaves = dice.chance(0.2)
                stream = link.stream(Message(type="count", meta={"items": items}), timeout_s=4.0)
                seen = 0
                async for item in stream:
                    if item.meta["n"] != seen:
                        raise Violation("streams have no gap", f"item {item.meta['n']} came after {seen}")
                    seen += 1
                    if leaves and seen > items // 2:
                        await stream.aclose()
                        return
                if seen != items:
                    raise Violation("streams have no gap", f"{seen} of {items} items came")
            case 2:
                few = dice.chance(0.3)
                carried = numbers[:1] if few else ()
                count = 1 + dice.below(6 if few else 20)
                notes = [Message(type="note", meta={"n": n}, tensors=carried) for n in range(count)]
                for note in notes:
                    await link.send(note)
                for note in notes:
                    _check(note, await link.receive())
            case 3:
                await self._at_once(link, numbers)
            case 4:
                await self._ask_and_listen(link, question)
            case 5:
                await _ask_what_nobody_answers(link)
            case _:
                try:
                    _check(question, await link.call(question, timeout_s=dice.choose([0.01, 4.0])))
                except CallTimeout:
                    self.ledger.counts["too late"] += 1

    async def _at_once(self, link: Link, numbers: tuple[NDArray[Any], ...]) -> None:
        """Ask one thing after the other, until the link takes no more."""
        questions = [Message(type="echo", meta={"n": n}, tensors=numbers) for n in range(AT_ONCE)]
        calls: list[asyncio.Future[Message]] = []
        try:
            for question in questions:
                calls.append(link.call_nowait(question, timeout_s=4.0))  # noqa: PERF401 - what was asked counts
        except WouldBlock:
            self.ledger.counts["full"] += 1
            try:
                _check(questions[0], await link.call(questions[0], timeout_s=4.0))
            except CallTimeout:
                self.ledger.counts["too late"] += 1
        for question, call in zip(questions, calls, strict=False):
            _check(question, await call)

    async def _ask_and_listen(self, link: Link, question: Message) -> None:
        """Ask with a callback, and be told when nobody looks at the arrays of the question any more."""
        answer: asyncio.Future[Message | TransportError] = asyncio.get_running_loop().create_future()

        fails = (
            question.meta["n"] % 5 == 0 and sum(one.nbytes for one in question.tensors) > LINKS.chunk_bytes
        )

        def let_go() -> None:
            self.ledger.counts["let go"] += 1
            if fails:
                raise RuntimeError(
                    "who was told that arrays are free has failed: that is no matter of the link"
                )

        await link.wait_writable()
        link.ask(question, answer.set_result, timeout_s=4.0, release=let_go)
        came = await answer
        if isinstance(came, TransportError):
            raise came
        _check(question, came)

    # --- strangers -----------------------------------------------------------------------------

    async def _idle(self, node: Node) -> None:
        await asyncio.Event().wait()

    async def strike(self, world: World, fault: Fault) -> None:
        """Be a stranger, until turned away."""
        node = world.nodes[fault.targets[0]]
        kind = fault.kind
        if kind in KNOCKS:
            work = self._knock(node, kind)
        elif kind == "knock-crowd":
            work = self._crowd(node)
        elif kind in GUISES:
            work = self._in_guise(node, kind)
        else:
            self.breakers += 1
            work = self._break_rule(node, kind, f"breaker-{self.breakers}")
        task = world.loop.spawn(work, f"{node.name}/{kind}", node.host.context.copy())
        done, _ = await asyncio.wait([task], timeout=TURNED_S)
        if not done:
            task.cancel()
            raise Violation("strangers are turned away", f"{kind}: still there after {TURNED_S:g} s")
        task.result()

    async def _knock(self, node: Node, kind: str) -> None:
        expected = KNOCKS[kind].code
        while True:
            wire = await _dial()
            wire.say(KNOCKS[kind].says)
            told = _told(await wire.until(RECORD_BYTES))
            if kind == "knock-proof" and told == CHALLENGED:
                told = _told(await wire.until(RECORD_BYTES))
            # Whoever is sent away before it was read is reset, and may lose the word about it.
            crowded_out = told == "crowded" or (wire.was_reset and not told and expected)
            if not crowded_out:
                break
            await self._leave_crowd(wire)
        self._check_code(kind, told, expected)
        if await wire.until(1):
            raise Violation("strangers are turned away", f"{kind}: was told more after {told!r}")
        wire.hang_up()

    async def _leave_crowd(self, wire: _Wire | None = None) -> None:
        """Go, and say nothing for a while: who is sent away because of others learns nothing about itself."""
        if wire is not None:
            wire.hang_up()
        self.ledger.counts["crowded out"] += 1
        await asyncio.sleep(AGAIN_S)

    def _check_code(self, kind: str, code: str, expected: str) -> None:
        if code != expected:
            raise Violation("strangers are turned away", f"{kind}: was told {code!r}, not {expected!r}")
        self.ledger.counts["refused" if code else "hung up on"] += 1

    async def _crowd(self, node: Node) -> None:
        wires = [await _dial() for _ in range(2 * LINKS.max_unauthenticated)]
        codes = [_told(await wire.until(RECORD_BYTES)) for wire in wires]
        if "crowded" not in codes or set(codes) - {"crowded", "late"}:
            raise Violation("strangers are turned away", f"a crowd was told {codes}")
        for wire in wires:
            wire.hang_up()

    async def _in_guise(self, node: Node, kind: str) -> None:
        token = {"guise-token": OTHER_TOKEN, "guise-no-token": None}.get(kind, TOKEN)
        ghost = kind == "guise-role"
        network = self._network(node, token=token, rules=GHOSTS if ghost else RULES)
        identity = Identity(role="ghost" if ghost else "client", node=node.name, incarnation=1)
        while True:
            try:
                async with network.connect(ADDRESS, identity, timeout_s=TURNED_S / 2):
                    raise Violation("strangers are turned away", f"{kind}: was let in")
            except HandshakeRejected as error:
                if error.code != "crowded":
                    self._check_code(kind, error.code, "role" if ghost else "token")
                    return
            await self._leave_crowd()

    async def _break_rule(self, node: Node, kind: str, name: str) -> None:
        """Be let in, break a rule, and see the link end for it."""
        while True:
            wire = await _dial()
            handshake = ClientHandshake(
                Peer(role="client", node=name, incarnation=1), token=TOKEN, entropy=node.entropy, rules=RULES
            )
            wire.say(handshake.hello())
            try:
                wire.say(handshake.receive(await wire.record()))
                handshake.receive(await wire.record())
                break
            except (HandshakeRejected, ConnectionError, ValueError):
                wire.hang_up()
                await asyncio.sleep(0.5)
        await self._say_and_see(wire, kind, name)

    async def _say_and_see(self, wire: _Wire, kind: str, name: str) -> None:
        rule = ""
        if kind == "breach-deaf":
            assert wire.transport is not None
            wire.transport.pause_reading()
            wire.say(DEAF)
        elif kind == "breach-half":
            wire.say(FIRST)
            await asyncio.sleep(0.5)
            wire.hang_up()
        else:
            rule = BREACHES[kind].rule
            wire.say(BREACHES[kind].says)
        while True:
            await asyncio.sleep(0.05)
            if name in self.ended:
                break
        if self.ended[name] != rule:
            raise Violation(
                "who breaks a rule is shown out",
                f"{kind} lost its link for {self.ended[name]!r}, not {rule!r}",
            )
        self.ledger.counts["shown out"] += 1
        wire.hang_up()

    # --- the end -------------------------------------------------------------------------------

    async def settle(self) -> None:
        """See that everybody is answered once more."""
        before, by = dict(self.answered), self.world.now + SETTLED_S
        while any(self.answered[name] == before[name] for name in CLIENTS):
            if self.world.now > by:
                raise Violation("all are answered", f"{SETTLED_S:g} s after the last fault: {self.answered}")
            await asyncio.sleep(0.05)


async def _answer(request: Request) -> None:
    """Send back what came, or as many items as were asked for."""
    _check_question(request)
    message = request.message
    if message.type == "echo":
        request.reply(Message(type="echoed", meta=message.meta, tensors=message.tensors))
        return
    if not request.streaming:
        await asyncio.sleep(0.2)
        request.fail("stream", "items come as a stream")
        return
    with suppress(TransportError):  # whoever asked may have gone
        for number in range(message.meta["items"]):
            await request.send(Message(type="item", meta={"n": number}))
        request.end()


def _check_question(request: Request) -> None:
    """Raise ValueError where less than nothing is asked for: an error of who serves is told to who asks."""
    if request.message.meta.get("items", 0) < 0:
        raise ValueError("there are no fewer items than none")


async def _say_what_cannot_be_said(link: Link, question: Message) -> None:
    """Be refused by our own side, or told that who serves has failed; the link lives on."""
    for rule, tensor in CANNOT_TRAVEL:
        try:
            await link.call(Message(type="echo", tensors=(tensor,)), timeout_s=4.0)
        except LocalProtocolError as error:
            if error.rule != rule:
                raise
        else:
            raise Violation("answers fit", f"what breaks the rule {rule!r} has travelled")
    try:
        await link.call(question, timeout_s=4.0, into=[np.empty(3, np.float16)])
    except LocalProtocolError as error:
        if error.rule != "into":
            raise
    nonsense = Message(type="count", meta={"items": -1})
    try:
        await link.call(nonsense, timeout_s=4.0)
    except RemoteError as error:
        if error.code != "internal":
            raise
    try:
        async for item in link.stream(nonsense, timeout_s=4.0):
            raise Violation("answers fit", f"{nonsense!r} was answered with {item!r}")
    except RemoteError as error:
        if error.code != "internal":
            raise


async def _ask_what_nobody_answers(link: Link) -> None:
    """Say what nobody may say here, and ask in a way in which it is not answered."""
    try:
        await link.call(Message(type="item"), timeout_s=4.0)
    except LocalProtocolError as error:
        if error.rule != "role":
            raise
    try:
        await link.call(Message(type="count", meta={"items": 1}), timeout_s=4.0)
    except RemoteError as error:
        if error.code != "stream":
            raise
    else:
        raise Violation("answers fit", "a call was answered as if it were a stream")


def _check(question: Message, reply: Message) -> None:
    same = reply.meta == question.meta and all(map(np.array_equal, question.tensors, reply.tensors))
    if not same or len(question.tensors) != len(reply.tensors):
        raise Violation("answers fit", f"{question!r} was answered with {reply!r}")


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Go through a plan."""
    story = _Story(world, ledger)
    own: dict[str, Strike] = dict.fromkeys(KINDS_HERE, story.strike)
    await strike_all(world, plan.faults, ledger, own=own)
    await asyncio.sleep(max(0.0, STRIKE_S - world.now))
    await story.settle()


STRANGE = Scenario(
    name="strangers",
    about="strangers knock, members break rules of the wire, links break, and the honest are answered",
    kinds=(*KINDS_HERE, *LINK_KINDS),
    least_operations=200,
    limit_s=300.0,
    marks=("busy", "crowded out", "full", "hung up on", "let go", "too late"),
    plan=draw_plan,
    run=run,
)
