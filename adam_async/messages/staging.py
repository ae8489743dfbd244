"""Pure: data server and data server: files of one source that they stage together."""

from typing import Annotated

import msgspec

from adam_async.messages.body import Body, Rows


class ReadManifest(Body, frozen=True, kw_only=True):
    """First question of a data server to another one, and where theirs differ for the files of its list."""

    server: int
    """Number of the sender, of so many `servers`."""
    servers: int
    digest: str
    """As in the answer: both sides learn that their lists differ."""
    first: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Files wanted, from `first` on; it may answer with fewer."""


class ManifestPart(Body, frozen=True, kw_only=True):
    """Tensor: these files as JSON text; `data_server.staging.File`."""

    server: int
    """Number of the sender, of so many `servers`."""
    servers: int
    digest: str
    """Of all files: who has the same means the same files by the same numbers."""
    yours: int = 0
    """Files here that belong to the one that asked."""


class ReadFile(Body, frozen=True, kw_only=True):
    """Ask for the piece of a file that begins at `offset`. The answer waits for the file, up to `wait_s`."""

    digest: str
    file: Annotated[int, msgspec.Meta(ge=0)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    wait_s: float = 0.0


class FilePart(Body, frozen=True, kw_only=True):
    """Tensor, unless it has no bytes: the piece."""

    checksum: str
    """Of the whole file; empty, and no tensor: it is not here yet."""
    progress: int = 0
    """Bytes that the sender has staged: one that stays behind but moves is waited for."""


ROWS: Rows = {
    ReadManifest: frozenset({("data", "data")}),
    ManifestPart: frozenset({("data", "data")}),
    ReadFile: frozenset({("data", "data")}),
    FilePart: frozenset({("data", "data")}),
}
