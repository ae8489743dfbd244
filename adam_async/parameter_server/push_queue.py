"""Pure: the numbers of pushes, and the queue of a bundle: pushes by group of shards (AD-42), and other
requests.

Pushes for different shards may pass each other, so that pushes for the same shards join. Of the messages A0
A1 B0 B1 of two clients, A0 and B0 form one batch, and A1 and B1 the next. A push passes no other kind of
request, and no push of another group that shares a shard with it.

A shard takes a session's numbers from 1 without gaps, each once. The primary *orders* a push on a shard if
its number follows the last ordered number. A lower number is a repetition, and a higher number leaves a gap.
A shard's tables keep the numbers of refused pushes. So a later primary, too, refuses a repetition of a
refused push.

A shard takes each group of an epoch once, whichever session sends it. A push whose groups the shard has
already uses up its number and counts as a tick. A sum cannot be taken in part. So a push waits if a shard has
only some of its groups, until the map names its replica generation as lost: no live replica sends such a
push.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from adam_async.messages import DUPLICATE, GAP, NOT_PRIMARY, REFUSED, OfEach, Problem, Push, each_of, of_place
from adam_async.parameter_server.events import QueuedPull, QueuedPush, QueuedSets, QueuedTick
from adam_async.parameter_server.shard import Session, Shard, ShardTables
from adam_async.parameter_server.shard_group import ShardGroup, numbered_tables
from adam_async.run.group_ranges import has_groups, has_groups_each, with_groups, with_groups_each


def order_together(
    group: ShardGroup, tables: ShardTables, session: Session, number: int
) -> tuple[Sequence[int], list[Problem]]:
    """Order a push with one number on all shards of a group. Returns accepted places, and problems."""
    last = tables.ordered[session]
    if number == last + 1:
        tables.ordered[session] = number
        return group.places, []
    if number <= last:
        tables.duplicates += 1
        return (), [Problem(place, DUPLICATE) for place in group.places]
    return (), [Problem(place, GAP, last + 1) for place in group.places]


def order_apart(
    shards: Sequence[Shard | None], session: Session, numbers: Sequence[int]
) -> tuple[Sequence[int], list[Problem]]:
    """Order a push shard by shard. Returns accepted places, and problems."""
    accepted: list[int] = []
    problems: list[Problem] = []
    for place, shard in enumerate(shards):
        if shard is None:
            problems.append(Problem(place, NOT_PRIMARY))
            continue
        last, number = shard.tables.ordered[session], numbers[place]
        if number == last + 1:
            shard.separate().ordered[session] = number
            accepted.append(place)
        elif number <= last:
            shard.count_duplicate()
            problems.append(Problem(place, DUPLICATE))
        else:
            problems.append(Problem(place, GAP, last + 1))
    return accepted, problems


def order_step(
    shards: Sequence[Shard | None], session: Session, numbers: OfEach
) -> tuple[Sequence[int], list[Problem]]:
    """Order commands for all shards of a bundle, which go on sharing tables; see `order_apart`."""
    ours = [shard for shard in shards if shard is not None]
    if len(ours) < len(shards):
        return order_apart(shards, session, each_of(numbers, len(shards)))
    statuses: dict[ShardTables, tuple[int, int] | None] = {}
    for tables, number in numbered_tables(ours, numbers):
        last = tables.ordered[session]
        statuses[tables] = None
        if number == last + 1:
            tables.ordered[session] = number
        elif number <= last:
            tables.duplicates += 1
            statuses[tables] = DUPLICATE, 0
        else:
            statuses[tables] = GAP, last + 1
    found = [statuses[shard.tables] for shard in ours]
    accepted = [place for place, status in enumerate(found) if status is None]
    return accepted, [Problem(place, *status) for place, status in enumerate(found) if status is not None]


def has_new_number(push: Push, shards: Sequence[Shard | None], session: Session) -> bool:
    """Return whether at least one shard has not yet ordered the push's number."""
    numbered = zip(shards, each_of(push.numbers, len(shards)), strict=True)
    return any(shard is not None and shard.tables.ordered[session] < number for shard, number in numbered)


