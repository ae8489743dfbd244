"""CSV tables: pixels or paths, shapes, and rows that are damaged."""

from pathlib import Path

import numpy as np
import pytest

from adam_async.data_server.sources import limits
from adam_async.errors import DataError
from tests.adam_async.data_server.sources.small import grey, read

HEADER = "label,a,b,c,d"
ROWS = [f"{i % 3},{i},0,0,255" for i in range(40)]


def write(folder: Path, *lines: str, header: str = HEADER) -> Path:
    (folder / "a.csv").write_text("\n".join([header, *(lines or ROWS)]) + "\n")
    return folder / "a.csv"


async def test_rows_of_a_square_number_of_pixels_are_grey_squares(tmp_path: Path) -> None:
    dataset = await read(write(tmp_path))

    assert dataset.image_shape == (1, 2, 2)
    assert dataset.train_labels.tolist() == [int(i) % 3 for i in dataset.train_images[:, 0, 0, 0]]
    assert set(dataset.train_images[:, 0, 1, 1]) == {255}


@pytest.mark.parametrize(
    ("said", "shape"), [("# shape: 4,1,1", (4, 1, 1)), ("#shape=1x4", (1, 1, 4)), ("# digits", (1, 2, 2))]
)
async def test_the_first_line_may_say_the_shape(tmp_path: Path, said: str, shape: tuple[int, ...]) -> None:
    dataset = await read(write(tmp_path, header=f"\ufeff{said}\r\n{HEADER}"))

    assert dataset.image_shape == shape


@pytest.mark.parametrize(
    ("header", "claim"),
    [
        ("0,1,2,3,4", "begins with '0,1,2,3,4', expected a header: label,pixel0"),
        ("pixel0,pixel1", "expected a header"),
        ("", "begins with '', expected a header"),
        ("label", "expected a header"),
        ("label,a,b,c", "has 3 pixels in a row, which is no square"),
        (
            "# shape: 3,2,2\nlabel,a,b,c,d",
            r"has 4 pixels in a row, but the shape \(3, 2, 2\) in its first line",
        ),
    ],
)
async def test_a_header_that_is_not_understood_is_named(tmp_path: Path, header: str, claim: str) -> None:
    with pytest.raises(DataError, match=f"a.csv .*{claim}"):
        await read(write(tmp_path, header=header))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("," * 3000, 1),
        ("label,a,b,c,d\n1,2,3,4,5\n1," + "1" * 3000 + ",3,4,5\n", 3),
        ("label,a,b,c,d\r\n" + "x" * 3000 + ",2,3,4,5", 2),
        ("path,label\n" + "a" * 3000 + ",1\n", 2),
        ("# shape: 3,32,32" + " " * 3000, 1),
    ],
)
async def test_a_line_above_the_limit_is_refused_before_its_fields_take_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: int
) -> None:
    monkeypatch.setattr(limits, "MAX_LINE_BYTES", 2048)
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=rf"a.csv, line {line} has 30\d\d bytes, expected at most 2048"):
        await read(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("row", "claim"),
    [
        ("1,2,3", "line 42 has 2 pixels, expected 4"),
        ("1,2,3,4,5,6", "line 42 has 5 pixels, expected 4"),
        ("1,2,3,4,256", "line 42 has a pixel of 256, expected 0 to 255"),
        ("1,2,3,4,-1", "line 42 holds something else than pixels"),
        ("1,2,3,4,0.5", "something else than pixels"),
        ("1,2,,4,5", "something else than pixels"),
        ("1,2,3,4,", "something else than pixels"),
        ("1,99999999999999999999,3,4,5", "something else than pixels"),
        ("1", "something else than pixels"),
        ("cat,1,2,3,4", "line 42 has the label 'cat', expected a class number"),
        (",1,2,3,4", "line 42 has the label ''"),
        ("1\0,1,2,3,4", "line 42 has the label"),
    ],
)
async def test_a_damaged_row_is_named_or_left_out(tmp_path: Path, row: str, claim: str) -> None:
    path = write(tmp_path, *ROWS, row)
    with pytest.raises(DataError) as error:
        await read(path)
    dataset = await read(path, "skip")

    assert f"{path}, line 42 " in str(error.value)
    assert claim in str(error.value)
    assert len(dataset.train_labels) + len(dataset.test_labels) == 40
    assert len(dataset.damaged) == 1


