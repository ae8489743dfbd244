"""The answers of a store on one server: acknowledgements, values, states and refusals.

Values leave as copies: links never read live values.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.controller.role import reply_or_fail, reply_when_room
from adam_async.messages import GetRecord, RecordPart, StepsReported, Ticked, Values, pack, part_refusal
from adam_async.model.rules import Rule
from adam_async.parameter_server.events import (
    Acknowledge,
    AcknowledgeSteps,
    AcknowledgeTick,
    Effect,
    Propose,
    Refuse,
    SendBehind,
    SendStates,
    SendValues,
)
from adam_async.parameter_server.replay_log import OrderLog
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_group import ShardGroup, applied_clock
from adam_async.parameter_server.shard_transfer import read_states
from transport import BufferPool, Link, Message, Request


class Answers:
    """Answers requests from the shards of one store.

    Args:
        buffers: Memory for copies of values on their way out.
        rules: The rules of the store.
    """

    def __init__(self, buffers: BufferPool, rules: Sequence[Rule]) -> None:
        self._buffers = buffers
        self._rules = rules

    def perform(self, effects: Sequence[Effect]) -> None:
        """Answer; entries for the log are not answers, and their effects are the caller's."""
        shared: dict[tuple[Link, tuple[Shard, ...]], NDArray[Any]] = {}
        for effect in effects:
            match effect:
                case Acknowledge() if effect.shards:
                    # Answers to pushes of one client that were applied together share one copy.
                    key = (effect.request.link, effect.shards)
                    values = shared.get(key)
                    if values is None:
                        values = shared[key] = self._copy(effect.shards)
                    reply_or_fail(effect.request, pack(effect.body, [values]))
                case Acknowledge():
                    reply_or_fail(effect.request, pack(effect.body))
                case SendValues():
                    nbytes = _values_bytes(effect.shards)
                    reply_when_room(effect.request, nbytes, partial(self._values, effect.shards))
                case SendBehind():
                    behind = tuple([int(replica) for replica in effect.behind])
                    late = Values(versions=(), clock=effect.clock, behind=behind)
                    reply_or_fail(effect.request, pack(late))
                case SendStates():
                    nbytes = _states_bytes(effect.shards)
                    reply_when_room(effect.request, nbytes, partial(self._states, effect.shards))
                case AcknowledgeSteps():
                    reply_or_fail(effect.request, pack(StepsReported()))
                case AcknowledgeTick():
                    reply_or_fail(effect.request, pack(Ticked()))
                case Refuse():
                    effect.request.fail(effect.code, effect.text)
                case Propose():
                    continue

    def _values(self, shards: Sequence[Shard]) -> Message:
        body = Values(
            versions=shards.versions()
            if isinstance(shards, ShardGroup)
            else tuple([shard.version for shard in shards]),
            clock=applied_clock(shards),
        )
        return pack(body, [self._copy(shards)])

    def _states(self, shards: Sequence[Shard]) -> Message:
        return pack(*read_states(shards, self._rules[shards[0].spec.rule]))

    def _copy(self, shards: Sequence[Shard]) -> NDArray[Any]:
        """Copy shards one after the other into pooled memory: links never read live values."""
        dtype = shards[0].values.dtype
        size = values_count(shards)
        copy: NDArray[Any] = self._buffers.lend(size * dtype.itemsize, dtype, (size,))[0]
        at = 0
        for part in shards.strips if isinstance(shards, ShardGroup) else shards:
            end = at + len(part.values)
            copy[at:end] = part.values
            at = end
        return copy


def values_count(shards: Sequence[Shard]) -> int:
    """Return the number of values of shards."""
    if isinstance(shards, ShardGroup):
        return shards.size
    return sum([len(shard.values) for shard in shards])


def _values_bytes(shards: Sequence[Shard]) -> int:
    if isinstance(shards, ShardGroup):
        return shards.nbytes
    return sum([shard.values.nbytes for shard in shards])


def _states_bytes(shards: Sequence[Shard]) -> int:
    """Return the bytes of shards with the arrays of their rule."""
    return sum([array.nbytes for shard in shards for array in (shard.values, *shard.rule_state.values())])


def send_record(request: Request, body: GetRecord, log: OrderLog | None, *, node: str) -> None:
    """Answer a request for a part of the log of the order of a run's pushes."""
    if log is None:
        request.fail("no-record", f"{node} keeps no record of run {body.run}")
        return
    packed = np.frombuffer(log.packed(), np.uint8)
    refusal = part_refusal(body, len(packed), most_bytes=request.link.max_message_bytes)
    if refusal is not None:
        request.fail(*refusal)
        return
    part = packed[body.start : body.stop]
    reply_when_room(request, part.nbytes, lambda: pack(RecordPart(total=len(packed)), [part]))