def problems_of(queued: QueuedPush) -> tuple[Problem, ...]:
    """Return the problems of an answered push; the repetition of a refused push is a refusal again."""
    if not queued.problems:
        return ()
    push = queued.push
    session: Session = (push.session, push.incarnation)
    return tuple([_with_verdict(problem, queued, session) for problem in queued.problems])


def _with_verdict(problem: Problem, queued: QueuedPush, session: Session) -> Problem:
    shard = queued.shards[problem.index]
    if problem.status != DUPLICATE or shard is None:
        return problem
    refused = shard.tables.refusals[session]
    is_refused = of_place(queued.push.numbers, problem.index) in refused
    return Problem(problem.index, REFUSED) if is_refused else problem


def knows_a_part(push: Push, shards: Sequence[Shard | None], session: Session) -> bool:
    """Return whether a shard expects the push's number, and has some of its groups, but not all."""
    tables = {id(shard.tables): shard.tables for shard in shards if shard is not None}
    # Usually no shard has any of the groups; then the numbers need no check.
    has = has_groups_each([each.ordered_groups for each in tables.values()], push.groups)
    parts = {key for key, found in zip(tables, has, strict=True) if found is None}
    if not parts:
        return False
    numbered = zip(shards, each_of(push.numbers, len(shards)), strict=True)
    return any(s is not None and id(s.tables) in parts and s.tables.ordered[session] < n for s, n in numbered)


def order_groups(queued: QueuedPush, tables: ShardTables | None) -> None:
    """Order the groups of a push; set apart the accepted places whose shards have the groups already.

    A group counts once on a shard, whichever session and replica sends it.

    Args:
        tables: Tables of exactly the shards of the push; None if the shards have several tables.
    """
    named, known = queued.push.groups, queued.accepted
    if tables is None:
        found = {place: shard.tables for place in known if (shard := queued.shards[place]) is not None}
        has = [*has_groups_each([each.ordered_groups for each in found.values()], named)]
        known = tuple([place for place, has_all in zip(found, has, strict=True) if has_all])
        fresh = [each for each, has_all in zip(found.values(), has, strict=True) if not has_all]
        ordered = with_groups_each([each.ordered_groups for each in fresh], named)
        for each, sets in zip(fresh, ordered, strict=True):
            each.ordered_groups = sets
    elif known and not has_groups(tables.ordered_groups, named):
        tables.ordered_groups = with_groups(tables.ordered_groups, named)
        return
    if known:
        apart = {*known}
        queued.known = known
        queued.accepted = tuple([place for place in queued.accepted if place not in apart])
        queued.problems += [Problem(place, DUPLICATE) for place in known]


def set_apart(queued: QueuedPush, finite: Sequence[bool]) -> None:
    """Refuse the accepted places of a push whose gradients are not finite."""
    refuse_places(queued, [place for place in queued.accepted if not finite[place]])


def refuse_places(queued: QueuedPush, places: Sequence[int]) -> None:
    """Refuse some accepted places of a push."""
    if places:
        apart = {*places}
        queued.refused = (*queued.refused, *places)
        queued.accepted = tuple([place for place in queued.accepted if place not in apart])
        queued.problems += [Problem(place, REFUSED) for place in places]


MAX_BATCH = 32
"""Maximum number of pushes in a batch, so that the acknowledgement of the first is not too late."""

SHARD_VALUES = 1 << 21
"""Maximum of the largest shard's values times the number of pushes in a batch: eight pushes to a shard of
2^18 values, the default size with float32."""

BATCH_VALUES = 1 << 22
"""Maximum of the values that a push asks for times the number of pushes in a batch: one round of the loop
copies the answers."""

BATCH_BYTES = 512 << 20
"""Maximum size of the gradients in a batch of several pushes, in bytes. The other copies take an entry of at
most `log_entries.MOST_BYTES`, including its details."""

Group = tuple[tuple[int, ...], tuple[int, ...]]
"""The shards of a push, and the indexes of the shards to which the server will apply the push."""

Other = QueuedPull | QueuedSets | QueuedTick


@dataclass(slots=True)
class _Pushes:
    """Groups of pushes without a common shard; the group that has waited longest comes first."""

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
        """Take the next item: the pushes of one group, in order, or another request.

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
    """Return the number of shards that an item of the queue names, summed over the pushes of a batch."""
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
