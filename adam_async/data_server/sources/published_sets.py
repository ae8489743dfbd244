"""Published data sets: the files of MNIST, Fashion-MNIST and CIFAR-10, with checksums, mirrors and images.

CIFAR-10's binary archive is a gzipped tar with five training batches and one test batch; a batch has records
of one label byte and 3 x 32 x 32 pixels. The archive with pickles is not read. Nothing is unpacked to disk;
only plain files with known names are read.

`pooch` downloads the files by checksum, from one mirror after the other. A file gets its final name only once
its checksum matches; an interrupted download starts from the beginning. Each download runs on a daemon
thread: a call to a silent name server cannot be interrupted, and must delay neither the disk nor the
program's end.
"""

import asyncio
import contextlib
import io
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Damage, Dataset, make_dataset
from adam_async.data_server.sources.idx import LIMIT_BYTES, gunzip, parse_idx
from adam_async.data_server.sources.kinds import STEMS, TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from adam_async.data_server.sources.shards import tar_members
from adam_async.errors import DataError, install_command

CHUNK_BYTES = 1 << 14
"""Size of one read from a connection, in bytes."""

LOOK_S = 0.02
"""Interval between two polls of the progress of a download, in seconds."""

OnBytes = Callable[[str, int, int | None], None]
"""Callback with a URL, the number of bytes so far, and the total if the server sent it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A published file."""

    name: str
    """Name in the folder, and at the end of a mirror's address."""
    checksum: str
    """``md5:`` or ``sha256:`` and hexadecimal digits."""
    limit_bytes: int
    """Upper bound on the size of a good copy, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSet:
    """The files of one data set, and their addresses."""

    name: str
    """Name in errors, such as ``MNIST``."""
    mirrors: tuple[str, ...]
    """Addresses of the folders that have the files, without a ``/`` at the end, in the order of attempts."""
    files: tuple[RemoteFile, ...]
    """Files in the order of their download: a small first file shows which mirrors answer."""
    file_s: float = 3600.0
    """Deadline for one whole file, in seconds, over all mirrors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloader:
    """Downloads data sets; reports each piece that arrives."""

    on_bytes: OnBytes = lambda url, done, total: None
    connect_s: float = 5.0
    """Deadline for the first bytes of the first file, in seconds, for all mirrors together."""
    stall_s: float = 30.0
    """Deadline between two pieces, in seconds."""

    async def download(self, wanted: RemoteSet, folder: Path) -> str:
        """Download the missing and the damaged files of a data set; return the mirror that served last.

        If no file was missing or damaged, the result is the first mirror.

        Raises:
            DataError: No mirror serves one of the files in time, or the folder is not writable; the error has
                each mirror's failure. Or `pooch` is not installed.
        """
        require_pooch()
        mirrors, first_s = wanted.mirrors, self.connect_s / max(len(wanted.mirrors), 1)
        for file in wanted.files:
            failures: list[str] = []
            try:
                async with asyncio.timeout(wanted.file_s):
                    for mirror in mirrors:
                        failure = await self._retrieve(file, f"{mirror}/{file.name}", folder, first_s)
                        if not failure:
                            break
                        failures.append(failure)
                    else:
                        text = "; ".join(failures) or "no mirrors"
                        raise DataError(f"{wanted.name} broke off at {file.name} ({text})")
            except TimeoutError:
                raise DataError(
                    f"{wanted.name} broke off at {file.name} (not whole after {wanted.file_s:g} s); try again"
                ) from None
            # The mirror that has served comes first from now on, because it answers.
            mirrors, first_s = (mirror, *(each for each in mirrors if each != mirror)), self.stall_s
        return mirrors[0]

    async def _retrieve(self, file: RemoteFile, url: str, folder: Path, first_s: float) -> str:
        """Download a missing file from one mirror; return the failure, or an empty text."""
        loop = asyncio.get_running_loop()
        # The deadline here must pass first, because its error has the number of bytes.
        transfer = _Transfer(file.limit_bytes, 2 * self.stall_s)
        arguments, name = (file, url, folder), f"download {url}"
        thread = threading.Thread(target=transfer.run, args=arguments, name=name, daemon=True)
        seen, deadline = 0, loop.time() + first_s
        try:
            thread.start()
            while True:
                alive, done = thread.is_alive(), transfer.done
                if done > seen:
                    seen, deadline = done, loop.time() + self.stall_s
                    self.on_bytes(url, done, transfer.total)
                if not alive:
                    return transfer.failure and f"{url}: {transfer.failure}"
                if loop.time() > deadline:
                    return f"{url}: no answer in time, after {seen} bytes"
                await asyncio.sleep(LOOK_S)
        finally:
            transfer.abandoned = True


