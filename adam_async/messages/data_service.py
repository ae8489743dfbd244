"""Pure: messages of data servers: leases, images, the test set, joining hosts, and staged files."""

from typing import Annotated

import msgspec

from adam_async.messages.body import (
    Addresses,
    After,
    Attempt,
    Body,
    Clock,
    Count,
    DrawnId,
    Epoch,
    GroupNumber,
    Images,
    Index,
    Loss,
    Name,
    NodeId,
    Partition,
    Progress,
    ReplicaNumber,
    Row,
    Rows,
    RunId,
    Seconds,
)

MOST_GROUPS = 64
"""Maximum number of groups whose images one request names."""

MOST_LEASES = 512
"""Maximum number of leases in one answer: more do not fit into one message."""

MOST_REPORTED = 256
"""Maximum number of groups in one report: more do not fit into one message."""

MOST_HELD = 1024
"""Maximum number of leases that a worker holds: it sends them all in one message."""


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A trained group whose push is acknowledged."""

    epoch: Epoch
    number: GroupNumber
    attempt: Attempt
    images: Images
    loss: Loss
    clock: Clock = 0
    """Step of the replica in which the group was trained."""


class HeldLease(msgspec.Struct, frozen=True, array_like=True):
    """One received lease, as a worker sends it to the next dealer."""

    number: GroupNumber
    attempt: Attempt
    clock: Clock = 0
    """`Leases.clock` of the answer with the group."""
    sync_clock: After = -1
    """Sync clock that the worker received before the group; -1: none."""


class LeaseGroups(Body, frozen=True, kw_only=True):
    """Request for up to `count` groups. The answer waits for work, at most `wait_s`.

    All workers of a replica receive the same groups in the same order, each at its own pace. The first
    request on a link has `count` 0 and the worker's leases; the answer has no groups.
    """

    run: RunId
    replica: ReplicaNumber
    replica_generation: DrawnId
    """Generation of the replica in the cluster map."""
    partition: Partition
    epoch: Epoch
    """Epoch of the last group that this worker has received; 0: none."""
    position: Count
    """Number of groups of this epoch that this worker has received in this replica generation: the answer
    begins after them. A request repeated after a broken link gets the same groups."""
    count: Count
    wait_s: Seconds
    heard: After = -1
    """Sync clock after the first `position` groups, if this worker has already received it (`Leases.end`,
    with `last`); -1: not received."""
    held: Annotated[tuple[HeldLease, ...], msgspec.Meta(max_length=MOST_HELD)] = ()
    """In the first request on a link, the newest of the received groups, from `Leases.settled` on."""


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """One leased group: its tag, and its number of images."""

    epoch: Epoch
    number: GroupNumber
    attempt: Attempt
    images: Images
    progress: Progress = 0.0
    """Progress of the run before the group, in epochs, for the group's replica: 1.25 is a quarter of the
    second epoch. Rate schedules use this value, so a rate depends only on the group."""


class Leases(Body, frozen=True, kw_only=True):
    """Leased groups, without their images."""

    leases: Annotated[tuple[Lease, ...], msgspec.Meta(max_length=MOST_LEASES)] = ()
    last: bool = False
    """Whether no further group waits for this replica: a step in progress ends with these groups."""
    clock: Clock = 0
    """Minimum clock of the first of these groups, up to which the replica ticks; 0 in asp."""
    end: Clock = 0
    """Sync clock if `last` is set: after the push of these groups the replica ticks up to this clock."""
    settled: After = 0
    """Number of first groups in the epoch that all workers of the replica have received and finished; -1: the
    dealer has not begun, and the worker sends its leases again."""


class ReadGroups(Body, frozen=True, kw_only=True):
    """Request for the images of some groups in an epoch, to any data server that is ready for the run."""

    run: RunId
    epoch: Epoch
    numbers: Annotated[tuple[GroupNumber, ...], msgspec.Meta(min_length=1, max_length=MOST_GROUPS)]
    """Numbers of the groups, each once. The answer has the first numbers."""
    least: Count = 1
    """Number of groups for which the answer waits. Further groups are in the answer if they are made already;
    otherwise the data server makes them ahead of the next request."""
    rows: tuple[Row, Row] | None = None
    """Requested rows of the images; ``(0, 0)``: no images; None: whole images."""


class Groups(Body, frozen=True, kw_only=True):
    """The first of the requested groups, at least one.

    Tensors: first the images (n, C, H, W) with the requested rows, group by group, each group within one
    tensor; then all groups' labels (n,). A request for no rows gets labels only.
    """

    count: Count
    """Number of groups."""


class ReportGroups(Body, frozen=True, kw_only=True):
    """Report of groups whose part on this worker is finished.

    A group is finished when all its parts are finished.
    """

    run: RunId
    replica: ReplicaNumber
    replica_generation: DrawnId
    partition: Partition
    finished: Annotated[tuple[Finished, ...], msgspec.Meta(max_length=MOST_REPORTED)]


class Reported(Body, frozen=True, kw_only=True):
    """Acknowledgement of a report."""


class ReadTest(Body, frozen=True, kw_only=True):
    """Request for test images `start` to `stop`, or for images of the current run's validation set or sample.

    The sample consists of training images from which a step derives statistics (`StepSpec.sample`).
    """

    start: Images
    stop: Images
    validation: bool = False
    sample: bool = False


class TestImages(Body, frozen=True, kw_only=True):
    """Tensors: images (n, C, H, W) uint8 and labels (n,). `total` is the size of the whole set."""

    __test__ = False  # pytest would take the class for tests because of its name

    total: Images


class Serve(Body, frozen=True, kw_only=True):
    """Request to a data host for a data server in a cluster. The data server serves until the link ends."""

    controller: Addresses
    """Address at which the host reaches the cluster's controllers, ``tcp://host:port``."""


