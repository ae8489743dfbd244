"""Pure: messages of data servers among themselves: files of one source that several servers stage."""

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import Count, Index, Name, Seconds


class ReadManifest(Body, frozen=True, kw_only=True):
    """First request to another data server; later requests fetch its list of files, if the lists differ."""

    server: Index
    """Number of the sender among the `servers`."""
    servers: Index
    digest: Name
    """Digest of the sender's list of files, by which both sides detect a difference."""
    first: Count = 0
    count: Count = 0
    """Maximum number of files in the answer, from `first` on."""


class ManifestPart(Body, frozen=True, kw_only=True):
    """A part of the list of files. Tensor: the files as JSON text; `data_server.staging.File`."""

    server: Index
    """Number of the sender among the `servers`."""
    servers: Index
    digest: Name
    """Digest of all files: with equal digests, equal numbers name equal files."""
    yours: Count = 0
    """Number of files on the sender whose owner is the requesting server."""


class ReadFile(Body, frozen=True, kw_only=True):
    """Request for the piece of a file at `offset`. The answer waits for the file, up to `wait_s`."""

    digest: Name
    file: Count
    offset: Count
    wait_s: Seconds = 0.0


class FilePart(Body, frozen=True, kw_only=True):
    """A piece of a file. Tensor, unless the piece is empty: bytes of the piece."""

    checksum: Name
    """Checksum of the whole file; empty, in a message without a tensor, if the sender does not have the file
    yet."""
    progress: Count = 0
    """Number of bytes that the sender has staged; the receiver keeps waiting while this number grows."""


ROWS: Rows = {
    ReadManifest: frozenset({("data", "data")}),
    ManifestPart: frozenset({("data", "data")}),
    ReadFile: frozenset({("data", "data")}),
    FilePart: frozenset({("data", "data")}),
}
