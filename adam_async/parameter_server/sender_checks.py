"""Pure: binds each push session to one peer and one replica.

A session belongs to the link identity (node and incarnation) that used it first: push numbers of another peer
would turn this peer's pushes into duplicates. It also belongs to one replica. If the session's generation is
the live one of that replica, the peer must be a worker that the cluster map names as a member of the replica.
In a store without a program each client is a replica.

A server may receive the map later than workers do. So it accepts and remembers sessions of a generation that
it does not know to be live, and checks the members once it knows the generation.
"""

from collections.abc import Callable, Mapping

from adam_async.messages import Push, ReportSteps, Tick
from adam_async.parameter_server.shard import Session
from adam_async.run.ids import Replica
from transport import Identity

Peer = tuple[str, int]
"""Identity of a peer: its node and its incarnation."""

MOST_SESSIONS = 8
"""Maximum number of sessions of one peer that the map does not name, and of one generation that it names."""

MOST_UNNAMED = 32
"""Maximum number of sessions of all peers that the map does not name. Correct ones wait for a newer map."""

MOST_SENDERS = 4096
"""Number of sessions of all peers above which the server forgets the oldest of ended generations."""

TABLES_BYTES = 64 << 20
"""Memory of the numbers of ended sessions in the tables of a bundle, in bytes, above which the server forgets
the oldest of them."""

ENTRY_BYTES = 512
"""Memory of the numbers of a session in the tables of a shard, in bytes."""


class SenderChecks:
    """The sessions of one bundle on one server.

    Args:
        program: Whether the store belongs to a program: its workers push, and its driver loads the values.
            Clients push to other stores.
        creator: Node of the client that loads the values of a store without a program.
    """

    def __init__(self, *, program: bool = True, creator: str = "") -> None:
        self._program = program
        self._creator = creator
        self._of: dict[Session, tuple[Peer, Replica]] = {}
        self._unnamed: dict[Session, Peer] = {}
        """Sessions of generations that the map has not named."""
        self._has_new = False
        """Whether a session was bound since the last call of `surplus`."""
        self._members: Mapping[tuple[Replica, int], frozenset[Peer]] = {}

    def replica_generations_changed(self, members: Mapping[tuple[Replica, int], frozenset[Peer]]) -> None:
        """Set the workers of each live replica generation; forget sessions of replaced generations."""
        self._members = members
        live = dict(members.keys())
        for session, (_, replica) in list(self._of.items()):
            if live.get(replica, session[1]) != session[1]:
                self._forget(session)
            elif (replica, session[1]) in members:
                self._unnamed.pop(session, None)

    def refusal(self, peer: Identity, message: Push | Tick | ReportSteps) -> str:
        """Return why a peer may not send this message; empty if it may. Binds the session to the peer."""
        if (peer.role == "client") == self._program:
            return self._not_a_user(peer)
        if self._program and isinstance(message, Push) and message.assign:
            return f"{peer.node} assigns values, and the store of a run takes none"
        session: Session = (message.session, message.incarnation)
        replica, sender = Replica(message.replica), (peer.node, peer.incarnation)
        bound = self._of.get(session)
        if bound == (sender, replica):
            members = self._members.get((replica, message.incarnation))
            if members is None or sender in members:
                return ""
        elif bound is not None:
            return f"this session is {bound[0][0]}'s, for replica {bound[1]}"
        members = self._members.get((replica, message.incarnation))
        if members is not None and sender not in members:
            return f"{peer.node} is no worker of replica {replica} in generation {message.incarnation}"
        if members is None:
            mine = sum([each == sender for each in self._unnamed.values()])
        else:
            mine = sum([owner == (sender, replica) and of[1] == session[1] for of, owner in self._of.items()])
        if mine >= MOST_SESSIONS:
            return f"{peer.node} has {MOST_SESSIONS} sessions, and no more at a time"
        if members is None:
            if len(self._unnamed) >= MOST_UNNAMED:
                return f"{MOST_UNNAMED} sessions wait for a map that names them, and no more may"
            self._unnamed[session] = sender
        self._of[session] = (sender, replica)
        self._has_new = True
        return ""

    def load_refusal(self, peer: Identity) -> str:
        """Return why a peer may not load values; empty if it may."""
        if (peer.role == "client") == self._program:
            return self._not_a_user(peer)
        if not self._program and peer.node != self._creator:
            return f"{peer.node} loads values, and {self._creator} created the store"
        return ""

    def read_refusal(self, peer: Identity) -> str:
        """Return why a peer may not read the state of rules; empty if it may."""
        return self._not_a_user(peer) if self._program and peer.role == "client" else ""

    def _not_a_user(self, peer: Identity) -> str:
        of = "a run" if self._program else "clients"
        return f"{peer.role} {peer.node} has no part in a store of {of}"

    def surplus(self, tables: Callable[[], int]) -> list[Session]:
        """Forget and return the oldest sessions of ended generations beyond the bounds of their number.

        Args:
            tables: Returns the number of different tables of the bundle's shards.
        """
        if not self._has_new:
            return []
        self._has_new = False
        # A session that the map has not named stays: without its numbers a repeated push would count twice.
        idle = [
            session
            for session, (_, replica) in self._of.items()
            if (replica, session[1]) not in self._members and session not in self._unnamed
        ]
        most = TABLES_BYTES // (ENTRY_BYTES * tables())
        surplus = idle[: max(len(self._of) - MOST_SENDERS, len(idle) - most, 0)]
        for session in surplus:
            self._forget(session)
        return surplus

    def _forget(self, session: Session) -> None:
        del self._of[session]
        self._unnamed.pop(session, None)

    def __repr__(self) -> str:
        return f"<SenderChecks {len(self._of)} sessions, {len(self._unnamed)} not in the map>"
