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

from adam_async.runtime.random_streams import Dice
from adam_async.simulation.faults import Strike, strike_all
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault, Plan, draw_options, in_order
from adam_async.simulation.scenario import Ledger, Scenario, Violation
from adam_async.simulation.scenarios.hostile import BREACHES, DEAF, FIRST, HANDSHAKES, MIB
from adam_async.simulation.scenarios.raw_wire import RawWire, dial_raw
from adam_async.simulation.scenarios.transport_clients import (
    ADDRESS,
    CLIENTS,
    HOST,
    LINKS,
    PORT,
    RULES,
    TOKEN,
    TransportClients,
    network_of,
)
from transport import DialFailed, HandshakeRejected, Identity, RoleTable
from transport.handshake import RECORD_BYTES, ClientHandshake
from transport.messages import Identity as Peer

OTHER_TOKEN = b"a token of some other cluster"

GHOSTS = RoleTable({"note": [("ghost", "server")]})
"""What those believe who have nothing to say here."""

MACHINES = ("stranger-0", "stranger-1")
JOINER = "joiner"
"""Machine of the member that joins beside a flood."""

STRIKE_S, SETTLED_S, TURNED_S = 20.0, 20.0, 12.0
"""Until when faults strike; so long after the last one all are answered; so long a stranger stays at most."""

FLOOD = LINKS.max_unauthenticated + 4
"""Number of simultaneous connections of a flood; each connects again as soon as it closes."""

FLOODED_S, JOIN_S = 0.3, 2.0
"""Seconds of a flood before a member joins, and the maximum seconds until it has joined."""

REFUSAL = 5
"""Kind of the record that refuses."""

CHALLENGED = "record 2"
"""What is heard of a port that goes on with a handshake."""

LINK_KINDS = ("cut", "cut-one-way", "reset")
GUISES = ("guise-token", "guise-no-token", "guise-role")
"""Shipped code with what it should not have."""

KINDS_HERE = (*HANDSHAKES, "knock-crowd", "knock-flood", *GUISES, *BREACHES, "breach-half", "breach-deaf")


def draw_plan(dice: Dice) -> Plan:
    """Draw each kind of stranger and fault once, and some more."""
    kinds = [*UNAUTHENTICATED.kinds, *(dice.choose(UNAUTHENTICATED.kinds) for _ in range(dice.below(4)))]
    return Plan(options=draw_options(dice, {}), faults=in_order([_draw_fault(dice, kind) for kind in kinds]))


def _draw_fault(dice: Dice, kind: str) -> Fault:
    at_s, lasts_s, amount = dice.between(1.0, STRIKE_S), 0.0, 0.0
    targets: tuple[str, ...] = (dice.choose(MACHINES),)
    if kind in LINK_KINDS:
        ends = [dice.choose(CLIENTS), HOST]
        dice.shuffle(ends)
        targets = (ends[0], ends[1])
        if kind != "reset":
            lasts_s, amount = dice.between(1.0, 5.0), float(dice.below(2))
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


def _told(heard: bytes) -> str:
    """What a port has said: the code of a refusal, or which other record; empty only if not a byte came."""
    if 0 < len(heard) < RECORD_BYTES:
        return f"{len(heard)} bytes"
    if heard and heard[10] != REFUSAL:
        return f"record {heard[10]}"
    return heard[12:28].rstrip(b"\0").decode()


