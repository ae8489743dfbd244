"""Pure: the facts of an ended epoch: its counts, from its dealer, and its evaluation, from the driver."""

from collections.abc import Iterable
from sys import float_info
from typing import Annotated

import msgspec

from adam_async.messages.bounds import Clock, Count, Images, ReplicaNumber, Seconds

RESULTS_KEPT = 32
"""Maximum number of epochs whose counts are in the map: the newest ones."""

MOST_BEHIND = 1 << 16
"""Maximum number of replicas with skipped groups."""

_Finite = Annotated[float, msgspec.Meta(ge=-float_info.max, le=float_info.max)]
"""A number that the JSON text of the cluster map can hold."""

SkippedGroups = tuple[tuple[Count, Count], ...]
"""Ranges of the skipped groups of an epoch."""


class EpochCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The counts of an epoch, which its dealer sets at its end."""

    images: Count = 0
    """Number of trained images, each counted once."""
    loss: _Finite | None = None
    """Mean loss of the images in `loss_images`; None if it is not finite."""
    loss_images: Count = 0
    """Number of images whose losses are known: all, unless the shards have dropped the set of the epoch, or a
    dealer was lost and no shard takes gradients of the part that computes the loss."""
    train_s: Seconds = 0.0
    """Time from the first lease to the last report, in seconds, earlier parts of a resumed epoch included."""
    clock: Clock = 0
    """Common clock of the replicas; in asp the highest clock of any replica."""
    skipped: Images = 0
    """Number of images left for the next epoch."""
    skipped_groups: SkippedGroups = ()
    behind: Annotated[tuple[ReplicaNumber, ...], msgspec.Meta(max_length=MOST_BEHIND)] = ()
    """Replicas whose shares have skipped groups."""


class Evaluation(msgspec.Struct, frozen=True):
    """The accuracy of the weights after an epoch, which the driver of the run sets."""

    epoch: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    test_accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)]
    validation_accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Accuracy on the training images held back; None without them."""


def joined_evaluations(*several: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """Return the evaluations of all epochs in order; of two of one epoch the later argument counts."""
    found = {each.epoch: each for evaluations in several for each in evaluations}
    return tuple(found[epoch] for epoch in sorted(found))


def newest_and_best(evaluations: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
    """Return the newest `RESULTS_KEPT` evaluations, and the earlier one with the best validation accuracy."""
    older, newest = evaluations[:-RESULTS_KEPT], evaluations[-RESULTS_KEPT:]
    best = max(older, key=lambda each: each.validation_accuracy or 0.0, default=None)
    return newest if best is None or best.validation_accuracy is None else (best, *newest)


def skipped_groups(results: Iterable[EpochCounts]) -> list[SkippedGroups]:
    """Return the ranges of skipped groups of each epoch."""
    return [each.skipped_groups for each in results]
