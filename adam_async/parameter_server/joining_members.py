"""Pure: the servers that join a bundle, as its primary sees them: their progress, and pauses after failures.

A server that cannot take up its copy, for example for lack of memory, leaves the joining members by itself.
The primary strikes out a server that takes no piece for `JOIN_S`. It invites neither server again for
`PAUSE_S`; meanwhile another server may take the place.
"""

from collections.abc import Iterable, Mapping, Set

from adam_async.run.bundle_record import Member

JOIN_S = 30.0
"""Time without another piece after which a joining member is struck out, in seconds."""

PAUSE_S = 60.0
"""Time for which a server that could not join is not invited again, in seconds."""


class JoiningMembers:
    """The joining members of one bundle, and the pauses of those that could not join."""

    def __init__(self) -> None:
        self._progress: dict[Member, tuple[int, float]] = {}
        """By joining member: the largest number of pieces that it had, and the time of the last one."""
        self._paused: dict[Member, float] = {}
        """By member: the end of its pause."""

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

    def paused(self, now: float) -> Set[Member]:
        """Return the members that the primary must not invite now."""
        self._paused = {member: until for member, until in self._paused.items() if until > now}
        return self._paused.keys()
