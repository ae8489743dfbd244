"""What a controller says of its group to whoever watches it: one line for each change, and none twice.

Theory of operation
-------------------
The group shows its core after every event; what the herald has said last is all that it keeps. It has no
timer: a core's own ticks come at least once in two election time-outs, and a leader's with each heartbeat, so
a line is late by no more than that.

*Who leads* is news once that one is known to be elected; that somebody asked for votes is none. *Who is lost*
or back is said by the leader, which knows for how long each voter has not answered; in its first `LOST_S` it
knows nothing yet. *That there is no majority* is said where nobody has led for `LEADERLESS_S`, with the names
of those of whom nothing was heard meanwhile: all who can are asked for their votes in that time.

What a person who started the controllers wants to see is of level `INFO`, and that there is no majority a
`WARNING`: a training that has its controllers beside it names those that die itself, and is told no more.
"""

import logging
import math
from collections.abc import Callable, Iterable

from adam_async.controller.bootstrap import name_of
from adam_async.controller.consensus import Core, Role

logger = logging.getLogger(__name__)

LOST_S = 2.0
"""Of whom a leader has heard nothing for so long is said to be lost."""

LEADERLESS_S = 2.0
"""So long nobody may lead before it is said."""

GROUPLESS_S = 5.0
"""So long one that belongs to no group may wait before it is said."""

LOOK_S = 0.1
"""Between two looks of a leader at who is there."""


class StatusLog:
    """Says what becomes of one controller's group.

    Args:
        name: Of the controller.
        names: Of all controllers that it was told of, itself among them.
        linked: Says which others it has a link to.
        kept: Whether it began with what it had kept of a group.
        now: The core's time.
        is_cut_off: Whether it was said already that no majority can be reached.
    """

    def __init__(
        self,
        name: str,
        *,
        names: Iterable[str],
        linked: Callable[[], set[str]],
        kept: bool,
        now: float,
        is_cut_off: bool = False,
    ) -> None:
        self._name = name
        self._others = sorted(set(names) - {name})
        self._linked = linked
        self._kept = kept
        self._belongs = False
        """Whether it was said that we belong to the group."""
        self._leader: tuple[int, str] | None = None
        """Term and leader that were named last."""
        self._leaderless_since: float | None = now
        self._heard: set[str] = set()
        """Who said something while nobody led."""
        self._waits = is_cut_off
        """Whether it was said that there is no leader."""
        self._leads_in = 0
        """The last term in which we led."""
        self._look_at = math.inf
        self._lost: set[str] = set()
        """Who was said to be lost, and not yet to be back, since nobody else leads."""
        self._strangers: set[tuple[str, str]] = set()

    def heard(self, name: str) -> None:
        """Another controller of the group said something."""
        if self._leaderless_since is not None:
            self._heard.add(name)

    def of_another_group(self, name: str, *, theirs: str, ours: str) -> None:
        """Another controller speaks for another group."""
        if (name, theirs) not in self._strangers:
            self._strangers.add((name, theirs))
            logger.warning(
                "%s belongs to group %s, %s to group %s: one of them has to begin anew, with an empty folder",
                self._name,
                ours,
                name,
                theirs,
            )

    def look(self, core: Core, *, now: float) -> None:
        """Say what is new since the last look."""
        if core.leader is None:
            self._look_for_a_leader(core, now)
            return
        self._leaderless_since = None
        if core.me not in core.members.voters or len(core.members.voters) == 1:
            return  # it is being taken in; or alone, and there is nobody to say anything of
        if not self._belongs:
            self._say_that_we_belong(core)
        if self._leader != (core.term, core.leader) or self._waits:
            self._say_who_leads(core.term, core.leader)
        if core.role is Role.LEADER:
            self._look_at_the_others(core, now)

    def _say_that_we_belong(self, core: Core) -> None:
        self._belongs = True
        names = {name_of(voter) for voter in core.members.voters}
        if not self._kept and core.me in core.log.snapshot.members.voters:
            how = "the group is founded"  # by all of them: they had to meet first
        else:
            how = "the group is there again" if self._kept else "it is taken into the group"
            self._lost = names - self._linked() - self._heard - {self._name}
        logger.info("%s: %s, with %d of %d controllers", self._name, how, len(names - self._lost), len(names))

    def _say_who_leads(self, term: int, leader: str) -> None:
        how = "again" if self._leader == (term, leader) else "now"
        self._leader, self._waits = (term, leader), False
        prefix = ""
        if name_of(leader) != self._name:
            prefix = f"{self._name}: "
            self._lost.clear()  # who comes back is news of that one
        logger.info("%s%s leads %s (term %d)", prefix, name_of(leader), how, term)

    # --- no leader ---------------------------------------------------------------------------

    def _look_for_a_leader(self, core: Core, now: float) -> None:
        if self._leaderless_since is None:
            self._leaderless_since = now
            self._heard.clear()
        waited_s = now - self._leaderless_since
        if self._waits or waited_s < (LEADERLESS_S if core.members.voters else GROUPLESS_S):
            return
        self._waits = True
        if not core.members.voters:
            lacking = [name for name in self._others if name not in self._linked()]
            whom = f"for {', '.join(lacking)}" if lacking else "to be taken in"
            logger.warning("%s belongs to no group yet, and waits %s", self._name, whom)
            return
        names = {name_of(voter) for voter in core.members.voters}
        silent = names - self._heard - {self._name}
        if len(names) - len(silent) >= core.members.quorum:
            logger.warning("%s knows of no leader: questions wait until there is one", self._name)
            return
        self._lost |= silent
        logger.warning(
            "%s has no majority: nothing was heard of %s for %.0f s; questions wait until %d of %d are there",
            self._name,
            ", ".join(sorted(silent)),
            waited_s,
            core.members.quorum,
            len(names),
        )

    # --- the others, as the leader knows them ------------------------------------------------

    def _look_at_the_others(self, core: Core, now: float) -> None:
        if self._leads_in != core.term:
            self._leads_in, self._look_at = core.term, now + LOST_S
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        voters = [voter for voter in core.members.voters if voter != core.me]
        gone = {name_of(voter) for voter in voters if core.silent_s(voter, now=now) >= LOST_S}
        there = {name_of(voter) for voter in voters} - gone
        news = [(name, f"is lost: nothing was heard of it for {LOST_S:g} s") for name in gone - self._lost]
        news += [(name, "is back") for name in self._lost & there]
        self._lost = (self._lost | gone) - there
        for name, what in sorted(news):
            logger.info("%s %s; %d of %d are there", name, what, len(there) + 1, len(voters) + 1)
