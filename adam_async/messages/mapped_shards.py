"""Pure: worker and parameter server of one host: workers that train in place on the memory of the server.

The server hands its memory over on the link of the request (`Link.hand_over`). As long as the link lasts, the
process at its other end may write there.
"""

from typing import Annotated

from msgspec import Meta

from adam_async.messages.body import Body, DrawnId, ReplicaNumber, Rows, StoreId, Version

_Few = Annotated[int, Meta(ge=1, le=1 << 16)]
"""Number of threads of a worker, of jobs of a thread, or of groups in a job."""


_Region = Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
"""Number of the sender's region on this link."""


class MapShards(Body, frozen=True, kw_only=True):
    """A worker's request for the memory of all shards of a run."""

    store: StoreId
    generation: Version
    session: DrawnId
    incarnation: DrawnId
    replica: ReplicaNumber
    notes: _Region
    """Region of the worker with the notes of its steps (`StepNotes`). The server reads them later."""
    threads: _Few
    jobs: _Few
    groups: _Few


class ShardsMapped(Body, frozen=True, kw_only=True):
    """Answer to `MapShards`."""

    region: _Region


class UnmapShards(Body, frozen=True, kw_only=True):
    """End of all writes of a worker. The answer comes once the server has counted all its steps."""

    store: StoreId


class KeepStill(Body, frozen=True, kw_only=True):
    """Request to keep the values of a run still, answered once the servers have counted all steps in them.

    The memory is kept still until the same message without `is_still`, or until the link ends.
    """

    store: StoreId
    is_still: bool = True


class Settled(Body, frozen=True, kw_only=True):
    """Answer to `UnmapShards` and `KeepStill`."""


ROWS: Rows = {
    MapShards: frozenset({("worker", "ps")}),
    ShardsMapped: frozenset({("ps", "worker")}),
    UnmapShards: frozenset({("worker", "ps")}),
    KeepStill: frozenset({("ps", "worker"), ("driver", "ps")}),
    Settled: frozenset({("worker", "ps"), ("ps", "worker"), ("ps", "driver")}),
}
