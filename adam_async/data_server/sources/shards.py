"""WebDataset shards: tar files in which members of one name form an example.

    00017.png, 00017.cls            the class number, or the name of the class, as text
    00017.jpg, 00017.json           an object with "label" or "cls"

A shard that ends in ``.tar.gz`` or ``.tgz`` is unpacked in memory. No file is ever written to disk. Members
that mean something only on a disk (absolute names, names with ``..``, links, devices) count as damage. A
truncated shard, or one that is not a tar file, is an error under either policy.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from adam_async.data_server.class_names import class_name
from adam_async.data_server.dataset import Damage, Dataset
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.files import IMAGE_SUFFIXES, check_kind, is_clutter, read_file, reading
from adam_async.data_server.sources.idx import GZIP_MAGIC, gunzip
from adam_async.data_server.sources.kinds import COMPRESSED, Files
from adam_async.data_server.sources.pictures import require_pillow
from adam_async.data_server.sources.samples import LoadRequest, Sample, Samples, StoredSample, assemble
from adam_async.data_server.sources.splits import Split, rank_of_image
from adam_async.errors import DataError

BLOCK = tarfile.BLOCKSIZE
MAX_LABEL_BYTES = 1 << 16
"""Maximum size of a label's file in a tar shard, in bytes."""


async def load_shards(request: LoadRequest, files: Files) -> Dataset:
    """Load all images of some tar shards.

    With a compressed shard all images are decoded. Without a split, images are split by their names.

    Raises:
        DataError: A shard is not a tar file or is cut short, or an error of `assemble`.
    """
    require_pillow()
    samples, cache = Samples(request), request.cache
    for path, split in files:
        if path.name.lower().endswith(COMPRESSED):
            cache = None
            data = await read_file(path, request.disk, room_bytes=request.room_bytes)
            data = await request.disk.run(unpack, data, str(path), request.room_bytes)
            await request.disk.run(add_shard, data, str(path), path.name, split, samples)
            del data
        else:
            await request.disk.run(list_shard, path, split, samples)
    return await assemble(samples, cache=cache)


def unpack(data: bytes, origin: str, room_bytes: int = limits.MAX_FILE_BYTES) -> bytes:
    """Return the plain tar file in a compressed one.

    Raises:
        DataError: The file is not gzipped, is truncated or damaged, or is too large unpacked.
    """
    if data and not data.startswith(GZIP_MAGIC):
        raise DataError(f"{origin} is not a gzipped tar file, or damaged")
    return gunzip(data, origin, room_bytes, limit=limits.MAX_FILE_BYTES)


def add_shard(data: bytes, origin: str, name: str, split: Split | None, samples: Samples) -> None:
    """Add the images of one shard.

    Raises:
        DataError: The file is not a tar file, is truncated, or has damage that is not skipped.
    """
    for key, label, (offset, size) in _images(io.BytesIO(data), len(data), origin, samples.request.damage):
        chosen = split or rank_of_image(f"{name}/{key}")
        samples.add(Sample(f"{origin}:{key}", label, chosen, data[offset : offset + size]))


def list_shard(path: Path, split: Split | None, samples: Samples) -> None:
    """List the positions of one shard's images without reading them. Blocks.

    Raises:
        DataError: As `add_shard`.
    """
    size = check_kind(path, limits.MAX_FILE_BYTES)
    with reading(path) as file:
        for key, label, (offset, length) in _images(file, size, str(path), samples.request.damage):
            chosen = split or rank_of_image(f"{path.name}/{key}")
            samples.add(StoredSample(f"{path}:{key}", label, chosen, path, offset, length))


Extent = tuple[int, int]
"""Offset and size of a range in a file, in bytes."""


def _images(file: BinaryIO, size: int, origin: str, damage: Damage) -> Iterator[tuple[str, str, Extent]]:
    """Yield the key, the label and the position of each image in a tar file of this many bytes."""
    parts: dict[str, dict[str, Extent]] = {}
    for member, place in tar_members(file, size, origin, damage):
        folder, _, name = member.rpartition("/")
        key, _, suffix = name.partition(".")
        parts.setdefault(f"{folder}/{key}" if folder else key, {})[suffix.lower()] = place
    for key, found in parts.items():
        image = next((found[suffix] for suffix in IMAGE_SUFFIXES if suffix in found), None)
        where = f"{origin}:{key}"
        try:
            label = _label(file, found, where)
            if image is None:
                raise DataError(f"{where} has {', '.join(found)}, but no image")
        except DataError as error:
            damage.note(str(error))
            continue
        yield key, label, image


def tar_members(file: BinaryIO, size: int, origin: str, damage: Damage) -> Iterator[tuple[str, Extent]]:
    """Yield name and position of the ordinary files in a tar file of this many bytes.

    Raises:
        DataError: The file is not a tar file, is truncated, or has damage that is not skipped.
    """
    if file.read(2) == GZIP_MAGIC:
        raise DataError(
            f"{origin} is compressed, expected a plain tar file; unpack it with gunzip, or name it .tar.gz"
        )
    try:
        file.seek(0)
        archive = tarfile.TarFile(fileobj=file, encoding="utf-8")
        count = 0
        while (member := archive.next()) is not None:
            count += 1
            limits.check_members(count, origin)
            problem = _problem(member)
            if problem:
                damage.note(f"{origin}:{member.name[:200]!r} {problem}; it is left where it is")
                continue
            end = member.offset_data + member.size
            if end > size:
                raise DataError(f"{origin} ends inside {member.name!r}; it was cut short, fetch it again")
            if member.isreg() and not is_clutter(PurePosixPath(member.name).name):
                yield member.name, (member.offset_data, member.size)
        file.seek(archive.offset)
        rest = file.read()
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{origin} is not a tar file, or damaged ({error})") from None
    if len(rest) < BLOCK or rest.strip(b"\0"):
        raise DataError(
            f"{origin} is cut short or damaged: after {count} members, at byte {size - len(rest)}, "
            "there is neither another one nor the end of a tar file; fetch it again"
        )


def _problem(member: tarfile.TarInfo) -> str:
    """Return why a member is refused; empty for an accepted member."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        return "has a name that is absolute or goes up"
    if member.issym() or member.islnk():
        return "is a link"
    if not (member.isreg() or member.isdir()) or member.issparse():
        return "is no ordinary file"
    if member.size > limits.MAX_IMAGE_BYTES or member.size < 0:
        return f"has {member.size} bytes, expected at most {limits.MAX_IMAGE_BYTES}"
    return ""


def _label(file: BinaryIO, found: dict[str, Extent], origin: str) -> str:
    """Read a sample's label in a tar file: the text of ``.cls``, or a field of ``.json``.

    Raises:
        DataError: The label is missing, too long or damaged.
    """
    place = found.get("cls", found.get("json"))
    if place is None:
        raise DataError(
            f"{origin} has {', '.join(found)}, but neither .cls nor .json with its label; if the folders in "
            "the archive are the classes, unpack it, and name the folder"
        )
    offset, size = place
    if size > MAX_LABEL_BYTES:
        raise DataError(f"{origin} has a label file of {size} bytes, expected a class")
    file.seek(offset)
    content = file.read(size)
    try:
        if "cls" in found:
            return class_name(content.decode().strip())
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} has a label that cannot be read ({error})") from None
    label = fields.get("label", fields.get("cls")) if isinstance(fields, dict) else None
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise DataError(f'{origin}.json has no "label" or "cls" that is a number or a name')
    return class_name(str(label))
