"""The folder of the user's caches: never the working directory, and never a folder of another user."""

import os
from pathlib import Path

import pytest

from adam_async.runtime.kernel_cache import NOWHERE, user_cache


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the user id have no name."""

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_the_environment_names_the_folder(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert user_cache(home) == tmp_path / ".cache" / "adam-async"
    assert user_cache({**home, "XDG_CACHE_HOME": "/caches"}) == Path("/caches/adam-async")
    assert user_cache({**home, "XDG_CACHE_HOME": "relative"}) == tmp_path / ".cache" / "adam-async"
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize("home", [None, "", ".", "~", "relative", "/no/such/home", "/proc/sys"])
def test_without_a_home_it_is_a_private_folder_of_temporary_files(home: str | None, tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": "", **({} if home is None else {"HOME": home})}
    expected = tmp_path / f"adam-async-{os.getuid()}"
    assert user_cache(environment) == user_cache(environment) == expected
    assert expected.stat().st_mode & 0o777 == 0o700
    assert list(Path().iterdir()) == []


@pytest.mark.usefixtures("nameless")
def test_a_relative_folder_of_temporary_files_is_not_taken() -> None:
    assert user_cache({"TMPDIR": "."}).parent == Path("/tmp")
    assert list(Path().iterdir()) == []


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize("kind", ["link", "file", "open to others", "of another user", "no folder"])
def test_code_from_a_folder_that_another_user_can_change_is_not_taken(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"adam-async-{os.getuid()}"
    environment = {"TMPDIR": str(tmp_path)}
    match kind:
        case "link":
            (tmp_path / "elsewhere").mkdir()
            folder.symlink_to("elsewhere")
        case "file":
            folder.touch()
        case "open to others":
            folder.mkdir()
            folder.chmod(0o777)
        case "of another user":
            other = os.getuid() + 1
            monkeypatch.setattr(os, "getuid", lambda: other)
            (tmp_path / f"adam-async-{other}").mkdir()
        case _:
            environment = {"TMPDIR": "/no/such/folder"}
    assert user_cache(environment) == NOWHERE
    with pytest.raises(OSError, match="Not a directory"):
        NOWHERE.mkdir(parents=True)
