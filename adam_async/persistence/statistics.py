"""Pure: the counts and ages of a segment store."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStatistics:
    """Counts since the opening of a store, and its state now."""

    updates: int = 0
    """Updates of shards, as marked by the owner."""
    writes: int = 0
    """States written because of updates."""
    state_bytes: int = 0
    """Bytes of these states."""
    compaction_writes: int = 0
    """States written again because little else of their file was in use."""
    compaction_bytes: int = 0
    """Bytes of these states."""
    entries: int = 0
    """Log entries appended."""
    entry_bytes: int = 0
    """Bytes of these entries."""
    written_bytes: int = 0
    """All bytes written to files of states, with heads and tables."""
    syncs: int = 0
    """Calls of ``fdatasync``."""
    rounds: int = 0
    """Complete rounds of states."""
    disk_bytes: int = 0
    """Size of all files now."""
    live_bytes: int = 0
    """Bytes of the newest states in them."""
    segments: int = 0
    """Number of files."""
    dirty: int = 0
    """Shards whose newest state is not on disk."""
    dirty_age_s: float = 0.0
    """Age of the oldest update that is not on disk, in seconds; 0 if there is none."""
    round_s: float = 0.0
    """Duration of the last round, in seconds."""
    in_round: bool = False
    """Whether a round is in progress: its states are neither dirty nor on disk."""
    current_round_s: float = 0.0
    """Time since the begin of the round in progress, in seconds; 0 between rounds."""
    period_s: float = 0.0
    """Time between the begins of two rounds now, in seconds: more than `flush_s` if the disk is too slow."""
    on_disk_as_of: float | None = None
    """Wall-clock time whose updates are all on disk, in seconds since 1970; None before the first round."""
    is_full: bool = False
    """Whether the last write found no space on the disk."""

    @property
    def amplification(self) -> float:
        """Bytes written to files of states, per byte of a state that was updated; 1 before the first one."""
        return self.written_bytes / self.state_bytes if self.state_bytes else 1.0
