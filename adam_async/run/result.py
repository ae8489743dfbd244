"""Pure: the results of a run: of each finished epoch, and of the whole run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, Self

from numpy.typing import NDArray

from adam_async.errors import RecordError, counted
from adam_async.run.counts import Counts, EpochCounts, Evaluation
from adam_async.run.run_copies import RunCopies
from adam_async.run.run_record import RunRecord
from adam_async.run.series import Sample
from adam_async.run.step_model import RunModel


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """One finished epoch."""

    epoch: int
    images: int
    """Number of trained images, each counted once."""
    skipped: int
    """Number of images left for the next epoch, which begins with them. The run never trains the images left
    in its last epoch."""
    train_loss: float
    test_accuracy: float
    train_s: float
    validation_accuracy: float | None = None
    """Accuracy on the held-back training images; None without any."""

    @classmethod
    def of(cls, counts: EpochCounts, evaluation: Evaluation) -> Self:
        """Return an epoch's result from its dealer's counts and its driver's evaluation."""
        loss = counts.loss if counts.loss_images else None
        return cls(
            epoch=evaluation.epoch,
            images=counts.images,
            skipped=counts.skipped,
            train_loss=nan if loss is None or isnan(loss) else loss,  # equal results are equal
            test_accuracy=evaluation.test_accuracy,
            train_s=counts.train_s,
            validation_accuracy=evaluation.validation_accuracy,
        )

    @property
    def evaluation(self) -> Evaluation:
        """The accuracies, as in the cluster map."""
        return Evaluation(self.epoch, self.test_accuracy, self.validation_accuracy)

    @property
    def images_per_s(self) -> float:
        """Training images per second of training."""
        return self.images / self.train_s if self.train_s else 0.0

    @property
    def accuracies(self) -> str:
        """The accuracies as text."""
        validation = self.validation_accuracy
        before = f"validation accuracy {validation:.2%}, " if validation is not None else ""
        return f"{before}test accuracy {self.test_accuracy:.2%}"

    def __str__(self) -> str:
        skipped = f", {self.skipped:,} skipped" if self.skipped else ""
        return (
            f"epoch {self.epoch}: loss {self.train_loss:.4f}, {self.accuracies}, "
            f"{counted(self.images, 'image')} in {self.train_s:.2f} s{skipped}"
        )


def epoch_results(record: RunRecord) -> tuple[EpochResult, ...]:
    """Return the results of the evaluated epochs whose counts are known, in order."""
    known = range(record.first, record.ended + 1)
    return tuple(
        [EpochResult.of(record.result(each.epoch), each) for each in record.evaluated if each.epoch in known]
    )


OnEpoch = Callable[[EpochResult], object]
"""Function called with each epoch after its evaluation. The function may be async. If it returns False, the
run ends with that epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResult:
    """One written checkpoint."""

    name: str
    epoch: int
    """Epoch of the checkpoint, taken within the epoch or at its end."""
    read_s: float
    """Time that the reading of the shards took, in seconds, with the waits for the disk. Training continues
    during the reading, except at the end of an epoch or run."""
    written_s: float
    """Time in seconds that the writing took, from the first shard read; training continues meanwhile."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunResult:
    """The result of a run."""

    epochs: tuple[EpochResult, ...]
    weights: Mapping[str, NDArray[Any]]
    """Values after `kept_epoch`, by tensor."""
    model: RunModel
    """The network; a `StepModel` if the run has a user's step."""
    data: dict[str, Any]
    statistics: dict[str, Counts]
    """Counts of each role that answered at the end, by node id."""
    events: tuple[dict[str, Any], ...]
    """Losses of roles and other events, with seconds since the start of the run."""
    series: tuple[Sample, ...] = ()
    """Samples, one for about each second of training."""
    copies: RunCopies | None = None
    """Copies of the shards at the last poll of the roles; None until the shards are placed."""
    checkpoints: tuple[CheckpointResult, ...] = ()
    checkpoint_missed: str = ""
    """Why the last checkpoint is missing; empty if the run wrote it, or if none was due."""
    kept_epoch: int = 0
    """Epoch of `weights`: the last one, or with `Config.keep_best` the best. 0 in an interrupted run's
    result, or if no epoch has ended."""
    record: bytes | RecordError | None = None
    """With `Config.record`: the bytes of the record's file, or the error that prevents a record."""

    @property
    def test_accuracy(self) -> float:
        """Test accuracy after `kept_epoch`, or, if that is 0, after the last epoch; 0 without an epoch."""
        kept = (epoch for epoch in self.epochs if epoch.epoch == self.kept_epoch)
        last = self.epochs[-1:]
        return next((epoch.test_accuracy for epoch in (*kept, *last)), 0.0)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes 0, 1, ... in order; empty if the training data have numbers only."""
        names = self.data.get("class_names", ())
        return tuple(name for name in names if isinstance(name, str))

    def __repr__(self) -> str:
        return (
            f"<RunResult {self.model.spec.name} {len(self.epochs)} epochs, "
            f"test accuracy {self.test_accuracy:.2%}>"
        )
