"""Pure: the settings of a segment store."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushSettings:
    """Settings of a segment store.

    Attributes:
        flush_s: Time from the first update of a shard to the round that writes it, in seconds.
        dirty_bytes: Size of dirty states from which on a round begins after half of `flush_s`, in bytes.
        segment_bytes: Size of a segment file from which on another one follows, in bytes.
        batch_bytes: Size from which on copied states are handed to the disk's thread, in bytes. One batch is
            in memory at a time, and at most one further state.
    """

    flush_s: float = 1.0
    dirty_bytes: int = 64 << 20
    segment_bytes: int = 64 << 20
    batch_bytes: int = 4 << 20
