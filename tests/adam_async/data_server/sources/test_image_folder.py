"""Folders of images by class: classes, sizes, colours, and what does not belong there."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from adam_async.data_server.sources import limits
from adam_async.errors import DataError
from tests.adam_async.data_server.sources.small import colour, encode, grey, read


def write(folder: Path, **images: bytes) -> Path:
    """Write images into folder/split/class; two underscores stand for each ``/``."""
    for name, data in images.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".img")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def pair(folder: Path, **more: bytes) -> Path:
    """Write 25 images of cats and dogs to train with and two to test with."""
    many = {f"train__{'cat' if i % 2 else 'dog'}__{i:02}": grey(i) for i in range(25)}
    return write(folder, **many, test__cat__a=grey(200), test__dog__b=grey(100), **more)


async def test_classes_are_numbered_by_their_names_and_keep_them(tmp_path: Path) -> None:
    dataset = await read(pair(tmp_path))

    assert dataset.class_names == ("cat", "dog")
    assert dataset.test_images[:, 0, 0, 0].tolist() == [200, 100]
    assert dataset.test_labels.tolist() == [0, 1]


async def test_folders_with_numbers_for_names_are_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    write(tmp_path, **{f"{split}__{n}__a": grey(n) for split in ("train", "test") for n in (2, 10, 1)})
    dataset = await read(tmp_path)

    assert dataset.class_names == ("1", "2", "10")
    assert dataset.train_labels[dataset.train_images[:, 0, 0, 0] == 10].tolist() == [2]


async def test_images_of_other_sizes_are_fitted_to_the_most_frequent(tmp_path: Path) -> None:
    wide = np.zeros((8, 24), np.uint8)
    wide[:, 6:18] = 77  # and what is left when the sides are cut off is columns 8 to 15
    dataset = await read(pair(tmp_path, train__cat__wide=encode(wide)))

    assert dataset.image_shape == (1, 4, 4)
    assert dataset.source.endswith("; 1 images of other sizes were fitted to 4x4")
    assert 77 in dataset.train_images[:, 0, 2, 2]


async def test_one_colour_image_makes_all_of_them_colour(tmp_path: Path) -> None:
    dataset = await read(pair(tmp_path, train__cat__red=colour(250, 1, 2)))

    assert dataset.image_shape == (3, 4, 4)
    assert dataset.test_images[0, :, 0, 0].tolist() == [200, 200, 200]
    assert [250, 1, 2] in dataset.train_images[:, :, 0, 0].tolist()


async def test_hidden_files_and_files_beside_the_classes_are_passed_over(tmp_path: Path) -> None:
    pair(tmp_path)
    (tmp_path / "README.txt").write_text("hello")
    (tmp_path / "train" / "notes").write_text("hello")
    (tmp_path / "train" / "cat" / ".DS_Store").write_text("hello")
    (tmp_path / "train" / ".cache").mkdir()

    assert len((await read(tmp_path)).train_labels) == 25


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (b"", "no PNG, .* image: it is empty"),
        (b"<svg></svg>", "begins with b'<svg></s'"),
        (grey(3)[:-20], "damaged image"),
        (b"\x89PNG\r\n\x1a\n", "damaged image|no PNG"),
    ],
)
async def test_a_damaged_image_is_an_error_or_is_left_out_and_listed(
    tmp_path: Path, data: bytes, claim: str
) -> None:
    pair(tmp_path, train__cat__bad=data)
    with pytest.raises(DataError, match=rf"cat/bad.img is .*{claim}.*; repair or remove it, or load with"):
        await read(tmp_path)
    dataset = await read(tmp_path, "skip")

    assert len(dataset.train_labels) == 25
    assert len(dataset.damaged) == 1
    assert "cat/bad.img" in dataset.damaged[0]
    assert "1 were damaged and left out" in dataset.source


async def test_more_than_a_twentieth_of_damage_is_an_error_whatever_was_asked_for(tmp_path: Path) -> None:
    pair(tmp_path, train__cat__bad=b"", train__cat__worse=b"")
    with pytest.raises(DataError, match=r"2 of 29 images are damaged, more than 5%; the first: .*bad.img"):
        await read(tmp_path, "skip")


async def test_a_path_that_is_no_file_is_not_read(tmp_path: Path) -> None:
    pair(tmp_path)
    os.mkfifo(tmp_path / "train" / "cat" / "pipe")
    with pytest.raises(DataError, match="pipe is a pipe, socket or device"):
        await read(tmp_path)
    (tmp_path / "train" / "cat" / "pipe").unlink()
    (tmp_path / "train" / "cat" / "deeper").mkdir()
    with pytest.raises(DataError, match="deeper is a folder, expected a file"):
        await read(tmp_path)
    (tmp_path / "train" / "cat" / "deeper").rmdir()
    (tmp_path / "train" / "cat" / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="loop cannot be read: "):
        await read(tmp_path)


async def test_a_file_or_a_data_set_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair(tmp_path, train__dog__huge=b"x" * 5000)
    monkeypatch.setattr(limits, "MAX_IMAGE_BYTES", 4999)
    with pytest.raises(DataError, match=r"huge.img has 5000 bytes, expected at most 4999"):
        await read(tmp_path)
    (tmp_path / "train" / "dog" / "huge.img").unlink()
    monkeypatch.setattr(limits, "MAX_TOTAL_BYTES", 1000)
    with pytest.raises(DataError, match="bytes of images, expected at most 1000"):
        await read(tmp_path)


async def test_a_test_class_that_is_not_trained_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test/Cat is a class that .*train lacks"):
        await read(pair(tmp_path, test__Cat__x=grey(1)))


async def test_training_images_alone_are_not_taken_for_a_class(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds train but neither test nor val"):
        await read(write(tmp_path, train__cat__a=grey(1)))


async def test_a_split_without_an_image_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of its 1 images is left for the (train|test) set"):
        await read(write(tmp_path, cat__a=grey(1)))
    (tmp_path / "cat" / "a.img").unlink()
    with pytest.raises(DataError, match="holds no image"):
        await read(tmp_path)


async def test_a_class_that_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m").mkdir()
    with pytest.raises(DataError, match=r"'a\\x1b\[31m' cannot be the name of a class"):
        await read(tmp_path)


async def test_images_of_sixteen_bits_are_counted_in_the_source(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), 0xFFFF, np.uint16)).save(file, "PNG")

    dataset = await read(pair(tmp_path, train__cat__deep=file.getvalue()))

    assert dataset.source.endswith("; 1 images of 16 bits were scaled to 8")
    assert 255 in dataset.train_images


async def test_files_of_desktops_are_no_images(tmp_path: Path) -> None:
    pair(tmp_path)
    for name in ("Thumbs.db", "thumbs.DB", "desktop.ini", ".DS_Store", "._cat.png"):
        (tmp_path / "train" / "cat" / name).write_bytes(b"no image")

    assert len((await read(tmp_path)).train_labels) == 25


async def test_a_few_images_without_a_test_part_are_split_so_that_each_class_has_both(tmp_path: Path) -> None:
    write(tmp_path, **{f"{name}__{i}": grey(i) for name in ("cat", "dog", "eel") for i in range(3)})

    dataset = await read(tmp_path)

    assert set(dataset.train_labels) == set(dataset.test_labels) == {0, 1, 2}
