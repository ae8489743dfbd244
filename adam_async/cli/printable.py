"""Pure: makes text of peers and files safe to show on a terminal and in a log."""

import re

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # controls C0 and C1, the escape character and ends of lines among them
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that change the text direction
    "\u2028\u2029"  # ends of lines and paragraphs
    "\ud800-\udfff]"  # bytes of file names that are not text, which no stream can encode
)


def printable(text: str) -> str:
    r"""Return one line that moves no cursor, changes no colour and shows its characters in their order.

    Controls and marks of direction become escapes such as ``\x1b`` and ``\u202e``. Backslashes stay as they
    are, so a second pass changes nothing: both a child process and its parent escape a line.
    """
    return _UNSAFE.sub(_escape, text)


def printable_lines(text: str) -> str:
    """Make each line of a text printable, as `printable` does."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _escape(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]