async def test_labels_may_be_names(tmp_path: Path) -> None:
    dataset = await read(write(tmp_path, *(f"{'dog' if i % 2 else 'cat'},{i},0,0,0" for i in range(40))))

    assert dataset.class_names == ("cat", "dog")
    assert dataset.train_labels.tolist() == [int(i) % 2 for i in dataset.train_images[:, 0, 0, 0]]


async def test_rows_may_name_files_in_either_order_and_quoted(tmp_path: Path) -> None:
    (tmp_path / "i").mkdir()
    for i in range(40):
        (tmp_path / "i" / f"{i},.png").write_bytes(grey(i))
    dataset = await read(write(tmp_path, *(f'{i % 3},"i/{i},.png"' for i in range(40)), header="label,path"))

    assert dataset.train_labels.tolist() == [int(i) % 3 for i in dataset.train_images[:, 0, 0, 0]]


@pytest.mark.parametrize(
    ("row", "claim"),
    [
        ("../secret.png,1", "names '../secret.png', expected the path of a file inside"),
        ("/etc/passwd,1", "names '/etc/passwd', expected"),
        ("..\\secret.png,1", "names '..\\\\secret.png', expected the path of a file inside"),
        (",1", "names '', expected"),
        ("absent.png,1", "absent.png cannot be read: No such file"),
        ("0.png", "line 42 has 1 fields, expected 2"),
        (f"{'x' * 5000},1", "cannot be read: File name too long"),
        ("0.png,cat", "0.png has the label 'cat'"),
    ],
)
async def test_a_row_that_names_no_file_of_the_folder_is_damaged(
    tmp_path: Path, row: str, claim: str
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.png").write_bytes(grey(1))
    for i in range(40):
        (inner / f"{i}.png").write_bytes(grey(i))
    path = write(inner, *(f"{i}.png,{i % 3}" for i in range(40)), row, header="path,label")
    with pytest.raises(DataError) as error:
        await read(path)
    dataset = await read(path, "skip")

    assert claim in str(error.value)
    assert len(dataset.damaged) == 1


async def test_tables_of_two_kinds_are_not_one_data_set(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("label,a\n1,2\n")
    (tmp_path / "test.csv").write_text("path,label\na.png,2\n")
    with pytest.raises(DataError, match=r"test.csv has images of files, .*train.csv of \(1, 1, 1\)"):
        await read(tmp_path)


async def test_rows_are_counted_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_MEMBERS", 30)
    with pytest.raises(DataError, match=r"a.csv holds more than 30 members or rows"):
        await read(write(tmp_path))


async def test_tables_named_after_the_two_sets_are_these_sets(tmp_path: Path) -> None:
    for name, rows in (("mnist_train.csv", 60), ("mnist_test.csv", 20)):
        (tmp_path / name).write_text("\n".join([HEADER, *(f"{n % 2},1,2,3,4" for n in range(rows))]))

    dataset = await read(tmp_path)

    assert (len(dataset.train_labels), len(dataset.test_labels)) == (60, 20)


async def test_a_path_may_have_other_separators_accents_and_spaces(tmp_path: Path) -> None:
    names = ("i/a.png", "i/Blu\u0308te.png", "i/\u00e9t\u00e9.png", "i/ends\u00a0", "back\\slash.png")
    rows = ("i\\a.png", "i/Bl\u00fcte.png", "i/e\u0301te\u0301.png", "i/ends\u00a0", "back\\slash.png")
    (tmp_path / "i").mkdir()
    for value, name in enumerate(names):
        (tmp_path / name).write_bytes(grey(value))

    dataset = await read(write(tmp_path, *(f"{row},0" for row in rows), header="path,label"))

    values = np.concatenate([dataset.train_images, dataset.test_images])[:, 0, 0, 0]
    assert sorted(values.tolist()) == [0, 1, 2, 3, 4]


async def test_labels_with_two_forms_of_accents_are_one_class(tmp_path: Path) -> None:
    rows = (f"caf\u00e9,{i},0,0,0\ncafe\u0301,{i},0,0,0" for i in range(10))

    assert (await read(write(tmp_path, *rows))).class_names == ("caf\u00e9",)


async def test_a_table_beside_class_folders_is_named_as_the_source_of_the_labels(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(6):
            (tmp_path / name / f"{number}.png").write_bytes(grey(number))
    write(tmp_path, *(f"cat/{number}.png,cat" for number in range(6)), header="path,label")

    dataset = await read(tmp_path)

    assert dataset.class_names == ("cat",)
    assert dataset.source.endswith("; labels from a.csv, not from the names of folders")
