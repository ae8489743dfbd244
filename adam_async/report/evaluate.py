"""Accuracy and loss of a model on the test images of a data set, class by class.

The evaluation matches classes by name if data and model have names, else by their order. Letters: N images, K
classes of the model.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.class_names import is_number
from adam_async.data_server.dataset import Dataset
from adam_async.errors import ConfigError, DataError
from adam_async.model.context import Context
from adam_async.model.network import PREDICT_BATCH, Network
from dataflow import ComputePool

MOST_NAMED = 5
"""Maximum number of classes that an error lists."""

UNKNOWN = -1
"""Number for classes of the data that the model lacks."""


class ClassResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results for the test images of one class."""

    label: int
    """Number of the class in the model."""
    name: str
    images: int
    right: int

    @property
    def accuracy(self) -> float:
        """Share of correctly classified images; 0 without images."""
        return self.right / self.images if self.images else 0.0


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a model on test images."""

    model: str
    data: str
    images: int
    right: int
    loss: float
    """Mean loss over the images."""
    classes: tuple[ClassResult, ...]
    """Classes of the data that the model has, in the order of the model."""

    @property
    def accuracy(self) -> float:
        """Share of correctly classified images."""
        return self.right / self.images if self.images else 0.0


Marked = tuple[NDArray[np.int64], float]
"""Classes of a batch's correctly classified images, and the summed losses of all its images."""


class Exam:
    """Pure: a test of a model on the test images of a data set, in batches.

    Args:
        network: The model. Several threads may score batches at once, each with its own context.
        class_names: Name of the model's class 0, 1, ...; empty if classes have only numbers.

    Raises:
        ConfigError: The model needs other images, or lacks a class of the data.
        DataError: The data set has no test images.
    """

    def __init__(
        self,
        network: Network,
        weights: Mapping[str, NDArray[Any]],
        dataset: Dataset,
        class_names: Sequence[str] = (),
    ) -> None:
        _check_images(network, dataset)
        self._network, self._weights, self._dataset = network, weights, dataset
        self._number_of = model_numbers(network, class_names, dataset)
        self._labels = self._number_of[dataset.test_labels]

    @property
    def batches(self) -> range:
        """The first image of each batch."""
        return range(0, len(self._labels), PREDICT_BATCH)

    def context(self) -> Context:
        """Allocate the arrays for one batch."""
        return self._network.context(PREDICT_BATCH, training=False)

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def mark(self, context: Context, first: int) -> Marked:
        """Run the model on the batch that begins at image `first`."""
        labels = self._labels[first : first + PREDICT_BATCH]
        context.load(self._dataset.test_images[first : first + PREDICT_BATCH], labels)
        loss = self._network.forward(self._weights, context)
        scores = context.slots(len(self._network.layers) - 1).inputs[0]
        named = scores.reshape(-1, len(labels)).argmax(axis=0)
        return labels[named == labels], loss * len(labels)

    def result(self, marked: Iterable[Marked]) -> Evaluation:
        """Add up the marks of all batches."""
        dataset = self._dataset
        right = np.zeros(int(self._number_of.max()) + 1, np.int64)
        losses = 0.0
        for hit, loss in marked:
            right += np.bincount(hit, minlength=len(right))
            losses += loss
        totals = np.bincount(self._labels, minlength=len(right))
        names = dataset.class_names or tuple(map(str, range(dataset.num_classes)))
        known = sorted((int(n), name) for n, name in zip(self._number_of, names, strict=True) if n != UNKNOWN)
        return Evaluation(
            model=self._network.spec.name,
            data=dataset.name,
            images=len(self._labels),
            right=int(right.sum()),
            loss=losses / len(self._labels),
            classes=tuple(
                ClassResult(label=n, name=name, images=int(totals[n]), right=int(right[n]))
                for n, name in known
            ),
        )


