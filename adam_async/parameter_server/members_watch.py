"""The watch of one member over the others: silence, slow members, invitations and handovers to the home.

At each tick, with the heartbeat, the watch strikes out or invites members through the core, or takes over
from a silent primary. The core decides which of these changes take effect.

A server that cannot take its copy, for example for lack of memory, leaves the joining members on its own. The
primary strikes out a server that takes no piece for `JOIN_S`. For `PAUSE_S` the primary invites neither of
these servers again, so another server may join instead.

A member that was struck out for its silence is *away*: the primary dials it, and invites it soon after it
answers. A member that falls silent again within `STEADY_S` may return only after `UNSTEADY_S`. Each return
costs a copy of the bundle, and each silence stops all commits until the primary strikes the member out.
"""

from collections.abc import Callable, Iterable, Mapping, Set

from adam_async.parameter_server.replication.local_copy import Bundle as BundleFacts
from adam_async.parameter_server.replication.member import BundleMember
from adam_async.parameter_server.replication.primary import Primary
from adam_async.parameter_server.store_host import StoreHost
from adam_async.run.store_record import BundleRecord, Member

JOIN_S = 30.0
"""Time in seconds without a new piece after which a joining member is struck out."""

PAUSE_S = 60.0
"""Time in seconds for which a server that could not join is not invited again."""

STEADY_S = 10.0
"""Minimum time between two silences of a member that may return at once, in seconds."""

MOST_KNOWN = 256
"""Maximum number of past members that the primary remembers."""

UNSTEADY_S = 5.0
"""Time in seconds for which a member that fell silent twice within `STEADY_S` is not invited."""


class JoiningMembers:
    """The joining members of one bundle, and the pauses of servers that could not join.

    Args:
        members: Members with which the bundle begins.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self._progress: dict[Member, tuple[int, float]] = {}
        """For each joining member, the most pieces it has had, and when it reached this number."""
        self._paused: dict[Member, float] = {}
        """Time at which the pause of each member ends."""
        self._silences: dict[Member, float] = {}
        """Time of each member's last silence, kept for `STEADY_S`."""
        self._silent: set[Member] = set()
        """Members that are to be struck out for their silence."""
        self._incarnations = dict(members)
        """Last incarnation of each server that has been a member, of up to `MOST_KNOWN` servers."""
        self.away: Set[Member] = frozenset()
        """Members that were struck out for their silence and have not been invited since."""

    def stalled(self, pieces: Mapping[Member, int], whole: int, now: float) -> list[Member]:
        """Record how many pieces each joining member has. Pause and return those without progress.

        A session begins without pieces, so only a new maximum counts as progress.

        Args:
            whole: Number of all pieces. A member with all of them only waits for entries.
        """
        self._progress = {
            member: known
            if (known := self._progress.get(member)) is not None and count <= known[0]
            else (count, now)
            for member, count in pieces.items()
        }
        stalled = [
            member
            for member, (most, since) in self._progress.items()
            if now - since > JOIN_S and most < whole
        ]
        self.pause(stalled, now)
        return stalled

    def pause(self, members: Iterable[Member], now: float) -> None:
        """Note that members could not join."""
        self._paused.update(dict.fromkeys(members, now + PAUSE_S))

    def silent(self, members: Iterable[Member]) -> None:
        """Note members that are to be struck out for their silence."""
        self._silent.update(members)

    def members_changed(self, members: Set[Member], now: float) -> Set[Member]:
        """Return the members struck out for silence; pause those silent twice within `STEADY_S`."""
        nodes = {node for node, _ in members}
        known = {node: each for node, each in self._incarnations.items() if node not in nodes} | dict(members)
        self._incarnations = dict(list(known.items())[-MOST_KNOWN:])
        left = self._silent - members
        # A member is not away; nor is an earlier incarnation of its server.
        away = self.away | left
        self.away = {(node, each) for node, each in away if node not in nodes and node in self._incarnations}
        for member in left:
            if now - self._silences.get(member, -STEADY_S) < STEADY_S:
                self._paused[member] = max(now + UNSTEADY_S, self._paused.get(member, now))
            self._silences[member] = now
        self._silences = {member: at for member, at in self._silences.items() if now - at < STEADY_S}
        self._silent &= members
        return left

    def is_back(self, server: Member) -> bool:
        """Return whether a server was a member, and was started again or fell silent since."""
        node, incarnation = server
        return server in self.away or self._incarnations.get(node, incarnation) != incarnation

    def barred(self, now: float, answers: Callable[[Member], bool]) -> Set[Member]:
        """Return the servers that the primary must not invite now: paused, or away without an answer."""
        self._paused = {member: until for member, until in self._paused.items() if until > now}
        return self._paused.keys() | {member for member in self.away if not answers(member)}


SILENT_S = 1.0
"""Silence after which a primary strikes a member out, in seconds."""

TAKE_OVER_S = 1.3
"""Silence of the primary after which the first member in sync takes over, in seconds."""

RANK_S = 0.2
"""Additional silence in seconds, for each earlier secondary, after which a later member takes over."""

INVITE_S = 5.0
"""Time in seconds for which a bundle lacks a member before its primary invites a new server."""

RETURN_S = 0.3
"""Time in seconds for which a bundle lacks a member before its primary invites a returned member."""

HAND_OVER_S = 1.0
"""Maximum time for which a primary stops ordering for a handover, in seconds."""

LOG_BYTES = 256 << 20
"""Log size in bytes above which a primary strikes out the members that still need the entries."""

STUCK_TICKS = 10
"""Number of heartbeats without a commit after which the primary refuses questions and names the reason."""

