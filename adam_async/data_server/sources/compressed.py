"""Pure: compressed tar shards, unpacked from front to back.

Only ordinary members up to the maximum size of an image are kept: the output of a bomb is counted and dropped
piece by piece, until it is larger than a shard may be.
"""

import gzip
import io
import tarfile
from typing import IO, cast

from adam_async.data_server.sources import limits
from adam_async.data_server.sources.damage import Damage
from adam_async.errors import DataError

ENDINGS = (".tar.gz", ".tgz")

AT_A_TIME = 1 << 20
"""Size of one piece that is dropped, in bytes."""


def unpack(data: bytes, origin: str, damage: Damage, room_bytes: int = limits.MAX_FILE_BYTES) -> bytes:
    """Return a plain tar file with the usable members of a compressed one.

    Args:
        damage: Collects members that are too large. The reader of the plain file checks names.

    Raises:
        DataError: The file is not a gzipped tar file, is cut short or damaged, or is too large unpacked.
    """
    file = _Unpacking(data, origin)
    kept = io.BytesIO()
    try:
        archive = tarfile.TarFile(fileobj=cast("IO[bytes]", file), encoding="utf-8")
        with tarfile.TarFile(fileobj=kept, mode="w", encoding="utf-8") as plain:
            count = 0
            while (member := archive.next()) is not None:
                count += 1
                limits.check_members(count, origin)
                if member.size > limits.MAX_IMAGE_BYTES:
                    damage.note(
                        f"{origin}:{member.name[:200]!r} has {member.size} bytes, expected at most "
                        f"{limits.MAX_IMAGE_BYTES}; it is left where it is"
                    )
                    continue
                limits.check_total(kept.tell() + max(member.size, 0), origin, room_bytes)
                plain.addfile(*_copied(member, file))
        file.check_end()
    except DataError:
        raise
    except EOFError:
        raise DataError(f"{origin} ends too early: it was cut short, fetch it again") from None
    except Exception as error:
        raise DataError(f"{origin} is not a gzipped tar file, or damaged ({error})") from None
    return kept.getvalue()


def _copied(member: tarfile.TarInfo, file: "_Unpacking") -> tuple[tarfile.TarInfo, IO[bytes] | None]:
    """A member for the plain file: its kind and its bytes, without the rest of its header."""
    copy = tarfile.TarInfo(member.name)
    if not member.isreg() or member.issparse():
        copy.type = tarfile.FIFOTYPE if member.issparse() else member.type
        copy.linkname = member.linkname
        return copy, None
    file.seek(member.offset_data)
    content = file.read(member.size)
    if len(content) < member.size:
        raise EOFError
    copy.size = member.size
    return copy, io.BytesIO(content)


class _Unpacking:
    """The unpacked bytes of a gzipped file, for `tarfile`, which reads forward only."""

    def __init__(self, data: bytes, origin: str) -> None:
        self._file = gzip.GzipFile(fileobj=io.BytesIO(data))
        self._origin = origin
        self._at = 0
        self._last = b""

    def tell(self) -> int:
        """Position of the next byte."""
        return self._at

    def seek(self, position: int) -> int:
        """Go on to a position, or to the end."""
        while self._at < position and self._take(min(position - self._at, AT_A_TIME)):
            pass
        return self._at

    def read(self, size: int) -> bytes:
        """Return the next bytes; fewer at the end.

        Raises:
            DataError: The bytes are more than a member may have, or all are more than a shard may have.
        """
        limits.check_file(size, limits.MAX_IMAGE_BYTES + tarfile.BLOCKSIZE, f"a header in {self._origin}")
        return self._take(size)

    def _take(self, size: int) -> bytes:
        self._last = self._file.read(size)
        self._at += len(self._last)
        if self._at > limits.MAX_FILE_BYTES:
            raise DataError(
                f"{self._origin} unpacks to more than {limits.MAX_FILE_BYTES} bytes; cut it into smaller ones"
            )
        return self._last

    def check_end(self) -> None:
        """Check that the last read ends a tar file, and that nothing follows.

        Raises:
            DataError: It does not end the file, or bytes follow.
        """
        at = self._at - len(self._last)
        whole = len(self._last) == tarfile.BLOCKSIZE and not self._last.strip(b"\0")
        while rest := self._take(AT_A_TIME):
            whole = whole and not rest.strip(b"\0")
        if not whole:
            raise DataError(
                f"{self._origin} is cut short or damaged: at byte {at}, unpacked, there is neither "
                "another member nor the end of a tar file; fetch it again"
            )
