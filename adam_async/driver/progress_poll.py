"""Polls of the roles of a run: their counts for the live table, and the roles that do not answer.

To the driver a stopped process and an unplugged cable look the same: the link stays up without messages, and
breaks much later.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from adam_async.controller.client import Membership
from adam_async.driver.count_types import RoleStatistics
from adam_async.driver.readiness import POLL_S
from adam_async.driver.role_counts import RoleCounts
from adam_async.run.progress import Progress
from adam_async.run.run_copies import copies_of

SILENT, HEARD = " has not answered for ", " answers again, "
"""Texts after a node's name in the events of its silence."""

POLLS = 2
"""Number of polls in a row without an answer that make an event; a busy machine may miss one poll."""


@dataclass(slots=True)
class _Silent:
    since: float
    polls: int = 0


class Silence:
    """Live roles that do not answer. Times are seconds of the loop's clock."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silent] = {}

    def observe(
        self, asked: Collection[str], answered: Collection[str], *, asked_at: float, now: float
    ) -> list[str]:
        """Take the result of one poll; returns the new events.

        Args:
            asked: Polled nodes. The method forgets a silent node that is no longer polled: the node is lost,
                and the map reports its loss.
        """
        events = []
        self._silent = {node: each for node, each in self._silent.items() if node in asked}
        for node in asked:
            if node in answered:
                silent = self._silent.pop(node, None)
                if silent is not None and silent.polls >= POLLS:
                    events.append(f"{node}{HEARD}after {now - silent.since:.0f} s")
                continue
            silent = self._silent.setdefault(node, _Silent(since=asked_at))
            silent.polls += 1
            if silent.polls == POLLS:
                events.append(f"{node}{SILENT}{now - silent.since:.0f} s")
        return events

    def shown(self, now: float) -> tuple[str, ...]:
        """Return each node whose silence is an event, with the length of its silence."""
        silent = ((node, each) for node, each in sorted(self._silent.items()) if each.polls >= POLLS)
        return tuple(f"{node} for {now - each.since:.0f} s" for node, each in silent)


Observe = Callable[[Mapping[str, RoleStatistics], float, float], None]
"""Function that takes the counts of one poll, the time of its requests, and the time of its end."""


class ProgressPoll:
    """Updates the progress of a run with the counts of its roles.

    Attributes:
        observe: Called after each poll.
    """

    def __init__(
        self, *, counts: RoleCounts, membership: Membership, progress: Progress, note: Callable[[str], None]
    ) -> None:
        self._counts = counts
        self._membership = membership
        self._progress = progress
        self._note = note
        self._silence = Silence()
        self.observe: Observe | None = None

    async def read(self, run: str, ended: Mapping[str, Any] | None = None) -> None:
        """Ask all data servers, parameter servers and workers at once, for at most `POLL_S`."""
        loop, progress = asyncio.get_running_loop(), self._progress
        addresses = self._counts.addresses("data", "ps", "worker")
        asked_at = loop.time()
        answers = await self._counts.answers(addresses, run, within_s=POLL_S)
        now = loop.time()
        for event in self._silence.observe(addresses, answers, asked_at=asked_at, now=now):
            self._note(event)
        progress.silent = self._silence.shown(now)
        # A silent role keeps its last counts, so sums do not fall while it is silent.
        known = {**progress.roles, **{node: each.values for node, each in answers.items()}}
        progress.update({node: known[node] for node in addresses if node in known}, now=now, ended=ended)
        progress.replicas = len(self._membership.map.live_replicas())
        progress.copies = copies_of(self._membership.map)
        if self.observe is not None:
            self.observe(answers, asked_at, now)
