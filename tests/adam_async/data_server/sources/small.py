"""Helpers for tests of sources: small data sets in every format, and reading them."""

import io
import json
import tarfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from adam_async.data_server.dataset import Dataset, Policy
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.runtime.disk import Disk

FORMATS = ("folders", "shards", "csv", "csv-paths", "npy", "npz", "parquet", "idx")

_spec = spec_from_file_location(
    "make_sample_data", Path(__file__).parents[4] / "examples/make_sample_data.py"
)
assert _spec is not None
assert _spec.loader is not None
example = module_from_spec(_spec)
_spec.loader.exec_module(example)

TRAIN = (np.arange(24 * 4 * 4, dtype=np.uint8).reshape(24, 4, 4), np.arange(24) % 3)
TEST = (255 - TRAIN[0][:6], np.arange(6) % 3)


def write_small(folder: Path) -> Path:
    """Write 24 images of 4x4 to train and 6 to test with, of three classes, in each format."""
    example.write(folder, "train", *TRAIN)
    example.write(folder, "test", *TEST)
    return folder


async def read(path: Path, damaged: Policy = "error") -> Dataset:
    async with Disk() as disk:
        return await load_dataset(str(path), disk, damaged=damaged)


def encode(pixels: Any, kind: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


def grey(value: int, rows: int = 4, columns: int = 4) -> bytes:
    return encode(np.full((rows, columns), value))


def colour(*value: int, rows: int = 4, columns: int = 4) -> bytes:
    return encode(np.broadcast_to(np.array(value, np.uint8), (rows, columns, len(value))))


def tar(*members: tuple[str | tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            if member.isreg():
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def described(label: Any) -> bytes:
    return json.dumps({"label": label}).encode()


def images_and_labels(dataset: Dataset) -> list[tuple[bytes, int]]:
    """All images of a data set with their labels, in an order that does not depend on the source's."""
    images = np.concatenate([dataset.train_images, dataset.test_images])
    labels = np.concatenate([dataset.train_labels, dataset.test_labels])
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))
