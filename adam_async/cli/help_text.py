"""Help as plain text: docstrings filled to the width of the terminal, without a parser of Markdown."""

from functools import cache
from typing import Any

from attrs import evolve
from cyclopts.help import HelpEntry, HelpPanel, InlineText
from cyclopts.help.formatters import DefaultFormatter
from docstring_parser import parse_from_object
from rich.console import Console, ConsoleOptions
from rich.text import Text

from adam_async.run.config import FIELDS, Config


class FilledHelp(DefaultFormatter):
    """Formats help as cyclopts does, and fills each paragraph: the lines of a docstring end anywhere.

    cyclopts fills only Markdown, whose modules take as long to import as all others of the help.
    """

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print a panel of commands or options."""
        entries = [evolve(entry, description=filled(_described(entry))) for entry in panel.entries]
        super().__call__(console, options, panel.copy(entries=entries))

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Print the description of a command."""
        super().render_description(console, options, filled(description))


def _described(entry: HelpEntry) -> Any:
    """Return the description of an entry; for an option of a run, the text at the field of `Config`."""
    names = [name.removeprefix("--").replace("-", "_") for name in entry.positive_names]
    empty = isinstance(entry.description, InlineText) and not str(entry.description.primary_renderable)
    if empty and names and names[0] in FIELDS:
        return InlineText(Text(_texts_of_run()[names[0]]))
    return entry.description


@cache
def _texts_of_run() -> dict[str, str]:
    """Return the text at each field of `Config`, which Python keeps in the source alone."""
    return {each.arg_name: each.description or "" for each in parse_from_object(Config).params}


def filled(text: Any) -> Any:
    """Return an inline text of cyclopts with each paragraph on one line, and without backquotes."""
    if not isinstance(text, InlineText) or not isinstance(text.primary_renderable, Text):
        return text
    paragraphs = text.primary_renderable.plain.replace("`", "").split("\n\n")
    line = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return InlineText(Text(line), force_empty_end=text.force_empty_end)
