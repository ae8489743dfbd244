"""The progress of a run follows what its roles counted."""

import pytest

from adam_async.run.cluster_map import ClusterMap
from adam_async.run.cluster_status import status_of
from adam_async.run.config import Config
from adam_async.run.counts import Counts, EpochCounts
from adam_async.run.learning_rate import Schedule
from adam_async.run.progress import Progress
from adam_async.run.result import EpochResult
from adam_async.run.series import Series
from tests.adam_async.role_counts import counts_of

EPOCH = EpochResult(epoch=1, images=100, skipped=0, train_loss=0.5, test_accuracy=0.9, train_s=4.0)


STATUS = status_of(ClusterMap(), {}, leading="")
"""Status of a cluster without nodes."""


def roles(*, images: int, loss: float | None = 0.5) -> dict[str, Counts]:
    return {
        "data-0": counts_of("data", images=images, loss=loss, loss_images=images, term=1),
        "ps-0": counts_of("ps", shards=2, staleness={"1": 3, "5": 1}, clock=4, waiting_for=[1]),
        "ps-1": counts_of("ps", shards=1, clock=5),
        "ps-2": counts_of("ps"),
        "worker-0": counts_of(
            "worker",
            clock=9,
            parameters={"admission_wait_s": 1.0},
            data={"blocked_s": 0.5},
            clock_wait_s=2.0,
            waiting_for="replica 1 at clock 4",
        ),
        "worker-1": counts_of("worker"),
    }


def begun() -> Progress:
    progress = Progress()
    progress.begin(Series(Schedule.of(Config()), epoch_images=100))
    progress.begin_epoch(1, now=100.0)
    return progress


def test_a_look_takes_in_staleness_clocks_and_waits() -> None:
    progress = begun()

    progress.update(roles(images=50), STATUS, now=102.0)

    assert (progress.images, progress.loss) == (50, 0.5)
    assert (progress.staleness_mean, progress.staleness_max) == (2.0, 5)
    assert (progress.clock, progress.waited_s) == (4, 3.5)
    assert [sample.s for sample in progress.series] == [2.0]


def test_the_time_of_a_sample_is_training_only() -> None:
    progress = begun()
    ended = EpochCounts(images=100, loss=0.25, loss_images=100, train_s=4.0)
    progress.update(roles(images=7), STATUS, now=104.5, ended=ended)  # the data server is at the next one
    progress.epochs.append(EPOCH)
    progress.begin_epoch(2, now=200.0)

    progress.update(roles(images=10), STATUS, now=201.0)

    assert [(sample.s, sample.images) for sample in progress.series] == [(4.0, 100), (5.0, 110)]
    assert [sample.loss for sample in progress.series] == [0.25, 0.5]


def test_a_diverged_loss_is_shown_and_left_out_of_the_series() -> None:
    progress = begun()

    progress.update(roles(images=10, loss=None), STATUS, now=101.0)

    assert progress.loss != progress.loss
    assert progress.series[0].loss is None


def test_a_run_forgets_the_one_before_it() -> None:
    progress = begun()
    progress.update(roles(images=10), STATUS, now=101.0)
    progress.epochs.append(EPOCH)

    progress.begin(Series(Schedule.of(Config()), epoch_images=100))

    assert (progress.epochs, progress.roles, list(progress.series), progress.clock) == ([], {}, [], 0)


def test_missing_statistics_count_as_zero() -> None:
    progress = begun()

    progress.update({}, STATUS, now=101.0)

    assert (progress.images, progress.loss, progress.clock, progress.waited_s) == (0, 0.0, 0, 0)
    assert progress.staleness_mean == pytest.approx(0.0)


def test_skipped_images_show_from_their_report_until_the_next_epoch() -> None:
    progress = begun()
    progress.update({"data-0": counts_of("data", images=80, loss=0.5, skipped=20, term=1)}, STATUS, now=101.0)
    assert progress.skipped == 20

    progress.begin_epoch(2, now=102.0)

    assert progress.skipped == 0


def test_images_held_back_for_validation_are_no_part_of_an_epoch() -> None:
    progress = begun()
    assert progress.images_of_epoch == 0, "nothing is known of the data"

    progress.data, progress.validation = {"train_images": 60_000}, 5_000

    assert progress.images_of_epoch == 55_000