class Serving(Body, frozen=True, kw_only=True):
    """A data server has joined the cluster. Tensor: the data's description in the map, as JSON text."""

    node: NodeId
    """Id of the data server in the cluster."""


class ReadManifest(Body, frozen=True, kw_only=True):
    """First request to another data server; if the file lists differ, later requests fetch its list."""

    server: Index
    """Number of the sender among the `servers`."""
    servers: Index
    digest: Name
    """Digest of the sender's file list, by which both sides detect a difference."""
    first: Count = 0
    count: Count = 0
    """Maximum number of files in the answer, from `first` on."""


class ManifestPart(Body, frozen=True, kw_only=True):
    """A part of the list of files. Tensor: the files as JSON text; `data_server.staging.File`."""

    server: Index
    """Number of the sender among the `servers`."""
    servers: Index
    digest: Name
    """Digest of all files: with equal digests, equal numbers name equal files."""
    yours: Count = 0
    """Number of files on the sender whose owner is the requesting server."""


class ReadFile(Body, frozen=True, kw_only=True):
    """Request for the piece of a file at `offset`. The answer waits for the file, up to `wait_s`."""

    digest: Name
    file: Count
    offset: Count
    wait_s: Seconds = 0.0


class FilePart(Body, frozen=True, kw_only=True):
    """A piece of a file. Tensor, unless the piece is empty: bytes of the piece."""

    checksum: Name
    """Checksum of the whole file; empty, in a message without a tensor, if the sender does not have the file
    yet."""
    progress: Count = 0
    """Number of bytes that the sender has staged; the receiver keeps waiting while this number grows."""


ROWS: Rows = {
    LeaseGroups: frozenset({("worker", "data")}),
    Leases: frozenset({("data", "worker")}),
    ReadGroups: frozenset({("worker", "data")}),
    Groups: frozenset({("data", "worker")}),
    ReportGroups: frozenset({("worker", "data")}),
    Reported: frozenset({("data", "worker")}),
    ReadTest: frozenset({("driver", "data")}),
    TestImages: frozenset({("data", "driver")}),
    Serve: frozenset({("driver", "data")}),
    Serving: frozenset({("data", "driver")}),
    ReadManifest: frozenset({("data", "data")}),
    ManifestPart: frozenset({("data", "data")}),
    ReadFile: frozenset({("data", "data")}),
    FilePart: frozenset({("data", "data")}),
}
