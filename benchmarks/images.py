"""The images of benchmarks: MNIST from the folder `ADAM_DATA_DIR`, parts of it, and noise."""

import os
from pathlib import Path

import numpy as np

from adam_async import Disk, load_dataset
from adam_async.data_server.dataset import Dataset


async def mnist(count: int = 0, *, times: int = 1) -> Dataset:
    """Load MNIST from the folder `ADAM_DATA_DIR`, or by the default ways of a run.

    Args:
        count: Number of training images; 0 takes all.
        times: Number of repetitions of the training images.
    """
    async with Disk() as disk:
        whole = await load_dataset(os.environ.get("ADAM_DATA_DIR", "mnist"), disk)
    return first_images(whole, count or len(whole.train_labels), times=times)


def first_images(whole: Dataset, count: int, *, times: int = 1) -> Dataset:
    """Return the first training images, with all test images."""
    images, labels = whole.train_images[:count], whole.train_labels[:count]
    return Dataset(
        name=whole.name,
        source=whole.source,
        train_images=np.tile(np.asarray(images[:]), (times, 1, 1, 1)) if times > 1 else images,
        train_labels=np.tile(labels, times) if times > 1 else labels,
        test_images=whole.test_images,
        test_labels=whole.test_labels,
        num_classes=whole.num_classes,
    )


def save(dataset: Dataset, file: Path) -> None:
    """Write images to a file that the data server of another process can read."""
    np.savez(
        file,
        x_train=np.asarray(dataset.train_images[:]),
        y_train=dataset.train_labels,
        x_test=dataset.test_images,
        y_test=dataset.test_labels,
    )


def save_noise(file: Path, images: int, *, side: int, tests: int) -> None:
    """Write square images that are easy to make and hard to learn."""
    dice = np.random.default_rng(0)
    train, test = (dice.integers(0, 256, (count, side, side), dtype=np.uint8) for count in (images, tests))
    np.savez(file, x_train=train, y_train=np.arange(images) % 10, x_test=test, y_test=np.arange(tests) % 10)
