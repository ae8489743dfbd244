"""Pure: the progress of a run, at the driver's last statistics."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adam_async.messages import read_number
from adam_async.run.counts import Counts, DataCounts, EpochCounts, ServerCounts, WorkerCounts
from adam_async.run.result import EpochResult
from adam_async.run.run_copies import RunCopies
from adam_async.run.series import Sample, Series, add_up, waited_s
from adam_async.run.step_model import RunModel

RECENT_S = 3.0
"""Time over which the rate is measured, in seconds: three statistics, one of which may be late."""


@dataclass(slots=True)
class Progress:
    """Values of the live table; the driver updates `Driver.progress` in place."""

    phase: str = "joining"
    data: dict[str, Any] = field(default_factory=dict)
    """Description of the data by their server; empty until the server has joined."""
    validation: int = 0
    """Number of training images that the run holds back from training."""
    model: RunModel | None = None
    plan: dict[str, Any] | None = None
    """Partition plan, from `PartitionPlan.to_dict`; None for an uncut model, or before the plan is known."""
    missing: str = ""
    """Roles that the run waits for, in words; empty for none."""
    consistency: str = "asp"
    epoch: int = 0
    last_epoch: int = 0
    """Number of the last epoch, unless the run ends early; 0 until the number is decided."""
    images: int = 0
    """Number of images trained in this epoch so far."""
    skipped: int = 0
    """Known number of images that the epoch leaves for the next one."""
    images_per_s: float = 0.0
    """Images per second over the last `RECENT_S` of training; 0 before training begins."""
    silent: tuple[str, ...] = ()
    """Roles without an answer to the last polls, each with the length of its silence."""
    loss: float = 0.0
    replicas: int = 0
    copies: RunCopies | None = None
    """Copies of the run's shards at the last update; None before they are placed."""
    clock: int = 0
    """Clock up to which all pushes of live replicas are applied, in steps."""
    waiting_for: tuple[str, ...] = ()
    """Workers that wait for clocks, each with the replicas that it waits for."""
    staleness_mean: float = 0.0
    staleness_max: int = 0
    waited_s: float = 0.0
    """Waits of workers for servers, images or clocks, in seconds, summed."""
    epochs: list[EpochResult] = field(default_factory=list)
    roles: dict[str, Counts] = field(default_factory=dict)
    """Statistics of data servers, parameter servers and workers at the last update, by node id."""
    takes_checkpoints: bool = False
    checkpoint: str = ""
    """Name of the newest checkpoint; empty without one."""
    checkpointed_at: float = 0.0
    """Time at which the newest checkpoint was written or resumed, in seconds of the loop's clock."""
    disk_age_s: float | None = None
    """Age of the oldest update that is not on the disk of its server, in seconds; None without disks."""
    _series: Series | None = field(default=None, init=False, repr=False)
    _began: float = field(default=0.0, init=False, repr=False)
    _recent: deque[tuple[float, int]] = field(default_factory=deque, init=False, repr=False)
    """Times of the latest updates of this epoch, each with the number of images trained in the epoch so
    far."""
    _added_up: tuple[int, float, int] = field(default=(0, 0.0, 0), init=False, repr=False)
    """Number of `epochs` added up so far, and their seconds and images."""

    @property
    def images_of_epoch(self) -> int:
        """Number of training images of an epoch; 0 until the data are known."""
        return max(int(self.data.get("train_images", 0)) - self.validation, 0)

    def begin(self, series: Series) -> None:
        """Begin a run; an earlier run keeps its own result."""
        self._series = series
        self.epoch, self.images, self.clock, self.waiting_for = 0, 0, 0, ()
        self.epochs.clear()
        self._added_up = 0, 0.0, 0
        self.roles = {}
        self.silent = ()
        self.copies = None
        self.checkpoint = ""

    def written(self, checkpoint: str, *, now: float) -> None:
        """Note a written or resumed checkpoint; `now` is in seconds of the loop's clock."""
        self.checkpoint, self.checkpointed_at = checkpoint, now

    def begin_epoch(self, epoch: int, *, now: float) -> None:
        """Begin to train an epoch; `now` is in seconds of the loop's clock."""
        self.phase, self.epoch, self.images, self.skipped = "training", epoch, 0, 0
        self._began = now
        self._recent = deque([(now, 0)])

    @property
    def series(self) -> Sequence[Sample]:
        """Samples of the run so far."""
        return self._series.samples if self._series is not None else ()

    def update(self, roles: Mapping[str, Counts], *, now: float, ended: EpochCounts | None = None) -> None:
        """Update the progress with statistics of the roles, during an epoch or just after it.

        Args:
            ended: Result of the epoch after its end, because the data server may be at the next epoch
                already.
        """
        self.roles = dict(roles)
        values = list(roles.values())
        dealers = [each for each in values if isinstance(each, DataCounts) and each.term]
        counts = ended or (dealers[0] if dealers else EpochCounts(loss=0.0))
        self.images, self.skipped, self.loss = counts.images, counts.skipped, read_number(counts.loss)
        self._measure_rate(now)
        holders = [each for each in values if isinstance(each, ServerCounts) and each.shards]
        self.clock = min((each.clock for each in holders), default=0)
        ages = [each.disk.age_s or 0.0 for each in holders if each.disk is not None]
        self.disk_age_s = max(ages, default=None)
        self.waiting_for = tuple(
            f"{node} for {each.waiting_for}"
            for node, each in sorted(roles.items())
            if isinstance(each, WorkerCounts) and each.waiting_for
        )
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
                loss=self.loss,
            )

    def _measure_rate(self, now: float) -> None:
        """Count the images of the last seconds, and forget older updates."""
        recent = self._recent
        recent.append((now, self.images))
        while len(recent) > 2 and recent[1][0] <= now - RECENT_S:
            recent.popleft()
        begin, images = recent[0]
        if now > begin:
            self.images_per_s = max(self.images - images, 0) / (now - begin)

    def _before(self) -> tuple[float, int]:
        """Return seconds and images of all ended epochs; adds up only epochs since the last call."""
        count, train_s, images = self._added_up
        for epoch in self.epochs[count:]:
            train_s += epoch.train_s
            images += epoch.images
        self._added_up = len(self.epochs), train_s, images
        return train_s, images
