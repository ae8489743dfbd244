"""Pure: checks that the answer of a bundle to a question for its groups is final for ended generations.

fence = Fence("bundle ps-0", {generation}, shards)   # when a primary has answered
fence.check(shards)                                  # at any later time, also at another primary
"""

from collections.abc import Mapping, Set

from adam_async.parameter_server.shard import Session, Shard
from adam_async.run.ids import ShardId
from tests.simulation.scenario import Violation

INVARIANT = "answered groups are final"


class Fence:
    """The pushes of ended replica generations on a bundle's shards, at the time of an answer.

    Args:
        name: Name of the bundle, for texts.
        ended: Generations that had ended in the map at the version of the question.
        shards: The shards of the primary that answered, by number.

    Raises:
        Violation: A push of an ended generation is ordered, and its groups are not in the answer.
    """

    def __init__(self, name: str, ended: Set[int], shards: Mapping[ShardId, Shard]) -> None:
        self._name = name
        self._ended = ended
        self._counted: dict[tuple[int, Session], int] = {}
        for number, shard in shards.items():
            counted, ordered = shard.tables.last_number, shard.tables.ordered
            for session in self._sessions(shard):
                self._counted[number, session] = counted[session]
                if ordered[session] > counted[session]:
                    waits = (
                        f"push {ordered[session]} of ended generation {session[1]} waits on shard {number}"
                    )
                    raise Violation(INVARIANT, f"{name} answered while {waits}")

    def _sessions(self, shard: Shard) -> list[Session]:
        return [session for session in sorted(shard.tables.sessions()) if session[1] in self._ended]

    def check(self, shards: Mapping[ShardId, Shard]) -> None:
        """Check that no further push of an ended generation was ordered. Raises Violation."""
        for number, shard in shards.items():
            for session in self._sessions(shard):
                newest, known = shard.tables.ordered[session], self._counted.get((number, session), 0)
                if max(newest, shard.tables.last_number[session]) > known:
                    text = f"push {newest} of ended generation {session[1]} on shard {number}, after {known}"
                    raise Violation(INVARIANT, f"{self._name} took {text} in its answer")
