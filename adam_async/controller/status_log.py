"""A controller's log lines about its group and the cluster: one line per change.

Theory of operation
-------------------
The consensus node passes its core to the log after every event; the log keeps only the last reported state.
The log has no timer: a core has a tick at least once in two election time-outs, and a leader has one with
each heartbeat. So a line is late by at most one such interval.

*Leader.* The log has a line for each elected leader, none for requests for votes. *Lost and returned
controllers.* The leader reports them, because it measures each voter's silence; in its first `LOST_S` it
reports none. *No majority.* A warning follows `LEADERLESS_S` without a leader. The warning names the
controllers that sent nothing meanwhile, although running controllers ask for votes.

The leading controller also logs each important change of the map (`report_changes`).

Lines for an operator have level `INFO`, a missing majority `WARNING`; a program that starts controllers
together with other roles reports cluster changes itself. The command `controller` shows both levels.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from adam_async.controller.bootstrap import name_of
from adam_async.controller.bundle_rules import bundle_lines
from adam_async.controller.consensus import Core, Role
from adam_async.controller.training_rules import program_lines
from adam_async.errors import counted
from adam_async.run.cluster_map import NOTICE, ClusterMap
from adam_async.run.store_record import StorePhase

logger = logging.getLogger(__name__)

LOST_S = 2.0
"""Silence after which the leader reports a controller lost, in seconds."""

LEADERLESS_S = 2.0
"""Time without a leader before a warning, in seconds."""

GROUPLESS_S = 5.0
"""Time outside of any group before a warning, in seconds."""

CHECK_S = 0.1
"""Interval in seconds at which a leader checks the others."""


class StatusLog:
    """Logs the changes of one controller's group.

    Args:
        names: Names of all known controllers, including this one.
        linked: Returns the names of the controllers with an open link.
        kept: Whether the controller started with durable records of a group.
        is_cut_off: Whether a warning about a majority without known addresses was logged already.
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
        """Whether the membership in the group was logged."""
        self._leader: tuple[int, str] | None = None
        """Term and leader in the last line about a leader; None before the first."""
        self._leaderless_since: float | None = now
        self._heard: set[str] = set()
        """Names of the controllers with a message since the leader was lost."""
        self._waits = is_cut_off
        """Whether the missing leader was logged."""
        self._leads_in = 0
        """Last term with this controller as leader."""
        self._check_at = math.inf
        self._lost: set[str] = set()
        """Names of the controllers logged as missing, lost or silent, and not yet as back; empty once another
        controller leads."""
        self._other_groups: set[tuple[str, str]] = set()
        """Pairs of a controller and its other group that were logged."""

    def heard(self, name: str) -> None:
        """Record a message from another controller of the group."""
        if self._leaderless_since is not None:
            self._heard.add(name)

    def of_another_group(self, name: str, *, theirs: str, ours: str) -> None:
        """Warn once of another controller in another group."""
        if (name, theirs) not in self._other_groups:
            self._other_groups.add((name, theirs))
            logger.warning(
                "%s belongs to group %s, %s to group %s: one of them has to begin anew, with an empty folder",
                self._name,
                ours,
                name,
                theirs,
            )

    def update(self, core: Core, *, now: float) -> None:
        """Log the changes since the last call."""
        if core.leader is None:
            self._check_leaderless(core, now)
            return
        self._leaderless_since = None
        if core.me not in core.members.voters or len(core.members.voters) == 1:
            return  # this controller is no voter yet, or is a group of one
        if not self._belongs:
            self._log_membership(core)
        if self._leader != (core.term, core.leader) or self._waits:
            self._log_leader(core.term, core.leader)
        if core.role is Role.LEADER:
            self._check_others(core, now)

    def _log_membership(self, core: Core) -> None:
        self._belongs = True
        names = {name_of(voter) for voter in core.members.voters}
        if not self._kept and core.me in core.log.snapshot.members.voters:
            how = "the group is founded"  # its first members all answered before
        else:
            how = "the group is there again" if self._kept else "it is taken into the group"
            self._lost = names - self._linked() - self._heard - {self._name}
        logger.info("%s: %s, with %d of %d controllers", self._name, how, len(names - self._lost), len(names))

    def _log_leader(self, term: int, leader: str) -> None:
        how = "again" if self._leader == (term, leader) else "now"
        self._leader, self._waits = (term, leader), False
        prefix = ""
        if name_of(leader) != self._name:
            prefix = f"{self._name}: "
            self._lost.clear()  # the new leader reports the returns
        logger.info("%s%s leads %s (term %d)", prefix, name_of(leader), how, term)

    # --- no leader ---------------------------------------------------------------------------

    def _check_leaderless(self, core: Core, now: float) -> None:
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

    # --- the other controllers, on the leader ------------------------------------------------

    def _check_others(self, core: Core, now: float) -> None:
        # A new leader has no controller's answer yet, so for a while it reports none as lost.
        if self._leads_in != core.term:
            self._leads_in, self._check_at = core.term, now + LOST_S
        if now < self._check_at:
            return
        self._check_at = now + CHECK_S
        voters = [voter for voter in core.members.voters if voter != core.me]
        gone = {name_of(voter) for voter in voters if core.silent_s(voter, now=now) >= LOST_S}
        there = {name_of(voter) for voter in voters} - gone
        changes = [(name, f"is lost: nothing was heard of it for {LOST_S:g} s") for name in gone - self._lost]
        changes += [(name, "is back") for name in self._lost & there]
        self._lost = (self._lost | gone) - there
        for name, change in sorted(changes):
            logger.info("%s %s; %d of %d are there", name, change, len(there) + 1, len(voters) + 1)


