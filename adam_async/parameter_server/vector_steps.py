"""Pure: steps on vectors: sums of scaled vectors and dot products, shard by shard, and their answers.

A step is a separate entry, as an assignment is. On each shard it takes effect whole or not at all: the sums
are computed aside, and replace the vectors if all of them are finite. Dot products are taken of the outcome.
The shard keeps the dot products with the step's number, so that a repeated step gets the same answer.

A shard has one rounded number for each dot product. The numbers in the answer have exactly the sum over all
shards of the bundle; the client rounds the sum over all bundles once. So the result does not depend on the
number of servers, and the answer has the same length for any number of shards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import DUPLICATE, GAP, NOT_PRIMARY, REFUSED, Commands, Problem, Pushed, of_place
from adam_async.model.vectors import BLOCK, Term, exact_parts, exact_sum
from adam_async.parameter_server.apply import PIECE_WORK, Applier, Pieces, Work
from adam_async.parameter_server.events import QueuedPush
from adam_async.parameter_server.shard import Shard, StepKey
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_record import vector_key

MOST_PROBLEMS = 8
"""Maximum number of problems in the answer to a step: the worst ones of all shards."""

LEAST_PARTS = 3
"""Minimum number of parts of a sum; zeros fill it up. A sum over many shards has about this many parts, so a
large model's answer is no longer than a small one's."""

MOST_PARTS = 1200
"""Maximum number of parts of all sums in one answer, whose meta has 16 KiB. Only numbers of extremely
different sizes have more than some parts."""

CALL_WORK = 4096
"""Work that takes as long as the calls for one term or one dot product, however few values a shard has."""

_SEVERITY = (GAP, NOT_PRIMARY, REFUSED, DUPLICATE)


def work_on_step(
    queued: QueuedPush, shards: Sequence[Shard], applier_of: Callable[[ShardSpec], Applier]
) -> Work:
    """Begin a step on the shards at its accepted places."""

    def pieces() -> Pieces:
        """Do the step shard by shard, and report for each whether it took effect."""
        commands = queued.push.commands
        assert commands is not None
        for place, shard in zip(queued.accepted, shards, strict=True):
            yield from _shard_pieces(applier_of(shard.spec), shard, commands, _key(queued, place))

    return Work(pieces())


def _key(queued: QueuedPush, place: int) -> StepKey:
    push = queued.push
    return push.session, push.incarnation, of_place(push.numbers, place)


def _shard_pieces(applier: Applier, shard: Shard, commands: Commands, key: StepKey) -> Pieces:
    new: dict[int, NDArray[Any]] = {}
    """New values of each vector."""
    size = shard.spec.size
    for command in commands.combine:
        if shard.vector(command.into) is None or command.array not in ("", shard.spec.tensor):
            continue
        terms: list[Term] = []
        for coefficient, number in command.terms:
            values = new[number] if number in new else shard.vector(number)
            if values is None:  # the vector lacks this array
                yield 0, [(False,)]
                return
            terms.append((coefficient, values))
        # The allocator returns the memory that the vector of the previous shard had.
        out, most = np.empty(size, applier.dtype), max(PIECE_WORK // max(len(terms), 1), 1)
        for start in range(0, size, most):
            part = slice(start, start + most)
            if not applier.vectors.combine(out[part], [(factor, each[part]) for factor, each in terms]):
                yield 0, [(False,)]
                return
            # Two terms take as long as applying one gradient.
            yield (len(out[part]) + CALL_WORK) * max(len(terms), 1) // 2, []
        new[command.into] = out
    for number, result in new.items():
        if number:  # no other object has a vector's memory, so replace it without a write
            shard.rule_state[vector_key(number)] = result
            continue
        for start in range(0, size, PIECE_WORK):
            part = slice(start, start + PIECE_WORK)
            shard.values[part] = result[part]
            yield len(result[part]) // 4, []
    if commands.dots:
        yield from _dot_pieces(applier, shard, commands, key)
    yield CALL_WORK, [(True,)]


def _dot_pieces(applier: Applier, shard: Shard, commands: Commands, key: StepKey) -> Pieces:
    found = []
    for each in commands.dots:
        first, second = shard.vector(each.first), shard.vector(each.second)
        if first is None or second is None or each.array not in ("", shard.spec.tensor):
            found.append(0.0)
            continue
        value = applier.vectors.dot(first, second)
        yield (len(first) + CALL_WORK) // 2, []
        if value is None:
            for total in exact_sum(first, second):
                value = total
                yield BLOCK, []
        assert value is not None
        found.append(value)
    shard.keep_dots(key, tuple(found))


def answer_to_step(queued: QueuedPush, problems: Sequence[Problem]) -> Pushed:
    """Return the answer to a step, which is equally short for any number of shards."""
    worst = sorted(problems, key=lambda each: _SEVERITY.index(each.status))[:MOST_PROBLEMS]
    commands = queued.push.commands
    assert commands is not None
    lost = {each.index for each in problems if each.status != DUPLICATE}
    kept = [
        None if shard is None else shard.dots.get(_key(queued, place))
        for place, shard in enumerate(queued.shards)
        if place not in lost
    ]
    tables = {shard.tables for shard in queued.shards if shard is not None}
    epoch = max([epoch for each in tables for epoch in each.ordered_groups], default=0)
    # A repetition may ask for other dot products than the step had.
    of_shards = [dots for dots in kept if dots is not None and len(dots) == len(commands.dots)]
    if not of_shards or len(of_shards) < len(kept):  # no dot products, or those of an old step
        return Pushed(versions=0, problems=tuple(worst), epoch=epoch)
    parts = [exact_parts([dots[at] for dots in of_shards]) for at in range(len(commands.dots))]
    if sum(map(len, parts)) > MOST_PARTS:
        return Pushed(versions=0, problems=tuple(worst), epoch=epoch)
    dots = tuple([each + (0.0,) * (LEAST_PARTS - len(each)) if each else () for each in parts])
    return Pushed(versions=0, problems=tuple(worst), dots=dots, epoch=epoch)
