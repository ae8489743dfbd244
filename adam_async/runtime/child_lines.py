"""Pure: cuts the bytes that a child process writes into lines of text, in bounded memory."""

import re

LINE_BYTES = 8192
"""Maximum number of bytes kept of one line: half from its start and half from its end."""

_ENDS = re.compile(rb"[\r\n]+")


class LineSplitter:
    """Cuts a stream of bytes into lines at newlines and carriage returns, and drops blank lines.

    A line of more than `LINE_BYTES` loses its middle: its start names its subject, and its end may hold text
    behind a progress bar.
    """

    def __init__(self) -> None:
        self._kept = bytearray()
        self._left_out = 0

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that these bytes complete, without their ends."""
        *complete, begun = _ENDS.split(data)
        lines = []
        for part in complete:
            self._add(part)
            lines += self.end()
        self._add(begun)
        return lines

    def end(self) -> list[str]:
        """Return the rest of the ended stream as a line, unless it is blank."""
        kept, left_out = bytes(self._kept), self._left_out
        self._kept.clear()
        self._left_out = 0
        if left_out:
            half = LINE_BYTES // 2
            line = f"{_text(kept[:half])} [{left_out} bytes left out] {_text(kept[half:])}".rstrip()
        else:
            line = _text(kept).rstrip()
        return [line] if line else []

    def _add(self, part: bytes) -> None:
        self._kept += part
        excess = len(self._kept) - LINE_BYTES
        if excess > 0:
            middle = LINE_BYTES // 2
            del self._kept[middle : middle + excess]
            self._left_out += excess

    def __repr__(self) -> str:
        return f"<LineSplitter {len(self._kept)} bytes of a line>"


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
