"""A server on the shipped transport, and clients that use every kind of call and message.

The clients follow the protocol. Despite other clients, each answer belongs to its question, and no client
loses its link for a broken rule.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.runtime.random_streams import RandomStream
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.scenario import Ledger, Violation
from transport import (
    BufferPool,
    CallTimeout,
    DialFailed,
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

ADDRESS, HOST, PORT = "tcp://server:1", "server", 1
TOKEN = b"a token of the simulated cluster"

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
"""Maximum number of open questions of a client: more than the server accepts."""

PAUSE_S = 0.06
"""Mean pause of a client between two questions, in seconds."""

ROOM_S = 5.0
"""Maximum time that a client waits for room on a link, in seconds; a link without progress ends earlier."""


def network_of(node: Node, *, token: bytes | None = TOKEN, rules: RoleTable = RULES) -> TcpNetwork:
    """Make the network of one incarnation of a machine."""
    return TcpNetwork(token=token, entropy=node.entropy, rules=rules, config=LINKS, pool=BufferPool())


class TransportClients:
    """The server and its clients.

    Attributes:
        ended: Broken rule for which the last link of each peer ended; empty if it ended without one.
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
        Violation: Neither room nor the end of the link came within `ROOM_S`.
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
