"""The short way of a push: it meets idle shards, so one call checks, numbers, applies and answers it.

Theory of operation
-------------------
On the long way a push is ordered, queued, joined with others, put into the log, applied in a later round of
the loop, and acknowledged. Most pushes to a small store meet shards on which nothing waits, so none of this
has an effect. The first push of a link to a group of shards takes the long way, whose checks leave a *lane*:
who sends, in which session and as which replica, to which shards and in which form. A later push with the
same head takes the lane and needs only the checks of what changes from push to push: its number, its clock,
the versions that it read, and its values. A push with factors first waits for room for its answer, which is
larger than the push. A push that passes the checks and meets shards with other work is ordered and queued,
without the checks of the long way.

A lane ends with everything that its checks depend on: the live replicas, the epoch, the remembered sessions,
the tables of the shards, the shards themselves. A push that a lane does not fit takes the long way, which
refuses what is wrong. So the short way has no refusals of its own.

A lane takes at most one push in a turn of its link's reading, so a client with many pushes cannot starve the
others: the rest queues and is joined. Only bundles whose entries are committed at once have lanes. Bundles
have none if they have other copies, durable pushes, a rule of the user or a recorded run, or are in bsp,
where contributions wait for their sum.

A flat gradient of a process of this host is read where its sender wrote it, and can change it. It is checked,
and each block is checked again as it is applied. A push that waits, or takes the long way, is copied first.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Part, Push, Pushed, pack
from adam_async.parameter_server.apply import PIECE_WORK, PRODUCTS_PER_VALUE, Applier
from adam_async.parameter_server.gradients import (
    DeltaPart,
    FactorPart,
    PushGradients,
    largest,
    read_gradients,
)
from adam_async.parameter_server.question_checks import QuestionChecks, answer_bytes
from adam_async.parameter_server.shard import FamilyMemory, Session, Shard, ShardTables, Sheet
from adam_async.parameter_server.shard_group import ShardGroup
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.store_host import StoreHost
from adam_async.run.group_ranges import has_groups
from transport import Link, LocalProtocolError, Placed, ProtocolError, Request

logger = logging.getLogger(__name__)

MOST_LANES = 256
"""Maximum number of lanes of a bundle; a further one ends all others, so that new sets of shards do not fill
the memory."""


class Lane(msgspec.Struct, kw_only=True, eq=False):
    """Outcome of the checks of the long way for the pushes of one link to one group of shards."""

    head: tuple[Any, ...]
    """The fields of a push that are the same on this lane, see `_head`."""
    changes: int
    """The `Bundle.changes` of the checks."""
    session: Session
    group: ShardGroup
    tables: ShardTables
    """Tables of all shards of the group, and of no others."""
    shards: int
    applier: Applier
    dtype: np.dtype[Any]
    is_plain: bool
    """Whether the rule is plain SGD, and so writes new values beside the old ones in one pass."""
    is_flat: bool
    """Whether the gradient of all shards is one flat tensor; otherwise its parts are read as on the long
    way."""
    limit: float
    """Bound on the norm of a gradient times its rate, below which no value can overflow."""
    turn: int = -1
    """The `Link.turn` of the last push on this lane."""


class ShortWay:
    """The lanes of one bundle on its primary.

    Args:
        host: Services of the server.
        changed: Callback of the disk; gets the changed shards of each push, and 1, the number of updates.
            None without a disk.
        charged: Takes a push once its link has room for its answer.
        queued: Called after a push was queued.
        publish: Lets readers of this host read the values of a group in place.
    """

    def __init__(
        self,
        state: ServerState,
        checks: QuestionChecks,
        host: StoreHost,
        changed: Callable[[Sequence[Shard], int], None] | None,
        charged: Callable[[Request, Push], None],
        queued: Callable[[], None],
        publish: Callable[[ShardGroup, Link], None],
    ) -> None:
        self._state = state
        self._checks = checks
        self._host = host
        self._lend = host.buffers.joined
        self._timeline = host.timeline
        self._changed = changed
        self._charged = charged
        self._queued = queued
        self._publish = publish
        self._lanes: dict[tuple[Link, tuple[int, ...]], Lane] = {}

    def prepare(self, link: Link, push: Push, applier: Applier) -> None:
        """Make the lane of a push that passed the checks of the long way, if its form has one."""
        state = self._state
        known = self._lanes.get((link, push.shards))
        if known is not None and known.changes == state.bundle.changes and known.head == _head(push):
            return
        # The speed of a rule of the user is unknown, and it may refuse a push.
        if applier.may_refuse:
            return
        # The short way notes nothing, so the pushes of a recorded run take the long way.
        if not state.alone or state.synchronous or state.bundle.log is not None:
            return
        group = state.bundle.group(push.shards) if push.generation == state.generation else None
        if group is None or group.size > PIECE_WORK or answer_bytes(group) > link.max_message_bytes:
            return
        tables = group.shared()
        if tables is None or not state.orders_at_once(push):
            return
        if len(self._lanes) >= MOST_LANES:
            self._lanes.clear()
        dtype = group[0].values.dtype
        self._lanes[link, push.shards] = Lane(
            head=_head(push),
            changes=state.bundle.changes,
            session=(push.session, push.incarnation),
            group=group,
            tables=tables,
            shards=len(group),
            applier=applier,
            dtype=dtype,
            is_plain=applier.rule.is_plain,
            is_flat=push.parts == (Part(factors=False, count=len(group)),),
            limit=largest(dtype),
        )

    def end(self) -> None:
        """End all lanes: the store leaves the server."""
        self._lanes.clear()

    def forget_places(self, memory: FamilyMemory) -> None:
        """Forget where the values of lanes in some memory are."""
        for lane in self._lanes.values():
            lane.group.forget(memory)

    def links_closed(self) -> None:
        """End the lanes of closed links."""
        for key in [key for key in self._lanes if key[0].closed]:
            del self._lanes[key]

    @np.errstate(over="ignore", invalid="ignore")
    def take(self, request: Request, push: Push, *, charged: bool = False) -> bool:
        """Check, number, apply and answer a push in this call; queue it if other work is in front of it.

        Args:
            charged: Whether the link has room for the answer. An answer of the size of the gradient needs no
                charge if it is sent in this call: the request gives its memory back now.

        Returns False if the push has to take the long way; then nothing has happened.
        """
        link, state = request.link, self._state
        lane = self._lanes.get((link, push.shards))
        if lane is None:
            return False
        if not (charged or lane.is_flat or not push.pull):
            request.charge(lane.group.nbytes, partial(self._charged, request, push))
            return True
        group, shards, tables, session = lane.group, lane.shards, lane.tables, lane.session
        if lane.changes != state.bundle.changes or lane.head != _head(push) or tables.shards != shards:
            return False
        is_free = state.is_free and link.turn != lane.turn
        if not is_free:
            if not ((charged or not push.pull) and state.may_queue(push)):
                return False
            request.copy_out()
        # A number that is not the next one is a repetition or a gap.
        number = tables.ordered[session] + 1
        if push.numbers != number or push.clock > self._checks.free_clock:
            return False
        version, own_applied = push.versions, push.own_applied
        if not (isinstance(version, int) and isinstance(own_applied, int)):
            return False
        if push.groups and (
            has_groups(tables.groups if is_free else tables.ordered_groups, push.groups) is not False
            or self._checks.fault_of_groups(push.groups, (tables,), push.epoch)
        ):
            return False
        if version > tables.version or own_applied >= number:
            return False
        tensors = request.message.tensors
        sheet = None
        if (memory := group.memory) is not None and (memory.sheets or memory.moves):
            sheet = group.next_sheet() if is_free else None
            if is_free and not group.may_lend:
                group.leave_lent()
            group.renew()
        is_apart = sheet is not None and lane.is_plain and lane.is_flat and group.flat is not None
        gradients = None if lane.is_flat else _parts_of(lane, push, request)
        if not lane.is_flat:
            if gradients is None:
                return False
        elif len(tensors) != 1 or tensors[0].dtype != lane.dtype or tensors[0].shape != (group.size,):
            return False
        # Not `<`: a gradient with NaN fails the comparison, too. The long way scans the values one by one.
        elif not is_apart and not sqrt(tensors[0].dot(tensors[0])) * max(push.rate, 1.0) <= lane.limit:
            return False
        if not is_free:
            self._queue(lane, request, push, gradients)
            return True
        begin = self._timeline.clock() if self._timeline is not None else 0.0
        lane.turn, read = link.turn, version + own_applied
        rate = push.rate / (1 + max(tables.version - read, 0)) if state.bundle.scales else push.rate
        try:
            is_usual = sheet is None and gradients is None and type(request.message) is not Placed
            if is_usual and not group.has_counts:
                lane.applier.batches.apply(group.strips, tensors, (rate,))
            elif not self._apply(lane, request, rate, gradients, sheet):
                return False
            body = state.applied_at_once(push, session, group, tables, read)
        except Exception as defect:
            # The values may have the push in part, and no number counts it: no later push may meet them.
            self._host.fail(defect)
            raise
        # Before the answer, which may lack memory: the disk must learn of the change in any case.
        if self._changed is not None:
            self._changed(group, 1)
        self._answer(lane, request, push, body)
        if self._timeline is not None:
            self._timeline.applied(self._host.node, [push], group.size, begin)
        return True

    def _answer(self, lane: Lane, request: Request, push: Push, body: Pushed) -> None:
        """Answer an applied push, with the values if it pulls."""
        group, link = lane.group, request.link
        values: tuple[NDArray[Any], ...] = ()
        lent = group.flat if link.takes_lent else None
        if push.pull:
            if group.nbytes >= link.lend_bytes and group.lacks_sheets:
                self._publish(group, link)
            values = (self._lend(group.flats, lane.dtype, group.size) if lent is None else lent,)
        try:
            request.reply(pack(body, values), lent=lent is not None)
        except LocalProtocolError as error:
            request.fail("too-large", f"the answer to a push cannot travel: {error}")

    def _apply(
        self, lane: Lane, request: Request, rate: float, gradients: PushGradients | None, sheet: Sheet | None
    ) -> bool:
        """Apply a push, and let the new values lie on another sheet if a reader has the old ones.

        Returns False if new values beside the old ones are not finite; then nothing has changed.
        """
        group, scales = lane.group, self._state.bundle.scales
        if sheet is not None and gradients is None and lane.is_plain and group.flat is not None:
            (flat,) = request.message.tensors
            into = sheet.values[group.begin : group.end]
            if not lane.applier.batches.step(group.flat, into, flat, rate):
                return False
            group.move(sheet, with_values=False)
            return True
        if sheet is not None:
            group.move(sheet, with_values=True)
        if gradients is not None:
            lane.applier.apply_pushes(group, [gradients], [(rate,) * lane.shards] if scales else None)
        else:
            self._apply_apart(lane, request, rate)
        return True

    def _apply_apart(self, lane: Lane, request: Request, rate: float) -> None:
        """Apply a checked gradient to strips that copy counts, or from memory that its sender can change."""
        (flat,) = request.message.tensors
        if type(request.message) is not Placed:
            lane.applier.apply_counted(lane.group, flat, rate)
        elif not lane.applier.apply_changing(lane.group, flat, rate):
            # The push counts as applied: its number must not be free for what its sender sends next.
            self._state.bundle.cut_pushes += 1
            logger.warning("%s changed a gradient during its push, and loses its link", request.link.peer)
            request.link.abort()

    def _queue(self, lane: Lane, request: Request, push: Push, gradients: PushGradients | None) -> None:
        """Order and queue a checked push behind other work."""
        group = lane.group
        if gradients is None:
            part = DeltaPart(request.message.tensors[0], group.sizes, push.rate, finite=True)
            gradients = PushGradients((part,))
        self._state.queue_checked(request, push, lane.session, group, lane.tables, gradients)
        self._queued()


def _parts_of(lane: Lane, push: Push, request: Request) -> PushGradients | None:
    """Return the gradients of a push with factors; None if they do not fit or may not be finite.

    Also None for factors of so many images that the loop would do several pieces of work in this call.
    """
    request.copy_out()
    try:
        gradients = read_gradients(push, request.message.tensors, (), lane.dtype, lane.group)
    except ProtocolError:
        return None
    images = max([part.x_IK.shape[1] for part in gradients.parts if isinstance(part, FactorPart)], default=0)
    is_small = lane.group.size * images <= PIECE_WORK * PRODUCTS_PER_VALUE
    return gradients if is_small and gradients.is_sure else None


def _head(push: Push) -> tuple[Any, ...]:
    """Return the fields of a push that are the same for all pushes of a lane."""
    return (
        push.session, push.incarnation, push.replica, push.generation, push.epoch, push.weight, push.assign,
        push.pull, push.parts, push.recorded, push.vector,
    )  # fmt: skip
