"""Pure: which types the counts of a role must have, as far as a driver calculates with them.

A role tells as JSON text what it counted, and the driver believes no role. Fields that are not named here may
have any type; a report checks them when it is written.
"""

from typing import Annotated, Any

import msgspec

from adam_async.messages.bounds import Count, Epoch, Seconds
from transport import RemoteProtocolError

Histogram = dict[Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")], Count]
"""Staleness, as text, to the number of pushes that had it."""


class _Pushing(msgspec.Struct):
    admission_waits: Count
    admission_wait_s: Seconds


class _Fetching(msgspec.Struct):
    blocked_fetches: Count
    blocked_s: Seconds


class _Ledger(msgspec.Struct):
    leads: bool


class _Row(msgspec.Struct):
    payload_bytes: Count
    frame_bytes: Count


class _Process(msgspec.Struct):
    host: str
    pid: int
    peak_rss_mb: float


class _Counted(msgspec.Struct, kw_only=True, rename={"ledger_record": "lending"}):
    process: _Process
    traffic: list[_Row]
    staleness: Histogram = {}
    refused: Count = 0
    shards: Count = 0
    clock: Count = 0
    waiting_for: str | list[int] = ""
    parameters: _Pushing | None = None
    data: _Fetching | None = None
    clock_waits: Count = 0
    clock_wait_s: Seconds = 0.0
    ledger_record: _Ledger | msgspec.UnsetType = msgspec.UNSET
    epoch: Epoch = 0
    finished: Count = 0
    images: Count = 0
    skipped: Count = 0
    loss: float | None = None


class _LedgerLeader(_Counted, kw_only=True):
    epoch: Epoch
    finished: Count
    images: Count
    loss: float | None


class _Server(_Counted, kw_only=True):
    clock: Count


def check_counted(values: dict[str, Any], role: str) -> None:
    """Refuse counts with which a driver cannot calculate.

    Raises:
        RemoteProtocolError: A field lacks, or has another type; it is named.
    """
    if "lending" in values:
        wanted: type[_Counted] = _LedgerLeader
    else:
        wanted = _Server if role == "ps" and values.get("shards") else _Counted
    try:
        msgspec.convert(values, wanted)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError("statistics", f"counts of a {role}: {error}") from None
