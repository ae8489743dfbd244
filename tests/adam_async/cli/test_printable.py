"""Text of peers and files loses its terminal controls, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.cli.printable import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("naïve café 数据 \\x1b", "naïve café 数据 \\x1b"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m\x7f\x85", "\\x9b31m\\x7f\\x85"),
        ("worker\nadam-async: forged\r\t", "worker\\nadam-async: forged\\r\\t"),
        ("\u202egnp.exe\u2066\u200f\u2028", "\\u202egnp.exe\\u2066\\u200f\\u2028"),
        ("\udcff.png", "\\udcff.png"),
    ],
)
def test_controls_of_a_terminal_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(), max_size=40))
def test_a_second_pass_changes_nothing_and_every_stream_can_write_the_result(text: str) -> None:
    shown = printable(text)

    assert printable(shown) == shown
    assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in shown)
    shown.encode()


def test_ends_of_our_own_lines_may_stay() -> None:
    assert printable_lines("a\x1b\nb\r") == "a\\x1b\nb\\r"
