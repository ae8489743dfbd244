"""Small checkpoints with known numbers, for tests."""

import msgspec
import numpy as np

from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.manifest import Checkpoint, Manifest, ShardRecord
from adam_async.messages.loss_sums import LossSum
from adam_async.run.config import Config
from adam_async.run.result import EpochResult
from adam_async.run.training_program import ResumeRecord

DATA = {
    "name": "tiny",
    "source": "made by a test",
    "shape": [1, 8, 8],
    "classes": 10,
    "train_images": 60,
    "test_images": 40,
}


def manifest_of(groups=3, *, epoch=2, run="run-1", **fields):
    """Return a manifest of a checkpoint within an epoch of 15 groups."""
    config = {"epochs": 3, "images_per_group": 4, "rate": 0.05, "momentum": 0.9, "servers": 2}
    resume = ResumeRecord(epoch=epoch, clock=20, results=({"images": 60, "loss": 2.0},) * (epoch - 1))
    return Manifest(
        **{
            "run": run,
            "config": msgspec.json.decode(msgspec.json.encode(Config(**config))),  # as read from a file
            "spec": {"name": "a model"},
            "data": DATA,
            "epoch": epoch,
            "groups": groups,
            "resume": resume,
            "arrays": ("momentum", "steps"),
            "shards": (ShardRecord(0, 20, {"0": 20}, 0, 0),),
            "sets": ({epoch: (0, groups)} if groups else {},),
            "losses": ({epoch: LossSum(4 * groups, 1 << 70)} if groups else {},),
            **fields,
        }
    )


def checkpoint_of(groups=3, *, rows=100, **fields):
    """A checkpoint in which every value is the number of groups."""
    return Checkpoint(
        manifest=manifest_of(groups, **fields),
        weights={
            "first/weights": np.full((rows, 30), groups, np.float32),
            "first/biases": np.full(30, groups, np.float64),
        },
        state={
            "momentum/first/weights": np.full((rows, 30), groups, np.float32),
            "steps/first/weights": np.full(2, groups, np.int64),
        },
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


def result_of(epoch, *, loss=0.5):
    """Return the result of an epoch."""
    return EpochResult(epoch=epoch, images=60, skipped=0, train_loss=loss, test_accuracy=0.75, train_s=1.5)
