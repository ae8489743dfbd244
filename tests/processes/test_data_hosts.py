"""Standalone data servers and trainings from command lines, and data servers that are started again."""

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes.commands import Command, run

pytestmark = pytest.mark.processes

TOKEN = "a token that nobody guesses"


def host_of(stack: ExitStack, *words: str, environment: dict[str, str] | None = None) -> tuple[Command, str]:
    """A standalone data server, and its address."""
    host = stack.enter_context(Command("data", "--data", "digits", *words, environment=environment))
    line = host.wait_for(" listens on ")
    address = line.partition(" listens on ")[2].partition(";")[0]
    assert f"; join it with: adam-async train --data {address}" in line
    return host, address


def test_a_host_serves_trainings_one_after_the_other_and_two_at_a_time_and_survives_ctrl_c() -> None:
    with ExitStack() as stack:
        host, address = host_of(stack, "--verbose")
        endless = ("train", "--data", address, "--epochs", "100000")
        with Command(*endless) as one, Command(*endless) as other:
            one.wait_for("epoch 1/100000")
            other.wait_for("epoch 1/100000")
            one.signal(signal.SIGINT)
            assert one.finish() == 130, one.output
            host.wait_for("no longer serves the cluster")
            other.signal(signal.SIGTERM)
            assert other.finish() == 143, other.output
            host.wait_for("no longer serves the cluster")
        assert "Traceback" not in one.output + other.output

        output = run("train", "--data", address, "--epochs", "2")
        assert "after 2 epochs" in output
        assert "digits inside the package" in output

        host.wait_for("no longer serves the cluster")
        host.signal(signal.SIGINT)
        assert host.finish() == 130
        assert "Traceback" not in host.output
        assert host.output.count(" serves the cluster at ") == 6, host.output


def test_processes_train_with_the_token_of_two_hosts(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(f"{TOKEN}\n")
    token_file.chmod(0o600)
    with ExitStack() as stack:
        _, one = host_of(stack, environment={"ADAM_TOKEN": TOKEN})
        _, two = host_of(stack, environment={"ADAM_TOKEN": TOKEN})
        both = ("train", "--data", f"{one},{two}", "--processes", "--epochs", "2")

        output = run(*both, "--token-file", str(token_file))
        assert "after 2 epochs" in output

        output = run(*both, code=6)
        assert "(--token-file, or ADAM_TOKEN)" in output
        assert "Traceback" not in output


@pytest.mark.parametrize(
    ("words", "code", "claim"),
    [
        (("--data", "tcp://127.0.0.1:1", "--config", "adam.toml"), 4, "cannot reach a data server at tcp://"),
        (("--data", "tcp://127.0.0.1"), 2, "data: address 'tcp://127.0.0.1' is not of the form"),
        (
            ("--data", "tcp://127.0.0.1:1", "--data-servers", "2"),
            2,
            "data_servers=2 excludes data servers at",
        ),
        (("--data", "digits", "--token-file", "t"), 2, "adam-async: --token-file "),
    ],
)
@pytest.mark.parametrize("processes", [(), ("--processes",)], ids=["local", "processes"])
def test_an_error_of_external_data_is_one_line(
    words: tuple[str, ...], code: int, claim: str, processes: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "adam.toml").write_text("[waits]\ndial_s = 0.1\n")
    words = tuple(str(tmp_path / word) if word == "adam.toml" else word for word in words)

    output = run("train", *words, *processes, code=code)
    assert claim in output
    assert output.splitlines()[-1].startswith("adam-async: ")
    assert "Traceback" not in output


def test_a_killed_data_server_is_started_again_while_there_is_another() -> None:
    with Command(
        "train", "--data", "digits", "--processes", "--data-servers", "2", "--epochs", "40"
    ) as command:
        command.wait_for("epoch 1/40")
        os.kill(command.child("data-1"), signal.SIGKILL)
        command.wait_for("data-1 died: killed by signal 9; starting it again")
        command.ends(0)

    epochs = re.findall(r"epoch \d+/40: .* (\S+) images in", command.output)
    assert epochs == ["1,437"] * 40, command.output
    assert "Traceback" not in command.output


def test_the_last_data_server_is_not_started_again_and_the_weights_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Command(
        "train", "--data", "digits", "--processes", "--epochs", "100000", "--out", str(out)
    ) as command:
        command.wait_for("epoch 1/100000")
        os.kill(command.child("data-0"), signal.SIGKILL)
        line = command.wait_for("data-0 died")
        command.ends(4)

    assert "starting it again" not in line
    assert re.search(
        rf"failed (in|after) epoch \d+, .*; kept: the latest weights in {out}/model.safetensors",
        command.output,
    )
    assert (out / "model.safetensors").exists()
