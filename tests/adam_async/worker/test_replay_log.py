"""The reads of groups are logged in a few bytes, and read back unchanged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.messages import Lease
from adam_async.worker.puller import TensorCopy, WorkerWeights
from adam_async.worker.replay_log import Reader, ReadLog, read_read_log

WHO = Reader(2, 1 << 55, 7)
SHARDS = {"a.weight": 3, "a.bias": 1, "b.weight": 1}


class Worker:
    """A worker's copy, its log, and the expected log."""

    def __init__(self, *, local=False, rated=False, shards=SHARDS):
        self.weights = WorkerWeights(recorded=True)
        self.shards, self.local = shards, local
        self.log = ReadLog(WHO, shards, local=local, rated=rated)
        self.said, self.version = [], 0
        for name in shards:
            self.install(name)

    def install(self, name):
        self.version += 1
        versions = tuple(self.version + place for place in range(self.shards[name]))
        self.weights.install([TensorCopy(name, np.zeros(1), versions)])

    def train(self, lease, clock, *, arriving=()):
        """Read, install the values that arrive meanwhile, make the local step."""
        read = self.weights.snapshot()
        for name in arriving:
            self.install(name)
        if self.local:
            for name in self.shards:
                self.weights.current(name).local += 1
        self.log.note(lease, clock, read)
        versions = {name: copy.versions for name, copy in read.copies.items()}
        self.said.append((lease.epoch, lease.number, clock, lease.progress, versions, dict(read.local)))

    def read_back(self):
        who, groups = read_read_log(bytes(self.log.data), frozen=frozenset(), local=self.local)
        assert who == WHO
        return [(g.epoch, g.number, g.clock, g.progress, dict(g.versions), dict(g.local)) for g in groups]


GROUP = st.tuples(
    st.integers(1, 3),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from([0.0, 0.25, 1.5]),
    st.lists(st.sampled_from(sorted(SHARDS)), unique=True),
    st.lists(st.sampled_from(sorted(SHARDS)), unique=True),
)


@given(groups=st.lists(GROUP, max_size=12), local=st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_log_has_the_versions_that_each_group_read(groups, local):
    worker, clock = Worker(local=local, rated=True), 0
    for epoch, number, step, progress, before, during in groups:
        for name in before:
            worker.install(name)
        clock += step
        worker.train(Lease(epoch, number, 1, 4, progress), clock, arriving=during)
    assert worker.read_back() == worker.said


def test_where_rates_do_not_go_by_it_progress_takes_no_bytes():
    worker = Worker()
    worker.train(Lease(1, 0, 1, 4, 0.75), 1)
    assert worker.read_back()[0][3] == 0.0


@pytest.mark.parametrize(
    ("shards", "rated", "most"),
    [({"w": 1}, False, 22), ({"w": 1}, True, 30), (SHARDS, False, 24), (SHARDS, True, 24)],
    ids=str,
)
def test_a_push_takes_few_bytes_per_shard(shards, rated, most):
    worker = Worker(local=True, rated=rated, shards=shards)
    before = len(worker.log.data)
    for number in range(50):
        for name in shards:
            worker.install(name)
        worker.train(Lease(1, 3 * number, 1, 4, number / 50), number + 1)
    assert (len(worker.log.data) - before) / 50 / sum(shards.values()) <= most


def test_groups_of_a_step_that_read_the_same_take_a_byte_each():
    worker = Worker()
    worker.train(Lease(1, 0, 1, 4), 1)
    before = len(worker.log.data)
    for number in range(1, 9):
        worker.train(Lease(1, number, 1, 4), 1)
    assert len(worker.log.data) - before == 8


def test_frozen_tensors_make_no_local_steps():
    worker = Worker(local=True)
    for number in range(3):
        worker.train(Lease(1, number, 1, 4), number + 1)
    _, groups = read_read_log(bytes(worker.log.data), frozen=frozenset({"a.bias"}), local=True)
    assert [group.local for group in groups][2] == {"a.weight": 2, "a.bias": 0, "b.weight": 2}


@pytest.mark.parametrize("cut", [4, 12, 35, 60, -1, -5])
def test_a_log_that_is_cut_off_is_refused(cut):
    worker = Worker()
    worker.train(Lease(1, 0, 1, 4), 1)
    with pytest.raises(ValueError, match="log of reads"):
        list(read_read_log(bytes(worker.log.data)[:cut], frozen=frozenset(), local=False)[1])
