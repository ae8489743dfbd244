"""The worker's copy: snapshots do not change, newer values are installed whole."""

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from adam_async.worker.weights import WorkerWeights


def weights_of(**versions):
    weights = WorkerWeights()
    for name, version in versions.items():
        weights.install(name, np.full(3, float(version)), (version,))
    return weights


def test_a_snapshot_stays_as_it_was_when_something_newer_is_installed():
    weights = weights_of(a=1, b=1)
    read = weights.snapshot()
    weights.install("a", np.full(3, 2.0), (2,))
    assert read.arrays["a"].tolist() == [1.0] * 3
    assert weights.snapshot().arrays["a"].tolist() == [2.0] * 3
    assert weights.snapshot().arrays["b"] is read.arrays["b"], "what did not change is shared"
    assert weights.installed == 3


def test_installed_values_are_the_very_array():
    weights, values = WorkerWeights(), np.ones(2)
    weights.install("a", values, (1,))
    assert weights.current("a").array is values


def test_values_that_are_newer_in_no_shard_are_not_installed():
    weights = WorkerWeights()
    weights.install("a", np.zeros(2), (3, 5))
    for versions, taken in (
        ((3, 5), False),
        ((2, 4), False),
        ((3, 6), True),
        ((4, 6), True),
        ((4, 6), False),
    ):
        before = weights.current("a")
        weights.install("a", np.zeros(2), versions)
        assert (weights.current("a") is not before) == taken, versions


def test_own_pushes_are_counted_in_the_copy_that_they_went_into_and_end_with_it():
    weights = weights_of(a=1, b=1)
    stepped = {"a": weights.current("a")}
    weights.count_local_steps(stepped)
    weights.count_local_steps(stepped)
    read = weights.snapshot()
    assert read.own_applied == {"a": 2, "b": 0}
    weights.count_local_steps(stepped)
    assert read.own_applied == {"a": 2, "b": 0}, "a snapshot is of its moment"
    weights.install("a", np.zeros(3), (2,))
    assert weights.snapshot().own_applied == {"a": 0, "b": 0}
    weights.count_local_steps(stepped)
    assert weights.snapshot().own_applied == {"a": 0, "b": 0}, "the step went into a copy that is gone"


def test_threads_see_whole_versions_while_the_loop_installs():
    weights, torn, stop = weights_of(a=0), [], threading.Event()

    def read():
        while not stop.is_set():
            copy = weights.snapshot().copies["a"]
            if copy.array.min() != copy.array.max() or copy.array[0] != copy.versions[0]:
                torn.append(copy)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(1, 500):
        weights.install("a", np.full(3, float(version)), (version,))
    stop.set()
    for thread in threads:
        thread.join()
    assert torn == []
    assert weights.installed == 500


def test_the_copy_with_the_newer_clock_stays_when_answers_cross():
    weights = WorkerWeights()
    weights.install("w", np.full(2, 5.0), (4, 4), clock=3)
    weights.install("w", np.full(2, 9.0), (5, 2), clock=2)
    assert weights.current("w").versions == (4, 4), "one shard is newer, but the whole is behind"
    weights.install("w", np.full(2, 7.0), (5, 3), clock=3)
    assert weights.current("w").versions == (4, 4), "of the same clock, and a shard would go back"
    weights.install("w", np.full(2, 7.0), (5, 3), clock=4)
    assert weights.current("w").versions == (5, 3), "who waits for a clock gets what has it"


@given(questions=st.permutations([(step, shard) for step in range(8) for shard in range(3)]))
def test_no_shard_goes_back_and_a_step_that_began_after_the_copy_came_replaces_it(questions):
    """Steps push to three shards, and are answered, in any order."""
    weights = WorkerWeights()
    weights.install("w", np.zeros(3), (0, 0, 0))
    applied, begun, answers, installed = [0] * 3, {}, {}, -1
    for moment, (step, shard) in enumerate(questions):
        applied[shard] += 1
        begun.setdefault(step, moment)
        answer = answers.setdefault(step, {})
        answer[shard] = applied[shard]
        if len(answer) < 3:
            continue
        before, came = weights.current("w").versions, tuple(answer[place] for place in range(3))
        weights.install("w", np.zeros(3), came)
        now = weights.current("w").versions
        assert all(new >= was for new, was in zip(now, before, strict=True))
        if begun[step] > installed:
            assert now == came
        if now != before:
            installed = moment


def test_a_copy_that_has_all_that_came_takes_its_clock_and_keeps_its_local_steps():
    weights = WorkerWeights()
    weights.install("w", np.zeros(2), (4,), clock=3)
    copy = weights.current("w")
    weights.install("w", np.ones(2), (4,), clock=7)
    assert weights.current("w") is copy
    assert copy.clock == 7


def test_the_clock_of_the_whole_only_rises_and_is_no_newer_than_the_copies_of_a_snapshot():
    weights = WorkerWeights()
    weights.install("w", np.zeros(2), (1,), clock=4)
    assert weights.snapshot().clock == 0, "other tensors of that clock have not landed"
    weights.landed(4)
    weights.landed(3)
    assert weights.snapshot().clock == 4
