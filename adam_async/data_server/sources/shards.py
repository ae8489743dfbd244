"""WebDataset shards: tar files in which members of one name belong together.

    00017.png, 00017.cls            the class number, or the name of the class, as text
    00017.jpg, 00017.json           an object with "label" or "cls"

Nothing is ever written to disk. Members that could be meant to (names that are absolute or go up, links,
devices) are damage; a shard that is cut short or not a tar file is an error, whatever is done with damage.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.damage import Damage
from adam_async.data_server.sources.files import read_file
from adam_async.data_server.sources.pictures import require_pillow
from adam_async.data_server.sources.samples import Sample, Samples, assemble
from adam_async.data_server.sources.splits import Split, split_of_image
from adam_async.errors import DataError
from adam_async.ports import Disk

IMAGE_SUFFIXES = ("png", "jpg", "jpeg", "bmp", "gif", "ppm", "pgm", "pbm", "webp")
BLOCK = tarfile.BLOCKSIZE
MAX_LABEL_BYTES = 1 << 16


async def load_shards(
    files: list[tuple[Path, Split | None]], disk: Disk, *, name: str, origin: str, source: str, damage: Damage
) -> Dataset:
    """Load all images of some tar shards.

    Args:
        files: The shards, each with what its images are for; None to split them by their names.
        disk: Reads and decodes.
        name: Short name of the data set.
        origin: What to call it in an error.
        source: Sentence for the report.
        damage: Where damaged images go.

    Raises:
        DataError: A shard is no tar file or cut short, or what `assemble` refuses.
    """
    require_pillow()
    samples = Samples(origin, damage)
    for path, split in files:
        data = await read_file(path, disk)
        await disk.run(add_shard, data, str(path), path.name, split, samples)
        del data
    return await assemble(samples, disk, name=name, source=source)


def add_shard(data: bytes, origin: str, name: str, split: Split | None, samples: Samples) -> None:
    """Add the images of one shard.

    Raises:
        DataError: No tar file, or cut short; or damage that is not to be skipped.
    """
    parts: dict[str, dict[str, bytes]] = {}
    for member, content in _members(data, origin, samples.damage):
        folder, _, file = member.rpartition("/")
        key, _, suffix = file.partition(".")
        parts.setdefault(f"{folder}/{key}" if folder else key, {})[suffix.lower()] = content
    for key, found in parts.items():
        image = next((found[suffix] for suffix in IMAGE_SUFFIXES if suffix in found), None)
        where = f"{origin}:{key}"
        try:
            label = _label(found, where)
            if image is None:
                raise DataError(f"{where} has {', '.join(found)}, but no image")
        except DataError as error:
            samples.damage.note(str(error))
            continue
        samples.add(Sample(where, image, label, split or split_of_image(f"{name}/{key}")))


def _members(data: bytes, origin: str, damage: Damage) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the ordinary files in a tar file."""
    if data.startswith(b"\x1f\x8b"):
        raise DataError(f"{origin} is compressed, expected a plain tar file; unpack it with gunzip first")
    try:
        archive = tarfile.TarFile(fileobj=io.BytesIO(data), encoding="utf-8")
        count = 0
        while (member := archive.next()) is not None:
            count += 1
            limits.check_members(count, origin)
            problem = _problem(member)
            if problem:
                damage.note(f"{origin}:{member.name[:200]!r} {problem}; it is left where it is")
                continue
            end = member.offset_data + member.size
            if end > len(data):
                raise DataError(f"{origin} ends inside {member.name!r}; it was cut short, fetch it again")
            if member.isreg():
                yield member.name, data[member.offset_data : end]
        rest = data[archive.offset :]
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{origin} is not a tar file, or damaged ({error})") from None
    if len(rest) < BLOCK or rest.strip(b"\0"):
        raise DataError(
            f"{origin} is cut short or damaged: after {count} members, at byte {len(data) - len(rest)}, "
            "there is neither another one nor the end of a tar file; fetch it again"
        )


def _problem(member: tarfile.TarInfo) -> str:
    """Say why a member cannot be taken; nothing if it can."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or not member.name.isprintable():
        return "has a name that is absolute, goes up or cannot be shown"
    if member.issym() or member.islnk():
        return "is a link"
    if not (member.isreg() or member.isdir()) or member.issparse():
        return "is no ordinary file"
    if member.size > limits.MAX_IMAGE_BYTES or member.size < 0:
        return f"has {member.size} bytes, expected at most {limits.MAX_IMAGE_BYTES}"
    return ""


def _label(found: dict[str, bytes], origin: str) -> str:
    content = found.get("cls", found.get("json"))
    if content is None:
        raise DataError(f"{origin} has {', '.join(found)}, but neither .cls nor .json with its label")
    if len(content) > MAX_LABEL_BYTES:
        raise DataError(f"{origin} has a label file of {len(content)} bytes, expected a class")
    try:
        if "cls" in found:
            return content.decode().strip()
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} has a label that cannot be read ({error})") from None
    label = fields.get("label", fields.get("cls")) if isinstance(fields, dict) else None
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise DataError(f'{origin}.json has no "label" or "cls" that is a number or a name')
    return str(label)
