"""`token new` and `token derive` write files that `--token-file` takes and only their owner can read."""

import os
from pathlib import Path

import pytest

from adam_async.cli.commands import run_command
from adam_async.cli.options import TrainOptions
from adam_async.cli.results import Kept
from adam_async.cli.terminal import Terminal, explain
from adam_async.cli.train import run_training
from adam_async.cluster.networks import cluster_network
from adam_async.run.token_file import read_token_text
from transport import BufferPool, HandshakeRejected, Identity, RoleKeys


def test_a_new_token_derives_the_keys_of_a_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token, worker = tmp_path / "token", tmp_path / "worker.keys"
    assert run_command(["token", "new", "--out", str(token)]) == 0
    derive = ["token", "derive", "--token-file", str(token), "--role", "worker"]
    assert run_command([*derive, "--out", str(worker)]) == 0
    assert [file.stat().st_mode & 0o777 for file in (token, worker)] == [0o600, 0o600]
    assert run_command(derive) == 0
    assert capsys.readouterr().out == worker.read_text()
    token.write_bytes(b"\xef\xbb\xbf" + token.read_bytes())  # as editors on Windows write text
    assert run_command(derive) == 0
    assert capsys.readouterr().out == worker.read_text()
    keys = read_token_text(worker.read_text().strip())
    assert isinstance(keys, RoleKeys)
    assert keys.role == "worker"
    assert run_command(["token", "new"]) == 0
    assert capsys.readouterr().out.strip() != token.read_text().strip()


def test_an_existing_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "token"
    out.write_text("mine")
    assert run_command(["token", "new", "--out", str(out)]) == 2
    assert "exists: remove it, or name another file" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert run_command(["token", "new", "--out", str(tmp_path / "no" / "folder")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "token", "said"),
    [
        ([], "", "name the role that gets the keys: --role ROLE, one of controller, "),
        (["--role", "worker"], "", "there is no token to derive keys from: give --token-file FILE"),
        (["--role", "wroker"], "sixteen bytes and more", "there is no role 'wroker'; roles are controller"),
        (["--role", "worker"], "short", "token of 5 bytes can be guessed"),
        (
            ["--role", "ps"],
            "adam-async-keys/1 worker ps=" + "A" * 43 + "=",
            "ADAM_TOKEN holds the keys of role",
        ),
    ],
)
def test_missing_tokens_and_roles_are_named(
    words: list[str],
    token: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ADAM_TOKEN", token)
    assert run_command(["token", "derive", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_role_command_refuses_the_keys_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADAM_TOKEN", "a token that nobody guesses")
    worker = tmp_path / "worker.keys"
    assert run_command(["token", "derive", "--role", "worker", "--out", str(worker)]) == 0
    for words in (["ps", "--controller", "tcp://127.0.0.1:1"], ["controller"], ["data", "--data", "digits"]):
        assert run_command([*words, "--token-file", str(worker)]) == 2
        said = capsys.readouterr().err
        assert f"holds the keys of role worker, and this is a {words[0]}: give it those that" in said
    hosts = ["train", "--data", "tcp://127.0.0.1:1", "--token-file", str(worker)]
    assert run_command(hosts) == 2
    assert "the keys of role worker alone, from which no others follow" in capsys.readouterr().err
    assert run_command(["train", "--controller", "tcp://127.0.0.1:1", "--token-file", str(worker)]) == 2
    assert "and this is a driver" in capsys.readouterr().err


async def test_a_driver_with_another_token_was_not_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("a token of somebody else")
    token.chmod(0o600)
    network = cluster_network("a token that nobody guesses", entropy=os.urandom, buffers=BufferPool())
    controller = Identity(role="controller", node="controller", incarnation=1)

    async with network.listen("tcp://127.0.0.1:0", controller, lambda link: link.wait_closed()) as listener:
        options = TrainOptions(controller=listener.address, token_file=token, quiet=True)
        with pytest.raises((HandshakeRejected, ExceptionGroup)) as failure:
            await run_training(options, {}, Terminal(quiet=True))

    code, sentence = explain(failure.value)
    assert code == 6
    assert sentence.startswith("token: the peer refused: the tokens differ: ")
    assert "interrupted" not in capsys.readouterr().err


def test_only_an_interrupted_run_says_so() -> None:
    began = Kept("in epoch 2", True, ("the latest weights in out",))
    before = Kept("before training began", False, ("the report in report.json",))

    assert began.sentence(interrupted=True) == "interrupted in epoch 2; kept: the latest weights in out"
    assert began.sentence(interrupted=False) == "failed in epoch 2; kept: the latest weights in out"
    assert before.sentence(interrupted=False) == ""
