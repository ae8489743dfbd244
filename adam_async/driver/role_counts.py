"""Counts of the roles of a run, at the request of its driver."""

import asyncio
from collections.abc import Callable, Mapping

from adam_async.controller.client import Membership
from adam_async.driver.count_types import DataCounts, RoleStatistics
from adam_async.driver.readiness import POLL_S, check_failed
from adam_async.driver.role_queries import RoleQueries
from adam_async.errors import RoleDied
from adam_async.messages import PROFILED
from adam_async.run.cluster_map import ClusterMap
from adam_async.runtime.trace_events import Part
from transport import RemoteProtocolError, TransportError


class RoleCounts:
    """Asks the roles in the cluster map for their counts.

    Args:
        grace_s: Time for the ledger leader to answer, in seconds. After a failure the newest leader gets the
            request; a second failure in a row at one address is an error.
    """

    def __init__(
        self,
        *,
        membership: Membership,
        queries: RoleQueries,
        run: Callable[[], str],
        note: Callable[[str], None],
        grace_s: float,
    ) -> None:
        self._membership = membership
        self._queries = queries
        self._run = run
        self._note = note
        self._grace_s = grace_s

    @property
    def _map(self) -> ClusterMap:
        return self._membership.map

    def data_address(self) -> str:
        """Return the address of the ledger leader.

        Raises:
            RoleDied, RunFailed: No data server leads the ledger.
        """
        if not self._map.ledger_leaders:
            if self._map.run is not None:
                check_failed(self._map, self._run())
            raise RoleDied("the data server", "no other has joined")
        return self._map.nodes[self._map.ledger_leaders[0]].address

    async def ledger_leader(self, *, ranges: bool = False, clock: int = 0) -> DataCounts:
        """Return the counts of the ledger leader; if it is lost, the counts of the next leader.

        Args:
            ranges, clock: See `GetStatistics`.

        Raises:
            TransportError, TimeoutError: The leader does not answer, or sends the counts of another role.
        """
        asked = ""
        while True:
            asked, before = self.data_address(), asked
            try:
                async with asyncio.timeout(self._grace_s):
                    found = (await self._ask(asked, ranges=ranges, clock=clock)).counts
            except (TransportError, TimeoutError):
                # A lost leader stays in the map until its successor is known.
                if asked == before and self.data_address() == asked:
                    raise
                continue
            if not isinstance(found, DataCounts):
                raise RemoteProtocolError("statistics", f"the role at {asked} is no data server")
            return found

    async def final(self, run: str) -> dict[str, RoleStatistics]:
        """Return the counts of all roles at the end of a run, by node id; note roles that do not answer."""
        controllers = [("", address) for address in self._membership.controllers]
        # The other controllers replace a lost leader, so a short wait for each of them is enough.
        dial_s = POLL_S if len(controllers) > 1 else None
        found = await self._queries.all_statistics(controllers, run, on_silence=self._note, dial_s=dial_s)
        others = self.addresses("ps", "data", "worker")
        return found | await self._queries.all_statistics(others.items(), run, on_silence=self._note)

    async def profiles(self) -> list[Part]:
        """Return the timelines of roles in other processes; note roles that do not answer."""
        addresses = self.addresses(*PROFILED).values()
        return await self._queries.all_profiles(addresses, on_silence=self._note)

    async def answers(
        self, addresses: Mapping[str, str], run: str, *, within_s: float
    ) -> dict[str, RoleStatistics]:
        """Ask several roles at once. See `RoleQueries.answers`."""
        return await self._queries.answers(addresses, run, within_s=within_s)

    async def _ask(self, address: str, *, ranges: bool, clock: int) -> RoleStatistics:
        run = self._map.run
        id = run.id if run is not None else ""
        return await self._queries.statistics(address, id, ranges=ranges, clock=clock)

    def addresses(self, *roles: str) -> dict[str, str]:
        """Return the addresses of the live nodes of these roles, by node id."""
        return {node: self._map.nodes[node].address for role in roles for node in self._map.live(role)}