# --- the cluster map -----------------------------------------------------------------------------


def report_learned(node: str, first: ClusterMap, missing: Sequence[str]) -> None:
    """Log in one line that a restarted controller has learned the stores of its first map."""
    if not first.version:
        return
    lost = f"; these did not report, and are lost: {', '.join(missing)}" if missing else ""
    logger.info(
        "%s learned %s from %s of an earlier controller%s",
        *(node, counted(len(first.stores), "store"), counted(len(first.live("ps")), "server"), lost),
    )


def report_changes(before: ClusterMap, after: ClusterMap) -> None:
    """As the leader, log the important changes from one map to the next."""
    for line in (*map_lines(before, after), *program_lines(before, after)):
        logger.info("%s", line)


def map_lines(before: ClusterMap, after: ClusterMap) -> Iterator[str]:
    """Yield lines for nodes that join, leave or are lost, drivers' notices, clients' stores and bundles."""
    for name, node in after.nodes.items():
        # Readers, and operators' commands, come and go without an effect on the cluster.
        if node.role == "reader" or name == f"driver-{node.incarnation:014x}":
            continue
        was = before.nodes.get(name)
        if was is None or was.live != node.live or was.incarnation != node.incarnation:
            yield f"{name} {'joined' if node.live else 'left' if node.left else 'is lost'}"
        elif node.info.get(NOTICE) != was.info.get(NOTICE):
            yield f"{name} reports: {node.info.get(NOTICE)}"
    for name, store in after.stores.items():
        there = before.stores.get(name)
        if not store.program and (there is None or (there.id, there.phase) != (store.id, store.phase)):
            yield f"store {name!r} {STORE_PHASES[store.phase].format(reason=store.reason)}"
    for name, store in before.stores.items():
        if not store.program and name not in after.stores:
            yield f"store {name!r} was deleted"
    yield from bundle_lines(before, after)


STORE_PHASES: Mapping[StorePhase, str] = {
    "placing": "waits for servers",
    "loading": "waits for its values",
    "open": "is open",
    "failed": "failed: {reason}",
}
"""Phases of a store in words."""
