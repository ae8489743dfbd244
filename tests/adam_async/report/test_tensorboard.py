"""TensorBoard's file has records with right checksums, and the scalars of the events."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from google_crc32c import value as crc32c

from adam_async.errors import DataError
from adam_async.report.tensorboard import TensorBoard, record
from adam_async.run.counts import Evaluation
from adam_async.run.events import Evaluated, Noted, Sampled, StepsTaken
from adam_async.run.series import Sample

SAMPLE = Sample(
    s=1.0, epoch=1, images=300, loss=0.25, rate=0.1, staleness_mean=None, bytes=1000, waited_s=0.5
)


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records_in(data: bytes) -> Iterator[bytes]:
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        body, data = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", data[:4])[0] == masked(body)
        data = data[4:]
        yield body


def fields_of(data: bytes) -> dict[int, bytes | int | float]:
    """Decode a message of protocol buffers."""
    found: dict[int, bytes | int | float] = {}

    def varint(at: int) -> tuple[int, int]:
        number = shift = 0
        while True:
            byte = data[at]
            at, number, shift = at + 1, number | (byte & 127) << shift, shift + 7
            if byte < 128:
                return number, at

    at = 0
    while at < len(data):
        key, at = varint(at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            found[field], at = varint(at)
        elif wire == 1:
            (found[field],) = struct.unpack("<d", data[at : at + 8])
            at += 8
        elif wire == 5:
            (found[field],) = struct.unpack("<f", data[at : at + 4])
            at += 4
        else:
            size, at = varint(at)
            found[field] = data[at : at + size]
            at += size
    return found


def written(folder: Path) -> list[tuple[float, int, str, float]]:
    (file,) = folder.iterdir()
    first, *rest = [fields_of(body) for body in records_in(file.read_bytes())]
    assert first[3] == b"brain.Event:2"
    found = []
    for event in rest:
        scalar = fields_of(fields_of(event[5])[1])  # type: ignore[arg-type]
        found.append((event[1], event.get(2, 0), scalar[1].decode(), scalar[2]))  # type: ignore[union-attr]
    return found  # type: ignore[return-value]


def test_a_loss_that_diverges_is_the_largest_number_and_ends_no_file(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path)
    writer.on_event(StepsTaken(at=4.0, store="s", steps=1, pushes=1, unanswered=0, loss=1e300))
    writer.close()
    assert written(tmp_path)[0][2:] == ("train/loss", pytest.approx(3.4028235e38))


def test_two_runs_of_a_program_within_a_second_have_a_file_each(tmp_path: Path) -> None:
    for at in (2.1, 2.2):
        writer = TensorBoard(tmp_path)
        writer.on_event(Sampled(at=at, sample=SAMPLE))
        writer.close()
    assert len([*tmp_path.iterdir()]) == 2


def test_scalars_of_samples_accuracies_and_steps_are_written(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path / "run")
    writer.on_event(Noted(at=1.0, text="no scalar, no file"))
    assert not (tmp_path / "run").exists()
    writer.on_event(Sampled(at=2.0, sample=SAMPLE))
    writer.on_event(Evaluated(at=3.0, evaluation=Evaluation(2, 0.75)))
    writer.on_event(StepsTaken(at=4.0, store="s", steps=70_000, pushes=9, unanswered=1, loss=None))
    writer.close()
    assert written(tmp_path / "run") == [
        (2.0, 300, "train/loss", 0.25),
        (2.0, 300, "train/rate", pytest.approx(0.1)),
        (2.0, 300, "train/waited_s", 0.5),
        (2.0, 300, "train/sent_bytes", 1000.0),
        (3.0, 2, "accuracy/test", 0.75),
        (4.0, 70_000, "store/unanswered", 1.0),
    ]


def test_an_error_of_the_system_names_the_folder_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match=r"in .*/file/run cannot be written: Not a directory"):
        TensorBoard(tmp_path / "file" / "run").on_event(
            Evaluated(evaluation=Evaluation(epoch=1, test_accuracy=0.5))
        )


def test_tensorboard_itself_reads_the_file(tmp_path: Path) -> None:
    loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the package tensorboard"
    )
    writer = TensorBoard(tmp_path)
    writer.on_event(Sampled(at=2.0, sample=SAMPLE))
    writer.close()
    events = loader.EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("train/loss")[0].value == 0.25


def test_a_record_has_the_checksums_of_tensorflow() -> None:
    assert record(b"").hex() == "0000000000000000" + "29039807" + "d8ea82a2"
