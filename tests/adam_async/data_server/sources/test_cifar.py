"""CIFAR-10's archive: its records become images, and whatever is wrong with it is a clear error."""

import gzip
import io
import tarfile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adam_async.data_server.sources.published_sets import RECORD_BYTES, TEST, TRAIN, parse_cifar
from adam_async.errors import DataError

FOLDER = "cifar-10-batches-bin/"
RECORDS = {
    name: np.random.default_rng(number).integers(0, 256, (2, RECORD_BYTES), np.uint8)
    for number, name in enumerate((*TRAIN, TEST))
}
for _number, _records in enumerate(RECORDS.values()):
    _records[:, 0] = _number, 9
BATCHES = {name: records.tobytes() for name, records in RECORDS.items()}


def archive(
    members: dict[str, bytes], *, links: dict[str, str] | None = None, form: int = tarfile.GNU_FORMAT
) -> bytes:
    """Pack members as the publisher does: a folder first, a text between them."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        folder = tarfile.TarInfo(FOLDER)
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in {FOLDER + "batches.meta.txt": b"airplane\n", **members}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    return file.getvalue()


def parse(data: bytes) -> None:
    parse_cifar(data, "a.tar.gz", source="")


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_records_become_images_with_labels(form: int) -> None:
    dataset = parse_cifar(gzip.compress(archive(BATCHES, form=form)), "a.tar.gz", source="said so")

    assert repr(dataset) == "<Dataset cifar-10 10 train 2 test (3, 32, 32) 10 classes>"
    assert dataset.train_labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert dataset.source == "said so"
    np.testing.assert_array_equal(dataset.train_images[2].reshape(-1), RECORDS[TRAIN[1]][0, 1:])
    np.testing.assert_array_equal(dataset.test_images.reshape(2, -1), RECORDS[TEST][:, 1:])


def with_batch(data: bytes) -> bytes:
    return archive(BATCHES | {TEST: data})


def with_label(label: int) -> bytes:
    return with_batch(bytes([0]) + bytes(RECORD_BYTES - 1) + bytes([label]) + bytes(RECORD_BYTES - 1))


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (b"", "a.tar.gz is not a tar file, or damaged"),
        (b"PK\3\4" + bytes(600), "a.tar.gz is not a tar file, or damaged"),
        (gzip.compress(archive(BATCHES))[:-20], "ends in the middle of its gzip data"),
        (archive(BATCHES)[:3000], "a.tar.gz ends inside '.*data_batch_1.bin'; it was cut short"),
        (archive({name: BATCHES[name] for name in TRAIN}), "lacks cifar-10-batches-bin/test_batch.bin"),
        (archive({}), "lacks .*data_batch_1.bin, .*test_batch.bin; is it cifar-10-binary.tar.gz"),
        (archive({}, links=dict.fromkeys(BATCHES, "/etc/passwd")), "lacks .*data_batch_1.bin"),
        (archive({f"../{name}": data for name, data in BATCHES.items()}), "lacks .*data_batch_1.bin"),
        (with_batch(b""), "test_batch.bin holds 0 bytes, expected 1 to 10000 records of 3073"),
        (with_batch(bytes(RECORD_BYTES + 1)), "holds 3074 bytes, expected"),
        (with_batch(bytes(RECORD_BYTES * 10_001)), "holds 30733073 bytes, expected"),
        (with_label(10), "test_batch.bin: record 1 has the label 10, expected 0 to 9"),
    ],
)
def test_a_wrong_archive_says_what_is_wrong(data: bytes, claim: str) -> None:
    with pytest.raises(DataError, match=claim):
        parse(data)


def test_a_batch_that_is_there_twice_is_refused() -> None:
    renamed = archive({**BATCHES, TRAIN[0].replace("_1", "_X"): BATCHES[TRAIN[0]]})
    second = renamed.rindex(b"data_batch_X.bin")
    header = bytearray(renamed)
    header[second : second + 16] = b"data_batch_1.bin"
    start = second - len(FOLDER)
    header[start + 148 : start + 156] = b" " * 8
    header[start + 148 : start + 156] = b"%06o\0 " % sum(header[start : start + 512])

    with pytest.raises(DataError, match=r"holds cifar-10-batches-bin/data_batch_1.bin twice"):
        parse(bytes(header))


WHOLE = archive(BATCHES)
PACKED = gzip.compress(WHOLE)


@settings(max_examples=200)
@given(st.booleans(), st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.booleans())
@example(False, 124, 0x80, False)  # a size in the binary form of GNU
def test_cut_or_flipped_archives_are_read_or_refused(packed: bool, at: int, byte: int, cut: bool) -> None:
    whole = PACKED if packed else WHOLE
    at %= len(whole)
    data = whole[:at] if cut else whole[:at] + bytes([byte]) + whole[at + 1 :]
    try:
        parse(data)
    except DataError as error:
        assert "a.tar.gz" in str(error)  # noqa: PT017
