"""Pure: binds each push session to one peer and one replica.

A session belongs to the link identity (node and incarnation) that used it first: push numbers of another peer
would turn this peer's pushes into duplicates. It also belongs to one replica. If its life is the live one of
that replica, the peer must be a worker that the cluster map names as a member of the replica.

A server may receive the map later than workers do. So it accepts and remembers sessions of a life that it
does not know to be live, and checks the members once it knows the life.
"""

from collections.abc import Mapping

from adam_async.messages import Push, Record, Tick
from adam_async.parameter_server.shard import Session
from adam_async.run.ids import Replica
from transport import Identity

Peer = tuple[str, int]
"""Identity of a peer: its node and its incarnation."""

MOST_SESSIONS = 64
"""Maximum number of sessions of one peer at a time."""

MOST_SPEAKERS = 4096
"""Number of sessions of all peers above which the server forgets the oldest of lives that are not live."""


class Speakers:
    """The sessions of one server in one run."""

    def __init__(self) -> None:
        self._of: dict[Session, tuple[Peer, Replica]] = {}
        self._sessions: dict[Peer, int] = {}
        self._members: Mapping[tuple[Replica, int], frozenset[Peer]] = {}

    def replica_generations_changed(self, members: Mapping[tuple[Replica, int], frozenset[Peer]]) -> None:
        """Set the workers of each live replica, by replica and life; forgets sessions of its other lives."""
        self._members = members
        live = dict(members.keys())
        for session, (_, replica) in list(self._of.items()):
            if live.get(replica, session[1]) != session[1]:
                self._forget(session)

    def refusal(self, peer: Identity, said: Push | Tick | Record) -> str:
        """Return why a peer may not send this message; empty if it may. Binds the session to the peer."""
        session: Session = (said.session, said.incarnation)
        replica, speaker = Replica(said.replica), (peer.node, peer.incarnation)
        bound = self._of.get(session)
        if bound == (speaker, replica):
            members = self._members.get((replica, said.incarnation))
            if members is None or speaker in members:
                return ""
        elif bound is not None:
            return f"this session is {bound[0][0]}'s, for replica {bound[1]}"
        members = self._members.get((replica, said.incarnation))
        if members is not None and speaker not in members:
            return f"{peer.node} is no worker of replica {replica} in life {said.incarnation}"
        if self._sessions.get(speaker, 0) >= MOST_SESSIONS:
            return f"{peer.node} has {MOST_SESSIONS} sessions, and no more at a time"
        self._of[session] = (speaker, replica)
        self._sessions[speaker] = self._sessions.get(speaker, 0) + 1
        return ""

    def surplus(self) -> list[Session]:
        """Forget and return the sessions beyond `MOST_SPEAKERS`, except those of live lives."""
        over = len(self._of) - MOST_SPEAKERS
        if over <= 0:
            return []
        idle = [s for s, (_, replica) in self._of.items() if (replica, s[1]) not in self._members]
        for session in idle[:over]:
            self._forget(session)
        return idle[:over]

    def _forget(self, session: Session) -> None:
        speaker, _ = self._of.pop(session)
        self._sessions[speaker] -= 1
        if not self._sessions[speaker]:
            del self._sessions[speaker]

    def __repr__(self) -> str:
        return f"<Speakers {len(self._of)} sessions of {len(self._sessions)} peers>"
