"""Pure: driver and data server: the test set, and a data host that joins a cluster."""

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import Addresses, Images, NodeId


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


ROWS: Rows = {
    ReadTest: frozenset({("driver", "data")}),
    TestImages: frozenset({("data", "driver")}),
    Serve: frozenset({("driver", "data")}),
    Serving: frozenset({("data", "driver")}),
}
