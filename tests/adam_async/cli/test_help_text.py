"""Help is filled as plain text, with the layout that cyclopts gives it."""

import pytest
from rich.console import Console

from adam_async.cli.commands import app, run_command


def lines_of(words: str, capsys: pytest.CaptureFixture[str], width: int = 100) -> list[str]:
    app([*words.split(), "--help"], console=Console(width=width))
    return [line.strip(" │") for line in capsys.readouterr().out.splitlines()]


def test_a_paragraph_is_filled_whatever_the_lines_of_its_docstring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = lines_of("train", capsys, width=400)
    assert any(
        line.startswith("--data") and line.endswith("several addresses with commas. [default: auto]")
        for line in lines
    )


def test_paragraphs_of_a_command_stay_apart(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of("data", capsys)
    first = lines.index("Run a data server, which leases image groups to the workers.")
    assert lines[first + 1 : first + 3] == [
        "",
        "Without --controller it is independent of a cluster, and serves each train --data tcp://HOST:PORT.",
    ]


def test_help_has_no_backquotes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Write a model of train --out for ONNX runtimes or PyTorch." in " ".join(lines_of("", capsys))


@pytest.mark.parametrize(
    "words", ["train --help", "train --model --help", "train -h", "--help train --version"]
)
def test_the_help_flag_shows_the_help_of_its_command_anywhere(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(words.split()) == 0
    assert "Usage: adam-async train" in capsys.readouterr().out


def test_an_unknown_command_with_a_help_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["trian", "--help"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err
