"""Parquet files: columns, names of classes, and damage."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adam_async.data_server.sources import limits
from adam_async.errors import DataError
from tests.adam_async.data_server.sources.small import grey, read


def write(folder: Path, *, metadata: dict[str, str] | None = None, **columns: Any) -> Path:
    good: dict[str, Any] = {"image": [grey(i) for i in range(40)], "label": [i % 3 for i in range(40)]}
    table = pa.table({name: column for name, column in (good | columns).items() if column is not None})
    pq.write_table(table.replace_schema_metadata(metadata), folder / "a.parquet")
    return folder / "a.parquet"


async def test_images_may_be_bytes_and_labels_text(tmp_path: Path) -> None:
    dataset = await read(write(tmp_path, label=["dog" if i % 2 else "cat" for i in range(40)]))

    assert dataset.class_names == ("cat", "dog")
    assert dataset.train_labels.tolist() == [int(i) % 2 for i in dataset.train_images[:, 0, 0, 0]]


@pytest.mark.parametrize(
    "label",
    [
        pa.array(["cat", "dog", "cat", "dog"] * 10).dictionary_encode(),
        pa.array(["cat", "dog", "cat", "dog"] * 10, pa.large_string()).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([1, 0] * 20, pa.int8()), pa.array(["dog", "cat"])),
        pa.DictionaryArray.from_arrays(pa.array([1, 0] * 20, pa.int8()), ["dog", "cat", "eel"], ordered=True),
        pa.DictionaryArray.from_arrays(pa.array([1, 0] * 20, pa.int32()), pa.array([8, 7])),
    ],
    ids=["text", "large-text", "small-codes", "ordered", "numbers"],
)
async def test_labels_may_be_categories(tmp_path: Path, label: pa.Array) -> None:
    dataset = await read(write(tmp_path, label=label))
    first, second = ("cat", "dog") if dataset.class_names else (7, 8)

    named = [dataset.class_names[n] if dataset.class_names else n for n in dataset.train_labels]
    assert named == [second if int(i) % 2 else first for i in dataset.train_images[:, 0, 0, 0]]


async def test_images_may_be_categories(tmp_path: Path) -> None:
    image = pa.array([grey(i) for i in range(40)]).dictionary_encode()

    dataset = await read(write(tmp_path, image=image))

    assert len(dataset.train_labels) + len(dataset.test_labels) == 40


async def test_the_names_of_classes_are_taken_from_the_description_of_the_columns(tmp_path: Path) -> None:
    for features, names in [
        ({"label": {"names": ["zero", "one", "two"], "_type": "ClassLabel"}}, ("zero", "one", "two")),
        ({"label": {"dtype": "int64", "_type": "Value"}}, ()),
        ({"label": {"names": ["zero", 1, "two"]}}, ()),
        ([], ()),
    ]:
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        assert (await read(write(tmp_path, metadata=metadata))).class_names == names
    with pytest.raises(DataError, match="the label 2 has no name"):
        metadata = {"huggingface": json.dumps({"info": {"features": {"label": {"names": ["a", "b"]}}}})}
        await read(write(tmp_path, metadata=metadata))


@pytest.mark.parametrize(
    ("columns", "claim"),
    [
        ({"label": None}, "has no column label; it has image"),
        ({"image": None, "img": [b""] * 40}, "has no column image; it has label, img"),
        ({"image": list(range(40))}, "has images of int64, expected encoded bytes"),
        ({"image": [{"path": "a"}] * 40}, "has images of struct"),
        ({"label": [0.5] * 40}, "has labels of double, expected integers or text"),
    ],
)
async def test_other_columns_are_named(tmp_path: Path, columns: dict[str, Any], claim: str) -> None:
    with pytest.raises(DataError, match=f"a.parquet {claim}"):
        await read(write(tmp_path, **columns))


@pytest.mark.parametrize(
    ("image", "label", "claim"),
    [
        (None, 1, "row 40 lacks its image or its label"),
        (b"?", 1, "row 40 is no PNG"),
        (grey(1), None, "row 40 lacks its image or its label"),
        (grey(1), -1, "row 40 has the label '-1'"),
    ],
)
async def test_a_damaged_row_is_named_or_left_out(
    tmp_path: Path, image: bytes | None, label: int | None, claim: str
) -> None:
    images, labels = [grey(i) for i in range(40)], [i % 3 for i in range(40)]
    path = write(tmp_path, image=[*images, image], label=[*labels, label])
    with pytest.raises(DataError) as error:
        await read(path)

    assert claim in str(error.value)
    assert len((await read(path, "skip")).damaged) == 1


async def test_a_file_that_is_none_or_cut_short_or_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    for data in (b"", b"PAR1", whole[:-9], whole[: len(whole) // 2], b"label\n"):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"a.parquet is not a Parquet file, or damaged"):
            await read(path, "skip")
    path.write_bytes(whole)
    monkeypatch.setattr(limits, "MAX_MEMBERS", 30)
    with pytest.raises(DataError, match=r"a.parquet holds more than 30 members or rows"):
        await read(path)


@pytest.mark.thorough
async def test_rows_come_in_order_from_all_groups_however_their_columns_are_written(tmp_path: Path) -> None:
    images = [grey(i % 7) for i in range(1300)]
    labels = [str(i % 3) for i in range(1300)]
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    write(tmp_path / "test")
    for structure in (False, True):
        for options in (
            {"use_dictionary": False},
            {"row_group_size": 400},
            {"row_group_size": 1100, "dictionary_pagesize_limit": 1, "data_page_size": 200},
        ):
            column = [{"bytes": image, "path": "a"} for image in images] if structure else images
            table = pa.table({"image": column, "label": labels})
            pq.write_table(table, tmp_path / "train" / "a.parquet", **options)
            dataset = await read(tmp_path)
            assert dataset.train_images[:, 0, 0, 0].tolist() == [i % 7 for i in range(1300)]
            assert dataset.train_labels.tolist() == [i % 3 for i in range(1300)]


SMALL_FILES = """
import asyncio, resource, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
from adam_async.errors import DataError
from tests.adam_async.data_server.sources.small import read

