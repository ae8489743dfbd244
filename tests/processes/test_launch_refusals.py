"""A launch without its engine, or with an engine that does not suit, is one line with the cure."""

from pathlib import Path

import pytest

from adam_async.errors import install_command
from tests.processes.commands import ROOT, Command, children_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

HOSTS = '[[hosts]]\nname = "127.0.0.1"\n'


def refused(folder: Path, *words: str) -> str:
    """Run a launch whose Python finds modules in a folder first; returns its only line."""
    file = folder / "adam.toml"
    file.write_text('data = "digits"\nservers = 2\nreplicas = 2\n')
    with Command("launch", *words, str(file), environment={"PYTHONPATH": f"{folder}:{ROOT}"}) as command:
        command.ends(2, seconds=60)
        assert children_of(command.pid) == {}
    assert command.output.count("\n") == 1, command.output
    return command.output


def module(folder: Path, name: str, text: str, *, version: str = "") -> None:
    """Write a module, and with a version its metadata."""
    (folder / f"{name}.py").write_text(text)
    if version:
        metadata = folder / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_python_without_ray_names_the_extra(tmp_path: Path) -> None:
    module(tmp_path, "ray", "raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n")

    output = refused(tmp_path, "ray", "--address", "local")
    assert f"launch ray needs Ray, of the extra `ray`: {install_command('ray')}" in output


def test_an_old_ray_is_named_with_the_oldest_that_suits(tmp_path: Path) -> None:
    module(tmp_path, "ray", "", version="2.9.3")

    output = refused(tmp_path, "ray", "--address", "local")
    assert f"this Python has Ray 2.9.3, older than 2.60: {install_command('ray')} --upgrade" in output


def test_a_python_without_asyncssh_names_the_extra(tmp_path: Path) -> None:
    module(
        tmp_path, "asyncssh", "raise ModuleNotFoundError(\"No module named 'asyncssh'\", name='asyncssh')\n"
    )
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(HOSTS)

    output = refused(tmp_path, "ssh", str(hosts))
    assert f"launch ssh needs asyncssh, of the extra `ssh`: {install_command('ssh')}" in output


def test_a_host_with_less_memory_than_its_roles_ask_for_is_named(tmp_path: Path) -> None:
    file = tmp_path / "adam.toml"
    file.write_text('data = "digits"\nprocesses = true\nmemory = ["ps=1024T"]\n')
    with Command("train", "--config", str(file)) as command:
        command.ends(2, seconds=60)

    assert "the processes on this machine ask for 1048576.0 GiB of memory, and it has" in command.output
    assert "lower --memory, start fewer roles, or add machines" in command.output
