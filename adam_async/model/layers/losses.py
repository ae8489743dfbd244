"""Pure: losses; each error gradient is that of the mean over the group's images.

Letters: K classes, F features, B batch.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from adam_async.errors import ModelError
from adam_async.model.layer import Array, Loss, ScratchSpec, Slots, Weights
from adam_async.model.spec import LayerSpec, OptionValue, Shape


class SoftmaxCrossEntropy(Loss):
    """Softmax over the classes and the negative logarithm of the right class's share.

    Labels: class numbers, ``(n,)``. Options: class_weights, one factor per class for its images' losses
    (empty: 1 for all). The group's loss is the sum over its images divided by their number, whatever the
    weights. So an image counts the same in every group.
    """

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {"class_weights": ()}
    TARGETS: ClassVar[tuple[str, ...]] = ("targets", "weights")

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        if len(input_shapes[0]) != 1:
            raise self.refusal(f"needs one score per class, not an input of {list(input_shapes[0])}")
        self.class_weights = self._read_class_weights()

    def _read_class_weights(self) -> tuple[float, ...]:
        value, classes = self._options["class_weights"], self.input_shapes[0][0]
        if not isinstance(value, tuple) or not (value == () or len(value) == classes):
            raise self.refusal(
                f"option 'class_weights' must be a list of {classes} numbers, one per class, not {value!r}"
            )
        if value and not (all(0 <= weight < math.inf for weight in value) and any(value)):
            raise self.refusal(
                f"option 'class_weights' must hold finite numbers of at least 0, not all 0, not {value!r}"
            )
        return tuple(float(weight) for weight in value)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the classes' shares, the arrays with a number per image, and the positions of right scores."""
        classes = self.input_shapes[0][0]
        specs: dict[str, ScratchSpec] = {
            "shares": ((classes, images), None),
            "row": ((images,), None),
            "targets": ((images,), np.int64),
        }
        if self.class_weights:
            specs["weights"] = ((images,), None)
        return specs

    def prepare(self, slots: Slots) -> None:
        """Number the images: an image's number and class number give a position among all scores."""
        slots.views["numbers"] = np.arange(slots.images)
        if self.class_weights:
            slots.views["class_weights"] = np.array(self.class_weights, slots.output.dtype)

    def load_targets(self, slots: Slots, labels: Array) -> None:
        """Check the class numbers and store their positions."""
        classes = self.input_shapes[0][0]
        if labels.shape != (slots.images,) or labels.dtype.kind not in "iu":
            raise ModelError(
                f"layer {self.name!r} needs {slots.images} class numbers, "
                f"not {labels.dtype} of shape {labels.shape}"
            )
        if labels.min() < 0 or labels.max() >= classes:
            raise ModelError(
                f"layer {self.name!r} has {classes} classes, "
                f"but labels go from {labels.min()} to {labels.max()}"
            )
        if self.class_weights:
            np.take(slots.views["class_weights"], labels, out=slots.scratch["weights"], mode="clip")
        np.multiply(labels, slots.images, out=slots.scratch["targets"], casting="unsafe", dtype=np.int64)
        np.add(slots.scratch["targets"], slots.views["numbers"], out=slots.scratch["targets"])

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Subtract each image's largest score, so that no exponential overflows; then compute the losses."""
        shares_KB, row_B, losses_B = slots.scratch["shares"], slots.scratch["row"], slots.output
        np.maximum.reduce(slots.inputs[0], axis=0, out=row_B)
        np.subtract(slots.inputs[0], row_B, out=shares_KB)
        np.take(shares_KB.reshape(-1), slots.scratch["targets"], out=losses_B, mode="clip")
        np.exp(shares_KB, out=shares_KB)
        np.add.reduce(shares_KB, axis=0, out=row_B)
        np.divide(shares_KB, row_B, out=shares_KB)
        np.log(row_B, out=row_B)
        np.subtract(row_B, losses_B, out=losses_B)
        if self.class_weights:
            np.multiply(losses_B, slots.scratch["weights"], out=losses_B)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Compute (share - right) * weight / images; `right` is 1 at the right class, else 0."""
        target = slots.input_error
        share = 1.0 / slots.images
        np.multiply(slots.scratch["shares"], share, out=target)
        target.reshape(-1)[slots.scratch["targets"]] -= share
        if self.class_weights:
            np.multiply(target, slots.scratch["weights"], out=target)


class MeanSquaredError(Loss):
    """Mean over the features of the squared difference.

    Labels: values of shape ``(n, features...)``; or, if the input is flat, class numbers ``(n,)``, each of
    which means 1 at its class and 0 elsewhere.
    """

    TARGETS: ClassVar[tuple[str, ...]] = ("targets",)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Name the targets, differences and squares."""
        shape: Shape = (*self.input_shapes[0], images)
        return {"targets": (shape, None), "difference": (shape, None), "squares": (shape, None)}

    def load_targets(self, slots: Slots, labels: Array) -> None:
        """Store the values, batch last."""
        targets, shape = slots.scratch["targets"], self.input_shapes[0]
        if labels.shape == (slots.images, *shape):
            np.copyto(targets, np.moveaxis(labels, 0, -1), casting="same_kind")
            return
        if len(shape) != 1 or labels.shape != (slots.images,) or labels.dtype.kind not in "iu":
            raise ModelError(
                f"layer {self.name!r} needs targets of shape {(slots.images, *shape)}, "
                f"not {labels.shape} of {labels.dtype}"
            )
        if labels.min() < 0 or labels.max() >= shape[0]:
            raise ModelError(
                f"layer {self.name!r} has {shape[0]} features, "
                f"but labels go from {labels.min()} to {labels.max()}"
            )
        targets.fill(0)
        targets[labels, np.arange(slots.images)] = 1

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Square the differences and take their mean per image."""
        difference, squares = slots.scratch["difference"], slots.scratch["squares"]
        np.subtract(slots.inputs[0], slots.scratch["targets"], out=difference)
        np.multiply(difference, difference, out=squares)
        rows_FB = squares.reshape(-1, slots.images)
        np.add.reduce(rows_FB, axis=0, out=slots.output)
        np.divide(slots.output, rows_FB.shape[0], out=slots.output)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Multiply the difference by two, and divide it by features and images."""
        difference = slots.scratch["difference"]
        np.multiply(difference, 2.0 / difference.size, out=slots.input_errors[0])
