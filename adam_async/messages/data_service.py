"""Pure: driver and data server: the test set, and a data host that is asked into a cluster."""

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import (
    Addresses,
    Images,
    NodeId,
)


class ReadTest(Body, frozen=True, kw_only=True):
    """Ask for test images `start` to `stop`; or for those that the run in progress holds back."""

    start: Images
    stop: Images
    validation: bool = False


class TestImages(Body, frozen=True, kw_only=True):
    """Tensors: images (n, C, H, W) uint8 and labels (n,). `total` is the size of the whole set."""

    __test__ = False  # not a test class, whatever its name suggests to pytest

    total: Images


class Serve(Body, frozen=True, kw_only=True):
    """Ask a data host for a data server in a cluster. It serves until the asker says goodbye or is lost."""

    controller: Addresses
    """Where the host reaches the cluster's controller, ``tcp://host:port``."""


class Serving(Body, frozen=True, kw_only=True):
    """A data server has joined the cluster. Tensor: what the map says of its data, as JSON text."""

    node: NodeId
    """Its id there."""


ROWS: Rows = {
    ReadTest: frozenset({("driver", "data")}),
    TestImages: frozenset({("data", "driver")}),
    Serve: frozenset({("driver", "data")}),
    Serving: frozenset({("data", "driver")}),
}
