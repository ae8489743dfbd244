"""Pure: the counts of a store on the disk of one server, in statistics and reports."""

import msgspec


class DiskCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the store of a run on the disk of one server."""

    updates: int
    """Number of applied pushes; a push counts once for each piece that it changes."""
    writes: int
    """Number of pieces written because of these pushes."""
    bytes: int
    """Size of the written pieces, in bytes."""
    amplification: float
    """Number of bytes written to files for each byte of the written pieces."""
    rounds: int
    """Number of complete rounds of writing."""
    syncs: int
    disk_bytes: int
    """Present size of the files, in bytes."""
    age_s: float | None = None
    """Age of the oldest update that is not on the disk, in seconds; None until all pieces were written."""
    period_s: float
    """Time between the beginnings of two rounds, in seconds."""
    as_of: float | None
    """Time up to which all updates are on the disk, in seconds since 1970; None before the first round."""
    full: bool
    """Whether the last write failed for lack of space."""
