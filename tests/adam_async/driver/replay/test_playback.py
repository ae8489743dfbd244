"""A recorded run is repeated in an order in which every read finds its recorded version."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.driver.replay.playback import Playback
from adam_async.driver.replay.recording import Header, Order, Reads, RecordedEpoch, Recording
from adam_async.errors import RecordError

HEADER = Header(
    config={}, spec={}, data={}, buckets=(), kernels="numpy", machine={}, epochs=(), weights="none"
)


@dataclass
class SimulatedWorker:
    """One thread that reads, computes and pushes; answers with newer values come late."""

    replica: int
    shards: int
    copy: list[int] = field(init=False)
    steps: int = 0
    reads: list[tuple[int, list[int], int]] = field(default_factory=list)
    clock: int = 0

    def __post_init__(self) -> None:
        self.copy = [0] * self.shards


def simulate(dice: random.Random, *, replicas: int, shards: int, rounds: int, local: bool) -> Recording:
    """A run without numbers: workers push, shards apply in batches, values travel as they like."""
    workers = [SimulatedWorker(replica, shards) for replica in range(replicas)]
    queues: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
    applied: list[list[tuple[int, int, bool]]] = [[] for _ in range(shards)]
    bounds = [[0] for _ in range(shards)]
    versions: list[list[int]] = [[] for _ in range(shards)]
    for _ in range(rounds):
        worker = dice.choice(workers)
        worker.reads.append((worker.clock + 1, list(worker.copy), worker.steps))
        worker.steps += local
        if dice.random() < 0.7:  # a step of one group, or of several
            worker.clock += 1
            for queue in queues:
                queue.append((worker.replica, worker.clock))
        for shard in dice.sample(range(shards), dice.randint(0, shards)):
            batch = [queues[shard].pop(0) for _ in range(min(len(queues[shard]), dice.randint(1, 3)))]
            if batch:
                finite = [dice.random() < 0.8 for _ in batch]
                applied[shard] += [(*push, not ok) for push, ok in zip(batch, finite, strict=True)]
                bounds[shard].append(len(applied[shard]))
                versions[shard].append((versions[shard] or [0])[-1] + sum(finite))
        if dice.random() < 0.5:
            fresh = dice.choice(workers)
            shard = dice.randrange(shards)
            newest = (versions[shard] or [0])[-1]
            if newest > fresh.copy[shard]:
                fresh.copy[shard], fresh.steps = newest, 0
    pushed = {worker.replica: worker.clock for worker in workers}
    return Recording(
        header=HEADER,
        reads={
            worker.replica: reads_of(
                worker.replica, [read for read in worker.reads if read[0] <= pushed[worker.replica]], shards
            )
            for worker in workers
        },
        orders=tuple(order_of(s, applied[s], bounds[s], versions[s]) for s in range(shards)),
    )


def reads_of(replica: int, rows: list[tuple[int, list[int], int]], shards: int) -> Reads:
    """Rows of (clock, versions read, local steps in the copy); the model is one tensor."""
    count = len(rows)
    return Reads(
        replica=replica,
        epochs=np.ones(count, np.int64),
        numbers=np.arange(count),
        clocks=np.array([clock for clock, _, _ in rows], np.int64),
        progress=np.zeros(count),
        versions=np.array([versions for _, versions, _ in rows], np.int64).reshape(count, shards),
        steps=np.array([steps for _, _, steps in rows], np.int64).reshape(count, 1),
    )


def order_of(
    shard: int, pushes: list[tuple[int, int, bool]], bounds: list[int], versions: list[int]
) -> Order:
    return Order(
        shard=shard,
        clients=np.array([client for client, _, _ in pushes], np.int64),
        clocks=np.array([clock for _, clock, _ in pushes], np.int64),
        refused=np.array([refused for _, _, refused in pushes], bool),
        skipped=np.zeros(len(pushes), bool),
        bounds=np.array(bounds),
        versions=np.array(versions, np.int64),
    )


class CheckingPlayer:
    """A player without arithmetic that checks each order."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.version = [0] * len(recording.orders)
        self.kept: set[tuple[int, int]] = set()
        self.most_kept = 0
        self.trained = dict.fromkeys(recording.reads, 0)
        self.applied = [0] * len(recording.orders)

    def train(self, replica: int, group: int) -> None:
        assert group == self.trained[replica]
        for shard, version in enumerate(self.recording.reads[replica].versions[group].tolist()):
            assert version == self.version[shard] or (shard, version) in self.kept
        self.trained[replica] += 1

    def apply(self, shard: int, batch: int) -> None:
        assert batch == self.applied[shard]
        order = self.recording.orders[shard]
        for entry in range(order.bounds[batch], order.bounds[batch + 1]):
            replica, clock = int(order.clients[entry]), order.clocks[entry]
            groups = np.count_nonzero(self.recording.reads[replica].clocks <= clock)
            assert self.trained[replica] >= groups
        self.version[shard] = int(order.versions[batch])
        self.applied[shard] += 1

    def keep(self, shard: int, version: int) -> None:
        assert version == self.version[shard]
        self.kept.add((shard, version))
        self.most_kept = max(self.most_kept, len(self.kept))

    def drop(self, shard: int, version: int) -> None:
        self.kept.discard((shard, version))


