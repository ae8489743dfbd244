"""Folders of images by class: classes, sizes, colours, and what does not belong there."""

import io
import os
import shlex
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
    assert dataset.source.endswith("; 1 image of other sizes fitted to 4x4")
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
    for name in ("Thumbs.db", "thumbs.DB", "desktop.ini", ".DS_Store", "._cat.png"):
        (tmp_path / "train" / "cat" / name).write_text("hello")
    (tmp_path / "train" / ".cache").mkdir()

    assert len((await read(tmp_path)).train_labels) == 25


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (b"", "no PNG, .* image: it is empty"),
        (b"<svg></svg>", "an SVG drawing, and no PNG, .*: convert it to PNG or JPEG"),
        (b"plain text", "no PNG, .* image: it begins with b'plain te'"),
        (grey(3)[:-20], "damaged image"),
        (b"\x89PNG\r\n\x1a\n", "damaged image|no PNG"),
    ],
)
async def test_a_damaged_image_is_an_error_or_is_left_out_and_listed(
    tmp_path: Path, data: bytes, claim: str
) -> None:
    pair(tmp_path, train__cat__bad=data)
    with pytest.raises(
        DataError, match=rf"cat/bad.img is .*{claim}.*; repair it, move it elsewhere, or leave it out with"
    ):
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


async def test_training_images_alone_are_not_taken_for_a_class(tmp_path: Path) -> None:
    dataset = await read(
        write(tmp_path, **{f"Training__{c}__{i}": grey(i) for c in ("cat", "dog") for i in range(5)})
    )

    assert dataset.class_names == ("cat", "dog")
    assert (len(dataset.train_labels), dataset.test_labels.tolist()) == (8, [0, 1])


async def test_a_split_without_an_image_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none of its 1 image is left for the (train|test) set"):
        await read(write(tmp_path, cat__a=grey(1)))
    (tmp_path / "cat" / "a.img").unlink()
    with pytest.raises(DataError, match="holds no image"):
        await read(tmp_path)


ODD_NAMES = (
    "at 3.04.00\u202fPM",
    "v\u00a013.05",
    "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    "\u65e5\u672c\u3000\u732b",
    "new\nline",
    "a\x1b[31m\x07",
    "\u202egnp.exe",
    "back\\slash 'quote' \"double\" $x",
    "-rf",
    " ",
    "family \U0001f468\u200d\U0001f469",
    "\ufeffmark\u2028",
    "\u00e9" * 127,
)


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_any_name_that_the_system_takes_is_that_of_a_class_and_of_an_image(
    tmp_path: Path, name: str
) -> None:
    for of_class in (name, "zebra"):
        (tmp_path / of_class).mkdir()
        for i in range(5):
            (tmp_path / of_class / f"{name[:100]}{i}").write_bytes(grey(i))

    dataset = await read(tmp_path)

    assert set(dataset.class_names) == {name, "zebra"}
    assert (len(dataset.train_labels), len(dataset.test_labels)) == (8, 2)


async def test_bytes_that_are_not_text_are_escapes_in_the_name_of_a_class(tmp_path: Path) -> None:
    for folder in (b"caf\xe9", b"zoo"):
        inner = os.fsencode(tmp_path) + b"/" + folder
        os.mkdir(inner)
        for i in range(5):
            (Path(os.fsdecode(inner)) / os.fsdecode(b"\xff%d" % i)).write_bytes(grey(i))

    dataset = await read(tmp_path)

    assert dataset.class_names == ("caf\\udce9", "zoo")
    assert len(dataset.train_labels) == 8


async def test_one_class_may_have_its_accents_in_two_forms(tmp_path: Path) -> None:
    composed, apart = "Bl\u00fcte", "Blu\u0308te"
    images = {f"train__{composed}__{i}": grey(i) for i in range(5)} | {f"test__{apart}__a": grey(9)}

    dataset = await read(write(tmp_path, **images, train__Zweig__b=grey(1)))

    assert dataset.class_names == (composed, "Zweig")
    assert dataset.test_labels.tolist() == [0]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "valid"),
        ("training", "testing"),
        ("Train", "Test"),
        ("TRAIN", "VAL"),
        ("training_set", "test_set"),
        ("seg_train", "seg_test"),
        ("Train Images", "dev"),
        ("train2017", "val2017"),
        ("trainset", "Evaluation"),
    ],
)
async def test_folders_of_any_usual_names_are_the_two_sets(tmp_path: Path, train: str, test: str) -> None:
    images = {f"{train}__{c}__{i}": grey(i) for c in ("cat", "dog") for i in range(10)}

    dataset = await read(write(tmp_path, **images, **{f"{test}__cat__a": grey(200)}))

    assert (len(dataset.train_labels), dataset.test_images[:, 0, 0, 0].tolist()) == (20, [200])


