"""Pure: the servers that join a bundle, as its primary sees them: their progress, and pauses after failures.

A server that cannot take up its copy, for example for lack of memory, leaves the joining members by itself.
The primary strikes out a server that takes no piece for `JOIN_S`. It invites neither server again for
`PAUSE_S`, during which another server may join instead.

A member that was struck out for its silence is *away*: the primary dials it, and invites it soon after it
answers. A member that falls silent again within `STEADY_S` may return only after `UNSTEADY_S`: each return
costs a copy of the bundle, and each silence stops all commits until the member is struck out.
"""

from collections.abc import Callable, Iterable, Mapping, Set

from adam_async.run.bundle_record import Member

JOIN_S = 30.0
"""Time without another piece after which a joining member is struck out, in seconds."""

PAUSE_S = 60.0
"""Time for which a server that could not join is not invited again, in seconds."""

STEADY_S = 10.0
"""Minimum time between two silences of a member that may return at once, in seconds."""

MOST_KNOWN = 256
"""Maximum number of servers that have been members and that the primary remembers."""

UNSTEADY_S = 5.0
"""Time for which a member that fell silent again within `STEADY_S` is not invited, in seconds."""


class JoiningMembers:
    """The joining members of one bundle, and the pauses of those that could not join.

    Args:
        members: The first members of the bundle.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self._progress: dict[Member, tuple[int, float]] = {}
        """Largest number of pieces that each joining member has had, and the time at which it reached this
        number."""
        self._paused: dict[Member, float] = {}
        """Time at which the pause of each member ends."""
        self._silences: dict[Member, float] = {}
        """Time of the last silence of each member, kept for `STEADY_S`."""
        self._silent: set[Member] = set()
        """Members that are to be struck out for their silence."""
        self._incarnations = dict(members)
        """Last incarnation of each server that has been a member, of up to `MOST_KNOWN` servers."""
        self.away: Set[Member] = frozenset()
        """Members that were struck out for their silence and have not been invited since."""

    def stalled(self, pieces: Mapping[Member, int], whole: int, now: float) -> list[Member]:
        """Note the number of pieces of each joining member. Pause and return those without progress.

        A session begins with no piece, so only a larger number than ever before is progress.

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
        """Follow the members. Return those struck out for silence; pause those silent twice in `STEADY_S`."""
        nodes = {node for node, _ in members}
        known = {node: each for node, each in self._incarnations.items() if node not in nodes} | dict(members)
        self._incarnations = dict(list(known.items())[-MOST_KNOWN:])
        left = self._silent - members
        # A member is no longer away, nor is an earlier incarnation of its server.
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
        """Return the servers that the primary must not invite now: in a pause, or away without an answer."""
        self._paused = {member: until for member, until in self._paused.items() if until > now}
        return self._paused.keys() | {member for member in self.away if not answers(member)}
