"""Pure: training losses that show that a run diverges or does not learn, and remedies."""

from math import inf, isfinite, log

from adam_async.model.network import Network as Model

TIMES_GUESSING = 10.0
"""Largest loss that is no divergence, in multiples of the loss of guessing; fresh models begin near 1."""


LITTLE_BELOW = 0.99
"""Smallest loss of a model that guesses, in multiples of the loss of guessing among equal classes."""


FEW_STEPS = 60
"""Steps that a run needs before its loss says whether it learns."""


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


def guessing_loss(model: Model) -> float:
    """Return the smallest loss that is no better than guessing; infinite for losses without such a scale."""
    last = model.layers[-1]
    if model.spec.layers[-1].kind != "softmax_cross_entropy" or getattr(last, "class_weights", None):
        return inf
    return LITTLE_BELOW * log(max(last.input_shapes[0][0], 2))


def guessing(loss: float, *, least: float, steps: int, rate: float) -> str:
    """Return a sentence that a run has not learnt, with remedies; empty if it has.

    Args:
        loss: Mean training loss of the last epoch.
        least: The value of `guessing_loss`.
        steps: Steps of the run; after a few no model has learnt.
        rate: The peak of the learning rate.
    """
    if loss < least or steps < FEW_STEPS:
        return ""
    return (
        f"the model has not learnt: its training loss {loss:.4g} is that of guessing; try a lower rate "
        f"(--rate {rate / 10:.3g}, it was {rate:.3g}), --rule adam or more epochs"
    )
