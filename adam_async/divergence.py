"""Pure: the training loss from which on a run diverges, and remedies."""

from math import inf, isfinite, log

from adam_async.model.network import Network as Model

TIMES_GUESSING = 10.0
"""Largest loss that is no divergence, in multiples of the loss of guessing; fresh models begin near 1."""


def largest_loss(model: Model) -> float:
    """Return the loss beyond which a run diverges; infinite for losses without a scale of their own."""
    last = model.layers[-1]
    if model.spec.layers[-1].kind != "softmax_cross_entropy":
        return inf
    weights = getattr(last, "class_weights", ()) or (1.0,)
    return TIMES_GUESSING * log(max(last.input_shapes[0][0], 2)) * max(weights)


def divergence(loss: float, *, largest: float, epoch: int, rate: float) -> str:
    """Return a sentence that a run diverges, with remedies; empty if it does not.

    Args:
        loss: Mean training loss of the epoch so far.
        largest: The value of `largest_loss`.
        epoch: The epoch.
        rate: The peak of the learning rate.
    """
    if isfinite(loss) and loss <= largest:
        return ""
    found = f"{loss:.4g}, more than {largest:.4g}" if isfinite(loss) else "not finite"
    return (
        f"training diverges: the loss of epoch {epoch} is {found}; try a lower rate (--rate {rate / 10:.3g}, "
        f"it was {rate:.3g}), --clip 1 or a longer --warm-up"
    )
