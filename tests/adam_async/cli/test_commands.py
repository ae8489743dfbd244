"""Words that are no command, or that no command takes, are answered with what there is."""

import pytest

from adam_async.cli.commands import app, run_command


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error line of wrong words."""
    assert run_command(list(words)) == 2
    out, said = capsys.readouterr()
    assert out == ""
    return said


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (("trian",), "train"),
        (("datta", "inspect"), "data"),
        (("--verison",), "--version"),
        (("data", "inspekt"), "data inspect"),
        (("data", "inspetc", "digits", "--json"), "data inspect"),
    ],
)
def test_a_typing_error_is_told_the_nearest_command(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], nearest: str
) -> None:
    assert f"is no command, did you mean {nearest!r}?" in refused(capsys, *words)


def test_a_word_like_no_command_is_told_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "zzz")

    assert said.startswith("adam-async: 'zzz' is no command; known: ")
    assert all(name in said for name in app if not name.startswith("-"))


def test_a_word_behind_data_is_told_that_data_takes_options(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "data", "zzz")

    assert "known: data inspect, or data with options, which begin with --" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "digits"), "train does not take digits: its options are --NAME VALUE"),
        (("data", "inspect", "digits", "x", "y"), "data inspect does not take x, y: its options are"),
    ],
)
def test_a_word_that_a_command_does_not_take_is_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, *words)
