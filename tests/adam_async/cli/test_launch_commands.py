"""Each command of `launch` comes whole from the description of its launcher."""

from importlib import import_module
from inspect import iscoroutinefunction, signature

import pytest
from docstring_parser import parse

from adam_async.cli.launch_commands import LAUNCHERS
from adam_async.launch.settings import LauncherSettings
from adam_async.option_types import options_of


@pytest.mark.parametrize("name", LAUNCHERS)
def test_each_option_of_a_launcher_has_a_text(name: str) -> None:
    kind, _ = LAUNCHERS[name]
    texts = {each.arg_name: each.description for each in parse(kind.__doc__ or "").params}

    assert [option for option in options_of(kind) if not texts.get(option)] == []


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_file_of_a_launcher_trains_with_its_description(name: str) -> None:
    kind, home = LAUNCHERS[name]
    train = import_module(f"adam_async.launch.{home}").train

    assert issubclass(kind, LauncherSettings)
    assert iscoroutinefunction(train)
    assert [*signature(train).parameters] == ["settings", "training"]
