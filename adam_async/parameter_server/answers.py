"""The answers of a bundle on one server: acknowledgements, values, states and refusals.

Values are sent as copies: links never read live values. An answer may wait for room in the budgets, and the
room may come between two rounds of one batch. Until its end the batch has changed values that no version
counts, so the answer then waits for the end, too.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.controller.role import reply_or_fail, reply_when_room
from adam_async.messages import GetRecord, RecordPart, ShardStates, Values, pack, part_refusal
from adam_async.model.rules import Rule
from adam_async.parameter_server.events import (
    Answer,
    Effect,
    KeepPin,
    Propose,
    Refuse,
    SendSets,
    SendStates,
    SendValues,
)
from adam_async.parameter_server.kept_shards import ClockSnapshot, bytes_of
from adam_async.parameter_server.replay_log import OrderLog
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_group import ShardGroup, applied_clock, versions_of
from adam_async.parameter_server.shard_transfer import read_states, states_message
from adam_async.run.group_ranges import merging
from transport import BufferPool, Link, Message, Request

MERGED_BYTES = 48
"""Memory of the merge of sets for each of their bounds, in bytes."""


class Answers:
    """Answers requests from the shards of one bundle.

    Args:
        buffers: Memory for the copies of values in answers.
        rules: The rules of the store.
        on_taken: Called after an answer has taken shards out of a snapshot; a sum may wait for this.
        is_torn: Returns whether a batch has changed values that no version counts; `whole` reports its end.
        spawn: Starts a task of the server, by name.
        publish: Lets readers of this host read the values of a group in place.
    """

    def __init__(
        self,
        buffers: BufferPool,
        rules: Sequence[Rule],
        on_taken: Callable[[], None],
        is_torn: Callable[[], bool],
        spawn: Callable[[str, Coroutine[Any, Any, None]], object],
        publish: Callable[[ShardGroup, Link], None],
    ) -> None:
        self._publish = publish
        self._buffers = buffers
        self._rules = rules
        self._on_taken = on_taken
        self._is_torn = is_torn
        self._spawn = spawn
        self._merging = asyncio.Lock()
        self._behind: list[tuple[Request, Callable[[], Message]]] = []
        """Answers that have room, and wait for the end of the batch in progress."""
        self._refusal: tuple[str, str] | None = None
        """Refusal of all further answers with values, once the shards have left; None before."""

    def perform(self, effects: Sequence[Effect], snapshot: ClockSnapshot | None) -> None:
        """Send the answers among the effects. The caller performs each `Propose`, which is no answer.

        Args:
            snapshot: The shards at the clock of a reader; None if no reader reads them.
        """
        shared: dict[tuple[Link, tuple[Shard, ...]], NDArray[Any]] = {}
        for effect in effects:
            match effect:
                case Answer() if effect.shards:
                    # Answers to pushes of one client that were applied together share one copy.
                    key = (effect.request.link, effect.shards)
                    values = shared.get(key)
                    if values is None:
                        values = shared[key] = self._values_of(effect.request.link, effect.shards)
                    reply_or_fail(
                        effect.request, pack(effect.body, [values]), lent=effect.request.link.shares
                    )
                case Answer():
                    reply_or_fail(effect.request, pack(effect.body))
                case SendValues():
                    nbytes = values_count(effect.shards) * effect.shards[0].values.itemsize
                    values_of = partial(self._values, effect.request.link, effect.shards, effect.vector)
                    self._send_when_room(effect.request, nbytes, values_of)
                case SendStates():
                    nbytes = sum(map(bytes_of, effect.shards))
                    self._send_when_room(effect.request, nbytes, partial(self._states, effect, snapshot))
                case SendSets():
                    nbytes = MERGED_BYTES * sum(map(len, effect.several))
                    effect.request.charge(nbytes, partial(self._begin_merge, effect))
                case Refuse():
                    effect.request.fail(effect.code, effect.text)
                case Propose() | KeepPin():
                    continue

    def _send_when_room(self, request: Request, nbytes: int, make: Callable[[], Message]) -> None:
        request.charge(nbytes, partial(self._send, request, make))

    def _send(self, request: Request, make: Callable[[], Message]) -> None:
        """Make and send an answer that has room, at once or behind the batch in progress."""
        if self._refusal is not None:
            request.fail(*self._refusal)
        elif self._is_torn():
            self._behind.append((request, make))
        else:
            reply_or_fail(request, make(), lent=request.link.shares)

    def whole(self) -> None:
        """Send the answers that have waited for the end of a batch."""
        behind, self._behind = self._behind, []
        for request, make in behind:
            self._send(request, make)

    def refuse(self, code: str, text: str) -> None:
        """Refuse the answers that wait, now and once they have room: the shards leave, perhaps in a batch."""
        self._refusal = code, text
        self.whole()

    def _begin_merge(self, effect: SendSets) -> None:
        self._spawn("merges-sets", self._merge(effect))

    async def _merge(self, effect: SendSets) -> None:
        """Merge the sets of an answer piece by piece, behind those of earlier answers."""
        async with self._merging:
            work = merging(effect.several)
            while effect.request.is_open:
                try:
                    next(work)
                except StopIteration as done:
                    self._send(effect.request, partial(pack, effect.body, done.value))
                    return
                await asyncio.sleep(0)

    def _values_of(self, link: Link, shards: Sequence[Shard]) -> NDArray[Any]:
        """Return values for a reader on a link: where they lie if it can borrow them there, else a copy."""
        if link.shares and isinstance(shards, ShardGroup):
            shards.renew()
            if shards.nbytes >= link.lend_bytes and shards.lacks_sheets:
                self._publish(shards, link)
            if shards.flat is not None and link.lends(shards.flat):
                return shards.flat
        return copy_of(shards, self._buffers)

    def _values(self, link: Link, shards: Sequence[Shard], vector: int) -> Message:
        body = Values(versions=versions_of(shards), clock=applied_clock(shards))
        if not vector:
            return pack(body, [self._values_of(link, shards)])
        parts = [values for shard in shards if (values := shard.vector(vector)) is not None]
        if len(parts) < len(shards):
            body = msgspec.structs.replace(body, deleted=True)
            return pack(body, [np.empty(0, shards[0].values.dtype)])
        return pack(body, [self._buffers.joined(parts, shards[0].values.dtype, values_count(shards))])

    def _states(self, effect: SendStates, snapshot: ClockSnapshot | None) -> Message:
        """Return copies of shards. Copies at a clock come from the snapshot, which may have ended by now."""
        rule = self._rules[effect.shards[0].spec.rule]
        if not effect.clock:
            return pack(*read_states(effect.shards, rule))
        copies = [snapshot.take(shard.spec.id) if snapshot is not None else None for shard in effect.shards]
        self._on_taken()  # after a wait for room no other event would continue a waiting sum
        whole = [copy for copy in copies if copy is not None]
        if snapshot is None or snapshot.clock != effect.clock or len(whole) < len(copies):
            return pack(ShardStates(arrays=(), passed=effect.clock))
        return pack(*states_message(whole, rule))


def copy_of(shards: Sequence[Shard], buffers: BufferPool) -> NDArray[Any]:
    """Copy shards one after the other into pooled memory: links never read live values."""
    if isinstance(shards, ShardGroup):
        shards.renew()
    parts = shards.flats if isinstance(shards, ShardGroup) else [shard.values for shard in shards]
    return buffers.joined(parts, shards[0].values.dtype, values_count(shards))


def values_count(shards: Sequence[Shard]) -> int:
    """Return the number of values of shards."""
    if isinstance(shards, ShardGroup):
        return shards.size
    return sum([len(shard.values) for shard in shards])


def send_record(request: Request, body: GetRecord, log: OrderLog | None) -> None:
    """Answer a request for a part of the log of a bundle."""
    fault = f"run {body.run} is not recorded" if log is None else log.fault
    if log is None or fault:
        request.fail("no-record", f"bundle {body.home} has no log: {fault}")
        return
    packed = np.frombuffer(log.packed(), np.uint8)
    refusal = part_refusal(body, len(packed), most_bytes=request.link.max_message_bytes)
    if refusal is not None:
        request.fail(*refusal)
        return
    part = packed[body.start : body.stop]
    reply_when_room(request, part.nbytes, lambda: pack(RecordPart(total=len(packed)), [part]))
