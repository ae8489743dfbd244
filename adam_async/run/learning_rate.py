"""Pure: the learning rate of a run: its default, the options that follow from the data, and its schedule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import msgspec

from adam_async.run.config import GROUP_IMAGES, Config

USUAL_RATE = 0.06
"""Constant default rate of rule ``sgd`` at 16 images per update, for images of `USUAL_NORM`."""

USUAL_NORM = 100.0
"""Maximum squared norm of images with the usual rate; the squared norm of MNIST's images is about 100."""

FRESH_GROUPS = 5 / 3
"""Maximum number of groups in flight at which gradients from copies count as fresh, and have the full
rate."""

FALLING, FALLING_FREE = 3.2, 1.6
"""Peak of a rate that rises and then falls to 0, as a multiple of the constant rate. The second value is for
uncut models with stale gradients and unbounded staleness. The peak is above the constant rate because the
noise of groups and stale gradients falls with the rate. The second value is half as high, because gradients
of several replicas are then stale by twice the groups in flight."""

FALLING_MOST, FALLING_CUT = 2.0, 2 / 3
"""Maximum peak of a rate that rises and then falls to 0, as a multiple of the constant rate for fresh
gradients. The second value is for cut models with unbounded staleness."""

RISE_EPOCHS, RISE_EPOCHS_STALE = 0.1, 1.0
"""Number of epochs in which a rate that later falls to 0 rises, with fresh and with stale gradients, unless
the run is short. Stale gradients disturb the first steps most."""

DEFAULT_STEPS = 1500
"""Number of steps in a run without `epochs`; a step is one push of `push_every` groups, in `bsp` of all
replicas. Small networks are near their best accuracy on small data after as many."""

PHOTO_RATE, PHOTO_RATE_STALE = 0.006, 0.003
"""Default rate of `photo_conv` with rule ``adam``, with one group in flight and with several, whose gradients
may be stale. The network's few weights allow a higher rate than other networks."""

PHOTO_GROUP_LEAST = 4
"""Minimum number of images per group for few photographs; smaller groups give noisier gradients."""

EPOCHS_LEAST, EPOCHS_MOST = 3, 100
"""Bounds on the default number of epochs, for large and for small data."""

FIRST_SHARE = 0.001
"""Minimum share of the rate during a warm-up, because a group at rate 0 would have no effect."""


def default_rate(config: Config, groups_in_flight: int = 0, squared_norm: float = 0.0) -> float:
    """Return the rate of a run: the given rate, or the rule's default.

    For `sgd` a constant rate is 0.06 at 16 images per update without momentum. The rate is lower with
    momentum, which adds up gradients. With fewer images per update it falls in proportion; with more it grows
    with their square root, up to twice. The rate is also lower if replicas do not wait for each other and
    compute so many groups at once, on copies, that gradients are stale. `Config.slack` bounds the number of
    stale groups. A rate that rises and falls to 0 (`Config.falls`) has a higher peak. Images with more or
    brighter pixels than MNIST's have larger gradients, so the rate is inversely proportional to their squared
    norm.

    Args:
        groups_in_flight: Groups in flight of all workers together; 0 if unknown or without effect.
        squared_norm: See `Dataset.squared_norm`; 0 if unknown.
    """
    if config.rate:
        return config.rate
    if config.rule not in ("auto", "sgd"):
        from adam_async.model.rules import rule_of  # imports NumPy

        return rule_of(config).rate
    size = config.images_per_update / 16
    rate = USUAL_RATE * (1 - config.momentum) * min(size, math.sqrt(size), 2.0) * norm_scale(squared_norm)
    stale, fresh = _stale_groups(config, groups_in_flight), rate
    if stale:
        rate *= FRESH_GROUPS / stale
    if not config.falls:
        return rate
    if not stale or config.slack is not None:
        return min(FALLING * rate, FALLING_MOST * fresh)
    if config.partitions > 1:
        return min(FALLING * rate, FALLING_CUT * fresh)
    return FALLING_FREE * rate


def _stale_groups(config: Config, groups_in_flight: int) -> int:
    """Return the number of groups in flight that make gradients stale; 0 in lockstep, in place, or if few."""
    if config.weights == "aliased" or config.synchronous:
        return 0
    if config.slack is not None:
        groups_in_flight = min(groups_in_flight, config.replicas * config.push_every * (config.slack + 1))
    return groups_in_flight if groups_in_flight > FRESH_GROUPS else 0


def default_epochs(config: Config, images: int) -> int:
    """Return as many epochs as have `DEFAULT_STEPS` steps, within bounds; the fewest for 0 images (unknown).

    Args:
        images: Number of training images without those for validation.
    """
    steps = math.ceil(images / (config.images_per_group * _groups_of_a_step(config)))
    return (
        min(max(math.ceil(DEFAULT_STEPS / steps), EPOCHS_LEAST), EPOCHS_MOST) if steps > 0 else EPOCHS_LEAST
    )


