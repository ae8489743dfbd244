"""Pure: the numbers of pushes: a shard takes a session's numbers from 1 without gaps, each once.

The primary *orders* a push on a shard if its number follows the last ordered one; a lower number is a
repetition, and a higher one leaves a gap. A repetition of a refused push is refused again, also by a later
primary, because the tables of a shard keep the numbers of refused pushes.
"""

from collections.abc import Sequence

from adam_async.messages import DUPLICATE, GAP, NOT_PRIMARY, REFUSED, Problem, Push
from adam_async.parameter_server.events import QueuedPush
from adam_async.parameter_server.shard import Session, Shard, ShardTables
from adam_async.parameter_server.shard_group import ShardGroup


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
            shard.count_duplicates()
            problems.append(Problem(place, DUPLICATE))
        else:
            problems.append(Problem(place, GAP, last + 1))
    return accepted, problems


def has_new_number(push: Push, shards: Sequence[Shard | None], session: Session) -> bool:
    """Return whether a push has a number that one of its shards has not ordered."""
    numbered = zip(shards, push.numbers, strict=True)
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
    return Problem(problem.index, REFUSED) if queued.push.numbers[problem.index] in refused else problem


def set_apart(queued: QueuedPush, finite: Sequence[bool]) -> None:
    """Refuse the accepted places of a push whose gradients are not finite."""
    queued.refused = tuple([place for place in queued.accepted if not finite[place]])
    if queued.refused:
        queued.accepted = tuple([place for place in queued.accepted if finite[place]])
        queued.problems += [Problem(place, REFUSED) for place in queued.refused]
