"""What a driver asks any role: how it is doing, and what it noted for the profile or for a replay."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from adam_async.driver.count_types import check_counted
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
from adam_async.messages.bounds import MOST_PROFILE_BYTES, MOST_STATISTICS_BYTES
from adam_async.run.config import Waits
from adam_async.runtime.trace_events import Part
from adam_async.runtime.traffic import Traffic
from transport import Identity, Network, RemoteProtocolError, TransportError

PROFILE_CHUNK = 50_000
"""Events of a profile read in one message: about 6 MB."""

MOST_PROFILE_EVENTS = 1 << 20
"""Maximum number of events of one role: three times what a timeline has room for."""

RECORD_CHUNK = 4 << 20
"""Bytes of a record read in one message."""

MOST_RECORD_BYTES = 4 << 30
"""Maximum size of what one role noted for a replay, in bytes."""


class Inquiries:
    """Asks over a link of its own each time; roles come and go.

    Args:
        network: How to reach the roles.
        identity: Who we are; role ``driver``.
        waits: Deadlines.
        traffic: Where links that ask for statistics are counted.
    """

    def __init__(self, *, network: Network, identity: Identity, waits: Waits, traffic: Traffic) -> None:
        self._network = network
        self._identity = identity
        self._waits = waits
        self._traffic = traffic

    async def statistics(
        self, address: str, run: str, *, dial_s: float | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The id of the node at an address, and what it counted, with its role.

        Args:
            address: Where it is.
            run: Whose counts.
            dial_s: How long it may take to reach it; without it as long as any peer.

        Raises:
            TransportError: It cannot be reached, or did not answer.
            ValueError: The cluster map has no address of this network for it.
        """
        timeout_s = self._waits.dial_s if dial_s is None else dial_s
        async with self._network.connect(address, self._identity, timeout_s=timeout_s) as link:
            self._traffic.watch(link)
            try:
                reply = await link.call(pack(GetStatistics(run=run)), timeout_s=self._waits.call_s)
            finally:
                self._traffic.gone(link)
            told = unpack(reply, Statistics)
            if (told.node, told.role) != (link.peer.node, link.peer.role):
                raise RemoteProtocolError("statistics", f"{link.peer} gave those of {told.role} {told.node}")
            values = read_text_tensor(reply, dict[str, Any], MOST_STATISTICS_BYTES)
            check_counted(values, told.role)
            return told.node, {**values, "role": told.role}

    async def all_statistics(
        self,
        addresses: Iterable[str],
        run: str,
        *,
        on_silence: Callable[[str], None],
        dial_s: float | None = None,
    ) -> dict[str, dict[str, Any]]:
        """What each node counted, by its id; `on_silence` is told of those that did not answer."""
        found: dict[str, dict[str, Any]] = {}
        for address in addresses:
            try:
                node, values = await self.statistics(address, run, dial_s=dial_s)
                found[node] = values
            except (TransportError, ValueError) as error:  # one that others reach in a way that we cannot
                on_silence(f"the role at {address} did not say what it counted: {error}")
        return found

    async def answers(
        self, addresses: Mapping[str, str], run: str, *, within_s: float
    ) -> dict[str, dict[str, Any]]:
        """What each node counted that says so in time; all are asked at once, so none delays another.

        Args:
            addresses: By node id.
            run: Whose counts.
            within_s: Seconds for each to be reached and to answer.
        """
        found: dict[str, dict[str, Any]] = {}

        async def ask(node: str, address: str) -> None:
            try:
                async with asyncio.timeout(within_s):
                    name, values = await self.statistics(address, run)
            except (TransportError, TimeoutError, ValueError):  # a node may name an address that is none
                return
            if name == node:
                found[node] = values

        async with asyncio.TaskGroup() as group:
            for node, address in addresses.items():
                group.create_task(ask(node, address), name=f"{self._identity.node}/asks-{node}")
        return {node: found[node] for node in addresses if node in found}

    async def all_profiles(
        self, addresses: Iterable[str], *, on_silence: Callable[[str], None]
    ) -> list[Part]:
        """What roles in other processes noted; `on_silence` is told of those that did not answer."""
        found: list[Part] = []
        for address in addresses:
            try:
                found += await self.profile(address)
            except (TransportError, ValueError) as error:
                on_silence(f"the role at {address} did not say what it noted: {error}")
        return found

    async def profile(self, address: str) -> list[Part]:
        """What the role at an address noted.

        Raises:
            TransportError: It cannot be reached, did not answer, or sent other events than asked for.
        """
        parts: list[Part] = []
        have, total = 0, 1
        async with self._network.connect(address, self._identity, timeout_s=self._waits.dial_s) as link:
            while have < total:
                ask = pack(GetProfile(start=have, stop=have + PROFILE_CHUNK))
                reply = await link.call(ask, timeout_s=self._waits.call_s)
                total = unpack(reply, Profile).total
                part = read_text_tensor(reply, Part, MOST_PROFILE_BYTES)
                events = len(part.events)
                if total > MOST_PROFILE_EVENTS or events != min(total - have, PROFILE_CHUNK):
                    raise RemoteProtocolError("profile", f"{events} events after {have} of {total}")
                parts.append(part)
                have += PROFILE_CHUNK  # not fewer: a role notes each answer as an event, too
        return parts

    async def record(self, address: str, run: str) -> bytes:
        """What the server or worker at an address noted for a replay of a run.

        Raises:
            TransportError: It cannot be reached, did not answer, or keeps no record of this run.
        """
        parts: list[bytes] = []
        have, total = 0, 1
        async with self._network.connect(address, self._identity, timeout_s=self._waits.dial_s) as link:
            while have < total:
                ask = pack(GetRecord(run=run, start=have, stop=have + RECORD_CHUNK))
                reply = await link.call(ask, timeout_s=self._waits.call_s)
                total = unpack(reply, RecordPart).total
                if len(reply.tensors) != 1 or reply.tensors[0].dtype != np.uint8:
                    raise RemoteProtocolError("tensors", "RecordPart must carry one tensor of bytes")
                part = reply.tensors[0].tobytes()
                if total > MOST_RECORD_BYTES or len(part) != min(total - have, RECORD_CHUNK):
                    text = f"{len(part)} bytes after {have} of {total} in a record"
                    raise RemoteProtocolError("tensors", text)
                parts.append(part)
                have += len(part)
        return b"".join(parts)