def once(value, rows):
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))

async def main(path):
    large, text = bytes(4 << 20), "x" * (4 << 20)
    structures = pa.StructArray.from_arrays([once(large, 4000), once(text, 4000)], ["bytes", "path"])
    for image, label in (
        (once(large, 4000), pa.array([1] * 4000)),
        (structures, once("a", 4000)),
        (once(large, 2000), pa.array([1] * 2000)),
        (once(b"", 4000), once(text, 4000)),
    ):
        table = pa.table({"image": image, "label": label})
        pq.write_table(table, path, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 30)
        try:
            await read(path)
        except DataError as error:
            print(path.stat().st_size, error)

# So that a failure of this test is not one of the machine.
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
asyncio.run(main(Path(sys.argv[1])))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) >> 10)
"""


@pytest.mark.thorough
async def test_a_small_file_that_says_it_holds_much_is_refused_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SMALL_FILES, str(path), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    *refused, peak_mib = output.decode().splitlines()

    assert process.returncode == 0
    said = [
        "has 12884901888 bytes of images, expected at most 8589934592; take fewer or smaller ones",
        "has 12884901888 bytes of images, expected at most 8589934592; take fewer or smaller ones",
        "row 0 is no PNG",
        f"row 0 has the label '{'x' * 80}'",
    ]
    for line, claim in zip(refused, said, strict=True):
        size, error = line.split(" ", 1)
        assert int(size) < 2000
        assert claim in error
    assert int(peak_mib) < 500


async def test_without_pyarrow_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow.*.*pip install .*\[parquet\]"):
        await read(path)