class _Run:
    """One run."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.world = world
        self.ledger = ledger
        self.breakers = self.joined = 0
        self.clients = TransportClients(world, ledger)
        for name in (*MACHINES, JOINER):
            world.node(name).start(self._idle)

    # --- strangers -----------------------------------------------------------------------------

    async def _idle(self, node: Node) -> None:
        await asyncio.Event().wait()

    async def strike(self, world: World, fault: Fault) -> None:
        """Be a stranger, until turned away."""
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
            raise Violation("strangers are turned away", f"{kind}: still there after {TURNED_S:g} s")
        task.result()

    async def _connect(self, node: Node, kind: str) -> None:
        wire = await dial_raw(HOST, PORT)
        wire.say(HANDSHAKES[kind].says)
        told = _told(await wire.until(RECORD_BYTES))
        if kind == "knock-proof" and told == CHALLENGED:
            told = _told(await wire.until(RECORD_BYTES))
        self._check_code(kind, told, HANDSHAKES[kind].code)
        if await wire.until(1):
            raise Violation("strangers are turned away", f"{kind}: was told more after {told!r}")
        wire.close()

    def _check_code(self, kind: str, code: str, expected: str) -> None:
        if code != expected:
            raise Violation("strangers are turned away", f"{kind}: was told {code!r}, not {expected!r}")
        self.ledger.counts["refused" if code else "hung up on"] += 1

    async def _crowd(self, node: Node) -> None:
        wires = [await dial_raw(HOST, PORT) for _ in range(2 * LINKS.max_unauthenticated)]
        codes = [_told(await wire.until(RECORD_BYTES)) for wire in wires]
        if "crowded" not in codes or set(codes) - {"crowded", "late"}:
            raise Violation("strangers are turned away", f"a crowd was told {codes}")
        for wire in wires:
            wire.close()

    async def _flood(self, node: Node) -> None:
        """Open connections without a proof repeatedly, until a member has joined beside them."""
        joiner = self.world.nodes[JOINER]
        async with asyncio.TaskGroup() as group:
            floods = [
                group.create_task(
                    self._renew(HANDSHAKES[kind].says[:RECORD_BYTES]), name=f"{node.name}/{kind}"
                )
                for kind in ("knock-silent", "knock-half", "knock-proof")
                for _ in range(FLOOD // 3)
            ]
            await asyncio.sleep(FLOODED_S)
            await self.world.loop.spawn(self._join(joiner), f"{JOINER}/join", joiner.host.context.copy())
            for flood in floods:
                flood.cancel()

    async def _renew(self, says: bytes) -> None:
        while True:
            wire = await dial_raw(HOST, PORT)
            try:
                wire.say(says)
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
                raise Violation("strangers are turned away", f"{kind}: was let in")
        except HandshakeRejected as error:
            self._check_code(kind, error.code, "role" if ghost else "token")

    async def _break_rule(self, node: Node, kind: str, name: str) -> None:
        """Be let in, break a rule, and see the link end for it."""
        while True:
            wire = await dial_raw(HOST, PORT)
            handshake = ClientHandshake(
                Peer(role="client", node=name, incarnation=1), token=TOKEN, entropy=node.entropy, rules=RULES
            )
            try:
                await wire.prove(handshake)
                break
            except (HandshakeRejected, ConnectionError, ValueError):
                wire.close()
                await asyncio.sleep(0.5)
        await self._say_and_see(wire, kind, name)

    async def _say_and_see(self, wire: RawWire, kind: str, name: str) -> None:
        rule = ""
        if kind == "breach-deaf":
            wire.stop_reading()
            wire.say(DEAF)
        elif kind == "breach-half":
            wire.say(FIRST)
            await asyncio.sleep(0.5)
            wire.close()
        else:
            rule = BREACHES[kind].rule
            wire.say(BREACHES[kind].says)
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
        """See that everybody is answered once more."""
        answered = self.clients.answered
        before, by = dict(answered), self.world.now + SETTLED_S
        while any(answered[name] == before[name] for name in CLIENTS):
            if self.world.now > by:
                raise Violation("all are answered", f"{SETTLED_S:g} s after the last fault: {answered}")
            await asyncio.sleep(0.05)


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Go through a plan."""
    current = _Run(world, ledger)
    own: dict[str, Strike] = dict.fromkeys(KINDS_HERE, current.strike)
    await strike_all(world, plan.faults, ledger, own=own)
    await asyncio.sleep(max(0.0, STRIKE_S - world.now))
    await current.settle()


UNAUTHENTICATED = Scenario(
    name="strangers",
    about="strangers knock, members break rules of the wire, links break, and the honest are answered",
    kinds=(*KINDS_HERE, *LINK_KINDS),
    least_operations=200,
    limit_s=300.0,
    marks=("busy", "full", "hung up on", "joined beside a flood", "let go", "too late"),
    plan=draw_plan,
    run=run,
)
