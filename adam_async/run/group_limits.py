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
    shape: tuple[int, ...]
    """Shape (C, H, W) of the requested rows of an image; with no rows there are labels only."""
    classes: int
    epochs: int
    """Number of epochs of the run."""
    validation: int = 0
    """Number of training images that the run holds back."""
    train_images: int = 0
    """Number of training images; 0 until a data server is in the map."""

    def map_changed(self, cluster: ClusterMap) -> None:
        """Take the size of the data set from the cluster map."""
        server = cluster.dealing or next(iter(cluster.live("data")), "")
        if server:
            self.train_images = int(cluster.nodes[server].info.get("train_images", self.train_images))

    def images_of(self, number: int) -> int:
        """Return the number of images of a group; 0 if no epoch has this group."""
        return max(min(self.images, self.train_images - self.validation - number * self.images), 0)

    def check_leases(self, leases: Sequence[Lease]) -> None:
        """Check that the run can have these groups.

        Raises:
            RemoteProtocolError: The run has no such group; the error names it.
        """
        for lease in leases:
            if not lease.images or lease.images != self.images_of(lease.number):
                text = f"group {lease.number} has {self.images_of(lease.number)} images, not {lease.images}"
                raise RemoteProtocolError("groups", text)
            if not 1 <= lease.epoch <= self.epochs:
                raise RemoteProtocolError("groups", f"the run has no epoch {lease.epoch}")

    def check_tensors(self, tensors: Sequence[NDArray[Any]]) -> None:
        """Check images (n, C, H, W) uint8, in any number of pieces, and labels (n,) int64.

        Raises:
            RemoteProtocolError: The run has no such images or labels; the error names the wrong part.
        """
        for piece in tensors[:-1]:
            self._check_images(piece)
        for labels in tensors[-1:]:
            self._check_labels(labels)

    def _check_images(self, images: NDArray[Any]) -> None:
        # Not by their size alone: a model refuses other axes, which would end its worker.
        if images.dtype != np.uint8 or images.shape[1:] != self.shape:
            text = f"images are {images.dtype} of shape {images.shape[1:]}, expected uint8 of {self.shape}"
            raise RemoteProtocolError("groups", text)

    def _check_labels(self, labels: NDArray[Any]) -> None:
        if labels.ndim != 1 or labels.dtype != np.int64:
            text = f"labels are {labels.dtype} of shape {labels.shape}, expected one int64 for each image"
            raise RemoteProtocolError("groups", text)
        if len(labels) and not 0 <= labels.min() <= labels.max() < self.classes:
            text = f"labels go from {labels.min()} to {labels.max()}, expected 0 to {self.classes - 1}"
            raise RemoteProtocolError("groups", text)
