"""Pure: the counts of a store on the disk of one server, in statistics and reports."""

import msgspec


class DiskCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the store of a run on the disk of one server."""

    updates: int
    """Applied pushes, each counted on each of its pieces."""
    writes: int
    """Pieces written because of them."""
    bytes: int
    """Bytes of these pieces."""
    amplification: float
    """Bytes written to files, per byte of these pieces."""
    rounds: int
    syncs: int
    disk_bytes: int
    """Size of the files now."""
    age_s: float | None = None
    """Age of the oldest update that is not on the disk, in seconds; None until all pieces were written."""
    period_s: float
    """Seconds between the begins of two rounds."""
    as_of: float | None
    """Time whose updates are all on the disk, in seconds since 1970."""
    full: bool
    """Whether the last write found no space."""
