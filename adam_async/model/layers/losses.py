"""Pure: losses. The error gradient they start is that of the mean over the group's images.

Letters: K classes, F features, B batch.
"""

import numpy as np

from adam_async.model.errors import ModelError
from adam_async.model.layer import Array, Loss, ScratchSpec, Slots, Weights
from adam_async.model.spec import LayerSpec, Shape


class SoftmaxCrossEntropy(Loss):
    """Softmax over the classes and the negative logarithm of the right one's share.

    Labels: class numbers, ``(n,)``.
    """

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        if len(input_shapes[0]) != 1:
            raise self.refusal(f"needs one score per class, not an input of {list(input_shapes[0])}")

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Shares of the classes, two rows of per-image numbers, and where each image's right score lies."""
        classes = self.input_shapes[0][0]
        return {
            "shares": ((classes, images), None),
            "row": ((images,), None),
            "targets": ((images,), np.int64),
        }

    def prepare(self, slots: Slots) -> None:
        """Number the images, to turn a class number into a position among all scores."""
        slots.views["numbers"] = np.arange(slots.images)

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
        np.multiply(labels, slots.images, out=slots.scratch["targets"], casting="unsafe", dtype=np.int64)
        np.add(slots.scratch["targets"], slots.views["numbers"], out=slots.scratch["targets"])

    def forward(self, weights: Weights, slots: Slots) -> None:
        """Subtract each image's largest score, then exponentiate: nothing overflows."""
        shares_KB, row_B, losses_B = slots.scratch["shares"], slots.scratch["row"], slots.output
        np.maximum.reduce(slots.inputs[0], axis=0, out=row_B)
        np.subtract(slots.inputs[0], row_B, out=shares_KB)
        np.take(shares_KB.reshape(-1), slots.scratch["targets"], out=losses_B, mode="clip")
        np.exp(shares_KB, out=shares_KB)
        np.add.reduce(shares_KB, axis=0, out=row_B)
        np.divide(shares_KB, row_B, out=shares_KB)
        np.log(row_B, out=row_B)
        np.subtract(row_B, losses_B, out=losses_B)

    def backward(self, weights: Weights, slots: Slots) -> None:
        """Shares minus one at the right class, divided by the number of images."""
        target = slots.input_errors[0]
        assert target is not None
        share = 1.0 / slots.images
        np.multiply(slots.scratch["shares"], share, out=target)
        target.reshape(-1)[slots.scratch["targets"]] -= share


class MeanSquaredError(Loss):
    """Mean over the features of the squared difference.

    Labels: values of shape ``(n, features...)``; or, where the input is flat, class numbers ``(n,)``,
    meaning 1 at the class and 0 elsewhere.
    """

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Targets, differences and squares."""
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
        """Twice the difference, divided by features and images."""
        difference = slots.scratch["difference"]
        np.multiply(difference, 2.0 / difference.size, out=slots.input_errors[0])
