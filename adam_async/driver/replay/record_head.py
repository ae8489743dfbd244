"""The first bytes of a record's file, which a command checks before it imports the modules of a replay."""

from pathlib import Path

from adam_async.errors import RecordError
from adam_async.runtime.ordinary_files import read_start

MAGIC = b"adam-async/record/2\n"
"""Name and version of the format."""

MOST_SHOWN = 40
"""Maximum length of another format in an error, in characters."""


def check_magic(data: bytes, origin: str) -> None:
    """Check that a file begins as a record of this version. Raises RecordError: it does not."""
    family = MAGIC.rpartition(b"/")[0]
    if not data.startswith(family):
        raise RecordError(f"{origin} is not a record of a run; name a file that `train --record` wrote")
    if not data.startswith(MAGIC):
        found = data.partition(b"\n")[0].decode("ascii", "replace")[:MOST_SHOWN]
        raise RecordError(
            f"{origin} has the format {found!r}; this version reads {MAGIC.decode().strip()!r}: repeat the "
            "run with the version that wrote it, or record it again"
        )


def check_record(path: Path) -> None:
    """Check that a file begins as a record. Blocks. Raises RecordError, or OSError: an unreadable file."""
    data, _ = read_start(path, 2 * MOST_SHOWN)
    check_magic(data, str(path))
