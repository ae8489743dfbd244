"""Terminal of ``rich`` that escapes controls in text of peers and files; our styles and movements pass."""

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from adam_async.cli.printable import printable_lines


class EscapingConsole(Console):
    """A console that escapes controls in all text, in cells of tables too. Markup and emoji are plain text.

    Args:
        file: Stream to write to; None is stdout.
        stderr: Write to stderr.
        width: Characters in a line; None asks the terminal.
        soft_wrap: Leave long lines to the terminal.
        force_terminal: Whether it is a terminal; None asks the file.
    """

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

    def render_str(self, text: str, **how: Any) -> Text:
        """Make text of a string, escaped before a table measures it."""
        return super().render_str(printable_lines(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of an object with their text escaped; our own control segments pass."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)
