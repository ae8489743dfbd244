"""Counts of the roles of a run, which its driver asks for."""

import asyncio
from collections.abc import Callable
from typing import Any

from adam_async.controller.client import Membership
from adam_async.driver.readiness import LOOK_S, check_failed
from adam_async.driver.role_queries import Inquiries
from adam_async.errors import RoleDied
from adam_async.messages import PROFILED
from adam_async.run.cluster_map import ClusterMap
from transport import TransportError


class RoleCounts:
    """Asks the roles in the cluster map for their counts.

    Args:
        membership: Has the map.
        inquiries: Sends the questions.
        run: Returns the id of the driver's run.
        note: Called with a role that does not answer, in words.
        grace_s: Time for the data server that leads the leases to answer; then the next one is asked.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        inquiries: Inquiries,
        run: Callable[[], str],
        note: Callable[[str], None],
        grace_s: float,
    ) -> None:
        self._membership = membership
        self._inquiries = inquiries
        self._run = run
        self._note = note
        self._grace_s = grace_s

    @property
    def _map(self) -> ClusterMap:
        return self._membership.map

    def data_address(self) -> str:
        """Return the address of the data server that leads the leases.

        Raises:
            RoleDied, RunFailed: No data server leads them.
        """
        if not self._map.ledger_leaders:
            if self._map.run is not None:
                check_failed(self._map, self._run())
            raise RoleDied("the data server", "no other has joined")
        return self._map.nodes[self._map.ledger_leaders[0]].address

    async def ledger_leader(self) -> dict[str, Any]:
        """Return the counts of the data server that leads the leases; if it is lost, of the next one.

        Raises:
            TransportError, TimeoutError: The leader does not answer.
        """
        asked = ""
        while True:
            asked, before = self.data_address(), asked
            try:
                async with asyncio.timeout(self._grace_s):
                    return (await self._ask(asked))[1]
            except (TransportError, TimeoutError):
                if asked == before:
                    raise

    async def final(self, run: str) -> dict[str, dict[str, Any]]:
        """Return the counts of all roles at the end of a run, by node id; note roles that do not answer."""
        controllers = self._membership.controllers
        # The other controllers do the work of a lost one, so a short wait for it is enough.
        dial_s = LOOK_S if len(controllers) > 1 else None
        found = await self._inquiries.all_statistics(controllers, run, on_silence=self._note, dial_s=dial_s)
        others = self.addresses("ps", "data", "worker")
        return found | await self._inquiries.all_statistics(others.values(), run, on_silence=self._note)

    async def profiles(self) -> list[Any]:
        """Return the timelines of roles in other processes; note roles that do not answer."""
        addresses = self.addresses(*PROFILED).values()
        return await self._inquiries.all_profiles(addresses, on_silence=self._note)

    async def _ask(self, address: str) -> tuple[str, dict[str, Any]]:
        run = self._map.run
        return await self._inquiries.statistics(address, run.id if run is not None else "")

    def addresses(self, *roles: str) -> dict[str, str]:
        """Return the addresses of the live nodes of these roles, by node id."""
        return {node: self._map.nodes[node].address for role in roles for node in self._map.live(role)}

    def __repr__(self) -> str:
        return f"<RoleCounts of run {self._run()}>"
