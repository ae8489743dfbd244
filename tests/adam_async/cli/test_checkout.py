"""The commands of a checkout: present beside tests/, refused with their cure in a folder of packages."""

from pathlib import Path

import pytest
from cyclopts import App

from adam_async.cli import checkout, commands
from adam_async.cli.checkout import COMMANDS, add_commands
from adam_async.cli.commands import run_command


def test_a_checkout_has_its_commands_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0

    words = capsys.readouterr().out.split()
    assert COMMANDS.keys() <= {*words}


def test_packages_without_tests_have_no_such_command(tmp_path: Path) -> None:
    app = App(name="adam-async")

    add_commands(app, tmp_path)

    assert not COMMANDS.keys() & {*app}


@pytest.mark.parametrize("words", [["simulate"], ["drill"], ["drill", "--help"], ["simulate", "--seed", "1"]])
def test_a_command_of_a_checkout_is_refused_elsewhere_with_the_cure(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in COMMANDS:
        monkeypatch.delitem(commands.app._commands, name)

    assert run_command(words) == 2

    said = capsys.readouterr().err
    assert f"{words[0]} needs a checkout of the project: its code is in tests/" in said
    assert f"{checkout.PACKAGES} has none. Install the checkout with `pip install -e .`" in said
