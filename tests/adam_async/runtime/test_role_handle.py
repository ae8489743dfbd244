"""The lines of a role are read in bounded memory, and its address and its end have one form."""

import pytest

from adam_async.runtime.role_handle import LINE_BYTES, LineSplitter, address_in, address_line, how_it_ended


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (
            "adam-async data --controller tcp://[::1]:71",
            "ps-0 listens on tcp://[::1]:70; join it with: adam-async data --controller tcp://[::1]:71",
        ),
        ("", "ps-0 listens on tcp://[::1]:70"),
    ],
)
def test_a_role_line_has_the_address_and_a_next_command_if_there_is_one(command: str, text: str) -> None:
    line = address_line("ps-0", "tcp://[::1]:70", command)

    assert line == text
    assert address_in(line) == "tcp://[::1]:70"


def test_other_lines_hold_no_address() -> None:
    assert address_in("worker-0 is here") == ""


def test_the_end_of_a_child_is_described_in_words() -> None:
    assert how_it_ended(-9) == "killed by signal 9"
    assert how_it_ended(5) == "ended with exit code 5"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_end_at_newlines_and_carriage_returns_however_the_bytes_arrive(size: int) -> None:
    data = "erste\nzweite Zeile ü\r\n\r 10 %\r 20 %\r\n\nohne Ende".encode()
    splitter = LineSplitter()

    lines = [line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])]

    assert lines == ["erste", "zweite Zeile ü", " 10 %", " 20 %"]
    assert splitter.end() == ["ohne Ende"]
    assert splitter.end() == []


def test_a_long_line_keeps_its_beginning_and_its_end_in_bounded_memory() -> None:
    splitter = LineSplitter()
    splitter.feed(b"begun ")
    for _ in range(256):
        assert splitter.feed(b"." * 65536) == []
        assert len(splitter._kept) <= LINE_BYTES

    (line,) = splitter.feed(b" ps-0 listens on tcp://127.0.0.1:7\nnext")

    assert line.startswith("begun ....")
    assert line.endswith(".... ps-0 listens on tcp://127.0.0.1:7")
    assert " bytes left out] " in line
    assert len(line) < LINE_BYTES + 50
    assert splitter.end() == ["next"]


def test_a_line_of_the_largest_size_is_whole() -> None:
    assert LineSplitter().feed(b"x" * LINE_BYTES + b"\n") == ["x" * LINE_BYTES]
