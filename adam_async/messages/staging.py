"""Pure: data server and data server: files of one source that they stage together."""

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import (
    Count,
    Name,
    Place,
    Seconds,
)


class ReadManifest(Body, frozen=True, kw_only=True):
    """First question of a data server to another one, and where theirs differ for the files of its list."""

    server: Place
    """Number of the sender, of so many `servers`."""
    servers: Place
    digest: Name
    """As in the answer: both sides learn that their lists differ."""
    first: Count = 0
    count: Count = 0
    """Files wanted, from `first` on; it may answer with fewer."""


class ManifestPart(Body, frozen=True, kw_only=True):
    """Tensor: these files as JSON text; `data_server.staging.File`."""

    server: Place
    """Number of the sender, of so many `servers`."""
    servers: Place
    digest: Name
    """Of all files: who has the same means the same files by the same numbers."""
    yours: Count = 0
    """Files here that belong to the one that asked."""


class ReadFile(Body, frozen=True, kw_only=True):
    """Ask for the piece of a file that begins at `offset`. The answer waits for the file, up to `wait_s`."""

    digest: Name
    file: Count
    offset: Count
    wait_s: Seconds = 0.0


class FilePart(Body, frozen=True, kw_only=True):
    """Tensor, unless it has no bytes: the piece."""

    checksum: Name
    """Of the whole file; empty, and no tensor: it is not here yet."""
    progress: Count = 0
    """Bytes that the sender has staged: one that stays behind but moves is waited for."""


ROWS: Rows = {
    ReadManifest: frozenset({("data", "data")}),
    ManifestPart: frozenset({("data", "data")}),
    ReadFile: frozenset({("data", "data")}),
    FilePart: frozenset({("data", "data")}),
}
