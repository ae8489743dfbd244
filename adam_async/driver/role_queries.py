"""A driver's queries to a role: its counts, its profile, and a bundle's log for a replay."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

import numpy as np
from msgspec import UNSET

from adam_async.messages import (
    GetProfile,
    GetRecord,
    GetStatistics,
    Profile,
    RecordPart,
    Statistics,
    pack,
    read_text_tensor,
    unpack,
)
from adam_async.messages.body import MOST_PROFILE_BYTES, MOST_STATISTICS_BYTES
from adam_async.parameter_server.replay_log import MOST_PACKED_BYTES
from adam_async.run.config import Waits
from adam_async.run.counts import ROLES, ControllerCounts, Counts, StoreCounts
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.trace_events import Part
from transport import Link, Message, RemoteProtocolError, TransportError

PROFILE_CHUNK = 50_000
"""Number of profile events that one message requests; the answer has about 6 MB."""

MOST_PROFILE_EVENTS = 1 << 20
"""Maximum number of profile events from one role: over three times a timeline's default capacity."""

RECORD_CHUNK = 4 << 20
"""Size of the part of a replay log in one message, in bytes."""


class RoleQueries:
    """Queries, each over its own link, because roles come and go.

    Args:
        endpoint: The driver's end of the links; queries for counts add to its traffic.
    """

    def __init__(self, endpoint: Endpoint, *, waits: Waits) -> None:
        self.endpoint = endpoint
        self._waits = waits

    async def statistics(self, address: str, run: str, *, dial_s: float | None = None) -> Counts:
        """Return the counts of the role at an address.

        Args:
            dial_s: Deadline of the connection in seconds; None: the deadline of any peer.

        Raises:
            TransportError: The role was unreachable, did not answer, or sent invalid counts.
            ValueError: The address is of no network that the driver has.
        """
        timeout_s = self._waits.dial_s if dial_s is None else dial_s
        async with self.endpoint.connected(address, timeout_s=timeout_s) as link:
            reply = await link.call(pack(GetStatistics(run=run)), timeout_s=self._waits.call_s)
            sender = _check_sender(reply, link)
            kind = ROLES.get(sender.role, Counts)
            counts: Counts = read_text_tensor(reply, kind, MOST_STATISTICS_BYTES)
            if counts.node != sender.node or counts.traffic is UNSET:
                raise RemoteProtocolError(
                    "statistics", f"the counts of {sender.node} lack their traffic, or are of {counts.node!r}"
                )
            return counts

    async def store_counts(self, address: str, store: str) -> StoreCounts:
        """Return a store's counts, by its id, from the server at an address; see `statistics`."""
        async with self.endpoint.connected(address, timeout_s=self._waits.dial_s) as link:
            reply = await link.call(pack(GetStatistics(run=store)), timeout_s=self._waits.call_s)
            _check_sender(reply, link)
            counts: StoreCounts = read_text_tensor(reply, StoreCounts, MOST_STATISTICS_BYTES)
            return counts

    async def answers(
        self,
        addresses: Iterable[tuple[str, str]],
        run: str,
        *,
        within_s: float | None = None,
        dial_s: float | None = None,
        on_silence: Callable[[str], None] = lambda _: None,
    ) -> dict[str, Counts]:
        """Return the counts of the roles that answer, by node id; all requests are sent at once.

        Args:
            addresses: Node id and address of each role; an empty id for a controller, whose id may be
                unknown.
            within_s: Seconds for each role to connect and to answer; None: the deadlines of `statistics`.
            dial_s: See `statistics`.
            on_silence: Called for each role that did not answer.
        """

        async def ask(node: str, address: str) -> Counts | None:
            """Return the counts of one role, if it answers in time."""
            try:
                async with asyncio.timeout(within_s):
                    statistics = await self.statistics(address, run, dial_s=dial_s)
                # A node listens under any name that it likes.
                if not (statistics.node == node if node else isinstance(statistics, ControllerCounts)):
                    raise RemoteProtocolError("statistics", f"{statistics.node} answers for {node or 'it'}")
            except (TransportError, TimeoutError, ValueError) as error:
                # A node may publish an invalid address, or one that others reach over another network.
                on_silence(f"the role at {address} did not report its counts: {error}")
                return None
            return statistics

        asker = self.endpoint.identity.node
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(ask(node, address), name=f"{asker}/asks-{node or address}")
                for node, address in addresses
            ]
        return {each.node: each for task in asking if (each := task.result()) is not None}

    def _uncounted(self, address: str) -> AbstractAsyncContextManager[Link]:
        """Return a link for the duration of one block; its bytes do not count in the driver's traffic."""
        endpoint = self.endpoint
        return endpoint.network.connect(address, endpoint.identity, timeout_s=self._waits.dial_s)

    async def profile(self, address: str) -> list[Part]:
        """Return the profile of the role at an address.

        Raises:
            TransportError: The role was unreachable, did not answer, or sent other events than requested.
        """
        parts: list[Part] = []
        have, total = 0, 1
        async with self._uncounted(address) as link:
            while have < total:
                ask = pack(GetProfile(start=have, stop=have + PROFILE_CHUNK))
                reply = await link.call(ask, timeout_s=self._waits.call_s)
                total = unpack(reply, Profile).total
                part = read_text_tensor(reply, Part, MOST_PROFILE_BYTES)
                events = len(part.events)
                if total > MOST_PROFILE_EVENTS or events != min(total - have, PROFILE_CHUNK):
                    raise RemoteProtocolError("profile", f"{events} events after {have} of {total}")
                parts.append(part)
                have += PROFILE_CHUNK  # an answer with fewer events is the last one
        return parts

    async def record(self, address: str, run: str, home: str) -> bytes:
        """Return the replay log that the server at an address has for a bundle of a run.

        Raises:
            TransportError: The server was unreachable, did not answer, or has no log of this bundle.
        """
        parts: list[bytes] = []
        have, total = 0, 1
        async with self._uncounted(address) as link:
            while have < total:
                ask = pack(GetRecord(run=run, home=home, start=have, stop=have + RECORD_CHUNK))
                reply = await link.call(ask, timeout_s=self._waits.call_s)
                total = unpack(reply, RecordPart).total
                if len(reply.tensors) != 1 or reply.tensors[0].dtype != np.uint8:
                    raise RemoteProtocolError("tensors", "RecordPart must carry one tensor of bytes")
                part = reply.tensors[0].tobytes()
                if total > MOST_PACKED_BYTES or len(part) != min(total - have, RECORD_CHUNK):
                    text = f"{len(part)} bytes after {have} of {total} in a record"
                    raise RemoteProtocolError("tensors", text)
                parts.append(part)
                have += len(part)
        return b"".join(parts)


def _check_sender(reply: Message, link: Link) -> Statistics:
    """Return the head of counts. Raises RemoteProtocolError: the counts are another node's."""
    sender = unpack(reply, Statistics)
    if (sender.node, sender.role) != (link.peer.node, link.peer.role):
        raise RemoteProtocolError("statistics", f"{link.peer} sent those of {sender.role} {sender.node}")
    return sender