class _Transfer:
    """One download on a thread: both pooch's downloader and the file that it writes to."""

    def __init__(self, limit_bytes: int, timeout_s: float) -> None:
        self._limit_bytes, self._timeout_s = limit_bytes, timeout_s
        self._file: IO[bytes]
        self._responses = contextlib.ExitStack()
        self.done = 0
        self.total: int | None = None
        self.failure = ""
        self.abandoned = False

    def run(self, file: RemoteFile, url: str, folder: Path) -> None:
        """Download a missing file, or note the failure."""
        import pooch

        # pooch's lines would mix with the lines of the progress.
        pooch.get_logger().setLevel(logging.WARNING)
        try:
            pooch.retrieve(url, known_hash=file.checksum, fname=file.name, path=folder, downloader=self)
        except Exception as error:
            self.failure = _reason(error)

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        from pooch import HTTPDownloader

        downloader = HTTPDownloader(
            chunk_size=CHUNK_BYTES,
            timeout=self._timeout_s,
            # A server that compresses for the transfer would send other bytes than those of the checksum.
            headers={"Accept-Encoding": "identity"},
            # pooch leaves the connection of a download that fails open.
            hooks={"response": self._answered},
        )
        with self._responses, open(output_file, "wb") as self._file:
            downloader(url, self, pooch)
        # pooch makes the file private, and several users may share a cache.
        Path(output_file).chmod(0o644)

    def _answered(self, response: Any, **options: Any) -> None:
        self._responses.callback(response.close)
        length = response.headers.get("Content-Length", "")
        self.total = int(length) if length.isdecimal() else None

    def write(self, data: bytes) -> None:
        """Write a piece to the file, in the place of the file that pooch would open.

        Raises:
            OSError: The server sends more than the limit, or the download was abandoned; the error ends the
                thread.
        """
        self.done += len(data)
        if max(self.done, self.total or 0) > self._limit_bytes:
            raise OSError(f"it sends more than the {self._limit_bytes} bytes expected")
        if self.abandoned:
            raise OSError("the download is abandoned")
        self._file.write(data)

    def flush(self) -> None:
        """Do nothing: pooch flushes after each piece, and closing the file flushes it."""


def _reason(error: BaseException) -> str:
    """Return the text of the error below the layers of pooch, requests and urllib3."""
    if isinstance(error, ValueError):
        return "it does not contain the file (its checksum differs)"
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or repr(error)


def require_pooch() -> None:
    """Refuse to continue without the library for downloads.

    Raises:
        DataError: `pooch` is not installed; the error has the command that installs it.
    """
    try:
        import pooch  # noqa: F401
    except ImportError:
        raise DataError(f"downloading needs pooch, of the extra `data`: {install_command('data')}") from None


DOWNLOADED = (TEST_LABELS, TEST_IMAGES, TRAIN_LABELS, TRAIN_IMAGES)
"""File names without ``.gz``, in the order of their download, a small file first."""


def _files(*checksums: str) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(name=f"{stem}.gz", checksum=checksum, limit_bytes=32 << 20)
        for stem, checksum in zip(DOWNLOADED, checksums, strict=True)
    )


MNIST = RemoteSet(
    name="MNIST",
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    files=_files(
        "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    file_s=120.0,
)
"""Handwritten digits; both mirrors have the same files. The deadline is short, because `auto` then loads the
digits of this package."""

FASHION = RemoteSet(
    name="Fashion-MNIST",
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    ),
    files=_files(
        "md5:bb300cfdad3c16e7a12a480ee83cd310",
        "md5:bef4ecab320f06d8554ea6380940ec79",
        "md5:25c81989df183df01b3e8a0aad5dffbe",
        "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    ),
)
"""Clothes in MNIST's format, with the publisher's checksums."""

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def parse_four(
    contents: Sequence[bytes],
    origins: Sequence[str],
    *,
    name: str,
    source: str,
    class_names: tuple[str, ...] = (),
    room_bytes: int = LIMIT_BYTES,
) -> Dataset:
    """Return the data set in four files of MNIST's format.

    Args:
        contents: The files, gzipped or not, in the order of `STEMS`.
        room_bytes: Memory for all images.

    Raises:
        DataError: A file is damaged or of the wrong kind, or the files do not belong together.
    """
    arrays: list[NDArray[np.uint8]] = []
    for content, origin, axes in zip(contents, origins, (3, 1, 3, 1), strict=True):
        arrays.append(parse_idx(content, origin, axes=axes, room_bytes=room_bytes))
        room_bytes -= arrays[-1].nbytes
    return make_dataset(
        name=name,
        source=source,
        train=(arrays[0], arrays[1]),
        test=(arrays[2], arrays[3]),
        origins=(origins[0], origins[1], origins[2], origins[3]),
        class_names=class_names,
    )


ARCHIVE = "cifar-10-binary.tar.gz"

CIFAR10 = RemoteSet(
    name="CIFAR-10",
    mirrors=("https://www.cs.toronto.edu/~kriz",),
    files=(RemoteFile(name=ARCHIVE, checksum="md5:c32a1d4ab5d03f1284b67883e8d87530", limit_bytes=256 << 20),),
)
"""The archive of 162 MiB, with the publisher's checksum."""

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
"""Size in bytes of a CIFAR-10 image with its label."""
BATCH_RECORDS = 10_000

TRAIN = tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6))
TEST = "cifar-10-batches-bin/test_batch.bin"


