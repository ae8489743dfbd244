"""`launch k8s` writes private files for the keys, and names a mistake in a file, a folder or an option."""

import json
from pathlib import Path

import pytest

from adam_async.cli.commands import run_command
from adam_async.run.token_file import check_token_is_for

IMAGE = ("--image", "adam-async:0.1.0")


def launch(folder: Path, *words: str, options: str = 'data = "digits"\n') -> int:
    (folder / "adam.toml").write_text(options)
    return run_command(["launch", "k8s", str(folder / "adam.toml"), "--out", str(folder / "out"), *words])


def test_the_keys_of_each_role_are_in_one_private_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, *IMAGE) == 0
    assert "next: kubectl apply -f " in capsys.readouterr().out
    file = tmp_path / "out" / "00-keys.json"
    assert file.stat().st_mode & 0o777 == 0o600
    keys = json.loads(file.read_text())["stringData"]
    assert list(keys) == ["client", "controller", "data", "driver", "ps", "reader", "worker"]
    for role, text in keys.items():
        check_token_is_for(text, role, origin="the Secret")


def test_a_secret_of_the_user_needs_no_keys(tmp_path: Path) -> None:
    assert launch(tmp_path, *IMAGE, "--secret", "mine") == 0
    assert not (tmp_path / "out" / "00-keys.json").exists()
    assert '"name": "mine"' in (tmp_path / "out" / "20-ps.json").read_text()


def test_files_that_the_options_name_travel_with_them(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "small.toml").write_text("name = 'small'\n")
    assert launch(tmp_path, *IMAGE, options='data = "digits"\nmodel = "nets/small.toml"\n') == 0
    data = json.loads((tmp_path / "out" / "00-config.json").read_text())["data"]
    assert list(data.values()) == ['data = "digits"\nmodel = "nets/small.toml"\n', "name = 'small'\n"]


@pytest.mark.parametrize(
    ("words", "options", "claim"),
    [
        (("--name", "My_Run"), "", "--name 'My_Run' is no name for Kubernetes"),
        (("--resources", "worker=0,8Gi"), "", "worker: processor 0 is zero, and no pod could start"),
        ((), "servers = 1\ncopies = 2\n", "copies=2 need as many servers, and there are 1: raise servers"),
        ((), "controllers = 2\n", "controllers must be 1, 3 or 5"),
        ((), 'model = "missing.toml"\n', "cannot be read: No such file or directory"),
        ((), "serverz = 1\n", "unknown key 'serverz'"),
        (("--step", "mine.py"), "", "--step 'mine.py' is no step: give package.module:factory"),
        (("--step-args", "{}"), "", "--step-args are for the factory of --step"),
        (("--step", "a:b", "--step-args", "{"), "", "--step-args must be a JSON object"),
        (("--layer", "odd"), "", "--layer 'odd': give each kind of layer once"),
        (("--step-path", "code"), "", "--step-path 'code' is no folder of the image"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(
    words: tuple[str, ...], options: str, claim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, *IMAGE, *words, options=options) == 2
    assert claim in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other.json").write_text("{}")
    assert launch(tmp_path, *IMAGE) == 2
    assert "is not empty, and kubectl would apply its files, too" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["other.json"]


def test_an_image_is_required(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(tmp_path) == 2
    assert "--image" in capsys.readouterr().err


def test_the_workers_may_import_the_step_that_the_command_names(tmp_path: Path) -> None:
    words = ("--step", "mine.steps:make", "--step-args", '{"hidden": 8}', "--step-path", "/srv/code")
    assert launch(tmp_path, *IMAGE, *words) == 0
    workers = (tmp_path / "out" / "40-worker.json").read_text()
    assert '"--allow-step",' in workers
    assert '"mine.steps"' in workers
    assert '"mine.steps:make"' in (tmp_path / "out" / "50-driver.json").read_text()
