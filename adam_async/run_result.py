"""Pure: what a run came to: each finished epoch, and the whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from numpy.typing import NDArray

from adam_async.model.network import Network as Model
from adam_async.replay.recording import RecordError
from adam_async.series import Sample


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
    trained_again: int = 0
    """Of groups whose lease came back, because their replica was lost."""

    @property
    def images_per_s(self) -> float:
        """Training images per second of training."""
        return self.images / self.train_s if self.train_s else 0.0

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return (
            f"epoch {self.epoch}: loss {self.train_loss:.4f}, test accuracy {self.test_accuracy:.2%}, "
            f"{self.images} images in {self.train_s:.2f} s{skipped}"
        )


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
    """The final values, by tensor."""
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
    record: bytes | RecordError | None = None
    """Of a run with `Config.record`: what its replay needs, as a file's bytes; or why there is none."""

    @property
    def test_accuracy(self) -> float:
        """Accuracy after the last epoch."""
        return self.epochs[-1].test_accuracy if self.epochs else 0.0

    def __repr__(self) -> str:
        return (
            f"<RunResult {self.model.spec.name} {len(self.epochs)} epochs, "
            f"test accuracy {self.test_accuracy:.2%}>"
        )


def divergence(epochs: Sequence[EpochResult], statistics: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Report the first epoch without a finite loss, if there is one.

    Args:
        epochs: The epochs that have ended.
        statistics: Counts of each node, by node id.
    """
    lost = next((epoch.epoch for epoch in epochs if not isfinite(epoch.train_loss)), None)
    if lost is not None:
        refused = sum(values.get("refused", 0) for values in statistics.values())
        yield (
            f"the loss is not finite from epoch {lost} on; {refused} gradients of shards were refused "
            "for the same reason: lower the rate"
        )
