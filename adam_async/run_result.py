"""Pure: what a run is at and what it came to: its progress, each finished epoch, and the whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from adam_async.model.network import Network as Model


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """One finished epoch."""

    epoch: int
    images: int
    skipped: int
    train_loss: float
    test_accuracy: float
    train_s: float

    @property
    def images_per_s(self) -> float:
        """Training images per second of training."""
        return self.images / self.train_s if self.train_s else 0.0

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: loss {self.train_loss:.4f}, test accuracy {self.test_accuracy:.2%}, "
            f"{self.images} images in {self.train_s:.2f} s"
        )


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

    @property
    def test_accuracy(self) -> float:
        """Accuracy after the last epoch."""
        return self.epochs[-1].test_accuracy if self.epochs else 0.0

    def __repr__(self) -> str:
        return (
            f"<RunResult {self.model.spec.name} {len(self.epochs)} epochs, "
            f"test accuracy {self.test_accuracy:.2%}>"
        )


@dataclass(slots=True)
class Progress:
    """What the live table shows; `Driver.progress` is updated in place."""

    phase: str = "joining"
    data: dict[str, Any] = field(default_factory=dict)
    """What the data server says of its data; empty until it has joined."""
    model: Model | None = None
    epoch: int = 0
    images: int = 0
    """Images of this epoch that are trained."""
    images_per_s: float = 0.0
    """Rate between the last two looks."""
    loss: float = 0.0
    replicas: int = 0
    """Live ones."""
    staleness_mean: float = 0.0
    waited_s: float = 0.0
    """Seconds that workers have waited for servers or for images, summed."""
    looked_at: float = 0.0
    """When the roles were last asked, in seconds of the loop's clock."""
    epochs: list[EpochResult] = field(default_factory=list)