@pytest.mark.parametrize("unlabelled", ["test__1", "test__unknown__1", "TEST__all__1"])
async def test_images_to_be_classified_are_no_test_set(tmp_path: Path, unlabelled: str) -> None:
    train = {f"train__{c}__{i}": grey(i) for c in ("cat", "dog") for i in range(5)}
    write(tmp_path, **train, **{unlabelled: grey(9)})

    dataset = await read(tmp_path)

    assert (len(dataset.train_labels), len(dataset.test_labels)) == (8, 2)
    assert dataset.source.endswith(f"{unlabelled[:4]} not read")

    dataset = await read(write(tmp_path, valid__cat__a=grey(200)))

    assert (len(dataset.train_labels), dataset.test_images[:, 0, 0, 0].tolist()) == (10, [200])


async def test_a_set_in_a_folder_of_its_own_name_is_found(tmp_path: Path) -> None:
    dataset = await read(
        write(
            tmp_path,
            **{f"{s}__{s}__{c}__{i}": grey(i) for s in ("train", "test") for c in "ab" for i in range(3)},
        )
    )

    assert (dataset.class_names, len(dataset.train_labels)) == (("a", "b"), 6)


@pytest.mark.parametrize(
    ("inner", "meant"),
    [
        (("photos",), "photos"),
        (("my photos",), "my photos"),
        (("a", "b", "photos"), "a/b/photos"),
        (("photos", "train"), "photos"),
    ],
)
async def test_the_folder_around_the_right_one_names_the_right_one(
    tmp_path: Path, inner: tuple[str, ...], meant: str
) -> None:
    for of_class in ("cat", "dog"):
        write(tmp_path.joinpath(*inner), **{f"{of_class}__{i}": grey(i) for i in range(3)})

    with pytest.raises(DataError, match="did you mean --data ") as error:
        await read(tmp_path)

    assert f"--data {shlex.quote(str(tmp_path / meant))}?" in str(error.value)
    assert "remove" not in str(error.value)


async def test_a_class_folder_names_the_folder_around_it(tmp_path: Path) -> None:
    write(tmp_path, **{f"{c}__{i}": grey(i) for c in ("cat", "dog") for i in range(3)})
    (tmp_path / "cat" / "0.img").rename(tmp_path / "cat" / "0.JPG")
    with pytest.raises(DataError, match=rf"did you mean --data {tmp_path}\?"):
        await read(tmp_path / "cat")


async def test_a_class_of_one_image_trains_it(tmp_path: Path) -> None:
    for name in "abcdefgh":
        path = tmp_path / name
        write(tmp_path, **{f"many__{i}": grey(i) for i in range(10)}, **{f"one__{name}": grey(200)})

        dataset = await read(tmp_path)

        assert 200 in dataset.train_images
        (path.parent / "one" / f"{name}.img").unlink()


async def test_images_of_sixteen_bits_are_counted_in_the_source(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), 0xFFFF, np.uint16)).save(file, "PNG")

    dataset = await read(pair(tmp_path, train__cat__deep=file.getvalue()))

    assert dataset.source.endswith("; 1 image of 16 bits scaled to 8")
    assert 255 in dataset.train_images


async def test_a_few_images_without_a_test_part_are_split_so_that_each_class_has_both(tmp_path: Path) -> None:
    write(tmp_path, **{f"{name}__{i}": grey(i) for name in ("cat", "dog", "eel") for i in range(3)})

    dataset = await read(tmp_path)

    assert set(dataset.train_labels) == set(dataset.test_labels) == {0, 1, 2}


@pytest.mark.parametrize(
    "names",
    [
        ("train/cat.1.jpg", "train/dog.2.jpg", "test1/3.jpg"),
        ("images/train/a.jpg", "images/val/c.jpg", "labels/train/a.txt"),
        ("Training/1.JPEG",),
        ("my photos/train/a.webp", "my photos/test/b.webp"),
    ],
)
async def test_images_in_no_class_folder_are_named_with_the_cure(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(grey(3))
    holds = (tmp_path / names[0]).parent
    while holds != tmp_path.parent:
        with pytest.raises(DataError, match="put the images of each class into a folder of its own") as error:
            await read(holds)
        assert "did you mean" not in str(error.value)
        holds = holds.parent


async def test_images_beside_class_folders_are_counted_in_the_source(tmp_path: Path) -> None:
    write(tmp_path, **{f"{c}__{i}": grey(i) for c in ("cat", "dog") for i in range(5)})
    for name in ("one.jpg", "two.PNG", ".hidden.png", "README.md"):
        (tmp_path / name).write_bytes(grey(1))

    dataset = await read(tmp_path)

    assert dataset.source.endswith(f"; 2 images beside the class folders of {tmp_path} not read")


@pytest.mark.parametrize("name", ["photos.zip", "Photos 2024.RAR", "photos.7z", "a.tar.bz2", "a.tar.xz"])
async def test_an_archive_that_is_not_read_is_to_be_unpacked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=f"unpack '?{name}'?, and name the folder"):
            await read(path)
