"""Pure: finite-difference checks of the gradients of built-in and other layers.

Along a random direction d, a function f of x with gradient g satisfies

    f(x + h d) - f(x - h d) = 2 h (g . d)

up to terms of order h cubed. In float64 with h = 1e-6 both sides agree to about nine digits. A wrong gradient
agrees by accident along one random direction with probability zero. Functions with kinks are checked at
random points, so a kink within h is unlikely.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import GradientMismatchError, ModelError
from adam_async.model.keyed_random import Dice
from adam_async.model.layer import Layer, Loss, Slots
from adam_async.model.network import Network

STEP = 1e-6
"""Step h along a direction."""

TOLERANCE = 1e-6
"""Maximum difference between the two sides of a check, relative to the largest of three numbers: the sum of g
. d's absolute terms, the finite difference, and 1e-3."""

Floats = NDArray[np.float64]


def check_gradient(
    name: str,
    value: Floats,
    gradient: Floats,
    function: Callable[[], float],
    dice: Dice,
    *,
    directions: int = 2,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare a gradient with finite differences of `function`, which reads `value`.

    Changes `value`, and restores it at the end.

    Raises:
        GradientMismatchError: The gradients differ; the message has `name` and both numbers.
    """
    kept = value.copy()
    for number in range(directions):
        drawn = dice.normal("gradient check", keys=(name, number), count=value.size, dtype=np.float64)
        direction = drawn.reshape(value.shape)
        value[...] = kept + STEP * direction
        above = function()
        value[...] = kept - STEP * direction
        below = function()
        value[...] = kept
        expected = (above - below) / (2.0 * STEP)
        terms = gradient * direction
        found = float(np.sum(terms))
        # Terms may cancel to almost nothing, while their finite differences' errors do not.
        if not abs(found - expected) <= tolerance * max(float(np.sum(np.abs(terms))), abs(expected), 1e-3):
            raise GradientMismatchError(
                f"gradient of {name}: {found:.9g} along direction {number}, "
                f"but the finite difference is {expected:.9g}"
            )


def check_network(
    network: Network,
    weights: dict[str, Floats],
    images: NDArray[Any],
    labels: NDArray[Any],
    dice: Dice,
    *,
    directions: int = 2,
    tolerance: float = TOLERANCE,
) -> None:
    """Check each tensor's gradient, and its factors' product, in a float64 network on one group.

    Raises:
        GradientMismatchError: A gradient is wrong; the message has the tensor's name.
        ModelError: The network computes in float32.
    """
    if network.dtype != np.float64:
        raise ModelError(f"gradients are checked in float64, but the network computes in {network.dtype}")
    context = network.context(images.shape[0])
    context.load(images, labels, dice=dice)
    network.forward(weights, context)
    network.backward(weights, context)
    gradients: dict[str, Floats] = {p.name: np.empty(p.shape, network.dtype) for p in network.trained}
    network.deltas(context, gradients)
    for name, gradient in gradients.items():
        factors = network.factors(context, name)
        if factors is not None and not np.allclose(
            factors[1].T @ factors[0], gradient, rtol=1e-12, atol=1e-14
        ):
            raise GradientMismatchError(f"the factors of {name} do not multiply to its gradient")
    for name, gradient in gradients.items():
        check_gradient(
            name,
            weights[name],
            gradient,
            lambda: network.forward(weights, context),
            dice,
            directions=directions,
            tolerance=tolerance,
        )


def check_layer(
    layer: Layer,
    dice: Dice,
    *,
    images: int = 3,
    labels: NDArray[Any] | None = None,
    directions: int = 2,
    tolerance: float = TOLERANCE,
) -> None:
    """Check one layer alone, in float64: error gradients of all inputs, gradients of all tensors.

    The function to differentiate is the sum of the outputs times random numbers; for a loss, the mean loss of
    `labels`.

    Raises:
        GradientMismatchError: A gradient is wrong; the message has its name.
    """
    slots = lone_slots(
        layer,
        [_draw(dice, f"input {number}", (*shape, images)) for number, shape in enumerate(layer.input_shapes)],
    )
    if layer.DRAWS:
        layer.draw(slots, dice, ())
    weights = {p.name: _draw(dice, p.name, p.shape) / np.sqrt(max(p.row_size, 1)) for p in layer.parameters}
    if isinstance(layer, Loss):
        if labels is None:
            raise ModelError(f"layer {layer.name!r} is a loss: give labels to check it")
        layer.load_targets(slots, labels)
        pull = np.full(images, 1.0 / images)
    else:
        pull = _draw(dice, "pull", slots.output.shape)

    def function() -> float:
        layer.forward(weights, slots)
        return float(np.sum(slots.output * pull))

    function()
    if not isinstance(layer, Loss):
        slots.error[...] = pull
    gradients = [(p, np.empty(p.shape, np.float64)) for p in layer.parameters]
    layer.backward(weights, slots)
    for parameter, out in gradients:
        layer.delta(slots, parameter.kind, out)
    for number, (value, error) in enumerate(zip(slots.inputs, slots.input_errors, strict=True)):
        assert error is not None
        check_gradient(
            f"{layer.name} input {number}",
            value,
            error.copy(),
            function,
            dice,
            directions=directions,
            tolerance=tolerance,
        )
    for parameter, gradient in gradients:
        check_gradient(
            parameter.name,
            weights[parameter.name],
            gradient,
            function,
            dice,
            directions=directions,
            tolerance=tolerance,
        )


def lone_slots(layer: Layer, inputs: Sequence[NDArray[Any]]) -> Slots:
    """Make the arrays to train a layer outside any network, with no shared memory.

    Args:
        layer: Any layer.
        inputs: Inputs of the layer, batch last, all of the same dtype and number of images; not copied.
    """
    images, dtype = inputs[0].shape[-1], inputs[0].dtype
    output_shape = (*layer.output_shape, images)
    slots = Slots(
        images=images,
        inputs=tuple(inputs),
        output=np.empty(output_shape, dtype),
        output_error=None if isinstance(layer, Loss) else np.empty(output_shape, dtype),
        input_errors=tuple(np.empty_like(value) for value in inputs),
        scratch={
            name: np.empty(shape, scratch_dtype or dtype)
            for name, (shape, scratch_dtype) in layer.scratch(images).items()
        },
    )
    layer.prepare(slots)
    return slots


def _draw(dice: Dice, name: str, shape: Sequence[int]) -> Floats:
    drawn = dice.normal("gradient check values", keys=(name,), count=int(np.prod(shape)), dtype=np.float64)
    return drawn.reshape(shape)
