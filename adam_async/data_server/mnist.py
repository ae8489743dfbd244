"""MNIST: its four files, what they must contain, and how they are fetched.

Checksums are of the unpacked *content*: mirrors and archives carry the same content compressed differently,
so that a checksum of the compressed file would refuse good copies.

All mirrors are asked at once for the smallest file; the first that delivers it serves the rest. A machine
without network thus knows after `connect_timeout_s` at the latest, however many mirrors there are.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

from adam_async.data_server.idx import gunzip
from adam_async.errors import DataError
from adam_async.ports import Disk, Fetch

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"

STEMS = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
"""File names without ``.gz``, in the order in which a data set is put together."""

SHA256: Mapping[str, str] = {
    TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)

FILE_LIMIT_BYTES = 16 << 20
"""No file of MNIST is larger than 10 MB compressed."""


async def download_mnist(
    folder: Path,
    *,
    disk: Disk,
    fetch: Fetch,
    mirrors: tuple[str, ...] = MIRRORS,
    checksums: Mapping[str, str] = SHA256,
    connect_timeout_s: float = 5.0,
    transfer_timeout_s: float = 120.0,
) -> str:
    """Fetch MNIST into `folder`, checked, and return the mirror it came from.

    Cancelling leaves whole files only; a later call fetches all four again.

    Raises:
        DataError: No mirror answered in time, or one sent something else; says what each mirror did.
    """
    first = TEST_LABELS
    mirror, content = await _fastest(mirrors, first, checksums[first], fetch, connect_timeout_s)
    await disk.write_atomic(folder / f"{first}.gz", [content])
    for stem in (TEST_IMAGES, TRAIN_LABELS, TRAIN_IMAGES):
        try:
            content = await _fetch_checked(mirror, stem, checksums[stem], fetch, transfer_timeout_s)
        except OSError as error:
            raise DataError(f"{mirror} broke off at {stem} ({_reason(error)}); try again") from None
        await disk.write_atomic(folder / f"{stem}.gz", [content])
    return mirror


async def _fastest(
    mirrors: tuple[str, ...], stem: str, checksum: str, fetch: Fetch, timeout_s: float
) -> tuple[str, bytes]:
    """Ask all mirrors for one file; return the first that delivers it, and the file."""
    failures: dict[str, str] = {}
    winner: list[tuple[str, bytes]] = []

    async def ask(mirror: str) -> None:
        try:
            content = await _fetch_checked(mirror, stem, checksum, fetch, timeout_s)
        except (OSError, DataError) as error:
            failures[mirror] = _reason(error)
            return
        winner.append((mirror, content))
        for task in asking:
            task.cancel()

    asking: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as group:
        asking += [group.create_task(ask(mirror), name=f"ask {mirror}") for mirror in mirrors]
    if not winner:
        raise DataError("; ".join(f"{mirror}: {failures[mirror]}" for mirror in mirrors) or "no mirrors")
    return winner[0]


async def _fetch_checked(mirror: str, stem: str, checksum: str, fetch: Fetch, timeout_s: float) -> bytes:
    url = f"{mirror}/{stem}.gz"
    content = await fetch(url, timeout_s=timeout_s, limit_bytes=FILE_LIMIT_BYTES)
    found = hashlib.sha256(gunzip(content, url)).hexdigest()
    if found != checksum:
        raise DataError(
            f"{url} does not contain {stem} of MNIST (SHA-256 {found[:12]}..., expected {checksum[:12]}...)"
        )
    return content


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(getattr(error, "reason", None) or error)
