"""Text of peers and files, safe for a terminal and a log: a function, and a console of ``rich``."""

import errno
import os
import re
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters C0 and C1, with the escape character and ends of lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that change the text direction
    "\u2028\u2029"  # ends of lines and paragraphs
    "\ud800-\udfff]"  # bytes of file names that are not text, which streams cannot encode
)


def printable(text: str) -> str:
    r"""Return one line without characters that move the cursor, change colours or reorder text.

    Control and direction characters become escapes such as ``\x1b`` and ``\u202e``. Backslashes stay, so a
    second pass changes nothing. A parent process makes a second pass over the lines of its child process.
    """
    return _UNSAFE.sub(_escape, text)


def printable_lines(text: str) -> str:
    """Make each line of a text printable, as `printable` does."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _escape(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]


class EscapingConsole(Console):
    """A console that escapes controls in all text and table cells. Markup and emoji are plain text."""

    def __init__(
        self,
        *,
        file: IO[str] | None = None,
        stderr: bool = False,
        width: int | None = None,
        soft_wrap: bool = False,
        force_terminal: bool | None = None,
    ) -> None:
        super().__init__(
            file=file,
            stderr=stderr,
            width=width,
            soft_wrap=soft_wrap,
            force_terminal=force_terminal,
            highlight=False,
            markup=False,
            emoji=False,
        )

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError: ``rich`` would end the process with code 1, also in a running loop."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a string as text, escaped before a table measures its width."""
        return super().render_str(printable_lines(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of an object with their text escaped; control segments of ``rich`` pass."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)
