"""Pure: worker and data server: groups that are leased, and those that are finished."""

from typing import Annotated

import msgspec

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import (
    MOST_IN_A_META,
    After,
    Attempt,
    Clock,
    Count,
    DrawnId,
    Epoch,
    GroupNumber,
    Images,
    Loss,
    Partition,
    Progress,
    ReplicaNumber,
    Row,
    RunId,
    Seconds,
)


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """One group was trained and its push acknowledged."""

    epoch: Epoch
    number: GroupNumber
    attempt: Attempt
    images: Images
    loss: Loss
    clock: Clock = 0
    """Step of the replica that it was in."""


class LeaseGroups(Body, frozen=True, kw_only=True):
    """Ask for up to `count` groups. The answer waits for work, but no longer than `wait_s`.

    All workers of a replica are given the same groups in the same order, each at its own pace.
    """

    run: RunId
    replica: ReplicaNumber
    replica_generation: DrawnId
    """Of the replica; see `ClusterMap.life`."""
    partition: Partition
    position: Count
    """Groups that this worker has received in this life: the answer goes on behind them. A question that is
    asked again after a broken link is answered with the same groups."""
    count: Count
    wait_s: Seconds
    heard: After = -1
    """Where all meet, as this worker was told it with `last` behind those groups; -1: it was not told."""
    rows: tuple[Row, Row] | None = None
    """Rows of the images that are wanted; ``(0, 0)``: no images at all. None: whole ones."""


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """One group handed out: its tag, and the images it holds out of those that ride along."""

    epoch: Epoch
    number: GroupNumber
    attempt: Attempt
    images: Images
    progress: Progress = 0.0
    """Epochs of the run that lie before it, for its replica: 1.25 is a quarter into the second. Schedules go
    by this, so that a rate depends on the group alone."""


class Groups(Body, frozen=True, kw_only=True):
    """Leased groups. Tensors, unless there are none: images (n, C, H, W) with the rows asked for, or none,
    one group after the other and each within one tensor; and the labels of all of them (n,)."""

    leases: Annotated[tuple[Lease, ...], msgspec.Meta(max_length=MOST_IN_A_META)] = ()
    last: bool = False
    """Nothing more waits for this replica: a step that is being collected ends with these groups."""
    clock: Clock = 0
    """The first of these groups begins no earlier than this clock: the replica ticks up to it. 0 in asp."""
    end: Clock = 0
    """With `last`: once these groups are pushed the replica ticks up to this clock, where all meet."""


class ReportGroups(Body, frozen=True, kw_only=True):
    """The part of this worker in these groups is finished. A group is finished when all parts are."""

    run: RunId
    replica: ReplicaNumber
    replica_generation: DrawnId
    partition: Partition
    finished: Annotated[tuple[Finished, ...], msgspec.Meta(max_length=MOST_IN_A_META)]


class Reported(Body, frozen=True, kw_only=True):
    """Acknowledgement of a report."""


ROWS: Rows = {
    LeaseGroups: frozenset({("worker", "data")}),
    Groups: frozenset({("data", "worker")}),
    ReportGroups: frozenset({("worker", "data")}),
    Reported: frozenset({("data", "worker")}),
}
