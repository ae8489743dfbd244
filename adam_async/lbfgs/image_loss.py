"""Pure: the loss of a network, or of a user's step, as the objective of an L-BFGS.

network = Network(named_model("mlp"), np.float64)
loss = ImageLoss(network, images, labels, batch=64)
optimizer = LBFGS(store, loss, loss.batches)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ConfigError
from adam_async.model.network import Network, Trainable
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.train_step import Batch, TrainStep
from adam_async.run.user_code import NamedStep

_RANDOM = (
    "draws random numbers: L-BFGS needs a loss that is a function of the values. Leave dropout out, or train "
    "by SGD"
)


class ImageLoss:
    """The mean loss over images as a function of one batch: the batch's part of the mean, and its gradient.

    Several threads may call the object at once.

    Args:
        model: A network, or a `TrainStep`, such as a `TorchStep`.
        images: The images, shape (N, C, H, W).
        labels: Their labels, shape (N,).
        batch: Number of images of a batch.

    Attributes:
        model: The network, or the step in the form of one.
        batches: The images in batches.

    Raises:
        ConfigError: A layer or the step draws random numbers, so the loss does not depend only on the values;
            or a layer is frozen; or there are no images; or the step does not take them.
    """

    def __init__(
        self,
        model: Network | StepModel | TrainStep,
        images: NDArray[Any],
        labels: NDArray[Any],
        *,
        batch: int = 256,
    ) -> None:
        if not len(images) or batch < 1:
            raise ConfigError(f"a loss needs images and batches: {len(images)} images, batch={batch}")
        if isinstance(model, Network | StepModel):
            self.model: RunModel = model
        else:
            self.model = _model_of(model, images, labels)
        for layer in getattr(model, "layers", ()):
            if layer.DRAWS:
                raise ConfigError(f"layer {layer.name!r} is {layer.spec.kind}, which {_RANDOM}")
        if self.model.frozen:
            raise ConfigError(f"{min(self.model.frozen)!r} is frozen: L-BFGS trains all tensors of a model")
        self.batches: Sequence[Batch] = [
            Batch(images[start : start + batch], labels[start : start + batch], number=number)
            for number, start in enumerate(range(0, len(images), batch))
        ]
        self._size = batch
        self._images = len(images)
        self._contexts: list[Any] = []
        """Contexts that no thread uses now."""

    def __call__(
        self, values: Mapping[str, NDArray[Any]], batch: Batch
    ) -> tuple[float, dict[str, NDArray[Any]]]:
        """Return a batch's loss and gradient, both as shares of the mean over all images."""
        model: Trainable = self.model
        try:
            context = self._contexts.pop()
        except IndexError:  # not by a look before, because another thread may take the last one
            context = model.context(self._size)
        context.load(batch.images, batch.labels, keys=(batch.epoch, batch.number))
        loss = model.forward(values, context)
        model.backward(values, context)
        gradient = {each.name: np.empty(each.shape, model.dtype) for each in model.trained}
        model.deltas(context, gradient)
        share = context.images / self._images
        self._contexts.append(context)
        for each in gradient.values():
            np.multiply(each, share, out=each)
        return loss * share, gradient


def _model_of(step: TrainStep, images: NDArray[Any], labels: NDArray[Any]) -> StepModel:
    """Return a step in the form of a network."""
    name, shape, classes = type(step).__name__, images.shape[1:], int(labels.max()) + 1
    if (prepare := getattr(step, "prepare", None)) is not None:
        prepare(shape, classes)
    if draws := getattr(step, "draws", ()):
        raise ConfigError(f"step {name} uses the random streams of {', '.join(sorted(draws))}, and {_RANDOM}")
    return StepModel(step, NamedStep(step, name).spec({"shape": shape, "classes": classes}))
