"""Pure: what a run came to: each finished epoch, and the whole."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from adam_async.errors import RecordError
from adam_async.model.network import Network as Model
from adam_async.run.series import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """One finished epoch."""

    epoch: int
    images: int
    """Trained, each counted once."""
    skipped: int
    """Left for the next epoch, where they come first; of the last one left out."""
    train_loss: float
    test_accuracy: float
    train_s: float
    validation_accuracy: float | None = None
    """On the training images held back; None without any."""
    trained_again: int = 0
    """Of groups whose lease came back, because their replica was lost."""

    @property
    def images_per_s(self) -> float:
        """Training images per second of training."""
        return self.images / self.train_s if self.train_s else 0.0

    @property
    def accuracies(self) -> str:
        """Both accuracies in words."""
        validation = self.validation_accuracy
        before = f"validation accuracy {validation:.2%}, " if validation is not None else ""
        return f"{before}test accuracy {self.test_accuracy:.2%}"

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return (
            f"epoch {self.epoch}: loss {self.train_loss:.4f}, {self.accuracies}, "
            f"{self.images} images in {self.train_s:.2f} s{skipped}"
        )


OnEpoch = Callable[[EpochResult], object]
"""Told of each epoch after its evaluation. It may be async; its False ends the run with that epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResult:
    """One checkpoint that was written."""

    name: str
    epoch: int
    """Epoch of the checkpoint, taken at its end or before."""
    paused_s: float
    """How long training stood still for it."""
    written_s: float
    """How long the disk took, beside training."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunResult:
    """What a run came to."""

    epochs: tuple[EpochResult, ...]
    weights: Mapping[str, NDArray[Any]]
    """The values after `kept_epoch`, by tensor."""
    model: Model
    data: dict[str, Any]
    statistics: dict[str, dict[str, Any]]
    """What each node counted, by node id."""
    events: tuple[dict[str, Any], ...]
    """Deaths and other incidents, with seconds since the run began."""
    series: tuple[Sample, ...] = ()
    """How it went, sampled about once per second of training."""
    checkpoints: tuple[CheckpointResult, ...] = ()
    """Those that were written, in their order."""
    checkpoint_missed: str = ""
    """Why the last checkpoint that was due was not written; empty if it was, or none was due."""
    kept_epoch: int = 0
    """The epoch that `weights` are of: the last one, or with `Config.keep_best` the best; 0 if none ended."""
    record: bytes | RecordError | None = None
    """Of a run with `Config.record`: what its replay needs, as a file's bytes; or why there is none."""

    @property
    def test_accuracy(self) -> float:
        """Accuracy of `weights`; of a run that was cut short, after its last epoch."""
        kept = (epoch for epoch in self.epochs if epoch.epoch == self.kept_epoch)
        last = self.epochs[-1:]
        return next((epoch.test_accuracy for epoch in (*kept, *last)), 0.0)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of class 0, 1, ...; empty if the training data have numbers only."""
        names = self.data.get("class_names", ())
        return tuple(name for name in names if isinstance(name, str))

    def __repr__(self) -> str:
        return (
            f"<RunResult {self.model.spec.name} {len(self.epochs)} epochs, "
            f"test accuracy {self.test_accuracy:.2%}>"
        )
