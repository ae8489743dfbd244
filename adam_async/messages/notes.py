"""Pure: driver and any role: what the role counted and noted."""

from adam_async.messages.body import ROLES, Body, Rows
from adam_async.messages.bounds import (
    Count,
    NodeId,
    RoleName,
    RunId,
)

PROFILED = ("ps", "data", "worker")
"""Those that a group passes: the ones that can note a profile."""


class GetRecord(Body, frozen=True, kw_only=True):
    """Ask a server or worker that records for bytes `start` to `stop` of what it noted."""

    run: RunId
    start: Count
    stop: Count


def part_refusal(body: GetRecord, num_bytes: int, *, most_bytes: int) -> tuple[str, str] | None:
    """Return code and text of the refusal of a part of a record; None if the role can send it.

    Args:
        body: The question.
        num_bytes: Bytes of the whole record.
        most_bytes: Bytes of the largest message.
    """
    if body.stop < body.start:
        return "malformed", f"a part of a record from {body.start} to {body.stop}"
    if min(body.stop, num_bytes) - body.start > most_bytes:
        return "too-large", f"a message has {most_bytes} bytes: ask for a smaller part"
    return None


class RecordPart(Body, frozen=True, kw_only=True):
    """Tensor: these bytes. `total` is how many there are."""

    total: Count


class GetStatistics(Body, frozen=True, kw_only=True):
    """Ask a role how it is doing; the driver builds the live table and the report from it."""

    run: RunId


class Statistics(Body, frozen=True, kw_only=True):
    """What the role counted. Tensor: the values as JSON text; docs/report.md names the fields."""

    node: NodeId
    role: RoleName


class GetProfile(Body, frozen=True, kw_only=True):
    """Ask a role that notes a profile for its events from `start` to `stop`."""

    start: Count
    stop: Count


class Profile(Body, frozen=True, kw_only=True):
    """What a role noted. Tensor: the events as JSON text; `trace_events.Part`."""

    total: Count
    """All events that it has."""


ROWS: Rows = {
    GetRecord: frozenset({("driver", "ps"), ("driver", "worker")}),
    RecordPart: frozenset({("ps", "driver"), ("worker", "driver")}),
    GetStatistics: frozenset(("driver", role) for role in ROLES if role != "driver"),
    Statistics: frozenset((role, "driver") for role in ROLES if role != "driver"),
    GetProfile: frozenset(("driver", role) for role in PROFILED),
    Profile: frozenset((role, "driver") for role in PROFILED),
}