def _groups_of_a_step(config: Config) -> int:
    return config.push_every * (config.replicas if config.synchronous else 1)


def _in_small_groups(config: Config, images: int) -> Config:
    """Return the options for this many photographs, with smaller groups if there are few.

    With the smaller groups `EPOCHS_MOST` epochs have up to `DEFAULT_STEPS` steps. One group is in flight,
    because with few steps stale gradients cost accuracy. Given options stay.
    """
    size = max(images * EPOCHS_MOST // (DEFAULT_STEPS * _groups_of_a_step(config)), PHOTO_GROUP_LEAST)
    if images <= 0 or size >= GROUP_IMAGES or config.images_per_group != GROUP_IMAGES or config.in_flight:
        return config
    return msgspec.structs.replace(config, images_per_group=size, in_flight=1)


def decide(
    config: Config,
    groups_in_flight: int,
    images: int = 0,
    squared_norm: float = 0.0,
    *,
    photographs: bool = False,
) -> Config:
    """Return the options in force: with rule, groups, epochs, rate and schedule decided.

    Args:
        images: Number of training images without the validation images; 0 if unknown.
        squared_norm: See `Dataset.squared_norm`; 0 if unknown.
        photographs: Whether the model is `photo_conv`'s, whose default rule is ``adam``.

    Raises:
        ConfigError: The default epochs of the data are not more than `warm_up`.
    """
    if config.rule == "auto":
        # A given rate, momentum or layer rate was chosen for sgd.
        adaptive = photographs and not (config.rate or config.momentum or config.layer_rate)
        config = msgspec.structs.replace(config, rule="adam" if adaptive else "sgd")
        config = _in_small_groups(config, images) if adaptive else config
    if photographs and config.rule == "adam" and not config.rate:
        rate = PHOTO_RATE if config.in_flight == 1 else PHOTO_RATE_STALE
        config = msgspec.structs.replace(config, rate=rate)
    rate = default_rate(config, groups_in_flight, squared_norm)
    epochs = config.epochs or default_epochs(config, images)
    found = msgspec.structs.replace(config, epochs=epochs, rate=rate)
    if config.schedule != "auto":
        return found
    if not config.falls:
        return msgspec.structs.replace(found, schedule="constant")
    usual = RISE_EPOCHS_STALE if _stale_groups(config, groups_in_flight) else RISE_EPOCHS
    rise = config.warm_up or min(usual, epochs / 3)
    return msgspec.structs.replace(found, schedule="cosine", warm_up=rise)


def squared_norm_of(data: Mapping[str, Any]) -> float:
    """Return the squared norm in a description of data; 0 if the value is impossible."""
    norm = data.get("squared_norm")
    return norm if isinstance(norm, float) and 0.0 <= norm <= math.prod(data["shape"]) else 0.0


def norm_scale(squared_norm: float) -> float:
    """Return the share of the usual rate for images of this squared norm: at most 1."""
    return min(USUAL_NORM / squared_norm, 1.0) if 0.0 < squared_norm < math.inf else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The rate as a function of progress alone, so a group has the same rate in every run with these options.

    With a warm-up the rate rises linearly over `warm_up` epochs, to `peak` at their end. The schedule begins
    after the warm-up: falls of ``step`` count from there, and ``cosine`` falls from there to 0 at `epochs`.
    """

    kind: Literal["constant", "step", "cosine"]
    peak: float
    """Rate at the beginning of the schedule."""
    warm_up: float
    """Length of the warm-up, in epochs."""
    decay: float
    """Factor by which ``step`` lowers the rate each time."""
    decay_every: float
    """Time between two falls of ``step``, in epochs."""
    epochs: int

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the schedule of decided options (see `decide`), whose peak is their rate."""
        return cls(
            kind="constant" if config.schedule == "auto" else config.schedule,
            peak=default_rate(config),
            warm_up=config.warm_up,
            decay=config.decay,
            decay_every=config.decay_every,
            epochs=config.epochs,
        )

    @property
    def fixed(self) -> float | None:
        """Rate of all groups if it never changes; otherwise None."""
        return self.peak if self.kind == "constant" and not self.warm_up else None

    def rate(self, progress: float) -> float:
        """Return the rate of a group, between 0 and `peak`.

        Args:
            progress: Number of epochs before the group.
        """
        if progress < self.warm_up:
            return self.peak * max(progress / self.warm_up, FIRST_SHARE)
        since = progress - self.warm_up
        if self.kind == "step":
            return self.peak * self.decay ** math.floor(since / self.decay_every)
        if self.kind == "cosine":
            done = min(since / (self.epochs - self.warm_up), 1.0)
            return self.peak * (1 + math.cos(math.pi * done)) / 2
        return self.peak
