"""Images that stay in their files: the same data set as when all are decoded at once, and sooner."""

from pathlib import Path

import numpy as np
import pytest

from adam_async.data_server import dataset as datasets
from adam_async.data_server.dataset import Dataset, Policy, StoredImages
from adam_async.data_server.sources import limits, samples
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.errors import DataError
from adam_async.run.memory_sizes import CacheLimits
from adam_async.runtime.disk import Disk
from tests.adam_async.data_server.sources.small import colour, encode, grey, read, tar, write_small
from tests.adam_async.data_server.sources.test_image_folder import pair, write

ASKED = CacheLimits(100)


async def read_stored(path: Path, damaged: Policy = "error", cache: CacheLimits = ASKED) -> Dataset:
    async with Disk() as disk:
        return await load_dataset(str(path), disk, damaged=damaged, cache=cache)


def assert_same(stored: Dataset, whole: Dataset) -> None:
    assert isinstance(stored.train_images, StoredImages)
    assert np.array_equal(stored.train_images[:], whole.train_images)
    for name in ("train_labels", "test_images", "test_labels"):
        assert np.array_equal(getattr(stored, name), getattr(whole, name))
    assert stored.class_names == whole.class_names
    assert stored.info() == whole.info() | {"source": stored.source}


@pytest.mark.parametrize("kind", ["folders", "shards", "npy"])
async def test_every_source_that_can_stay_stored_is_the_same_data_set(tmp_path: Path, kind: str) -> None:
    folder = write_small(tmp_path) / kind
    assert_same(await read_stored(folder), await read(folder))


async def test_sizes_and_colours_that_differ_are_fitted_as_they_are_at_once(tmp_path: Path) -> None:
    wide = np.arange(8 * 24, dtype=np.uint8).reshape(8, 24)
    pair(tmp_path, train__cat__wide=encode(wide), train__dog__red=colour(250, 1, 2))
    stored, whole = await read_stored(tmp_path), await read(tmp_path)

    assert_same(stored, whole)
    assert stored.source == whole.source


async def test_images_without_splits_of_their_own_are_split_alike(tmp_path: Path) -> None:
    write(tmp_path, **{f"{name}__{i:02}": grey(i) for name in ("cat", "dog") for i in range(20)})
    shards = tmp_path / "shards"
    shards.mkdir()
    members = [
        (f"{i}.{kind}", grey(i) if kind == "png" else b"7") for i in range(40) for kind in ("png", "cls")
    ]
    (shards / "all.tar").write_bytes(tar(*members))

    assert_same(await read_stored(shards), await read(shards))
    (shards / "all.tar").unlink()
    shards.rmdir()
    assert_same(await read_stored(tmp_path), await read(tmp_path))


async def test_a_label_without_a_class_is_damage(tmp_path: Path) -> None:
    labels = [b"?" if i == 3 else b"%d" % (i % 2) for i in range(40)]
    members = [part for i in range(40) for part in ((f"{i}.png", grey(i)), (f"{i}.cls", labels[i]))]
    (tmp_path / "all.tar").write_bytes(tar(*members))

    assert_same(await read_stored(tmp_path, "skip"), await read(tmp_path, "skip"))
    with pytest.raises(DataError, match=r"all.tar:3 has the label '\?', expected a class number from 0"):
        await read_stored(tmp_path)


async def test_training_images_are_not_read_before_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(40):
        write(tmp_path, **{f"train__cat__{i:02}": colour(i, 2, 3, rows=40, columns=40)})
    write(tmp_path, test__cat__a=colour(1, 2, 3, rows=40, columns=40))
    reads: list[tuple[str, int]] = []
    true_read = samples.read_piece

    def noting(path: Path, offset: int, size: int) -> bytes:
        reads.append((path.parent.parent.name, size))
        return true_read(path, offset, size)

    monkeypatch.setattr(samples, "read_piece", noting)
    monkeypatch.setattr(samples, "HEADER_BYTES", 60)
    monkeypatch.setattr(samples, "AT_A_TIME", 5)
    monkeypatch.setattr(datasets, "SAMPLED", 3)
    dataset = await read_stored(tmp_path)

    sizes = [size for split, size in reads if split == "train"]
    assert sizes[:25] == [60] * 25  # more than half: no other can win
    assert len(sizes) == 25 + 3  # and the sample that the squared norm is calculated from
    reads.clear()
    assert dataset.train_images[3].shape == (3, 40, 40)
    assert len(reads) == 1


async def test_without_a_size_images_that_fit_are_loaded_at_once(tmp_path: Path) -> None:
    pair(tmp_path)
    for kind in ("folders", "npy"):
        write_small(tmp_path / "small")
        source = tmp_path / "small" / kind
        for size, staying in ((1 << 30, False), (1 << 14, False), (100, True)):
            dataset = await read_stored(source, cache=CacheLimits(size, asked=False))
            assert isinstance(dataset.train_images, StoredImages) == staying


async def test_damage_in_an_image_is_found_when_it_is_needed(tmp_path: Path) -> None:
    write(pair(tmp_path), train__cat__05=grey(9)[:-20])
    dataset = await read_stored(tmp_path)
    with pytest.raises(DataError, match=r"05.img is a damaged image"):
        dataset.train_images[:]

    dataset = await read_stored(tmp_path, "skip")
    images = dataset.train_images
    assert isinstance(images, StoredImages)
    assert images[2].max() == 7  # that of 07, the next cat
    assert list(images.replaced) == [2]


async def test_damage_in_a_header_counts_as_if_all_were_decoded(tmp_path: Path) -> None:
    write(pair(tmp_path), train__cat__05=b"no image")
    with pytest.raises(DataError, match=r"05.img is no PNG"):
        await read_stored(tmp_path)

    assert_same(await read_stored(tmp_path, "skip"), await read(tmp_path, "skip"))


async def test_a_file_that_goes_or_shrinks_in_use_is_named(tmp_path: Path) -> None:
    dataset = await read_stored(pair(tmp_path))
    gone, shrunk = tmp_path / "train" / "cat" / "01.img", tmp_path / "train" / "cat" / "03.img"
    gone.unlink()
    shrunk.write_bytes(b"x")
    with pytest.raises(DataError, match=r"01.img cannot be read: No such file"):
        dataset.train_images[0]
    with pytest.raises(DataError, match=r"03.img has become shorter than \d+ bytes"):
        dataset.train_images[1]


@pytest.mark.parametrize("limit", ["MAX_IMAGE_BYTES", "MAX_TOTAL_BYTES", "MAX_FILE_BYTES"])
async def test_limits_hold_for_what_stays_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    source = write_small(tmp_path) / ("shards" if limit == "MAX_FILE_BYTES" else "folders")
    monkeypatch.setattr(limits, limit, 60)
    with pytest.raises(DataError, match="expected at most 60"):
        await read_stored(source)


async def test_an_invalid_or_cut_tar_file_is_refused_as_by_loading_at_once(tmp_path: Path) -> None:
    shard = tmp_path / "x.tar"
    good = tar(("a.png", grey(1)), ("a.cls", b"0"))
    for data in (b"no tar" * 200, good[:1100], good[:2000]):
        shard.write_bytes(data)
        with pytest.raises(DataError) as whole:
            await read(shard)
        with pytest.raises(DataError) as stored:
            await read_stored(shard)
        assert str(stored.value) == str(whole.value)
