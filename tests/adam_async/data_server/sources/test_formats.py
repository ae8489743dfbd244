"""Every format gives back what was written into it, whichever way it is split."""

import asyncio
from pathlib import Path

import pytest

from adam_async.data_server.sources.datasets import load_dataset
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk
from tests.adam_async.data_server.sources.small import FORMATS, example, images_and_labels, read, write_small


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All digits, in every format."""
    folder = tmp_path_factory.mktemp("digits")
    asyncio.run(example.main(str(folder)))
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("kind", FORMATS)
async def test_the_digits_come_back_byte_for_byte(digits: Path, kind: str) -> None:
    async with Disk() as disk:
        written = await load_dataset("digits", disk)
        found = await load_dataset(str(digits / kind), disk)

    if kind != "folders":  # whose images come class by class
        assert found.train_images.tobytes() == written.train_images.tobytes()
        assert found.test_labels.tolist() == written.test_labels.tolist()
    assert images_and_labels(found) == images_and_labels(written)
    assert (len(found.train_labels), len(found.test_labels)) == (1437, 360)
    assert found.damaged == ()
    assert found.source.startswith(f"{digits / kind}, as asked for")
    assert found.class_names == (tuple("0123456789") if kind == "folders" else ())


@pytest.mark.parametrize("name", ["csv/train.csv", "parquet/train.parquet"])
async def test_without_a_test_set_one_image_in_five_tests_and_always_the_same(
    digits: Path, name: str
) -> None:
    first, again = await read(digits / name), await read(digits / name)

    assert len(first.train_labels) + len(first.test_labels) == 1437
    assert 0.16 < len(first.test_labels) / 1437 < 0.24
    assert first.test_images.tobytes() == again.test_images.tobytes()
    assert set(images_and_labels(first)) <= set(images_and_labels(await read(digits / "idx")))


async def test_images_of_other_classes_change_no_side(tmp_path: Path) -> None:
    folder = write_small(tmp_path) / "folders" / "train"
    before = {image.tobytes() for image in (await read(folder)).test_images}
    (folder / "new").mkdir()
    for name in range(20):
        (folder / "new" / f"{name}.png").write_bytes((folder / "0" / "00000.png").read_bytes())
    after = {image.tobytes() for image in (await read(folder)).test_images}

    assert before
    assert before <= after


async def test_val_stands_in_for_test_and_is_left_out_beside_it(tmp_path: Path) -> None:
    small = write_small(tmp_path)
    (small / "folders" / "test").rename(small / "folders" / "val")
    (small / "shards" / "test.tar").rename(small / "shards" / "validation-0.tar")
    (small / "csv" / "val.csv").write_text("label,a\n1,3\n")

    for kind in ("folders", "shards"):
        assert len((await read(small / kind)).test_labels) == 6
    with pytest.raises(DataError, match=r"is other.csv for training or for testing"):
        (small / "csv" / "other.csv").write_text("label,a\n1,3\n")
        await read(small / "csv")
    (small / "csv" / "other.csv").unlink()
    assert len((await read(small / "csv")).train_labels) == 24


async def test_images_in_npy_files_stay_on_disk(tmp_path: Path) -> None:
    dataset = await read(write_small(tmp_path) / "npy")

    assert not dataset.train_images.flags.owndata
    assert not dataset.train_images.flags.writeable