STALLED_TICKS = 50
"""Number of heartbeats without a commit after which a primary strikes out members that take no entries."""


class MembersWatch:
    """The watch of one member over the bundle's other members.

    Args:
        core: The member.
        facts: Facts of the bundle that never change.
        host: Services of the server.
        copies: Number of copies that the bundle should have.
    """

    def __init__(self, core: BundleMember, facts: BundleFacts, host: StoreHost, copies: int) -> None:
        self._core = core
        self._facts = facts
        self._host = host
        self._copies = copies
        self._joining = JoiningMembers(core.record.members)
        self._struck_out: set[Member] = set()
        """Members that this primary has asked the controllers to strike out."""
        self._committed = 0
        """Position up to which entries were committed at the last tick."""
        self._stuck_ticks = 0
        """Number of ticks in a row at which entries waited and none was committed."""
        self._lacks_since: float | None = None
        self._home_since: float | None = None
        """Time since which the home can become primary again; None if it cannot, or is primary already."""

    @property
    def away(self) -> Set[Member]:
        """Live servers that a primary may invite once they answer again."""
        return {*filter(self._host.is_live, self._joining.away)}

    @property
    def is_stuck(self) -> bool:
        """Whether entries of this primary have waited for a while, and none was committed."""
        return self._stuck_ticks >= STUCK_TICKS

    def stopped(self) -> None:
        """Note that this member is no longer the primary."""
        self._stuck_ticks = 0

    def record_changed(self, record: BundleRecord) -> None:
        """Follow the bundle's record in the cluster map, before the core does."""
        now, before = self._host.now(), self._core.record
        # A live server that was not struck out has left on its own: it cannot hold its copy.
        left = {*before.joining} - {*record.members} - self._struck_out
        self._joining.pause(filter(self._host.is_live, left), now)
        self._struck_out.intersection_update(record.members)
        for member in sorted(self._joining.members_changed({*record.members}, now)):
            self._host.links.dial_again(member)
        for member in {*record.members} - {*before.members}:
            self._host.links.expect(member)

    def tick(self) -> None:
        """Look for silent members."""
        core, record, links = self._core, self._core.record, self._host.links
        if (primary := core.primary) is not None:
            silent = [
                member for member in record.members if member != core.me and links.silent_s(member) > SILENT_S
            ]
            self._joining.silent(silent)
            self._strike_out(primary, [*silent, *primary.laggards(LOG_BYTES)])
            self._count_stuck_ticks()
            if self._stuck_ticks >= STALLED_TICKS:
                self._strike_out(primary, primary.waits_for())
            self._strike_out_stalled(primary)
            self._invite(primary)
            self._bring_home(primary)
        elif core.me in record.in_sync and record.primary is not None:
            rank = record.in_sync.index(core.me) - 1
            silent_s = links.silent_s(record.primary)
            if silent_s > TAKE_OVER_S + RANK_S * rank:
                self._joining.silent([record.primary])
                core.take_over()

    def _strike_out(self, primary: Primary, members: Iterable[Member]) -> None:
        for member in members:
            self._struck_out.add(member)
            primary.strike_out(member)

    def _strike_out_stalled(self, primary: Primary) -> None:
        """Strike out the joining members without progress, and name the reason and the remedy."""
        facts, pieces = self._facts, primary.joining_pieces()
        stalled = self._joining.stalled(pieces, facts.pieces, self._host.now())
        named = set(stalled) - self._struck_out
        self._strike_out(primary, stalled)
        for member in sorted(named):
            self._host.notice(
                f"{member[0]} does not join the shards of {facts.home} in store {facts.store}: it has "
                f"{pieces[member]} of {facts.pieces} pieces, and none was new for {JOIN_S:g} s; its log may "
                f"have the reason; it is invited again after {PAUSE_S:g} s: start it again, or add a server"
            )

    def _count_stuck_ticks(self) -> None:
        log = self._core.log
        is_stuck = log.committed < log.last and log.committed == self._committed
        self._stuck_ticks = self._stuck_ticks + 1 if is_stuck else 0
        self._committed = log.committed

    def _invite(self, primary: Primary) -> None:
        """Invite another server if the bundle has lacked a member long enough."""
        now, record = self._host.now(), self._core.record
        if len(record.members) >= self._copies:
            self._lacks_since = None
        elif self._lacks_since is None:
            self._lacks_since = now
        elif now - self._lacks_since > RETURN_S:
            barred = self._joining.barred(now, self._host.links.answers)
            # A server that was lost returns at once. Another server would replace the lost one, so wait a
            # while; invite at once if pushes wait.
            takes_all = now - self._lacks_since > INVITE_S or len(record.in_sync) < self._facts.min_in_sync

            def may_join(server: Member) -> bool:
                return server not in barred and (takes_all or self._joining.is_back(server))

            member = self._host.next_member(may_join)
            if member is not None:
                self._lacks_since = now
                primary.invite(member)

    def _bring_home(self, primary: Primary) -> None:
        """Hand the bundle over to its home once the home has been in sync for `INVITE_S`.

        This keeps loads even.
        """
        now, record = self._host.now(), self._core.record
        home = next((member for member in record.in_sync if member[0] == self._facts.home), None)
        if home is None or home == self._core.me or len(record.in_sync) < self._copies:
            self._home_since = None
        elif self._home_since is None:
            self._home_since = now
        elif now - self._home_since > HAND_OVER_S + INVITE_S:
            primary.cancel_hand_over()
            self._home_since = now
        elif now - self._home_since > INVITE_S:
            primary.hand_over(home)
