"""A hostile peer that invents sessions, and names apart shards that correct messages name together.

A server takes few sessions that the map does not name, and none of their pushes splits tables of shards.
Split tables take memory, and slow all later pushes.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from adam_async.messages import Pushed, pack, unpack
from adam_async.parameter_server.shard import Session, Shard
from adam_async.parameter_server.state import ServerState
from tests.simulation.scenario import Violation
from tests.simulation.scenarios.hostile_facts import push_to
from transport import CallTimeout, Link, Message, RemoteError, TransportError

MOST_TAKEN, SESSIONS = 8, 12
"""Maximum number of a peer's sessions that a server takes, and number that a peer invents."""

REPLICA = 1 << 18
"""First replica number of a peer, beyond those of correct peers."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two shards with the same tables, as a peer found them."""

    state: ServerState
    first: Shard
    other: Shard
    version: int
    """Version of the first shard when they shared tables."""


def _pairs(states: Sequence[ServerState]) -> Iterator[_Pair]:
    """For each store whose clients the map names, yield two shards that share tables, if there are any."""
    for state in states:
        seen: dict[int, Shard] = {}
        for shard in state.shards.values() if state.live else ():
            first = seen.setdefault(id(shard.tables), shard)
            if first is not shard:
                yield _Pair(state, first, shard, first.version)
                break


def _push(state: ServerState, shard: Shard, session: int) -> Message:
    """Return a push of zeros under a generation that the map never names."""
    replica = REPLICA + session % 1000
    push = push_to(state, [shard], replica=replica, session=session, generation=session)
    return pack(push, [np.zeros(shard.spec.size, shard.values.dtype)])


async def split_tables(
    dial: Callable[[], Awaitable[Link]], states: Sequence[ServerState], first: int, answer_s: float
) -> int:
    """Push to one of two shards that share tables, in one invented session after the other.

    Args:
        dial: Returns a new link to the server, when awaited.
        states: The states of the stores on the server.
        first: Number of the first session.
        answer_s: Time limit of an answer, in seconds.

    Returns the number of pushes.

    Raises:
        Violation: A push has split tables, or the server has taken too many sessions of the peer.
    """
    sent = 0
    taken: dict[str, int] = {}
    link = await dial()
    for session in range(first, first + SESSIONS):
        for pair in list(_pairs(states)):
            if link.closed:
                link = await dial()
            sent += 1
            push = _push(pair.state, pair.first, session)
            try:
                pushed = unpack(await link.call(push, timeout_s=answer_s), Pushed)
            except RemoteError as error:
                if error.code != "busy":  # the server has not taken the session
                    continue
            except (TransportError, CallTimeout):
                continue
            else:
                if not pushed.problems and _has_split(pair, (session, session)):
                    text = f"session {session:x} of no named client pushed to {pair.first!r} apart"
                    raise Violation("tables stay shared", text)
            taken[pair.state.store] = taken.get(pair.state.store, 0) + 1
            if taken[pair.state.store] > MOST_TAKEN:
                raise Violation("sessions are bounded", f"{taken} sessions of one peer are taken")
    link.abort()
    return sent


def _has_split(pair: _Pair, mine: Session) -> bool:
    """Return whether the push of a session alone has split the tables of two shards.

    If other pushes were applied since the peer found the pair, a push may have named a shard apart.
    """
    first, other = pair.first.last_number, pair.other.last_number
    is_alone = pair.first.version == pair.version + 1
    return is_alone and mine in first and {**first, mine: 0} == {**other, mine: 0}
