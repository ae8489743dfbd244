"""Pure: ends a run before its last epoch: finds losses of a run that diverges or does not learn, and chooses
the epoch whose weights stay.

Patience and `keep_best` use only validation images. `until_accuracy` uses validation images or, if the run
has no validation split, test images.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite, log
from typing import Any

from numpy.typing import NDArray

from adam_async.errors import Diverged
from adam_async.run.config import Config
from adam_async.run.counts import Evaluation
from adam_async.run.result import EpochResult
from adam_async.run.step_model import RunModel, StepModel

TIMES_GUESSING = 10.0
"""Loss above which a run diverges, as a multiple of the loss of guessing; a fresh model has about 1."""

LITTLE_BELOW = 0.99
"""Minimum loss of a model that counts as guessing, as a multiple of the loss of guessing among equally
frequent classes."""

FEW_STEPS = 60
"""Minimum number of steps after which a run's loss shows whether it learns."""

CHANCES = 1.5
"""Minimum test accuracy of a model that is better than guessing, as a multiple of one over the number of
classes."""


def largest_loss(model: RunModel) -> float:
    """Return the loss above which a run diverges; infinite for losses without a fixed scale."""
    if isinstance(model, StepModel):
        return inf
    last = model.layers[-1]
    if model.spec.layers[-1].kind != "softmax_cross_entropy":
        return inf
    weights = getattr(last, "class_weights", ()) or (1.0,)
    return TIMES_GUESSING * log(max(last.input_shapes[0][0], 2)) * max(weights)


def divergence(loss: float, *, largest: float, epoch: int, rate: float) -> str:
    """Return a sentence that reports a divergence, with remedies; empty without divergence.

    Args:
        largest: The value of `largest_loss`.
    """
    if isfinite(loss) and loss <= largest:
        return ""
    found = f"{loss:.4g}, more than {largest:.4g}" if isfinite(loss) else "not finite"
    return (
        f"training diverges: the loss of epoch {epoch} is {found}; try a lower rate (--rate {rate / 10:.3g}, "
        f"it was {rate:.3g}), --clip 1 or a longer --warm-up"
    )


def guessing_loss(model: RunModel, classes: int) -> float:
    """Return the smallest loss that is no better than guessing; infinite with class weights, and for losses
    without a fixed scale."""
    if isinstance(model, StepModel):
        return inf
    last = model.layers[-1]
    if model.spec.layers[-1].kind != "softmax_cross_entropy" or getattr(last, "class_weights", None):
        return inf
    return LITTLE_BELOW * log(max(min(last.input_shapes[0][0], classes), 2))


def guessing(
    loss: float, accuracy: float, *, least: float, classes: int, steps: int, rule: str, rate: float
) -> str:
    """Return a sentence that reports a run without learning, with remedies; empty if the run has learnt.

    Args:
        least: The value of `guessing_loss`.
        steps: Number of steps in the run; below `FEW_STEPS` the function reports nothing.
    """
    if not least <= loss < inf or steps < FEW_STEPS or accuracy >= CHANCES / classes:
        return ""
    other = "" if rule in ("adam", "adamw") else ", --rule adam"
    return (
        f"the model has not learnt: its training loss {loss:.4g} is no better than guessing; try another "
        f"rate (--rate {rate / 10:.3g}, it was {rate:.3g}){other} or more epochs"
    )


class LossChecks:
    """Checks the losses of one run."""

    def __init__(self, config: Config, model: RunModel, warn: Callable[[str], None]) -> None:
        self._config = config
        self._model = model
        self._warn = warn
        self._largest = largest_loss(model)
        self._warned = False
        self.failure = ""
        """Reason for a divergence that ends the run; empty without one."""

    def check(self, epoch: int, loss: float) -> None:
        """Check the mean loss of an epoch so far; with `Config.keep_going`, warn once of a divergence.

        Raises:
            Diverged: The run diverges, and `Config.keep_going` is off.
        """
        found = divergence(loss, largest=self._largest, epoch=epoch, rate=self._config.rate)
        if found and not self._config.keep_going:
            self.failure = found
            raise Diverged(f"{found}; or train on in any case with --keep-going")
        if found and not self._warned:
            self._warned = True
            self._warn(f"{found}; training goes on because of --keep-going")

    def check_end(self, epochs: Sequence[EpochResult], classes: int) -> None:
        """Warn of a run that ends with the loss and the accuracy of guessing."""
        config = self._config
        if not epochs:
            return
        found = guessing(
            epochs[-1].train_loss,
            epochs[-1].test_accuracy,
            least=guessing_loss(self._model, classes),
            classes=classes,
            steps=sum(epoch.images for epoch in epochs) // config.images_per_update,
            rule=config.rule,
            rate=config.rate,
        )
        if found:
            self._warn(found)


class EpochChoice:
    """The choice of the epoch whose weights a run keeps, and the decision to end the run.

    Args:
        patience: Number of epochs in a row without a better validation accuracy after which the run ends; 0:
            no limit.
        before: Earlier epochs of the run, whose weights are gone.
    """

    def __init__(
        self,
        *,
        patience: int = 0,
        keep_best: bool = False,
        until_accuracy: float = 0.0,
        before: Sequence[Evaluation] = (),
    ) -> None:
        self._patience = patience
        self._keep_best = keep_best
        self._until_accuracy = until_accuracy
        self._best = -1.0
        self._best_epoch = 0
        self._kept_accuracy = -1.0
        self.weights: Mapping[str, NDArray[Any]] = {}
        self.epoch = 0
        """Epoch of the kept weights; 0 before the first epoch."""
        for result in before:
            self._look(result)

    def take(self, result: EpochResult, weights: Mapping[str, NDArray[Any]]) -> str:
        """Take an epoch's result; return why the run ends after it, or an empty text.

        Args:
            weights: The values after the epoch; must not change afterwards.
        """
        self._look(result.evaluation)
        accuracy = result.validation_accuracy
        better = accuracy is None or accuracy > self._kept_accuracy
        if better or not self._keep_best:
            self.weights, self.epoch = weights, result.epoch
            self._kept_accuracy = -1.0 if accuracy is None else accuracy
        waited = result.epoch - self._best_epoch
        if self._patience and waited >= self._patience:
            return (
                f"validation accuracy was best after epoch {self._best_epoch} ({self._best:.2%}) and has not "
                f"risen in {waited} epoch{'s' if waited > 1 else ''}: so training ends (patience)"
            )
        if 0 < self._until_accuracy <= (result.test_accuracy if accuracy is None else accuracy):
            return f"epoch {result.epoch} reached the accuracy asked for"
        return ""

    def _look(self, result: Evaluation) -> None:
        accuracy = result.validation_accuracy
        if accuracy is not None and accuracy > self._best:
            self._best, self._best_epoch = accuracy, result.epoch
