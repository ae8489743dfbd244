"""Scalars of a run or a store in a file that TensorBoard reads.

A file is a sequence of records: the data's length as a little-endian 64-bit number, its checksum, the data,
their checksum. A checksum is a CRC-32C, rotated and moved by a constant (TensorFlow,
`core/lib/io/record_writer.h`). The data are a protocol buffer `Event` (`core/util/event.proto`) with the
time, the step, and a summary of one scalar. The few fields of `Event` are written here, so no package is
needed.
"""

import platform
from collections.abc import Mapping
from os import getpid
from pathlib import Path
from struct import pack
from typing import BinaryIO

from google_crc32c import value as crc32c

from adam_async.errors import DataError, failing_as
from adam_async.report.stream import Callback
from adam_async.run.events import AnyEvent, ClientCounted, Evaluated, Sampled, StatusSeen, StepsTaken

Scalars = dict[str, float]

LARGEST = 3.4028234663852886e38
"""Largest number of a scalar, which has 32 bits."""


class TensorBoard(Callback):
    """Writes the scalars of events into a new file of a folder.

    Args:
        folder: Folder of this run; TensorBoard shows each folder as one run.

    Raises:
        DataError: In `on_event`, so that the run continues without the file if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def on_event(self, event: AnyEvent) -> None:
        """Write the scalars of an event, if it has any."""
        step, scalars = scalars_of(event)
        with failing_as(DataError, f"the file of TensorBoard in {self._folder} cannot be written"):
            for name, value in scalars.items():
                self._write(_event(event.at, step, name, value), event.at)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, data: bytes, at: float) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{at:.6f}.{platform.node()}.{getpid()}"
            self._file = open(self._folder / name, "xb", buffering=0)
            self._file.write(record(_double(1, at) + _bytes(3, b"brain.Event:2")))
        self._file.write(record(data))


def scalars_of(event: AnyEvent) -> tuple[int, Scalars]:
    """Return an event's step, and its known scalars by name: none if it has no scalars.

    The step is the number of trained images for samples, the epoch for accuracies, and the steps of an
    optimizer.
    """
    step, scalars = _scalars_of(event)
    return step, {name: float(value) for name, value in scalars.items() if value is not None}


def _scalars_of(event: AnyEvent) -> tuple[int, Mapping[str, float | None]]:
    match event:
        case Sampled(sample=sample):
            return sample.images, {
                "train/loss": sample.loss,
                "train/rate": sample.rate,
                "train/staleness": sample.staleness_mean,
                "train/waited_s": sample.waited_s,
                "train/sent_bytes": sample.bytes,
            }
        case Evaluated(evaluation=evaluation):
            return evaluation.epoch, {
                "accuracy/test": evaluation.test_accuracy,
                "accuracy/validation": evaluation.validation_accuracy,
            }
        case StatusSeen(status=status) if status.run is not None:
            return int(event.at), {
                "cluster/images_per_s": status.run.images_per_s,
                "cluster/live_replicas": status.condition.live,
                "cluster/survivable_losses": status.condition.survives,
            }
        case StepsTaken():
            return event.steps, {"train/loss": event.loss, "store/unanswered": event.unanswered}
        case ClientCounted(counts=counts):
            return event.clock or counts.acknowledged, {
                "store/acknowledged": counts.acknowledged,
                "store/waited_s": counts.admission_wait_s,
                "store/reconnects": counts.reconnects,
            }
        case _:
            return 0, {}


def record(data: bytes) -> bytes:
    """Return data as a record of the file."""
    length = pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    return pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _event(at: float, step: int, name: str, value: float) -> bytes:
    """Return the event of one scalar."""
    value = min(max(value, -LARGEST), LARGEST)  # `pack` refuses the loss of a run that diverges
    scalar = _bytes(1, name.encode()) + bytes([2 << 3 | 5]) + pack("<f", value)
    return _double(1, at) + bytes([2 << 3]) + _varint(step) + _bytes(5, _bytes(1, scalar))


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    """Return a number of at least 0 in groups of seven bits, the lowest first."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))
