"""The short way of a push: it meets idle shards, so one call checks, numbers, applies and answers it.

Theory of operation
-------------------
On the long way a push is ordered, queued, joined with others, put into the log, applied in a later round of
the loop, and acknowledged. Most pushes to a small store meet shards on which nothing waits, so none of this
has an effect. The first push of a link to a group of shards takes the long way, whose checks leave a *lane*:
who sends, in which session and as which replica, to which shards and in which form. A later push with the
same head takes the lane and needs only the checks of what changes from push to push: its number, its clock,
the versions that it read, and its values.

A lane ends with everything that its checks depend on: the live replicas, the epoch, the remembered sessions,
the tables of the shards, the shards themselves. A push that a lane does not fit takes the long way, which
refuses what is wrong. So the short way has no refusals of its own.

A lane takes at most one push in a turn of its link's reading, so a client with many pushes cannot starve the
others: the rest queues and is joined. Only bundles whose entries are committed at once have lanes, so not
those with other copies or durable pushes, and not bsp, where contributions wait for their sum.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import msgspec
import numpy as np

from adam_async.messages import Part, Push, pack
from adam_async.parameter_server.apply import PIECE_WORK, Applier
from adam_async.parameter_server.gradients import largest
from adam_async.parameter_server.question_checks import QuestionChecks, answer_bytes
from adam_async.parameter_server.shard import Session, Shard, ShardTables
from adam_async.parameter_server.shard_group import ShardGroup
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.store_host import StoreHost
from transport import Link, LocalProtocolError, Request

MOST_LANES = 256
"""Number of lanes of a bundle at which all of them end: ever new sets of shards must not fill the memory."""


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
    limit: float
    """Bound on the norm of a gradient times its rate, below which no value can overflow."""
    turn: int = -1
    """The `Link.turn` of the last push on this lane."""


class ShortWay:
    """The lanes of one bundle on its primary.

    Args:
        host: Services of the server.
        changed: Called with the changed shards of each push, and 1; None if no disk follows them.
    """

    def __init__(
        self,
        state: ServerState,
        checks: QuestionChecks,
        host: StoreHost,
        changed: Callable[[Sequence[Shard], int], None] | None,
    ) -> None:
        self._state = state
        self._checks = checks
        self._host = host
        self._lend = host.buffers.joined
        self._timeline = host.timeline
        self._changed = changed
        self._lanes: dict[tuple[Link, tuple[int, ...]], Lane] = {}

    def prepare(self, link: Link, push: Push, applier: Applier) -> None:
        """Make the lane of a push that passed the checks of the long way, if its form has one."""
        state = self._state
        known = self._lanes.get((link, push.shards))
        if known is not None and known.changes == state.bundle.changes and known.head == _head(push):
            return
        if not state.alone or state.synchronous:
            return
        group = state.bundle.group(push.shards) if push.generation == state.generation else None
        if group is None or group.size > PIECE_WORK or answer_bytes(group) > link.max_message_bytes:
            return
        tables = group.shared()
        if tables is None or push.assign or push.parts != (Part(factors=False, count=len(group)),):
            return
        # The state refuses these, or lets them wait.
        if push.epoch > state.bundle.epoch or state.is_over(push):
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
            limit=largest(dtype),
        )

    def __len__(self) -> int:
        return len(self._lanes)

    def end(self) -> None:
        """End all lanes: the store leaves the server."""
        self._lanes.clear()

    def links_closed(self) -> None:
        """End the lanes of closed links."""
        for key in [key for key in self._lanes if key[0].closed]:
            del self._lanes[key]

    @np.errstate(over="ignore", invalid="ignore")
    def take(self, request: Request, push: Push) -> bool:
        """Check, number, apply and answer a push in this call.

        Returns False if the push has to take the long way; then nothing has happened.
        """
        link, state = request.link, self._state
        lane = self._lanes.get((link, push.shards))
        if lane is None or lane.changes != state.bundle.changes or lane.head != _head(push):
            return False
        if not state.is_free:
            return False
        group, shards, tables, session = lane.group, lane.shards, lane.tables, lane.session
        if tables.shards != shards or link.turn == lane.turn:
            return False
        # A number that is not the next one is a repetition or a gap.
        number = tables.ordered[session] + 1
        if push.numbers != (number,) * shards or push.clock > self._checks.free_clock:
            return False
        versions, owns = push.versions, push.own_applied
        if not len(versions) == len(owns) == shards:
            return False
        read, own_applied = versions[0], owns[0]
        if versions.count(read) != shards or owns.count(own_applied) != shards:
            return False
        if push.groups and self._checks.fault_of_groups(push.groups, (tables,), push.epoch):
            return False
        tensors = request.message.tensors
        if read > tables.version or own_applied >= number or len(tensors) != 1:
            return False
        flat = tensors[0]
        if flat.dtype != lane.dtype or flat.shape != (group.size,):
            return False
        # Not `<`: a gradient with NaN fails the comparison, too. The long way scans the values one by one.
        if not sqrt(flat.dot(flat)) * max(push.rate, 1.0) <= lane.limit:
            return False
        lane.turn = link.turn
        begin = self._timeline.clock() if self._timeline is not None else 0.0
        rate = push.rate
        if state.bundle.scales:
            rate /= 1 + max(tables.version - read - own_applied, 0)
        try:
            if group.has_counts:
                lane.applier.apply_counted(group, flat, rate)
            else:
                lane.applier.batches.apply(group.strips, (flat,), (rate,))
            body = state.applied_at_once(push, session, group, tables)
        except Exception as defect:
            # The values may have the push in part, and no number counts it: no later push may meet them.
            self._host.fail(defect)
            raise
        # Before the answer, which may lack memory: the disk must learn of the change in any case.
        if self._changed is not None:
            self._changed(group, 1)
        # No charge: the answer has the size of the gradient, whose memory the request gives back now.
        values = (self._lend(group.flats, lane.dtype, group.size),) if push.pull else ()
        try:
            request.reply(pack(body, values))
        except LocalProtocolError as error:
            request.fail("too-large", f"the answer to a push cannot travel: {error}")
        if self._timeline is not None:
            self._timeline.applied(self._host.node, [push], group.size, begin)
        return True


def _head(push: Push) -> tuple[Any, ...]:
    """Return the fields of a push that are the same for all pushes of a lane."""
    return (
        push.session, push.incarnation, push.replica, push.generation, push.epoch, push.weight, push.assign,
        push.pull, push.parts,
    )  # fmt: skip