async def evaluate(
    network: Network,
    weights: Mapping[str, NDArray[Any]],
    dataset: Dataset,
    *,
    threads: int,
    class_names: Sequence[str] = (),
) -> Evaluation:
    """Evaluate a model on a data set's test images, on `threads` compute threads. See `Exam`.

    A cancellation ends the evaluation after the current batches of the threads.
    """
    exam = Exam(network, weights, dataset, class_names)
    contexts = [exam.context() for _ in range(threads)]
    async with ComputePool(threads=threads, name="evaluate", contexts=contexts, intake=2 * threads) as pool:
        async with asyncio.TaskGroup() as group:
            parts = [
                group.create_task(
                    pool.run(_mark, exam, first, cost="evaluate", with_context=True), name=f"evaluate-{first}"
                )
                for first in exam.batches
            ]
    return exam.result(part.result() for part in parts)


def _mark(context: Context, exam: Exam, first: int) -> Marked:
    return exam.mark(context, first)


def _check_images(network: Network, dataset: Dataset) -> None:
    spec = network.spec
    if tuple(spec.input_shape) != dataset.image_shape:
        raise ConfigError(
            f"model {spec.name!r} takes images of {tuple(spec.input_shape)} (channels, rows, columns), but "
            f"{dataset.name} has {dataset.image_shape}; name the data it was trained on with --data"
        )
    if not len(dataset.test_labels):
        raise DataError(f"{dataset.name} has no test images; evaluate on data that has some")


def model_numbers(network: Network, class_names: Sequence[str], dataset: Dataset) -> NDArray[np.int64]:
    """Match each class of the data with a class of a model.

    Names decide if model and data have names. A name that is a number matches the class with that number if
    one side has only numbers. Otherwise the order of classes decides; only data without class names may then
    have fewer classes than the model.

    Returns:
        Shape (classes of the data,): numbers of the model's classes, or `UNKNOWN`.

    Raises:
        ConfigError: The model lacks the class of a test image, or classes cannot be matched.
    """
    model, outputs = network.spec.name, network.layers[-1].input_shapes[0][0]
    theirs, count = dataset.class_names, dataset.num_classes
    if theirs and not class_names and count != outputs:
        if not all(map(is_number, theirs)):
            raise ConfigError(
                f"{dataset.name} has {count} named classes, but the {outputs} classes of model {model!r} "
                "have no names, so they cannot be matched; train the model again on data with names"
            )
        class_names = tuple(map(str, range(outputs)))
    by_name = class_names and (theirs or all(map(is_number, class_names)))
    if not by_name:
        if count > outputs:
            raise ConfigError(f"model {model!r} has {outputs} classes, but {dataset.name} has {count}")
        return np.arange(count, dtype=np.int64)
    names = theirs or tuple(map(str, range(count)))
    number_of = {name: number for number, name in enumerate(class_names)}
    numbers = np.array([number_of.get(name, UNKNOWN) for name in names], np.int64)
    present = np.unique(dataset.test_labels)
    unknown = [names[label] for label in present if numbers[label] == UNKNOWN]
    if unknown:
        raise ConfigError(
            f"{dataset.name} has test images of {_listed(unknown)}, and model {model!r} knows "
            f"{_listed(class_names)}; leave these images out, or train a model on data that have them"
        )
    return numbers


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def table(evaluation: Evaluation) -> list[str]:
    """Return the evaluation as lines of text."""
    head = (
        f"{evaluation.model} on {evaluation.data}: accuracy {evaluation.accuracy:.2%} "
        f"({evaluation.right} of {evaluation.images} test images), loss {evaluation.loss:.4f}"
    )
    wide = max(len("class"), *(len(row.name) for row in evaluation.classes))
    rows = [
        f"{row.name:>{wide}}  {row.images:>6}  {row.right:>6}  {row.accuracy:>8.2%}"
        for row in evaluation.classes
    ]
    return [head, f"{'class':>{wide}}  {'images':>6}  {'right':>6}  {'accuracy':>8}", *rows]