def playback_of(recording: Recording, player: CheckingPlayer) -> Playback:
    return Playback(recording, player, np.zeros(len(recording.orders), np.int64))


def run(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


@given(
    seed=st.integers(0, 10**6),
    replicas=st.integers(1, 4),
    shards=st.integers(1, 4),
    rounds=st.integers(1, 60),
    local=st.booleans(),
)
def test_everyone_finds_the_versions_that_they_read_and_nothing_is_kept_in_the_end(
    seed: int, replicas: int, shards: int, rounds: int, local: bool
) -> None:
    recording = simulate(
        random.Random(seed), replicas=replicas, shards=shards, rounds=rounds, local=local and shards == 1
    )
    player = CheckingPlayer(recording)
    playback = playback_of(recording, player)

    run(playback.advance())

    assert player.applied == [len(order.versions) for order in recording.orders]
    never = {
        (shard, version)
        for replica, reads in recording.reads.items()
        for row in reads.versions[player.trained[replica] :].tolist()
        for shard, version in enumerate(row)
    }
    assert player.kept <= never


def test_kept_versions_are_bounded_by_staleness_and_not_by_the_length_of_the_run() -> None:
    # Two workers alternate, and each reads the version five pushes before its own.
    steps, late = 80, 5
    reads = {
        replica: reads_of(
            replica, [(k + 1, [max(0, 2 * k + replica - late)], 0) for k in range(steps // 2)], 1
        )
        for replica in range(2)
    }
    pushes = [(step % 2, step // 2 + 1, False) for step in range(steps)]
    order = order_of(0, pushes, list(range(steps + 1)), list(range(1, steps + 1)))
    recording = Recording(header=HEADER, reads=reads, orders=(order,))
    player = CheckingPlayer(recording)

    run(playback_of(recording, player).advance())

    assert player.most_kept == late


def test_it_stops_at_the_versions_that_were_evaluated() -> None:
    recording = simulate(random.Random(5), replicas=2, shards=2, rounds=40, local=False)
    player = CheckingPlayer(recording)
    playback = playback_of(recording, player)
    middle = np.array([order.versions[len(order.versions) // 2] for order in recording.orders])

    run(playback.advance(middle))

    assert all(came >= wanted for came, wanted in zip(player.version, middle.tolist(), strict=True))
    assert player.applied != [len(order.versions) for order in recording.orders]


def test_values_that_were_evaluated_while_others_went_on_are_kept_until_they_are_released() -> None:
    recording = simulate(random.Random(8), replicas=3, shards=3, rounds=60, local=False)
    middle = tuple(int(order.versions[len(order.versions) // 2]) for order in recording.orders)
    epoch = RecordedEpoch(epoch=1, images=1, train_loss=0.0, test_accuracy=0.0, versions=middle)
    header = msgspec.structs.replace(HEADER, epochs=(epoch,))
    recording = Recording(header=header, reads=recording.reads, orders=recording.orders)
    player = CheckingPlayer(recording)
    playback = playback_of(recording, player)

    run(playback.advance(np.array(middle)))
    run(playback.advance())

    assert all((shard, version) in player.kept for shard, version in enumerate(middle))
    playback.release(np.array(middle))
    assert not any((shard, version) in player.kept for shard, version in enumerate(middle))


def test_a_record_that_goes_in_a_circle_is_refused_with_the_names_of_shard_and_push() -> None:
    reads = {0: reads_of(0, [(1, [1, 0], 0)], 2), 1: reads_of(1, [(1, [0, 1], 0)], 2)}
    orders = (order_of(0, [(1, 1, False)], [0, 1], [1]), order_of(1, [(0, 1, False)], [0, 1], [1]))
    recording = Recording(header=HEADER, reads=reads, orders=orders)

    with pytest.raises(RecordError, match=r"circle: shard 0 at push 0 \(clock 1 of replica 1\), which waits"):
        run(playback_of(recording, CheckingPlayer(recording)).advance())


@pytest.mark.parametrize(
    ("pushes", "read", "claim"),
    [
        ([(0, 3, False)], [0], "shard 0 applied the push of replica 0 with clock 3, which has no reads"),
        ([(0, 1, False), (0, 1, False)], [0], "clock 1, which it applied before"),
        ([(0, 1, False)], [9], "group 0 of epoch 1 at replica 0 read version 9 of shard 0, which that shard"),
    ],
)
def test_missing_parts_of_a_record_are_named(
    pushes: list[tuple[int, int, bool]], read: list[int], claim: str
) -> None:
    order = order_of(0, pushes, list(range(len(pushes) + 1)), list(range(1, len(pushes) + 1)))
    recording = Recording(header=HEADER, reads={0: reads_of(0, [(1, read, 0)], 1)}, orders=(order,))

    with pytest.raises(RecordError, match=claim):
        playback_of(recording, CheckingPlayer(recording))
