"""Pure: the choice of the epoch whose weights a run keeps, and of the last epoch.

Patience and `keep_best` use only validation images. `until_accuracy` uses validation images, or test images
if the run has no validation split.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from adam_async.run.counts import Evaluation
from adam_async.run.result import EpochResult


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
        """The epoch of the kept weights; 0 before the first one."""
        for result in before:
            self._look(result)

    def take(self, result: EpochResult, weights: Mapping[str, NDArray[Any]]) -> str:
        """Take the result of an epoch; returns the reason to end the run after it, or an empty text.

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
