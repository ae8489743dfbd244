"""Small checkpoints with known numbers, for tests."""

from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from adam_async.checkpoint.checkpoint import Manifest, StoredPieces, saved_manifest
from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.tensors import WholeTensors
from adam_async.driver.preparation import store_of
from adam_async.messages import ShardState
from adam_async.messages.group_sets import LossSum
from adam_async.parameter_server.piece_states import Catalogue, catalogue_state, piece_state, run_state
from adam_async.parameter_server.shard_transfer import set_state
from adam_async.run.config import Config
from adam_async.run.counts import EpochCounts
from adam_async.run.run_record import RunRecord
from adam_async.run.store_record import NUM_BUCKETS, ArrayRecord
from adam_async.run.training_program import ResumeRecord, TrainingProgram
from adam_async.runtime.disk import Disk

DATA = {
    "name": "tiny",
    "source": "made by a test",
    "shape": [1, 8, 8],
    "classes": 10,
    "train_images": 60,
    "test_images": 40,
}

FILES = ["states-00000001.segment", "states-00000002.segment"]
"""Files of a small checkpoint: that of its pieces, and the head."""

CONFIG = Config(epochs=3, images_per_group=4, rate=0.05, momentum=0.9, servers=2)


def record_of(*, epoch=2, run="run-1", runs=(), data=DATA, spec=None, config=CONFIG):
    """Return the record of a run in an epoch of 15 groups."""
    results = (EpochCounts(images=60, loss=0.5, loss_images=60, train_s=1.5),) * (epoch - 1)
    program = TrainingProgram(
        config=config,
        spec={"name": "a model"} if spec is None else spec,
        resumed=ResumeRecord(epoch=epoch, clock=0, results=results, runs=runs) if runs else None,
        data=data,
        asked_rate=config.rate,
    )
    return RunRecord(program=program.record(run, ("driver", 1)), ended=epoch - 1, results=results)


def manifest_of(groups=3, *, epoch=2, run="run-1", **fields):
    """Return a manifest of a checkpoint within an epoch of 15 groups."""
    return msgspec.structs.replace(saved_manifest(record_of(epoch=epoch, run=run), (epoch, groups)), **fields)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """A checkpoint in memory that a folder can write, as it writes a `NewCheckpoint`."""

    manifest: Manifest
    catalogue: Catalogue
    record: RunRecord
    tensors: WholeTensors
    states: tuple[ShardState, ...]

    @property
    def weights(self):
        return self.tensors.weights

    @property
    def state(self):
        return self.tensors.state

    async def pieces(self):
        stored = StoredPieces(self.catalogue)
        for name, specs in stored.specs.items():
            bundle = stored.bundle(specs)
            for spec in specs:
                shard, part = bundle.shards[spec.id], slice(spec.start, spec.stop)
                shard.values[:] = self.tensors.values_of(spec)
                for array, own in shard.rule_state.items():
                    whole = self.state[f"{array}/{spec.tensor}"]
                    place = stored.table.by_tensor[spec.tensor].index(spec)
                    own[:] = whole[place] if array == "steps" else whole.reshape(-1)[part]
                set_state(shard, self.states[int(spec.id)])
            bundle.share_equal_tables()
            version = max(shard.version for shard in bundle.shards.values())
            yield piece_state(bundle, *name, specs, order=(0, version))

    def head(self):
        return [catalogue_state(self.catalogue), run_state(self.record, (1, self.record.ended))]


def checkpoint_of(groups=3, *, rows=100, epoch=2, weights=None, config=None, **fields):
    """A checkpoint of Adam in which every value is the number of groups, unless it has other weights."""
    config = config or msgspec.structs.replace(
        CONFIG, rule="adam" if weights is None else "sgd", momentum=0.0
    )
    record = record_of(epoch=epoch, config=config, **fields)
    if weights is None:
        shapes = {"first/weights": ((rows, 30), "float32"), "first/biases": ((30,), "float64")}
    else:
        shapes = {name: (value.shape, value.dtype.name) for name, value in weights.items()}
    arrays = tuple(ArrayRecord(name, *shape) for name, shape in shapes.items())
    program = saved_manifest(record)
    store = store_of(record.program, TrainingProgram(config=config, spec=program.spec), arrays)
    buckets = tuple(f"ps-{number % 2}" for number in range(NUM_BUCKETS))
    store = msgspec.structs.replace(store, pieces=1, buckets=buckets, generation=1)
    catalogue = Catalogue("model", store, arrays, 0.0)
    tensors = StoredPieces(catalogue).new_tensors()
    for name, array in (*tensors.weights.items(), *tensors.state.items()):
        array[...] = groups if weights is None else weights.get(name, 0)
    sets = {epoch: (0, groups)} if groups else {}
    losses = {epoch: LossSum(4 * groups, 1 << 70)} if groups else {}
    clock = 17 + groups
    states = tuple(ShardState(int(spec.id), clock, {0: clock}, sets, losses) for spec in tensors.table.shards)
    return Example(
        manifest=saved_manifest(record, (epoch, groups)).at_clock_of(states),
        catalogue=catalogue,
        record=record,
        tensors=tensors,
        states=states,
    )


def name_of(groups):
    """Return the name of a checkpoint of `checkpoint_of`."""
    return f"checkpoint-0002-{groups:06}"


async def written(disk, path, *groups):
    """Return a folder into which checkpoints were written."""
    folder = CheckpointFolder(path, disk)
    await folder.take_up(None)
    for number in groups:
        await folder.write(checkpoint_of(number))
    return folder


class CountingDisk(Disk):
    """A disk that counts the bytes that were read."""

    read = 0

    async def read_bytes(self, *arguments):
        found = await super().read_bytes(*arguments)
        self.read += len(found)
        return found

    async def read_part(self, *arguments):
        found = await super().read_part(*arguments)
        self.read += len(found)
        return found

    async def read_pieces(self, *arguments):
        async with aclosing(super().read_pieces(*arguments)) as pieces:
            async for piece in pieces:
                self.read += len(piece)
                yield piece
