"""Peers that hold the keys of a role and abuse names, addresses and shares of the cluster map.

Each attack has its own correct parties, which join from the hostile peer's machine: a client whose loss must
be noticed, or an operator with a driver's keys. The hostile members do not belong to the run, which
continues.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from adam_async.controller.map_client import MapClient
from adam_async.messages import ROLES
from adam_async.messages.table import role_table
from adam_async.model.rules import Sgd
from adam_async.run.cluster_map import NodeRecord
from adam_async.run.store_record import ArrayRecord, StoreRecord, cut_arrays
from adam_async.runtime.traffic import Traffic
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Node, Violation
from tests.simulation.scenarios.cluster import TOKEN, WAITS, Cluster, network_of
from transport import Identity, RemoteError
from transport.keys import derive

LOST_S = 20.0
"""Time limit in seconds of an answer, and of the report of a loss."""

TRIES, PAUSE_S = 20, 0.3
"""Number of attempts to set a record, and the pause between them in seconds: the leader may change."""

MOST_STORES = 64
"""Number of stores that a cluster takes from one client."""

LEFT_PIECES = 3
"""Number of array list pieces that a client leaves without a store."""

BAD_ADDRESSES = (
    *("tcp://a..b:1", f"tcp://{'a' * 64}:1", f"tcp://{'a.' * 200}b:1", "tcp://a\0b:1", "tcp://[::1:1"),
    *("tcp://u@h:1", "tcp://h:0", "tcp://h:65536", "tcp://0.0.0.0:1", "ftp://h:1", "tcp:// h:1", ""),
)
"""Addresses that no role can dial."""

RULES = role_table()


class HostileMembers:
    """Attacks of one machine on the cluster map.

    Args:
        cluster: The attacked cluster.
        counts: Counts of the messages' outcomes.
        node: Machine of the hostile peer, and of an attack's correct parties.
        dice: Source of all choices.
    """

    def __init__(self, cluster: Cluster, counts: Counter[str], node: Node, dice: RandomStream) -> None:
        self._cluster = cluster
        self._counts = counts
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
        lost.close()
        for _ in range(int(LOST_S / PAUSE_S)):
            await asyncio.sleep(PAUSE_S)
            if not self._cluster.map.nodes[client.node].live:
                held.close()
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
        client = await self._dial(driver)
        if refusal := await self._set(client, f"nodes/{name}", _record(driver)):
            raise Violation("a name serves its role", f"{driver} cannot join after {squatter}: {refusal}")
        await self._leave(client, driver)
        held.close()
        return True

    async def name_bad_address(self) -> bool:
        """Join under addresses that no role can dial."""
        peer = Identity(
            role=self._dice.choose(["worker", "ps"]),
            node=f"free-{self._own}",
            incarnation=self._incarnation(),
        )
        client = await self._dial(peer)
        for address in BAD_ADDRESSES:
            record = msgspec.structs.replace(_record(peer), address=address)
            if not await self._set(client, f"nodes/{peer.node}", record):
                raise Violation("addresses can be dialled", f"{peer} has joined at {address[:80]!r}")
            self._counts["addresses refused"] += 1
        client.close()
        return True

    async def fill_map(self) -> bool:
        """Create as many stores as possible, leave lists of arrays behind, and join with a large record."""
        creator = Identity(role="client", node=f"client-{self._own}", incarnation=self._incarnation())
        reader = Identity(role="reader", node=f"reader-{self._own}", incarnation=self._incarnation())
        client = await self._dial(reader)
        large = msgspec.structs.replace(_record(reader), info={"text": "x" * (20 << 10)})
        if not await self._set(client, f"nodes/{reader.node}", large):
            raise Violation("the map has shares", f"{reader} has a record of 20 KiB")
        client.close()
        client = await self._join(creator)
        created: list[str] = []
        for number in range(MOST_STORES + 1):
            name = f"{creator.node}-{number}"
            if refusal := await self._create(client, creator.node, name):
                self._counts["stores refused"] += 1
                break
            created.append(name)
        for name in created[MOST_STORES:]:
            raise Violation(
                "the map has shares", f"{creator} has created more than {MOST_STORES} stores: {name}"
            )
        if len(created) < MOST_STORES and "clients have" not in refusal:
            raise Violation("a client has its share", f"{creator} has {len(created)} stores: {refusal}")
        for name in created:
            await self._set(
                client, f"stores/{name}", msgspec.structs.replace(_store(name, ""), phase="deleted")
            )
        await self._leave_pieces(client, creator)
        return True

    async def _leave_pieces(self, client: MapClient, creator: Identity) -> None:
        """Leave array list pieces without a store; they leave the map with their creator."""
        for number in range(LEFT_PIECES):
            arrays = [ArrayRecord("w" * 1000 + str(row), (4,)) for row in range(40)]
            (piece,) = cut_arrays(f"{creator.node}-left", arrays, creator=creator.node)
            await self._set(client, f"stores/{creator.node}-left/{number}", piece)
        await self._leave(client, creator)
        if left := [key for key, piece in self._cluster.map.arrays.items() if piece.creator == creator.node]:
            raise Violation("the map has shares", f"{creator} has left {', '.join(left)} behind")

    # --- parties -----------------------------------------------------------------------------

    def _incarnation(self) -> int:
        return int.from_bytes(self._node.entropy(7), "little")

    async def _dial(self, identity: Identity) -> MapClient:
        """Return a client of the map with a link to the leader."""
        client = new_map_client(self._cluster, self._node, identity)
        await client.get(timeout_s=LOST_S)
        return client

    async def _join(self, identity: Identity) -> MapClient:
        client = await self._dial(identity)
        if refusal := await self._set(client, f"nodes/{identity.node}", _record(identity)):
            raise Violation("correct peers are answered", f"{identity} cannot join: {refusal}")
        return client

    async def _leave(self, client: MapClient, identity: Identity) -> None:
        gone = msgspec.structs.replace(_record(identity), live=False, left=True)
        await self._set(client, f"nodes/{identity.node}", gone)
        client.close()

    async def _create(self, client: MapClient, creator: str, name: str) -> str:
        """Create a store of one number, which waits for more servers than there are."""
        (piece,) = cut_arrays(name, [ArrayRecord("w", (1,))], creator=creator)
        return await self._set(client, f"stores/{name}/0", piece) or await self._set(
            client, f"stores/{name}", _store(name, creator)
        )

    async def _set(self, client: MapClient, key: str, record: msgspec.Struct) -> str:
        """Set a record at its present version; return the refusal, empty if the record is set."""
        problem = ""
        for _ in range(TRIES):
            try:
                outcome = await client.compare_and_set(
                    key, self._cluster.map.version_of(key), record, timeout_s=LOST_S
                )
                if outcome.done:
                    return ""
                problem = "its version is another one"
            except RemoteError as error:
                problem = str(error)
                if error.code in ("invalid", "forbidden"):
                    return problem
            await asyncio.sleep(PAUSE_S)
        return problem


def new_map_client(cluster: Cluster, node: Node, identity: Identity) -> MapClient:
    """Make a client of the map that has the keys of its role alone."""
    return MapClient(
        network=network_of(node, token=derive(TOKEN, identity.role, ROLES, RULES)),
        controllers=",".join(cluster.addresses.values()),
        identity=identity,
        waits=WAITS,
        traffic=Traffic(identity.node),
    )


def _record(identity: Identity) -> NodeRecord:
    return NodeRecord(role=identity.role, address="", incarnation=identity.incarnation)


def _store(name: str, creator: str) -> StoreRecord:
    return StoreRecord(
        id=name,
        creator=creator,
        rules=(Sgd(rate=0.1),),
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
