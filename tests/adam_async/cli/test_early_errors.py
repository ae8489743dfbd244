"""Help, the version and wrong words, options and values need no module that takes long to import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = (
    "numpy",
    "numba",
    "torch",
    "adam_async.model.network",
    "adam_async.cluster",
    "adam_async.driver",
    "transport.network",
    "rich.markdown",
)
"""Modules of which each takes a good part of the time of a wrong command."""

ASK = (
    "import os, sys; from adam_async.cli.main import main\n"
    "code = main(sys.argv[1:])\n"
    "slow = sys.modules.keys() & os.environ['SLOW'].split()\n"
    "print('loaded', code, *sorted(slow))"
)


def ran(*words: str, slow: tuple[str, ...] = SLOW, **variables: str) -> tuple[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ADAM_")}
    done = subprocess.run(
        [sys.executable, "-c", ASK, *words],
        check=True,
        capture_output=True,
        text=True,
        env=environment | variables | {"SLOW": " ".join(slow)},
    )
    return done.stdout.splitlines()[-1], done.stderr


@pytest.mark.parametrize("words", ["--help", "train --help", "worker --help", "launch ssh --help"])
def test_help_loads_nothing_slow(words: str) -> None:
    assert ran(*words.split())[0] == "loaded 0"


def test_the_version_loads_no_command() -> None:
    assert ran("--version", slow=("cyclopts", "rich")) == ("loaded 0", "")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("trian", "'train'"),
        ("train --epoks 3", "--epoks"),
        ("train --epochs x", "whole number"),
        ("train --epochs -1", "epochs must be"),
        ("train --consistency ssp", "consistency must be asp"),
        ("train --slow worker-0:2", "share of a core"),
        ("train --controller here", "--controller: address 'here'"),
        ("launch ssh . --momentum 2", "momentum must be in"),
        ("ps --controller tcp://host", "--controller: address 'tcp://host'"),
        ("worker --join tcp://host:70000", "--join: address"),
        ("controller --bind 7070", "--bind: address '7070'"),
        ("store list --controller tcp//host:1", "--controller: address"),
        ("status --controller host:1", "--controller: address"),
        ("train --model foo", "unknown model 'foo'; known: auto"),
        ("train --model absent.toml", "--model absent.toml cannot be read"),
        ("train --augment --transforms absent.toml", "--transforms absent.toml cannot be read"),
        ("train --resume absent", "--resume absent cannot be read"),
        ("train --resume . --epochs -1", "epochs must be"),
        ("train --store absent --images-per-group 0", "images_per_group must be"),
        ("train --replay absent", "--replay absent cannot be read"),
        ("train --init absent", "--init absent cannot be read"),
        ("train --config absent", "--config absent cannot be read"),
        ("train --token-file absent", "--token-file absent cannot be read"),
        ("train --health foo", "--health: address 'foo'"),
        ("evaluate absent", "model absent cannot be read"),
        ("predict absent a.png", "model absent cannot be read"),
        ("predict . absent.png", "image absent.png cannot be read"),
        ("export absent --onnx x.onnx", "model absent cannot be read"),
        ("report absent", "report absent cannot be read"),
        ("checkpoint list absent", "checkpoint absent cannot be read"),
        ("launch ssh absent", "the file of hosts absent cannot be read"),
        ("simulate --scenario foo", '"foo" for --scenario'),
        ("simulate --plan absent", "--plan absent cannot be read"),
        ("plan --model foo", "unknown model 'foo'"),
        ("doctor --model foo", "unknown model 'foo'"),
        ("worker --join tcp://localhost:1 --memory-budget x", "--memory-budget must be a size"),
        ("worker --join tcp://localhost:1 --slow x", "slow 'x' is not of the form"),
        ("data --size foo", "size must be ROWSxCOLUMNS"),
        ("data --cache foo", "cache must be auto or a size"),
        (
            "store list --controller tcp://localhost:1 --token-file absent",
            "--token-file absent cannot be read",
        ),
    ],
)
def test_a_wrong_word_option_or_value_is_refused_before_slow_imports(words: str, named: str) -> None:
    loaded, error = ran(*words.split())
    assert loaded == "loaded 2"
    assert named in error


@pytest.mark.parametrize("where", ["file", "variable"])
def test_a_wrong_value_of_a_file_or_variable_is_refused_before_slow_imports(
    tmp_path: Path, where: str
) -> None:
    file = tmp_path / "adam.toml"
    file.write_text("epochs = 'x'\n")
    if where == "file":
        loaded, error = ran("train", "--config", str(file))
    else:
        loaded, error = ran("train", ADAM_EPOCHS="x")
    assert loaded == "loaded 2"
    assert "epochs must be a whole number, not 'x' (set " in error


@pytest.mark.parametrize(
    "words",
    [
        "train --data absent",
        "evaluate . --data absent",
        "data inspect absent",
        "data --data absent",
        "plan --data absent",
    ],
)
def test_missing_data_are_refused_before_slow_imports(words: str) -> None:
    loaded, error = ran(*words.split())
    assert loaded == "loaded 3"
    assert "absent does not exist; name a folder with a data set" in error


def test_missing_data_of_a_variable_are_refused_before_slow_imports() -> None:
    loaded, error = ran("train", ADAM_DATA="fashion-mnst")
    assert loaded == "loaded 3"
    assert "did you mean fashion-mnist?" in error
