"""Samples of a run over time: totals so far, and the staleness of what is new."""

from typing import Any

from adam_async.run.config import Config
from adam_async.run.counts import Counts
from adam_async.run.learning_rate import Schedule
from adam_async.run.series import SAMPLES_KEPT, Series, add_up, add_up_by_name, waited_s
from tests.adam_async.role_counts import counts_of


def roles(*, staleness: dict[str, int], payload: int, admission_s: float) -> dict[str, Counts]:
    """Return the statistics of a server and a worker."""
    return {
        "ps-0": counts_of(
            "ps",
            staleness=staleness,
            traffic=[{"payload_bytes": payload, "frame_bytes": 10}, {"frame_bytes": 5}],
        ),
        "worker-0": counts_of(
            "worker", parameters={"admission_wait_s": admission_s}, data={"blocked_s": 0.25}, clock_wait_s=0.5
        ),
    }


def series(**options: Any) -> Series:
    return Series(Schedule.of(Config(rate=0.5, **options)), epoch_images=100)


def take(samples: Series, statistics: dict[str, Counts], **at: Any) -> None:
    samples.take(statistics, **{"s": 1.0, "epoch": 1, "images": 1, "images_before": 0, "loss": 1.0, **at})


def test_a_sample_holds_totals_of_the_whole_run() -> None:
    samples = series()
    at = {"s": 2.5, "epoch": 2, "images": 40, "images_before": 100, "loss": 0.5}
    take(samples, roles(staleness={"1": 4}, payload=100, admission_s=1.0), **at)
    (sample,) = samples.samples

    assert (sample.s, sample.epoch, sample.images, sample.loss, sample.rate) == (2.5, 2, 140, 0.5, 0.5)
    assert (sample.bytes, sample.waited_s) == (115, 1.75)


def test_staleness_is_that_of_the_pushes_since_the_sample_before() -> None:
    samples = series()
    seen = ({"0": 4}, {"0": 4, "3": 1, "5": 1}, {"0": 4, "3": 1, "5": 1}, {})
    for second, histogram in enumerate(seen):
        take(samples, roles(staleness=histogram, payload=0, admission_s=0.0), s=float(second))

    assert [sample.staleness_mean for sample in samples.samples] == [0.0, 4.0, None, None]


def test_the_last_pushes_of_an_epoch_are_counted_with_those_after_it() -> None:
    samples = series()
    for s, histogram in ((1.0, {"4": 10}), (1.02, {"4": 10, "0": 2}), (2.0, {"4": 18, "0": 2})):
        take(samples, roles(staleness=histogram, payload=0, admission_s=0.0), s=s)

    assert [sample.staleness_mean for sample in samples.samples] == [4.0, None, 3.2]


def test_the_rate_is_that_of_the_schedule_at_the_images_trained() -> None:
    samples = series(epochs=2, schedule="cosine")
    for epoch, images in ((1, 0), (2, 0), (2, 100)):
        take(samples, {}, epoch=epoch, images=images)

    assert [round(sample.rate, 12) for sample in samples.samples] == [0.5, 0.25, 0.0]


def test_a_loss_of_no_images_or_no_number_is_none_and_time_never_goes_back() -> None:
    samples = series()
    for s, images, loss in ((2.0, 0, 0.0), (1.5, 10, float("nan")), (3.0, 10, 0.5)):
        take(samples, {}, s=s, images=images, loss=loss)

    assert [sample.loss for sample in samples.samples] == [None, None, 0.5]
    assert [sample.s for sample in samples.samples] == [2.0, 2.0, 3.0]


def test_a_long_run_keeps_a_bounded_number_of_samples_in_their_order() -> None:
    samples = series()
    for at in range(3 * SAMPLES_KEPT):
        take(samples, {}, s=float(at))

    times = [sample.s for sample in samples.samples]
    assert SAMPLES_KEPT // 2 < len(times) <= SAMPLES_KEPT
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0.0, 3.0 * SAMPLES_KEPT - 1)


def test_histograms_add_up_as_numbers() -> None:
    joined = add_up([{"2": 3, "10": 1}, {"2": 1, "0": 5}])

    assert list(joined.histogram.items()) == [("0", 5), ("2", 4), ("10", 1)]
    assert (joined.mean, joined.max, joined.pushes) == (1.8, 10, 10)


def test_without_pushes_there_is_no_staleness() -> None:
    nothing = add_up([{}, {}])

    assert (nothing.histogram, nothing.mean, nothing.max, nothing.pushes) == ({}, 0.0, 0, 0)


def test_histograms_of_the_same_name_are_joined_and_names_come_in_their_order() -> None:
    joined = add_up_by_name([{"10": {"1": 2}, "2": {"0": 1}}, {"10": {"3": 2}}])

    assert list(joined) == ["2", "10"]
    assert (joined["10"].histogram, joined["10"].mean) == ({"1": 2, "3": 2}, 2.0)


def test_waits_of_workers_add_up_by_their_kind() -> None:
    waits = [{"parameters": {"admission_wait_s": 1.0}, "clock_wait_s": 2.0}, {"data": {"blocked_s": 0.5}}]

    assert waited_s([counts_of("ps"), *(counts_of("worker", **each) for each in waits)]) == (1.0, 0.5, 2.0)
    assert waited_s([]) == (0, 0, 0)
