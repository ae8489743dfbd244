"""The words of a role's command leave its place to the launcher, and its keys to stdin."""

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from adam_async.cluster import launcher as launching
from adam_async.cluster.launcher import FOLDER_PREFIX, LocalLauncher, RestartPolicy, RoleSpec
from adam_async.errors import ConfigError
from adam_async.run.config import Config
from adam_async.run.option_sources import role_words
from adam_async.runtime.disk import Disk


def spec(role: str, *arguments: str, **more: object) -> RoleSpec:
    return RoleSpec(
        role=role, node=f"{role}-0", arguments=arguments, orders=b"secret\n", environment={}, **more
    )


def value(words: Sequence[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_the_launcher_chooses_address_and_threads_unless_the_role_has_them() -> None:
    free = spec("worker", "--controller", "tcp://h:1").words(bind="tcp://h:0", threads=4)
    fixed = spec("worker", bind="tcp://h:7", threads=2).words(bind="tcp://h:0", threads=4)

    assert free[:4] == ("worker", "--id", "worker-0", "--supervised")
    assert (value(free, "--bind"), value(free, "--threads")) == ("tcp://h:0", "4")
    assert (value(fixed, "--bind"), value(fixed, "--threads")) == ("tcp://h:7", "2")
    assert free[-2:] == ("--controller", "tcp://h:1")


def test_only_workers_have_threads_and_no_word_is_an_order() -> None:
    words = spec("ps").words(bind="tcp://h:0", threads=4)

    assert "--threads" not in words
    assert not any("secret" in word for word in words)


def test_only_parameter_servers_listen_on_a_second_address() -> None:
    apart = {"bind": "tcp://h:0", "threads": 4, "copies_bind": "tcp://h1:0"}

    assert value(spec("ps").words(**apart), "--copies-bind") == "tcp://h1:0"
    assert "--copies-bind" not in spec("data").words(**apart)
    assert "--copies-bind" not in spec("ps").words(bind="tcp://h:0", threads=4)


def test_a_role_comes_back_five_times_in_a_row_by_default() -> None:
    assert spec("ps").restart == RestartPolicy(most=5, sound_s=10.0)


def test_a_data_server_gets_the_images_of_the_run() -> None:
    words = role_words(Config(data="digits", spill="/tmp/x", cache="1G", size="48x64"), "data")

    assert value(words, "--data") == "digits"
    assert (value(words, "--cache"), value(words, "--spill")) == ("1G", "/tmp/x")
    assert value(words, "--size") == "48x64"
    assert "--size" not in role_words(Config(), "data")


async def test_a_state_folder_ends_with_its_block_and_takes_those_of_killed_clusters_with_it(
    tmp_path: Path,
) -> None:
    left = tmp_path / f"{FOLDER_PREFIX}left"
    left.mkdir()
    (left / "lock").touch()
    launcher = LocalLauncher({"TMPDIR": str(tmp_path)})

    async with launcher.state_folder("mine") as folder:
        found = await asyncio.to_thread(lambda: {path.name for path in tmp_path.iterdir()})
        assert folder == str(tmp_path / f"{FOLDER_PREFIX}mine")
        assert found == {f"{FOLDER_PREFIX}mine"}

    assert await asyncio.to_thread(lambda: list(tmp_path.iterdir())) == []


async def test_a_folder_for_the_logs_of_controllers_that_cannot_be_made_is_an_error_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(launching, "_make_own_folder", refuse)
    launcher = LocalLauncher({"TMPDIR": str(tmp_path)})

    async def refuse_removal(disk: Disk, folder: Path) -> None:
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder))

    monkeypatch.setattr(Disk, "remove_folder", refuse_removal)
    with pytest.raises(ConfigError, match="No space left on device; let TMPDIR name another folder"):
        async with launcher.state_folder("mine"):
            pass


async def test_roles_that_ask_for_more_memory_than_this_machine_has_are_refused() -> None:
    launcher = LocalLauncher({})
    enough = Config(threads=1, servers=2, memory=("ps=64M",))
    assert await launcher.prepare(enough, data_servers=1) == 1

    with pytest.raises(ConfigError, match=r"on this machine ask for 2097152\.0 GiB of memory, and it has"):
        await launcher.prepare(msgspec.structs.replace(enough, memory=("ps=1024T",)), data_servers=1)
