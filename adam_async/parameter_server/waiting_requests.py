"""Pure: questions that wait for what is not there yet: a clock, or the end of the sums in progress."""

from adam_async.parameter_server.events import (
    Effect,
    QueuedPull,
    QueuedRead,
    Refuse,
    SendBehind,
    SendStates,
    SendValues,
)
from adam_async.run.ids import Replica


class Parked:
    """The parked questions of one server. Deadlines are absolute seconds on the caller's clock."""

    def __init__(self) -> None:
        self._waiting: list[QueuedPull | QueuedRead] = []
        self.fresh = False
        """Whether somebody began to wait since the shell last looked: there is a new deadline to keep."""

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, queued: QueuedPull | QueuedRead) -> list[Effect]:
        """Answer a question if what it wants is there; otherwise it waits here."""
        answer = _answer(queued)
        if answer is not None:
            return [answer]
        self._waiting.append(queued)
        self.fresh = True
        return []

    def answer(self) -> list[Effect]:
        """Something was applied, or somebody is not waited for any more: answer what can be answered now."""
        answers: list[Effect] = []
        waiting: list[QueuedPull | QueuedRead] = []
        for queued in self._waiting:
            answer = _answer(queued)
            if answer is None:
                waiting.append(queued)
            else:
                answers.append(answer)
        self._waiting = waiting
        return answers

    def give_up(self, now: float) -> list[Effect]:
        """Answer those whose time is up, without what they want."""
        late = [queued for queued in self._waiting if queued.deadline <= now]
        self._waiting = [queued for queued in self._waiting if queued.deadline > now]
        return [_late(queued) for queued in late]

    def next_deadline(self) -> float | None:
        """When the next one's time is up; None while nobody waits."""
        return min((queued.deadline for queued in self._waiting), default=None)

    def waiting_for(self) -> tuple[Replica, ...]:
        """The replicas that somebody waits for."""
        return tuple(sorted({replica for queued in self._waiting for replica in _behind(queued)}))


def _answer(queued: QueuedPull | QueuedRead) -> SendValues | SendStates | None:
    """The answer, if what is wanted is there."""
    if isinstance(queued, QueuedRead):
        ready = all(shard.held is None or shard.held.settled for shard in queued.shards)
        return SendStates(queued.request, queued.shards) if ready else None
    if queued.clock and any(shard.applied_clock() < queued.clock for shard in queued.shards):
        return None
    return SendValues(queued.request, queued.shards)


def _late(queued: QueuedPull | QueuedRead) -> SendBehind | Refuse:
    behind = _behind(queued)
    if isinstance(queued, QueuedPull):
        clock = min(shard.applied_clock() for shard in queued.shards)
        return SendBehind(queued.request, clock, behind)
    names = ", ".join(map(str, behind)) or "none of those known"
    text = f"contributions are held until those of all replicas have come; behind: {names}"
    return Refuse(queued.request, "not-settled", text)


def _behind(queued: QueuedPull | QueuedRead) -> tuple[Replica, ...]:
    """The replicas that it waits for."""
    found: set[Replica] = set()
    for shard in queued.shards:
        if isinstance(queued, QueuedPull):
            clock = queued.clock
        else:
            clock = max(shard.held.waiting, default=0) if shard.held is not None else 0
        found.update(replica for replica, finished in shard.clocks.items() if finished < clock)
    return tuple(sorted(found))
