"""Pure: messages of data servers: the test set, hosts that join a cluster, and files that several stage."""

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import Addresses, Count, Images, Index, Name, NodeId, Seconds


class ReadTest(Body, frozen=True, kw_only=True):
    """Request for test images `start` to `stop`, or for images of the current run's validation set or sample.

    The sample consists of training images from which a step derives statistics (`StepSpec.sample`).
    """

    start: Images
    stop: Images
    validation: bool = False
    sample: bool = False


class TestImages(Body, frozen=True, kw_only=True):
    """Tensors: images (n, C, H, W) uint8 and labels (n,). `total` is the size of the whole set."""

    __test__ = False  # pytest would take the class for tests because of its name

    total: Images


class Serve(Body, frozen=True, kw_only=True):
    """Request to a data host for a data server in a cluster. The data server serves until the link ends."""

    controller: Addresses
    """Address at which the host reaches the cluster's controllers, ``tcp://host:port``."""


class Serving(Body, frozen=True, kw_only=True):
    """A data server has joined the cluster. Tensor: the data's description in the map, as JSON text."""

    node: NodeId
    """Id of the data server in the cluster."""


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
    ReadTest: frozenset({("driver", "data")}),
    TestImages: frozenset({("data", "driver")}),
    Serve: frozenset({("driver", "data")}),
    Serving: frozenset({("data", "driver")}),
    ReadManifest: frozenset({("data", "data")}),
    ManifestPart: frozenset({("data", "data")}),
    ReadFile: frozenset({("data", "data")}),
    FilePart: frozenset({("data", "data")}),
}
