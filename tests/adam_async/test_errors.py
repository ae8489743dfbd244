"""The command that installs an extra belongs to this Python and to this installation."""

import json
import shlex
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from adam_async.errors import install_command


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        (None, "adam-async[torch]"),
        ({"url": "file:///wheels/a.whl", "archive_info": {}}, "adam-async[torch]"),
        ({"url": "file:///src/adam", "dir_info": {}}, "adam-async[torch]"),
        ({"url": "file:///my%20code/adam", "dir_info": {"editable": True}}, "-e '/my code/adam[torch]'"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    origin: dict[str, object] | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    words = shlex.split(install_command("torch"))
    assert words == [sys.executable, "-m", "pip", "install", *shlex.split(wanted)]


def test_a_package_that_lies_on_the_path_has_a_command_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert install_command("ssh").endswith(" -m pip install 'adam-async[ssh]'")
