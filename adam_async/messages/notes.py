"""Pure: questions to roles about their statistics, profiles and records.

A driver asks controllers, parameter servers, data servers and workers; clients and readers ask parameter
servers for the statistics of a store.
"""

from adam_async.messages.body import Body, Count, NodeId, RoleName, Rows, RunId

PROFILED = ("ps", "data", "worker")
"""Roles that process groups, and can record a profile."""

ANSWERING = ("controller", *PROFILED)
"""Roles that report statistics to a driver."""

USERS = ("client", "reader")
"""Roles that ask parameter servers for the statistics of a store."""


class GetRecord(Body, frozen=True, kw_only=True):
    """Request to a bundle's primary for bytes `start` to `stop` of its log."""

    run: RunId
    """Id of the run, which is the id of its store."""
    home: NodeId
    """Name of the bundle."""
    start: Count
    stop: Count


def part_refusal(body: GetRecord, num_bytes: int, *, most_bytes: int) -> tuple[str, str] | None:
    """Return code and text that refuse a part of a log; None if the server can send it.

    Args:
        num_bytes: Size of the whole log, in bytes.
        most_bytes: Maximum size of a message, in bytes.
    """
    if body.stop < body.start:
        return "malformed", f"a part of a log from {body.start} to {body.stop}"
    if min(body.stop, num_bytes) - body.start > most_bytes:
        return "too-large", f"a message has {most_bytes} bytes: ask for a smaller part"
    return None


class RecordPart(Body, frozen=True, kw_only=True):
    """A part of a log. Tensor: bytes of the part. `total` is the size of the whole log, in bytes."""

    total: Count


class GetStatistics(Body, frozen=True, kw_only=True):
    """Request for the statistics of a role, from which the driver makes the live table and the report.

    A client or reader asks a parameter server for the counts of the store that `run` names.
    """

    run: RunId


class Statistics(Body, frozen=True, kw_only=True):
    """Statistics of a role. Tensor: the values as JSON text; docs/reference/report.md names the fields.

    For a client or reader: the counts of one store, `run.counts.StoreCounts`.
    """

    node: NodeId
    role: RoleName


class GetProfile(Body, frozen=True, kw_only=True):
    """Request for events `start` to `stop` of a role's profile."""

    start: Count
    stop: Count


class Profile(Body, frozen=True, kw_only=True):
    """A part of a profile. Tensor: the events as JSON text; `trace_events.Part`."""

    total: Count
    """Number of all events of the role."""


ROWS: Rows = {
    GetRecord: frozenset({("driver", "ps")}),
    RecordPart: frozenset({("ps", "driver")}),
    GetStatistics: frozenset((*(("driver", role) for role in ANSWERING), *((role, "ps") for role in USERS))),
    Statistics: frozenset((*((role, "driver") for role in ANSWERING), *(("ps", role) for role in USERS))),
    GetProfile: frozenset(("driver", role) for role in PROFILED),
    Profile: frozenset((role, "driver") for role in PROFILED),
}
