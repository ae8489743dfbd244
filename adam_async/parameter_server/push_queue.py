"""Pure: the queue of a bundle: one queue of pushes per group of shards (AD-42), other requests in between.

Pushes for different shards may pass each other, so that those for the same shards join: of the messages
A0 A1 B0 B1 of two clients, A0 and B0 are one batch, and A1 and B1 are the next one. No push passes one of
another group with which it shares a shard, or another kind of request.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from adam_async.parameter_server.events import QueuedPull, QueuedPush, QueuedSets, QueuedTick
from adam_async.parameter_server.shard_group import ShardGroup

MAX_BATCH = 32
"""Maximum number of pushes of a batch, so that the first of them is not acknowledged too late."""

SHARD_VALUES = 1 << 21
"""Maximum number of values of the largest shard of a batch times the number of its pushes: eight pushes to a
shard of 2^18 values, the default size with float32."""

BATCH_VALUES = 1 << 22
"""Maximum number of values that a push asks for times the number of pushes of a batch: one round of the loop
copies the answers."""

BATCH_BYTES = 512 << 20
"""Maximum size of the gradients of a batch of several pushes, in bytes. The other copies take an entry of at
most `log_entries.MOST_BYTES`, with its details."""

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""The shards of a push, and the indexes of the shards to which the server will apply the push."""

Other = QueuedPull | QueuedSets | QueuedTick


@dataclass(slots=True)
class _Pushes:
    """Groups without a common shard; the one that has waited longest comes first."""

    groups: dict[Group, deque[QueuedPush]] = field(default_factory=dict)
    shards: set[int] = field(default_factory=set)

    def takes(self, group: Group) -> bool:
        return group in self.groups or self.shards.isdisjoint(group[0])

    def add(self, group: Group, push: QueuedPush) -> None:
        self.groups.setdefault(group, deque()).append(push)
        self.shards.update(group[0])


class PushQueue:
    """The queue of one bundle on its primary."""

    def __init__(self) -> None:
        self.items: deque[_Pushes | Other] = deque()

    def __bool__(self) -> bool:
        return bool(self.items)

    def __iter__(self) -> Iterator[QueuedPush | Other]:
        for item in self.items:
            if isinstance(item, _Pushes):
                for waiting in item.groups.values():
                    yield from waiting
            else:
                yield item

    def add(self, item: QueuedPush | Other) -> None:
        """Queue an item behind all items that it must not pass."""
        if not isinstance(item, QueuedPush):
            self.items.append(item)
            return
        group = item.push.shards, tuple(item.accepted)
        last = self.items[-1] if self.items else None
        if not isinstance(last, _Pushes) or not last.takes(group):
            last = _Pushes()
            self.items.append(last)
        last.add(group, item)

    def take(
        self, joins: Callable[[QueuedPush, QueuedPush], bool], most: Callable[[QueuedPush], int]
    ) -> list[QueuedPush] | Other:
        """Take the next item: pushes of one group, in their order, or another request.

        The rest of the group waits behind the other groups.

        Args:
            joins: Returns whether a push may be taken with the first one.
            most: Returns the maximum number of pushes to take, given the first one.

        Raises:
            IndexError: The queue is empty.
        """
        head = self.items[0]
        if not isinstance(head, _Pushes):
            self.items.popleft()
            return head
        group, waiting = next(iter(head.groups.items()))
        taken = [waiting.popleft()]
        room = most(taken[0])
        left = BATCH_BYTES - taken[0].gradients.nbytes
        while waiting and len(taken) < room and joins(waiting[0], taken[0]):
            left -= waiting[0].gradients.nbytes
            if left < 0:
                break
            taken.append(waiting.popleft())
        del head.groups[group]
        if waiting:
            head.groups[group] = waiting
        else:
            head.shards.difference_update(group[0])
        if not head.groups:
            self.items.popleft()
        return taken


def shards_named(head: list[QueuedPush] | Other) -> int:
    """Return the number of shards that an item of the queue names; each push of a batch counts its own."""
    if isinstance(head, QueuedTick):
        return len(head.tick.shards)
    return sum([len(each.shards) for each in head]) if isinstance(head, list) else len(head.shards)


def most_joined(head: QueuedPush) -> int:
    """Return the maximum number of pushes in a batch that begins with a given push."""
    if isinstance(head.shards, ShardGroup):
        largest, size = head.shards.largest, head.shards.size
    else:
        sizes = [len(shard.values) for shard in head.shards if shard is not None]
        largest, size = max(sizes, default=1), sum(sizes)
    # The largest shard bounds the batch.
    most = min(MAX_BATCH, SHARD_VALUES // largest)
    return min(most, BATCH_VALUES // size) if head.push.pull and size else most
