"""Pure: the limits of groups in a run; a worker refuses an answer of a data server beyond them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Lease
from adam_async.run.cluster_map import ClusterMap
from transport import RemoteProtocolError


@dataclass(slots=True, kw_only=True)
class GroupLimits:
    """The sizes of groups, images and labels in one run."""

    images: int
    """Number of images of each group but the last one of an epoch, which may have fewer."""
    pixels: int
    """Number of values in the requested rows of an image; 0: labels only."""
    classes: int
    epochs: int
    """Number of epochs of the run."""
    validation: int = 0
    """Number of training images that the run holds back."""
    train_images: int = 0
    """Number of training images; 0 until a data server is in the map."""

    def map_changed(self, cluster: ClusterMap) -> None:
        """Take the size of the data set from the cluster map."""
        servers = cluster.ledger_leaders or cluster.live("data")
        if servers:
            self.train_images = int(cluster.nodes[servers[0]].info.get("train_images", self.train_images))

    def images_of(self, number: int) -> int:
        """Return the number of images of a group; 0 if no epoch has this group."""
        return max(min(self.images, self.train_images - self.validation - number * self.images), 0)

    def check(self, leases: Sequence[Lease], tensors: Sequence[NDArray[Any]]) -> None:
        """Check that the run can have the groups of an answer.

        Args:
            tensors: Images (n, C, H, W) uint8, in any number of pieces, and labels (n,) int64; none without
                a lease.

        Raises:
            RemoteProtocolError: The run has no such group, images or labels; the error names the wrong part.
        """
        for lease in leases:
            images = self.images_of(lease.number)
            if not images or lease.images != images:
                text = f"group {lease.number} has {images} images, not {lease.images}"
                raise RemoteProtocolError("groups", text)
            if not 1 <= lease.epoch <= self.epochs:
                raise RemoteProtocolError("groups", f"the run has no epoch {lease.epoch}")
        if tensors:
            *pieces, labels = tensors
            for piece in pieces:
                self._check_images(piece)
            self._check_labels(labels)

    def _check_images(self, images: NDArray[Any]) -> None:
        if images.ndim != 4 or images.dtype != np.uint8 or images.size != len(images) * self.pixels:
            text = (
                f"images are {images.dtype} of shape {images.shape}, expected uint8 of {self.pixels} values"
            )
            raise RemoteProtocolError("groups", text)

    def _check_labels(self, labels: NDArray[Any]) -> None:
        if labels.ndim != 1 or labels.dtype != np.int64:
            text = f"labels are {labels.dtype} of shape {labels.shape}, expected one int64 for each image"
            raise RemoteProtocolError("groups", text)
        if len(labels) and not 0 <= labels.min() <= labels.max() < self.classes:
            text = f"labels go from {labels.min()} to {labels.max()}, expected 0 to {self.classes - 1}"
            raise RemoteProtocolError("groups", text)
