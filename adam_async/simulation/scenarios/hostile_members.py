"""Peers that hold the keys of a role and abuse names, addresses and shares of the cluster map.

Each attack has correct parties of its own, which join from the machine of the hostile peer: a client whose
loss must be noticed, or an operator with a driver's keys. They are strangers to the run, which goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from adam_async.controller.leader_connection import unpack_answer
from adam_async.messages import ROLES, CompareAndSet, OpenSession, SessionOpened, pack, text_tensor, unpack
from adam_async.messages.table import role_table
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.store_record import ArrayRecord, RuleRecord, StoreRecord, cut_arrays
from adam_async.runtime.random_streams import RandomStream
from adam_async.simulation.nodes import Node
from adam_async.simulation.scenario import Violation
from adam_async.simulation.scenarios.training_cluster import TOKEN, network_of
from transport import CallTimeout, Identity, Link, RemoteError, TransportError
from transport.keys import derive

ANSWER_S, LOST_S = 3.0, 20.0
"""Time limits of an answer, and of the report of a loss, in seconds."""

TRIES, PAUSE_S = 20, 0.3
"""Number of attempts to set a record, and the pause between them, in seconds: the leader may change."""

MOST_STORES = 64
"""Number of stores that a cluster takes from one client."""

LEFT_PIECES = 3
"""Number of pieces of lists of arrays that a client leaves without a store."""

BAD_ADDRESSES = (
    *("tcp://a..b:1", f"tcp://{'a' * 64}:1", f"tcp://{'a.' * 200}b:1", "tcp://a\0b:1", "tcp://[::1:1"),
    *("tcp://u@h:1", "tcp://h:0", "tcp://h:65536", "tcp://0.0.0.0:1", "ftp://h:1", "tcp:// h:1", ""),
)
"""Addresses that no role can dial."""

RULES = role_table()


class Cluster(Protocol):
    """The cluster, as its hostile peers see it."""

    @property
    def map(self) -> ClusterMap:
        """The newest cluster map."""
        ...

    @property
    def leader(self) -> str:
        """The leader of the controllers; empty if there is none."""
        ...

    @property
    def group(self) -> str:
        """Name of the group of controllers."""
        ...

    def address(self, target: str) -> str:
        """Return the address of a role."""
        ...

    def count(self, what: str) -> None:
        """Count the outcome of a message."""
        ...


class HostileMembers:
    """Attacks of one machine on the cluster map.

    Args:
        cluster: The attacked cluster.
        node: Machine of the hostile peer, and of the correct parties of an attack.
        dice: Source of all choices.
    """

    def __init__(self, cluster: Cluster, node: Node, dice: RandomStream) -> None:
        self._cluster = cluster
        self._node = node
        self._dice = dice
        self._own = f"{node.name}-{dice.below(1 << 30):x}"
        """Text that makes the names of this attack unique."""

    async def hide_loss(self) -> bool:
        """Keep a link under the name and incarnation of a client that is lost."""
        client = Identity(role="client", node=f"client-{self._own}", incarnation=self._incarnation())
        cover = Identity(role="reader", node=client.node, incarnation=client.incarnation)
        lost = await self._join(client)
        held = await self._dial(cover)
        lost.abort()
        for _ in range(int(LOST_S / PAUSE_S)):
            await asyncio.sleep(PAUSE_S)
            if not self._cluster.map.nodes[client.node].live:
                held.abort()
                return True
        raise Violation(
            "a lost node is noticed", f"{client.node} is lost for {LOST_S:g} s, and {cover} hides it"
        )

    async def use_up_name(self) -> bool:
        """Join under a name that a driver needs, and leave or stay."""
        name = self._dice.choose([f"driver-{self._own}", f"free-{self._own}"])
        squatter = Identity(
            role=self._dice.choose(["client", "reader"]), node=name, incarnation=self._incarnation()
        )
        held = await self._join(squatter)
        if self._dice.chance(0.5):
            await self._leave(held, squatter)
        driver = Identity(role="driver", node=name, incarnation=self._incarnation())
        link = await self._dial(driver)
        if refusal := await self._set(link, f"nodes/{name}", _record(driver)):
            raise Violation("a name serves its role", f"{driver} cannot join after {squatter}: {refusal}")
        await self._leave(link, driver)
        held.abort()
        return True

    async def name_bad_address(self) -> bool:
        """Join under addresses that no role can dial."""
        peer = Identity(
            role=self._dice.choose(["worker", "ps"]),
            node=f"free-{self._own}",
            incarnation=self._incarnation(),
        )
        link = await self._dial(peer)
        for address in BAD_ADDRESSES:
            record = msgspec.structs.replace(_record(peer), address=address)
            if not await self._set(link, f"nodes/{peer.node}", record):
                raise Violation("addresses can be dialled", f"{peer} has joined at {address[:80]!r}")
            self._cluster.count("addresses refused")
        link.abort()
        return True

    async def fill_map(self) -> bool:
        """Create as many stores as possible, leave lists of arrays behind, and join with a large record."""
        client = Identity(role="client", node=f"client-{self._own}", incarnation=self._incarnation())
        reader = Identity(role="reader", node=f"reader-{self._own}", incarnation=self._incarnation())
        link = await self._dial(reader)
        large = msgspec.structs.replace(_record(reader), info={"text": "x" * (20 << 10)})
        if not await self._set(link, f"nodes/{reader.node}", large):
            raise Violation("the map has shares", f"{reader} has a record of 20 KiB")
        link.abort()
        link = await self._join(client)
        created: list[str] = []
        for number in range(MOST_STORES + 1):
            name = f"{client.node}-{number}"
            if refusal := await self._create(link, client.node, name):
                self._cluster.count("stores refused")
                break
            created.append(name)
        for name in created[MOST_STORES:]:
            raise Violation(
                "the map has shares", f"{client} has created more than {MOST_STORES} stores: {name}"
            )
        if len(created) < MOST_STORES and "clients have" not in refusal:
            raise Violation("a client has its share", f"{client} has {len(created)} stores: {refusal}")
        for name in created:
            await self._set(
                link, f"stores/{name}", msgspec.structs.replace(_store(name, ""), phase="deleted")
            )
        await self._leave_pieces(link, client)
        return True

    async def _leave_pieces(self, link: Link, client: Identity) -> None:
        """Leave pieces of lists of arrays without a store; they leave the map with their creator."""
        for number in range(LEFT_PIECES):
            arrays = [ArrayRecord("w" * 1000 + str(row), (4,)) for row in range(40)]
            (piece,) = cut_arrays(f"{client.node}-left", arrays, creator=client.node)
            await self._set(link, f"stores/{client.node}-left/{number}", piece)
        await self._leave(link, client)
        if left := [key for key, piece in self._cluster.map.arrays.items() if piece.creator == client.node]:
            raise Violation("the map has shares", f"{client} has left {', '.join(left)} behind")

    # --- parties -----------------------------------------------------------------------------

    def _incarnation(self) -> int:
        return int.from_bytes(self._node.entropy(7), "little")

    async def _dial(self, identity: Identity) -> Link:
        """Return a link to the leader."""
        network = network_of(self._node, token=derive(TOKEN, identity.role, ROLES, RULES))
        for _ in range(TRIES):
            if self._cluster.leader:
                break
            await asyncio.sleep(PAUSE_S)
        address = self._cluster.address(self._cluster.leader)
        return await network.dial(address, identity, timeout_s=LOST_S)

    async def _join(self, identity: Identity) -> Link:
        link = await self._dial(identity)
        if refusal := await self._set(link, f"nodes/{identity.node}", _record(identity)):
            raise Violation("correct peers are answered", f"{identity} cannot join: {refusal}")
        return link

    async def _leave(self, link: Link, identity: Identity) -> None:
        gone = msgspec.structs.replace(_record(identity), live=False, left=True)
        await self._set(link, f"nodes/{identity.node}", gone)
        link.abort()

    async def _create(self, link: Link, creator: str, name: str) -> str:
        """Create a store of one number, which waits for more servers than there are."""
        (piece,) = cut_arrays(name, [ArrayRecord("w", (1,))], creator=creator)
        return await self._set(link, f"stores/{name}/0", piece) or await self._set(
            link, f"stores/{name}", _store(name, creator)
        )

    async def _set(self, link: Link, key: str, record: msgspec.Struct) -> str:
        """Set a record at its present version; return the refusal, empty if the record is set."""
        problem = ""
        for _ in range(TRIES):
            cluster = self._cluster.map
            try:
                opened = await link.call(pack(OpenSession()), timeout_s=ANSWER_S)
                body = CompareAndSet(
                    key=key,
                    expected=cluster.version_of(key),
                    session=unpack(opened, SessionOpened).session,
                    number=1,
                    after=cluster.version,
                    group=self._cluster.group,
                )
                answer = await link.call(pack(body, [text_tensor(record)]), timeout_s=ANSWER_S)
                if unpack_answer(answer).done:
                    return ""
                problem = "its version is another one"
            except RemoteError as error:
                if error.code in ("invalid", "forbidden"):
                    return str(error)
                problem = str(error)
            except (TransportError, CallTimeout) as error:
                problem = str(error)
            await asyncio.sleep(PAUSE_S)
        return problem


def _record(identity: Identity) -> NodeRecord:
    return NodeRecord(role=identity.role, address="", incarnation=identity.incarnation)


def _store(name: str, creator: str) -> StoreRecord:
    return StoreRecord(
        id=name,
        creator=creator,
        rules=(RuleRecord(rule="sgd", rate=0.1),),
        arrays=1,
        nbytes=4,
        state_arrays=0,
        pieces=1,
        shard_bytes=16,
        servers=64,
    )


ATTACKS: Mapping[str, Callable[[HostileMembers], Awaitable[bool]]] = {
    "cover": HostileMembers.hide_loss,
    "squat": HostileMembers.use_up_name,
    "address": HostileMembers.name_bad_address,
    "fill": HostileMembers.fill_map,
}
"""Attacks on the cluster map, by kind of fault."""
