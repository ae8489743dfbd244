"""Pure: limits of a source, checked against its headers before decoding.

The limits are far above every data set that this package is made for. The limits keep a small damaged or
hostile file from taking all memory. A source that decodes as a whole must also fit the machine: `--cache`
sets its limit. Encoded images that decode one by one, on demand, have only the limit `MAX_TOTAL_BYTES`.
"""

from collections.abc import Sequence

from adam_async.errors import DataError

MAX_IMAGE_PIXELS = 1 << 26
"""Maximum number of pixels in an image; its decoded colours then take 192 MiB."""

MAX_IMAGE_BYTES = 1 << 26
"""Maximum size of one encoded image, in a file or archive, in bytes."""

MAX_FILE_BYTES = 1 << 31
"""Maximum size of one shard, table or archive, in bytes."""

MAX_MEMBERS = 1 << 20
"""Maximum number of members in a tar shard, and of rows in a table."""

MAX_LINE_BYTES = 1 << 22
"""Maximum length of a table's line, in bytes: its fields take about fifty times as much memory."""

MAX_TOTAL_BYTES = 1 << 33
"""Maximum size of all images in a data set, encoded or decoded, in bytes."""


def check_file(size: int, limit: int, origin: str) -> None:
    """Refuse a file, or a member of a file, that is larger than `limit` bytes.

    Raises:
        DataError: The file is larger.
    """
    if size > limit:
        raise DataError(f"{origin} has {size} bytes, expected at most {limit}; cut it into smaller files")


def check_members(members: int, origin: str) -> None:
    """Refuse a file with more members or rows than `MAX_MEMBERS`. Raises DataError: the file has more."""
    if members > MAX_MEMBERS:
        raise DataError(f"{origin} holds more than {MAX_MEMBERS} members or rows; cut it into smaller files")


def check_lines(lines: Sequence[bytes], origin: str) -> None:
    """Refuse a table with a line above `MAX_LINE_BYTES`. Raises DataError; names the first."""
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{origin}, line {number} has {len(line)} bytes, expected at most {MAX_LINE_BYTES}; is it "
                "a table?"
            )


def check_total(size: int, origin: str, room_bytes: int = MAX_TOTAL_BYTES) -> None:
    """Refuse a data set above `MAX_TOTAL_BYTES` or above the room of this machine.

    Raises:
        DataError: The data set is larger; the error has the remedy.
    """
    if size > MAX_TOTAL_BYTES:
        raise DataError(
            f"{origin} has {size} bytes of images, expected at most {MAX_TOTAL_BYTES}; "
            "take fewer or smaller ones"
        )
    if size > room_bytes:
        raise DataError(
            f"{origin} takes {size} bytes in memory, but there is room for {room_bytes} only: take fewer "
            "or smaller images, free memory, or raise --cache where the command has it; images of .npy files "
            "stay on the disk"
        )
