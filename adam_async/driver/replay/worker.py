"""Pure: one client of a recorded run: the worker that trained its groups, which trains them again.

The worker's own code (`adam_async/worker/`) computes a group, adds up a step and splits it for the servers.
This module passes the recorded reads to that code, and changes the worker's weights at the recorded points.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from adam_async.data_server.client import ImageGroup
from adam_async.driver.replay.recording import Reads
from adam_async.driver.replay.shards import Pushes, RecordedModel, ReplayedShards
from adam_async.errors import RecordError
from adam_async.messages import Lease, Push
from adam_async.run.ids import ShardId
from adam_async.worker.copy_mode import context_of
from adam_async.worker.puller import Puller, Snapshot, TensorCopy, WorkerWeights
from adam_async.worker.push_plan import PushPlan
from adam_async.worker.pusher import Pusher, Step
from adam_async.worker.stepper import ReplicaClock, Stepper
from adam_async.worker.training import GroupTrainer, ThreadScratch
from transport import BufferPool

NEVER = 1 << 62
"""Number of steps between two pulls: never reached, because the record gives the values."""

Images = Callable[[int, int], tuple[NDArray[Any], NDArray[Any]]]
"""Function from the epoch and the number of a group to its images and labels."""


class RecordedWeights(WorkerWeights):
    """A worker's copy of the weights, which changes at the recorded points.

    Values that arrived while a group was computed are installed right after its snapshot. So a local step of
    the group changes the same copy as in the run.
    """

    def __init__(self) -> None:
        super().__init__(recorded=True)
        self._meanwhile: Iterable[TensorCopy] = ()

    def install(self, arrived: Iterable[TensorCopy]) -> None:
        """Replace tensors without a comparison of clocks and versions: the record sets the versions."""
        self._current.update({copy.tensor: copy for copy in arrived})

    def install_after_snapshot(self, copies: Iterable[TensorCopy]) -> None:
        """Install tensors, with the versions of their shards, right after the next snapshot."""
        self._meanwhile = copies

    def versions(self, tensor: str) -> tuple[int, ...]:
        """Return the versions of a tensor's shards in the copy; empty before the first install."""
        copy = self._current.get(tensor)
        return () if copy is None else copy.versions

    def snapshot(self) -> Snapshot:
        read = super().snapshot()
        self.install(self._meanwhile)
        self._meanwhile = ()
        return read


@dataclass(frozen=True, slots=True, eq=False)
class _Firing:
    """The part of a `dataflow.Firing` that training uses."""

    scratch: ThreadScratch


class _Outbox:
    """A stand-in for the client of the servers, and its connections, that keeps the pushes."""

    def __init__(self, client: int, servers: Iterable[str], pushes: Pushes) -> None:
        self.connections = dict.fromkeys(servers, self)
        self._client = client
        self._pushes = pushes

    def push(
        self,
        tensors: Sequence[NDArray[Any]],
        step: Step,
        number: int,
        into: None,
        *,
        shards: tuple[ShardId, ...],
        **fields: Any,
    ) -> None:
        """See `Session.push`; no answer follows."""
        fields |= {"store": "", "session": 0, "incarnation": 0, "replica": self._client, "generation": 0}
        self._pushes.put(Push(shards=shards, numbers=0, **fields), tensors, step.freed)


class ReplayedWorker:
    """Trains one client's groups again, in order."""

    def __init__(
        self,
        *,
        client: int,
        reads: Reads,
        model: RecordedModel,
        plan: PushPlan,
        shards: ReplayedShards,
        pushes: Pushes,
        images: Images,
    ) -> None:
        config, network, table = model.config, model.network, model.table
        self._reads = reads
        self._shards = shards
        self._images = images
        self._names = [p.name for p in network.parameters]
        self._places = {name: [spec.id for spec in table.by_tensor[name]] for name in self._names}
        self._weights = RecordedWeights()
        self._firing: Any = _Firing(ThreadScratch(network, context_of(network, config, plan)))
        self._trainer = GroupTrainer(network, config, weights=self._weights, plan=plan, buffers=1)
        outbox: Any = _Outbox(client, model.buckets, pushes)
        puller = Puller(
            network=network,
            table=table,
            buckets=model.buckets,
            client=outbox,
            weights=self._weights,
            buffers=BufferPool(),
        )
        pusher = Pusher(
            config,
            plan=plan,
            client=outbox,
            puller=puller,
            trainer=self._trainer,
            on_finished=lambda _: None,  # no lease waits for the report
        )
        # The record has the order of the pushes, and the values: steps have no bound, and no pull follows.
        self._stepper = Stepper(ReplicaClock(push_every=config.push_every, pull_every=NEVER), pusher)

    def train(self, group: int) -> float:
        """Train the next group, and push a step after its last group; return the group's mean loss.

        Raises:
            RecordError: The record has impossible versions or local steps.
        """
        reads = self._reads
        epoch, number, clock = (int(of[group]) for of in (reads.epochs, reads.numbers, reads.clocks))
        self._weights.install(self._changes(group, stepped=None))
        if group + 1 < len(reads.clocks):
            self._weights.install_after_snapshot(self._changes(group + 1, stepped=True))
        images, labels = self._images(epoch, number)
        lease = Lease(epoch, number, 0, len(labels), float(reads.progress[group]))
        trained = self._trainer.train(self._firing, ImageGroup(lease, images, labels))
        self._check_read(group, trained.read)
        if not group or reads.clocks[group - 1] != clock:
            self._stepper.start(clock - 1)
        self._stepper.add(self._firing, trained)
        if group + 1 == len(reads.clocks) or reads.clocks[group + 1] != clock:
            self._stepper.close()
        assert trained.loss is not None, "the worker trains the whole model"
        return trained.loss

    def _changes(self, group: int, *, stepped: bool | None) -> Iterable[TensorCopy]:
        """Return the tensors that a group reads in another version than the worker's copy has.

        With `stepped`, return only tensors with local steps before the read.
        """
        changes = []
        for place, name in enumerate(self._names):
            versions = tuple(self._reads.versions[group, self._places[name]].tolist())
            if stepped and not self._reads.steps[group, place]:
                continue
            if self._weights.versions(name) != versions:
                changes.append(TensorCopy(name, self._shards.tensor(name, versions), versions))
        return changes

    def _check_read(self, group: int, read: Snapshot) -> None:
        assert read.local is not None
        for place, name in enumerate(self._names):
            versions = tuple(self._reads.versions[group, self._places[name]].tolist())
            steps = int(self._reads.steps[group, place])
            if read.copies[name].versions != versions or read.local[name] != steps:
                raise RecordError(
                    f"the record is damaged: group {self._reads.numbers[group]} of epoch "
                    f"{self._reads.epochs[group]} read {name}, versions {versions}, with {steps} steps, "
                    f"but only versions {read.copies[name].versions} with {read.local[name]} are possible"
                )
