"""Counts of a run's roles, for its driver and the live table, and the roles that do not answer.

A stopped process and an unplugged cable look the same to the driver: the link stays up without messages, and
breaks much later.
"""

import asyncio
from collections.abc import Callable

from adam_async.controller.client import Membership
from adam_async.driver.cluster_watch import ClusterWatch
from adam_async.driver.events import RunEvents
from adam_async.driver.readiness import POLL_S, check_failed
from adam_async.driver.role_queries import RoleQueries
from adam_async.messages import PROFILED
from adam_async.report.stream import EventStream
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.counts import Counts, DataCounts, EpochCounts
from adam_async.run.events import Sampled
from adam_async.run.progress import Progress
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.trace_events import Part
from transport import RemoteProtocolError, TransportError

BEGIN_S = 0.02
"""Pause between two questions to a dealer that is about to begin an epoch, in seconds."""


class RoleCounts(RoleQueries):
    """Asks the roles in the cluster map for their counts.

    Args:
        run: Returns the id of the run.
        events: Takes silences, waits and notes.
        stream: Takes the counts of each poll.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        waits: Waits,
        membership: Membership,
        run: Callable[[], str],
        events: RunEvents,
        stream: EventStream,
    ) -> None:
        super().__init__(endpoint, waits=waits)
        self._membership = membership
        self._run = run
        self._events = events
        self._stream = stream
        self._watch = ClusterWatch(self, membership, run=run, events=events, stream=stream, waits=waits)

    @property
    def _map(self) -> ClusterMap:
        return self._membership.map

    def data_address(self) -> str:
        """Return the address of the dealer; empty while the run waits for a data server.

        Raises:
            RunFailed, RoleDied: The run waits for no data server, because it has failed.
        """
        if self._map.run is not None and not self._map.dealing:
            check_failed(self._map, self._run())
        return self._map.dealer_address

    async def dealer(self) -> DataCounts:
        """Return the dealer's counts; if it is lost or has not begun the epoch, wait for the next dealer.

        The dealer has `grace_s` to answer. After a failure the newest dealer gets the request; a second
        failure in a row at one address is an error.

        Raises:
            TransportError, TimeoutError: The dealer does not answer, or sends the counts of another role.
            RunFailed, RoleDied: The run has failed.
        """
        asked = ""
        while True:
            asked, before = self.data_address(), asked
            epoch = self._map.epoch
            if not asked:
                await asyncio.sleep(POLL_S)
                continue
            try:
                async with asyncio.timeout(self._waits.grace_s):
                    run = self._map.run
                    found = await self.statistics(asked, run.id if run is not None else "")
            except (TransportError, TimeoutError):
                # A lost dealer stays in the map until the controllers notice its loss.
                if asked == before and self.data_address() == asked:
                    raise
                continue
            if not isinstance(found, DataCounts):
                raise RemoteProtocolError("statistics", f"the role at {asked} is no data server")
            if epoch is None or epoch.ended or found.epoch >= epoch.number:
                return found
            await asyncio.sleep(BEGIN_S)  # the dealer reads the groups that the shards have

    async def final(self, run: str) -> dict[str, Counts]:
        """Return all roles' counts at the end of a run, by node id; note roles that do not answer."""
        controllers = [("", address) for address in self._membership.controllers]
        # The other controllers replace a lost leader, so a short wait for each of them is enough.
        dial_s = POLL_S if len(controllers) > 1 else None
        found = await self.answers(controllers, run, on_silence=self._events.note, dial_s=dial_s)
        others = self.addresses("ps", "data", "worker").items()
        return found | await self.answers(others, run, on_silence=self._events.note)

    async def profiles(self) -> list[Part]:
        """Return the timelines of roles in other processes; note roles that do not answer."""
        found: list[Part] = []
        for address in self.addresses(*PROFILED).values():
            try:
                found += await self.profile(address)
            except (TransportError, ValueError) as error:
                self._events.note(f"the role at {address} did not send its profile: {error}")
        return found

    async def update(self, progress: Progress, ended: EpochCounts | None = None) -> None:
        """Update the progress of the run with the counts of its roles, asked at once, within `POLL_S`.

        Args:
            ended: Result of the epoch after its end.
        """
        status = await self._watch.poll()
        now = asyncio.get_running_loop().time()
        progress.update(self._watch.counts, status, now=now, ended=ended)
        progress.silent = self._watch.silence.shown(now)
        if progress.series:
            self._stream.publish(Sampled(sample=progress.series[-1]))

    def addresses(self, *roles: str) -> dict[str, str]:
        """Return the addresses of these roles' live nodes, by node id."""
        return {node: self._map.nodes[node].address for role in roles for node in self._map.live(role)}
