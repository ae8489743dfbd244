"""Pure: the counts and ages of a segment store."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class RoundCounts:
    """Counts of the rounds of a store since its opening."""

    rounds: int = 0
    """Number of complete rounds of states."""
    updates: int = 0
    """Number of updates of shards, as marked by the owner."""
    writes: int = 0
    """Number of states written because of updates."""
    state_bytes: int = 0
    """Size of the states written because of updates, in bytes."""
    compaction_writes: int = 0
    """Number of states written again because their files were mostly superfluous."""
    compaction_bytes: int = 0
    """Size of the states written again, in bytes."""
    round_s: float = 0.0
    """Duration of the last round, in seconds."""


@dataclass(slots=True, kw_only=True)
class SegmentStatistics(RoundCounts):
    """Counts since the opening of a store, and its state now."""

    entries: int = 0
    """Number of log entries appended."""
    entry_bytes: int = 0
    """Size of the appended log entries, in bytes."""
    written_bytes: int = 0
    """Number of all bytes written to files of states, with heads and records."""
    syncs: int = 0
    """Number of calls of ``fdatasync``."""
    disk_bytes: int = 0
    """Size of all files now, in bytes."""
    live_bytes: int = 0
    """Size of the newest states in the files, in bytes."""
    segments: int = 0
    """Number of files."""
    dirty: int = 0
    """Number of shards with updates that no round has taken."""
    dirty_age_s: float = 0.0
    """Age of the oldest update that no round has taken, in seconds; 0 if there is none."""
    in_round: bool = False
    """Whether a round is in progress: its states are neither dirty nor on disk."""
    current_round_s: float = 0.0
    """Time since the beginning of the round in progress, in seconds; 0 between rounds."""
    period_s: float = 0.0
    """Present time between the beginnings of two rounds, in seconds: more than `flush_s` if the disk is too
    slow."""
    on_disk_as_of: float | None = None
    """Wall-clock time up to which all updates are on disk, in seconds since 1970; None if it is unknown."""
    is_full: bool = False
    """Whether the last write found no space on the disk."""

    @property
    def amplification(self) -> float:
        """Number of bytes written to files of states per byte of updated states; 1 before any update."""
        return self.written_bytes / self.state_bytes if self.state_bytes else 1.0
