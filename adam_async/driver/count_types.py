"""Pure: the counts of roles, with the types that a driver needs for its calculations.

A role sends its counts as JSON text, and the driver trusts no role. Fields without a type here may have any
type; a report checks them when it is written.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from adam_async.messages.bounds import Count, Epoch, Name, Seconds
from transport import RemoteProtocolError

Histogram = dict[Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")], Count]
"""Number of pushes by staleness, which is text of 1 to 9 digits."""


class PushWaits(msgspec.Struct, frozen=True):
    """Waits of a worker for parameter servers."""

    admission_waits: Count
    admission_wait_s: Seconds


class FetchWaits(msgspec.Struct, frozen=True):
    """Waits of a worker for groups of images."""

    blocked_fetches: Count
    blocked_s: Seconds


class LinkCounts(msgspec.Struct, frozen=True):
    """Bytes of all messages of one type that a role sent to one other role."""

    payload_bytes: Count
    frame_bytes: Count


class ProcessCounts(msgspec.Struct, frozen=True):
    """The process of a role."""

    host: Name
    pid: Count
    peak_rss_mb: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
    age_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e10)] = 0.0


class KernelCounts(msgspec.Struct, frozen=True):
    """Kernels of a worker's network."""

    set: str
    """Implementation of the layers."""
    compiled: Count
    of: Count


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts that a role of any kind may have."""

    process: ProcessCounts
    traffic: list[LinkCounts]
    staleness: Histogram = {}
    refused: Count = 0
    shards: Count = 0
    clock: Count = 0
    waiting_for: str | list[int] = ""
    parameters: PushWaits | None = None
    data: FetchWaits | None = None
    clock_waits: Count = 0
    clock_wait_s: Seconds = 0.0
    kernels: KernelCounts | None = None
    epoch: Epoch = 0
    finished: Count = 0
    images: Count = 0
    skipped: Count = 0
    loss: float | None = None


class DataCounts(Counts, frozen=True, kw_only=True):
    """Counts of a data server: the progress of the epoch."""

    term: Count
    """Term in which the server deals out the groups of the run; 0: another one does."""
    epoch: Epoch
    """Epoch whose groups the server deals out; 0: none yet."""
    finished: Count
    images: Count
    loss: float | None
    """Mean loss over the images of finished groups; None if it is not finite."""
    train_s: Seconds = 0.0
    drained: bool = False
    """Whether a run that stops has no leased group left."""


class DiskAge(msgspec.Struct, frozen=True):
    """State of a parameter server's disk."""

    age_s: Seconds | None = None
    """Age of the oldest update that is not on the disk, in seconds; None until the disk has all shards."""
    full: bool = False
    """Whether the last write found no space."""


class ServerCounts(Counts, frozen=True, kw_only=True):
    """Counts of a parameter server with shards."""

    clock: Count
    disk: DiskAge | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleStatistics:
    """The counts of one role.

    Attributes:
        counts: The fields that a driver calculates with.
        values: All fields as received, and the role, for reports and the live table.
    """

    node: str
    counts: Counts
    values: dict[str, Any]


def read_counts(values: dict[str, Any], role: str) -> Counts:
    """Read the counts of a role.

    Raises:
        RemoteProtocolError: A field is missing or has another type; the error has its name.
    """
    wanted: type[Counts] = Counts
    if role == "data" and "term" in values:
        wanted = DataCounts
    elif role == "ps" and values.get("shards"):
        wanted = ServerCounts
    try:
        return msgspec.convert(values, wanted)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError("statistics", f"counts of a {role}: {error}") from None
