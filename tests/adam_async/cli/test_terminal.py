"""Text of a peer or a file cannot control the terminal, on any path to it."""

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.table import Table

from adam_async.cli.live_table import LiveTable
from adam_async.cli.terminal import EscapingConsole, Terminal, log_to_stderr, printable, printable_lines
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.cluster_status import status_of
from adam_async.run.condition import Condition, Wait
from adam_async.run.progress import Progress

HOSTILE = "ps-0\x1b]0;owned\x07\x9b31m\u202e[red]:bug:\nadam-async: forged"
SHOWN = "ps-0\\x1b]0;owned\\x07\\x9b31m\\u202e[red]:bug:\\nadam-async: forged"


def test_lines_news_and_errors_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()

    terminal.print(HOSTILE)
    terminal.notice(HOSTILE)
    terminal.error(HOSTILE)

    said = capsys.readouterr()
    assert said.out == f"{SHOWN}\n"
    error = SHOWN.replace("\\n", " ")
    assert said.err == f"{SHOWN}\nadam-async: {error}\n"


def test_a_logged_line_is_one_line_and_a_traceback_keeps_its_own(
    capsys: pytest.CaptureFixture[str], no_handlers: None
) -> None:
    log_to_stderr(verbose=False)
    logger = logging.getLogger("adam_async.test")

    logger.warning("%s is lost", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("it failed")

    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"{SHOWN} is lost"
    assert said[1:3] == ["it failed", "Traceback (most recent call last):"]
    assert "\x1b" not in "".join(said)


def test_cells_of_tables_are_escaped_and_our_own_styles_stay() -> None:
    stream = io.StringIO()
    console = EscapingConsole(file=stream, width=200, force_terminal=True)
    table = Table("name", title="workers", title_style="bold")
    table.add_row(HOSTILE)

    console.print(table)

    written = stream.getvalue()
    assert "\x1b[1m" in written
    assert "\\x1b]0;owned" in written
    assert "\\u202e[red]:bug:" in written
    assert not {"\x07", "\x9b", "\u202e"} & set(written)
    assert "\x1b]" not in written


@pytest.mark.parametrize("drawn", [False, True])
async def test_the_table_of_a_run_escapes_phases_lines_and_names(drawn: bool) -> None:
    stream = io.StringIO()
    progress = Progress(last_epoch=1)
    progress.phase = progress.missing = HOSTILE
    wait = Wait(who=HOSTILE, what=HOSTILE, deadline_s=None, cure=HOSTILE)
    status = status_of(ClusterMap(), {}, leading="")
    condition = Condition(verdict="well", waits=(wait,), weakest=HOSTILE, survives=0)
    progress.status = structs.replace(status, condition=condition)

    async with LiveTable(progress, stream=stream, terminal=drawn) as table:
        table.refresh()
        table.print(HOSTILE)

    written = stream.getvalue()
    assert SHOWN in written
    assert not {"\x07", "\x9b", "\u202e"} & set(written)
    assert "\x1b]" not in written


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
