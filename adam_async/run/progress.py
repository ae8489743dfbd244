"""Pure: the progress of a run, at the driver's last statistics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

from adam_async.messages import read_number
from adam_async.run.cluster_status import ClusterStatus
from adam_async.run.counts import Counts, DataCounts, EpochCounts, ServerCounts, of_kind
from adam_async.run.result import EpochResult
from adam_async.run.run_copies import RunCopies
from adam_async.run.series import Sample, Series, add_up, waited_s
from adam_async.run.step_model import RunModel


@dataclass(slots=True)
class Progress:
    """Values of the live table; the driver updates `Driver.progress` in place."""

    phase: str = "joining"
    data: dict[str, Any] = field(default_factory=dict)
    """The server's description of the data; empty until the server has joined."""
    validation: int = 0
    """Number of training images that the run holds back from training."""
    model: RunModel | None = None
    plan: dict[str, Any] | None = None
    """Partition plan, from `PartitionPlan.to_dict`; None for an uncut model, or before the plan is known."""
    missing: str = ""
    """Roles that the run waits for, in words; empty if none."""
    consistency: str = "asp"
    epoch: int = 0
    last_epoch: int = 0
    """Number of the last epoch unless the run ends early; 0 until decided."""
    images: int = 0
    """Number of images trained in this epoch so far."""
    skipped: int = 0
    """Known number of images that the epoch leaves for the next one."""
    began_at: float | None = None
    """Time at which the run began to train, in seconds of the loop's clock; None before."""
    silent: tuple[str, ...] = ()
    """Roles without an answer to the last polls, each with the length of its silence."""
    loss: float = 0.0
    status: ClusterStatus | None = None
    """State of the cluster at the last update; None before any."""
    clock: int = 0
    """Clock up to which all pushes of live replicas are applied, in steps."""
    staleness_mean: float = 0.0
    staleness_max: int = 0
    waited_s: float = 0.0
    """Waits of workers for servers, images or clocks, in seconds, summed."""
    epochs: list[EpochResult] = field(default_factory=list)
    roles: dict[str, Counts] = field(default_factory=dict)
    """Statistics of data servers, parameter servers and workers at the last update, by node id."""
    takes_checkpoints: bool = False
    checkpoint: str = ""
    """Name of the newest checkpoint; empty if there is none."""
    checkpointed_at: float = 0.0
    """Time at which the newest checkpoint was written or resumed, in seconds of the loop's clock."""
    disk_age_s: float | None = None
    """Age in seconds of the oldest update that its server's disk lacks; None without disks."""
    _series: Series | None = field(default=None, init=False, repr=False)
    _began: float = field(default=0.0, init=False, repr=False)
    _added_up: tuple[int, float, int] = field(default=(0, 0.0, 0), init=False, repr=False)
    """Number of `epochs` added up so far, and their seconds and images."""

    @property
    def images_of_epoch(self) -> int:
        """Number of training images per epoch; 0 until the data are known."""
        return max(int(self.data.get("train_images", 0)) - self.validation, 0)

    def begin(self, series: Series) -> None:
        """Begin a run; an earlier run keeps its result."""
        self._series = series
        self.epoch, self.images, self.clock = 0, 0, 0
        self.epochs.clear()
        self._added_up = 0, 0.0, 0
        self.roles = {}
        self.silent = ()
        self.status, self.began_at = None, None
        self.checkpoint = ""

    def written(self, checkpoint: str, *, now: float) -> None:
        """Note a written or resumed checkpoint; `now` is in seconds of the loop's clock."""
        self.checkpoint, self.checkpointed_at = checkpoint, now

    def begin_epoch(self, epoch: int, *, now: float) -> None:
        """Begin to train an epoch; `now` is in seconds of the loop's clock."""
        self.phase, self.epoch, self.images, self.skipped = "training", epoch, 0, 0
        self.began_at = now if self.began_at is None else self.began_at
        self._began = now

    @property
    def images_per_s(self) -> float:
        """Images per second over the last seconds of training; 0 before training begins."""
        return (
            self.status.run.images_per_s if self.status is not None and self.status.run is not None else 0.0
        )

    @property
    def copies(self) -> RunCopies | None:
        """Copies of the run's shards at the last update; None until the shards are placed."""
        return self.status.copies if self.status is not None else None

    @property
    def series(self) -> Sequence[Sample]:
        """Samples of the run so far."""
        return self._series.samples if self._series is not None else ()

    def update(
        self,
        roles: Mapping[str, Counts],
        status: ClusterStatus,
        *,
        now: float,
        ended: EpochCounts | None = None,
    ) -> None:
        """Update the progress with statistics of the roles, during an epoch or just after it.

        Args:
            status: State of the cluster, with the same statistics.
            ended: Result of the epoch after its end, because the data server may be at the next epoch
                already.
        """
        self.roles = dict(roles)
        self.status = status
        values = list(roles.values())
        dealers = [each for each in of_kind(DataCounts, values) if each.term]
        counts = ended or (dealers[0] if dealers else EpochCounts(loss=0.0))
        self.images, self.skipped, self.loss = counts.images, counts.skipped, read_number(counts.loss)
        holders = [each for each in of_kind(ServerCounts, values) if each.shards]
        self.clock = min((each.clock for each in holders), default=0)
        ages = [each.disk.age_s or 0.0 for each in holders if each.disk is not None]
        self.disk_age_s = max(ages, default=None)
        staleness = add_up(each.staleness for each in holders)
        self.staleness_mean, self.staleness_max = staleness.mean, staleness.max
        self.waited_s = sum(waited_s(values))
        if self._series is not None:
            before_s, images_before = self._before()
            self._series.take(
                roles,
                s=before_s + (now - self._began if ended is None else ended.train_s),
                epoch=self.epoch,
                images=self.images,
                images_before=images_before,
                loss=self.loss if counts.loss_images else nan,
            )

    def _before(self) -> tuple[float, int]:
        """Return seconds and images of all ended epochs; adds up only epochs since the last call."""
        count, train_s, images = self._added_up
        for epoch in self.epochs[count:]:
            train_s += epoch.train_s
            images += epoch.images
        self._added_up = len(self.epochs), train_s, images
        return train_s, images