def parse_cifar(data: bytes, origin: str, *, source: str) -> Dataset:
    """Return the data set in the archive.

    Raises:
        DataError: The archive is damaged, or a batch is missing, duplicated, or not made of records.
    """
    batches = {name: _batch(member, f"{origin}:{name}") for name, member in _members(data, origin).items()}
    missing = [name for name in (*TRAIN, TEST) if name not in batches]
    if missing:
        raise DataError(f"{origin} lacks {', '.join(missing)}; is it {ARCHIVE}?")
    train = np.concatenate([batches[name] for name in TRAIN])
    test = batches[TEST]
    return make_dataset(
        name="cifar-10",
        source=source,
        train=(train[:, 1:].reshape(-1, *SHAPE), train[:, 0]),
        test=(test[:, 1:].reshape(-1, *SHAPE), test[:, 0]),
        origins=(f"{origin}:images", f"{origin}:labels", f"{origin}:test images", f"{origin}:test labels"),
        class_names=CLASS_NAMES,
    )


def _members(data: bytes, origin: str) -> dict[str, memoryview]:
    """Return the tar's batches by name, as views of it. Members that are no files are left out."""
    content = gunzip(data, origin)
    found: dict[str, memoryview] = {}
    for name, (at, size) in tar_members(io.BytesIO(content), len(content), origin, Damage("skip")):
        if name in (*TRAIN, TEST):
            if name in found:
                raise DataError(f"{origin} holds {name} twice")
            found[name] = memoryview(content)[at : at + size]
    return found


def _batch(member: memoryview, origin: str) -> NDArray[np.uint8]:
    """Return the records of a batch: (records, 1 + pixels)."""
    records, rest = divmod(len(member), RECORD_BYTES)
    if rest or not 0 < records <= BATCH_RECORDS:
        raise DataError(
            f"{origin} holds {len(member)} bytes, expected 1 to {BATCH_RECORDS} records of {RECORD_BYTES}"
        )
    batch = np.frombuffer(member, np.uint8).reshape(records, RECORD_BYTES)
    wrong = np.flatnonzero(batch[:, 0] >= len(CLASS_NAMES))
    if len(wrong):
        raise DataError(
            f"{origin}: record {int(wrong[0])} has the label {int(batch[wrong[0], 0])}, "
            f"expected 0 to {len(CLASS_NAMES) - 1}"
        )
    return batch


@dataclass(frozen=True, slots=True)
class Published:
    """A data set with a known name."""

    files: RemoteSet
    names: tuple[str, ...]
    """Names of the files, in the order of `parse`'s arguments."""
    parse: Callable[[Sequence[bytes], Sequence[str], str], Dataset]
    """Function from contents and names of the files, and the sentence for the report, to the data set."""


def _fashion(contents: Sequence[bytes], origins: Sequence[str], source: str) -> Dataset:
    return parse_four(contents, origins, name="fashion-mnist", source=source, class_names=FASHION_CLASSES)


def _cifar(contents: Sequence[bytes], origins: Sequence[str], source: str) -> Dataset:
    return parse_cifar(contents[0], origins[0], source=source)


PUBLISHED: Mapping[str, Published] = {
    "fashion-mnist": Published(FASHION, tuple(f"{stem}.gz" for stem in STEMS), _fashion),
    "cifar-10": Published(CIFAR10, (ARCHIVE,), _cifar),
}
