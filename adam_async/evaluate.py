"""How well a saved model does on the test images of a data set."""

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset
from adam_async.errors import ConfigError, DataError
from adam_async.model.network import PREDICT_BATCH, Network
from adam_async.model.spec import ModelSpec
from adam_async.ports import Disk
from adam_async.saved_model import load_model
from dataflow import ComputePool


class ClassResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the images of one class fared."""

    label: int
    images: int
    right: int

    @property
    def accuracy(self) -> float:
        """Share named rightly; 0 where there is no image."""
        return self.right / self.images if self.images else 0.0


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is worth on some test images."""

    model: str
    data: str
    images: int
    right: int
    loss: float
    """Mean over the images of what the model's loss layer gives."""
    classes: tuple[ClassResult, ...]

    @property
    def accuracy(self) -> float:
        """Share of the images named rightly."""
        return self.right / self.images if self.images else 0.0


async def evaluate_file(path: Path, dataset: Dataset, *, disk: Disk, threads: int) -> Evaluation:
    """Evaluate the model in a file that ``train --out`` wrote.

    Args:
        path: The file.
        dataset: Its test images are used.
        disk: Reads the file.
        threads: Compute threads.

    Cancelling it ends it after the batches that the threads are in.

    Raises:
        ConfigError: The file is missing or no model, or the model does not fit the data.
        DataError: There are no test images.
    """
    try:
        data = await disk.read_bytes(path)
    except OSError as error:
        raise ConfigError(
            f"model {path} cannot be read: {error.strerror or error}; name a file that `train --out` wrote"
        ) from None
    spec, weights = await disk.run(lambda: load_model(data, origin=str(path)))
    return await evaluate(spec, weights, dataset, threads=threads)


async def evaluate(
    spec: ModelSpec, weights: Mapping[str, NDArray[Any]], dataset: Dataset, *, threads: int
) -> Evaluation:
    """Evaluate a model on a data set's test images; see `evaluate_file`."""
    check_fit(spec, dataset)
    network = Network(spec, dtype=next(iter(weights.values())).dtype if weights else np.float32)
    images, labels = dataset.test_images, dataset.test_labels
    cuts = range(0, len(labels) + PREDICT_BATCH, PREDICT_BATCH)
    contexts = [network.context(PREDICT_BATCH, training=False) for _ in range(threads)]
    right = np.zeros(dataset.num_classes, np.int64)
    losses = 0.0
    async with ComputePool(threads=threads, name="evaluate", contexts=contexts, intake=2 * threads) as pool:
        async with asyncio.TaskGroup() as group:
            parts = [
                group.create_task(
                    pool.run(
                        _batch, network, weights, images[a:b], labels[a:b], cost="evaluate", with_context=True
                    ),
                    name=f"evaluate-{a}",
                )
                for a, b in pairwise(cuts)
            ]
        for part in parts:
            hit, loss = part.result()
            right += np.bincount(hit, minlength=dataset.num_classes)
            losses += loss
    totals = np.bincount(labels, minlength=dataset.num_classes)
    return Evaluation(
        model=spec.name,
        data=dataset.name,
        images=len(labels),
        right=int(right.sum()),
        loss=losses / len(labels),
        classes=tuple(
            ClassResult(label=label, images=int(totals[label]), right=int(right[label]))
            for label in range(dataset.num_classes)
        ),
    )


def check_fit(spec: ModelSpec, dataset: Dataset) -> None:
    """Refuse data that the model cannot take.

    Raises:
        ConfigError: Other image shape, or more classes than the model tells apart.
        DataError: There are no test images.
    """
    if tuple(spec.input_shape) != dataset.image_shape:
        raise ConfigError(
            f"model {spec.name!r} takes images of {tuple(spec.input_shape)} (channels, rows, columns), but "
            f"{dataset.name} has {dataset.image_shape}; name the data it was trained on with --data"
        )
    scores = Network(spec).layers[-1].input_shapes[0][0]
    if dataset.num_classes > scores:
        raise ConfigError(
            f"model {spec.name!r} tells {scores} classes apart, but {dataset.name} has {dataset.num_classes}"
        )
    if not len(dataset.test_labels):
        raise DataError(f"{dataset.name} has no test images; evaluate on data that has some")


def table(evaluation: Evaluation) -> list[str]:
    """The evaluation as lines of text."""
    head = (
        f"{evaluation.model} on {evaluation.data}: accuracy {evaluation.accuracy:.2%} "
        f"({evaluation.right} of {evaluation.images} test images), loss {evaluation.loss:.4f}"
    )
    rows = [
        f"{row.label:>5}  {row.images:>6}  {row.right:>6}  {row.accuracy:>8.2%}" for row in evaluation.classes
    ]
    return [head, f"{'class':>5}  {'images':>6}  {'right':>6}  {'accuracy':>8}", *rows]


def _batch(
    context: Any,
    network: Network,
    weights: Mapping[str, NDArray[Any]],
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
) -> tuple[NDArray[np.int64], float]:
    """Labels of the images named rightly, and the sum of the losses."""
    context.load(images, labels)
    loss = network.forward(weights, context)
    scores = context.slots(len(network.layers) - 1).inputs[0]
    named = scores.reshape(-1, len(labels)).argmax(axis=0)
    return labels[named == labels], loss * len(labels)
