"""Help, the version and wrong words, options and values need no module that takes long to import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.adam_async.cli.heads import write_head

SLOW = (
    "numpy",
    "numba",
    "torch",
    "adam_async.model.network",
    "adam_async.cluster",
    "adam_async.driver.driver",
    "transport.network",
    "rich.markdown",
)
"""Modules of which each takes a good part of the time of a wrong command."""

ASK = """
import contextlib, io, json, os, sys
from adam_async.cli.main import main
slow = set(os.environ["SLOW"].split())
for words in json.load(sys.stdin):
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        code = main(words)
    print(json.dumps([code, error.getvalue(), *sorted(sys.modules.keys() & slow)]))
    slow -= sys.modules.keys()
"""
"""Program that runs commands: prints the exit code, the error and the slow modules that each has loaded."""

Cases = list[tuple[str, str]]
"""Commands, each with a part of its error."""


def ran_all(
    commands: list[str], folder: Path, slow: tuple[str, ...] = SLOW, **variables: str
) -> list[list[Any]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ADAM_")}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        check=True,
        capture_output=True,
        text=True,
        cwd=folder,
        input=json.dumps([words.split() for words in commands]),
        env=environment | variables | {"SLOW": " ".join(slow)},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def ran(words: str, slow: tuple[str, ...] = SLOW, **variables: str) -> list[Any]:
    return ran_all([words], Path.cwd(), slow, **variables)[0]


def check_all(cases: Cases, folder: Path, code: int = 2) -> None:
    """Check that each command fails with its error and this exit code, and loads no slow module."""
    for (words, named), (ended, error, *loaded) in zip(
        cases, ran_all([words for words, _ in cases], folder), strict=True
    ):
        assert (ended, loaded) == (code, []), words
        assert named in error, words


@pytest.mark.parametrize("words", ["--help", "train --help", "worker --help", "launch ssh --help"])
def test_help_loads_nothing_slow(words: str) -> None:
    assert ran(words) == [0, ""]


def test_the_version_loads_no_command() -> None:
    assert ran("--version", slow=("cyclopts", "rich")) == [0, ""]


WRONG_WORDS: Cases = [
    ("trian", "'train'"),
    ("train --epoks 3", "--epoks"),
    ("train --epochs x", "whole number"),
    ("train --data --epochs 3", "train: --data needs a value (adam-async train --help)"),
    ("train --dtype float64", "--dtype is no option of a command: set ADAM_DTYPE, or dtype in the file of"),
    (
        "train --waits.dial_s 3",
        "--waits.dial_s is no option of a command: its table is [waits] in the file of",
    ),
    ("train --wait 3", "--wait: must be a time with its unit, such as 60s or 5m, not '3'"),
    ("train --betas 0.9", "train: --betas needs 2 values (adam-async train --help)"),
    ("status", "status needs --controller tcp://HOST:PORT, the address that the controller printed ("),
    ("ps", "ps needs --controller tcp://HOST:PORT, the address"),
    ("worker", "worker needs --join tcp://HOST:PORT, the address"),
    ("logs", "logs needs NODE (adam-async logs --help)"),
    ("checkpoint list", "checkpoint list needs FOLDER ("),
    ("predict", "predict needs MODEL (adam-async predict --help)"),
    ("train --epochs -1", "epochs must be"),
    ("train --consistency ssp", "consistency must be asp, ssp:S with a whole number S of steps"),
    ("train --slow worker-0:2", "share of a core"),
    ("train --controller here", "--controller: address 'here'"),
    ("launch ssh pyproject.toml --momentum 2", "momentum must be at least 0 and below 1"),
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
    ("train --store absent --images-per-group 0", "--images-per-group must be within 1 and 65536, not 0"),
    ("train --replay absent", "--replay absent cannot be read"),
    ("train --init absent", "--init absent cannot be read"),
    ("train --config absent", "--config absent cannot be read"),
    ("train --token-file absent", "--token-file absent cannot be read"),
    ("train --health foo", "--health: address 'foo'"),
    ("evaluate absent", "model absent cannot be read"),
    ("predict absent a.png", "model absent cannot be read"),
    ("export absent --onnx x.onnx", "model absent cannot be read"),
    ("report absent", "report absent cannot be read"),
    ("checkpoint list absent", "checkpoint absent cannot be read"),
    ("launch ssh absent", "the file of hosts absent cannot be read"),
    ("simulate --scenario foo", '"foo" for --scenario'),
    ("simulate --plan absent", "--plan absent cannot be read"),
    ("plan --model foo", "unknown model 'foo'"),
    ("doctor --model foo", "unknown model 'foo'"),
    ("worker --join tcp://localhost:1 --memory-budget x", "--memory-budget must be a size"),
    ("worker --join tcp://localhost:1 --slow x", "--slow 'x' is not of the form"),
    ("data --size foo", "--size must be ROWSxCOLUMNS"),
    ("data --cache foo", "--cache must be auto or a size"),
    ("store list --controller tcp://localhost:1 --token-file absent", "--token-file absent cannot be read"),
    ("train --step foo", "step is 'foo': give package.module:factory"),
    ("train --step absent:fn", "there is no module 'absent'"),
    ("train --step os:absent", "os has no 'absent'"),
    ("train --step os:getcwd", "os does not define getcwd"),
    ("train --step os:getcwd --model digits", "--model and --step both name"),
    ("train --step-args {}", "--step-args are for the factory of --step"),
    ("train --step json:dumps --step-args x", "--step-args must be a JSON object"),
    ("train --step-path absent", "--step-path absent is no folder"),
    ("train --layer x", "--layer 'x': give each kind of layer once"),
    ("train --layer k=absent:Class", "there is no module 'absent'"),
    ("train --layer k=os:absent", "os has no 'absent'"),
    ("train --data absent:function", "there is no module 'absent'"),
    ("train --data os:absent", "os has no 'absent'"),
    ("train --data tcp://host", "data: address 'tcp://host'"),
    ("train --model pyproject.toml", "unknown key"),
    ("train --augment --transforms pyproject.toml", "expected nothing but tables [[transform]]"),
    ("train --checkpoint pyproject.toml/x", "pyproject.toml exists and is no folder"),
    ("train --store pyproject.toml/x/y", "pyproject.toml exists and is no folder"),
    ("train --out pyproject.toml", "it exists and is no folder"),
    ("train --report tests", "tests is a folder; name a file in it"),
    ("train --events new.json --report ./new.json", "--events and --report both write new.json"),
    ("train --record tests", "tests is a folder; name a file in it"),
    ("train --profile pyproject.toml/x", "it exists and is no folder"),
    ("train --resume tests", "no checkpoint in tests can be read"),
    ("train --resume pyproject.toml", "no checkpoint in pyproject.toml: Not a directory"),
    ("train --init tests", "tests/model.safetensors cannot be read"),
    ("train --replay tests", "--replay tests cannot be read: Is a directory"),
    ("train --token-file tests", "--token-file tests cannot be read: Is a directory"),
    ("train --attach", "--attach is for a cluster whose roles outlive train"),
    ("train --flush-s 1", "--flush-s 1.0 has no effect without a folder for the shards: give --store DIR"),
    ("train --keep 3", "--keep 3 has no effect without a folder for the checkpoints: give --checkpoint DIR"),
    ("train --profile x --controller tcp://localhost:1", "--profile is for roles that this command"),
    ("simulate --seeds x", "--seeds must be A..B"),
    ("simulate --seed -1", "--seed must be a number of at least 0, not -1"),
    ("simulate --jobs -1", "--jobs must be within 0 and"),
    ("simulate --trace x", "--trace is of one run"),
    ("role", "role needs --from-env"),
    ("role --from-env --config tests", "--config tests cannot be read: Is a directory"),
    ("evaluate tests", "tests/model.safetensors cannot be read"),
    ("checkpoint list tests", "no checkpoint in tests can be read"),
    ("launch ssh tests", "the file of hosts tests cannot be read: Is a directory"),
    ("launch ssh README.md", "README.md is not TOML"),
    ("controller --peers x", "--peers: 'x' is not of the form"),
    ("controller --dir pyproject.toml", "it exists and is no folder"),
    ("ps --controller tcp://localhost:1 --flush-s -1", "--flush-s must be within 0.01 and 3600, not -1.0"),
    (
        "ps --controller tcp://localhost:1 --flush-s 5",
        "--flush-s 5.0 has no effect without a folder for the shards: give --dir DIR, or leave --flush-s out",
    ),
    ("data --data digits --wait 5s", "--wait has no effect without --controller: give --controller"),
    ("data --data digits --stage-wait 5", "--stage-wait 5.0 has no effect without a copy: give --stage"),
    (
        "data --data digits --stage-peers tcp://localhost:1",
        "--stage-peers tcp://localhost:1 has no effect without a copy: give --stage FOLDER",
    ),
    ("ps --controller tcp://localhost:1 --copies-bind x", "--copies-bind: address 'x'"),
    ("ps --controller tcp://localhost:1 --advertise x", "--advertise: address 'x'"),
    ("worker --join tcp://localhost:1 --allow-step absent", "--allow-step absent: its import failed"),
    ("ps --controller tcp://localhost:1 --allow-rule absent:Lion", "there is no module 'absent'"),
    ("ps --controller tcp://localhost:1 --allow-rule x", "give package.module:Class"),
    ("ps --controller tcp://localhost:1 --step-path absent", "--step-path absent is no folder"),
    ("train --rule absent:Lion", "there is no module 'absent'"),
    ("worker --join tcp://localhost:1 --layer x", "--layer 'x': give each kind"),
    ("worker --join tcp://localhost:1 --threads -1", "--threads must be a number of at least 0"),
    ("worker --join tcp://localhost:1 --threads 999999", "--threads must be within 0 and"),
    ("data --allow-transform x", "expected package.module:function"),
    ("data --step-path absent", "--step-path absent is no folder"),
    ("data --stage x --stage-peers y", "--stage-peers: address 'y'"),
    ("store show --controller tcp://localhost:1", "needs the name of a store; adam-async store list shows"),
    ("store save x tests --controller tcp://localhost:1", "tests is a folder; name a file in it"),
]
"""Commands with a wrong word, option or value, or with a file that does not exist."""


def test_a_wrong_word_option_or_value_is_refused_before_slow_imports() -> None:
    check_all(WRONG_WORDS, Path.cwd())


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with folders and files that commands refuse, and with a model."""
    folder = tmp_path_factory.mktemp("places")
    for name in ("empty", "flat"):
        (folder / name).mkdir()
    (folder / "flat" / "a.png").touch()
    (folder / "words.txt").write_text("words without an order")
    (folder / "list.json").write_text("[]")
    (folder / "bad.toml").write_text("foo = 1\n")
    write_head(folder / "model")
    return folder


WRONG_FILES: Cases = [
    ("train --spill words.txt/x", "words.txt exists and is no folder"),
    ("data --spill words.txt", "words.txt cannot be made: it exists and is no folder"),
    ("train --init words.txt", "words.txt is not a safetensors file"),
    ("evaluate words.txt", "words.txt is not a safetensors file"),
    ("predict words.txt words.txt", "words.txt is not a safetensors file"),
    ("export words.txt --onnx x.onnx", "words.txt is not a safetensors file"),
    ("predict model", "predict needs images"),
    ("predict model words.txt --top 0", "--top must be a number of at least 1, not 0"),
    ("export model", "export needs a file to write: --onnx FILE, --torch FILE, or both"),
    ("export model --torch model/model.safetensors", "is the model, or is named twice"),
    ("export model --torch empty", "empty is a folder; name a file in it"),
    ("evaluate model --threads -1", "--threads must be within 0 and"),
    ("report", "name one report or several"),
    ("report words.txt", "words.txt is no report of this version"),
    ("report list.json", "Expected `object`, got `array`"),
    ("train --replay words.txt", "words.txt is not a record of a run"),
    ("simulate --plan list.json", "list.json is no plan of a simulated run"),
    ("plan --partitions 0", "--partitions must be within 1 and 64, not 0"),
    ("plan --in-flight 5000", "--in-flight must be within 0 and 4096, not 5000"),
    ("plan --threads -1", "--threads must be a number of at least 0, not -1"),
    ("plan --bandwidth x", "--bandwidth 'x' is not a bandwidth: write 1Gbit/s"),
    ("plan --latency x", "--latency 'x' is not a latency: write 0.1ms"),
    (
        "plan --halo exchange --plan layers",
        "--halo exchange has no effect with --plan layers, only with plan",
    ),
    ("plan --json empty", "empty is a folder; name a file in it"),
    ("plan --model bad.toml", "unknown key 'foo' in a model"),
    ("doctor --model bad.toml", "unknown key 'foo' in a model"),
    ("doctor --images-per-group 0", "--images-per-group must be within 1"),
    ("data inspect digits --classes 0", "--classes must be within 1 and 1024, not 0"),
    ("data inspect digits --size x", "--size must be ROWSxCOLUMNS"),
    ("data inspect digits --transforms bad.toml", "bad.toml has 'foo'"),
    ("launch slurm --nodes 0", "--nodes must be within 1 and"),
    ("launch slurm --controller tcp://localhost:1", "--controller has no effect with launch"),
    ("launch torchrun --port -1", "--port must be within 0 and 65535, not -1"),
    ("launch torchrun", "torchrun sets RANK and MASTER_ADDR"),
    ("launch ray --env x", "--env 'x'"),
    ("scale -1 --controller tcp://localhost:1", "the number of workers must be within 0"),
    ("worker --join tcp://localhost:1 --in-flight -1", "--in-flight must be within 0 and 4096, not -1"),
    ("drill --replicas 0", "--replicas must be within 1 and 1024, not 0"),
    ("controller --id=", "--id '' must be a name of 1 to 80 bytes"),
    ("worker --join tcp://localhost:1 --id=", "--id '' must be a name of 1 to 80 bytes"),
    ("predict model absent.png", "image absent.png cannot be read"),
]
"""Commands with a file of the wrong kind, or a number out of its bounds."""

WRONG_DATA: Cases = [
    ("train --data empty", "empty holds no data set: expected train-images"),
    ("train --data words.txt", "words.txt is neither a folder nor an .npz"),
    ("train --data http://host/x", "http://host/x is an address"),
    ("train --data flat", "found a.png; did you mean --data .?"),
    ("data inspect words.txt", "words.txt is neither a folder nor an .npz"),
    ("data --data empty", "empty holds no data set"),
    ("plan --data empty", "empty holds no data set"),
    ("train --data absent", "absent does not exist; name a folder with a data set"),
    ("evaluate model --data absent", "absent does not exist; name a folder with a data set"),
    ("data inspect absent", "absent does not exist; name a folder with a data set"),
    ("data --data absent", "absent does not exist; name a folder with a data set"),
    ("plan --data absent", "absent does not exist; name a folder with a data set"),
]
"""Commands with a source of images that does not exist, or holds no data set."""


def test_a_file_of_the_wrong_kind_or_a_number_out_of_bounds_is_refused_before_slow_imports(
    places: Path,
) -> None:
    check_all(WRONG_FILES, places)


def test_wrong_data_are_refused_before_slow_imports(places: Path) -> None:
    check_all(WRONG_DATA, places, code=3)


@pytest.mark.parametrize("where", ["file", "variable"])
def test_a_wrong_value_of_a_file_or_variable_is_refused_before_slow_imports(
    tmp_path: Path, where: str
) -> None:
    file = tmp_path / "adam.toml"
    file.write_text("epochs = 'x'\n")
    if where == "file":
        code, error, *loaded = ran(f"train --config {file}")
    else:
        code, error, *loaded = ran("train", ADAM_EPOCHS="x")
    assert (code, loaded) == (2, [])
    assert "epochs must be a whole number, not 'x' (set " in error


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "no variable names the role"),
        ({"ADAM_ROLE": "foo"}, "ADAM_ROLE=foo is no role"),
        ({"ADAM_ROLE": "worker", "ADAM_CONTROLLER": "x"}, "ADAM_CONTROLLER: address 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE='x' must be a whole number"),
        ({"POD_NAME": "foo"}, "POD_NAME=foo names no role"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not set, and must be"),
    ],
)
def test_a_wrong_variable_of_a_batch_job_is_refused_before_slow_imports(
    variables: dict[str, str], named: str
) -> None:
    code, error, *loaded = ran("role --from-env", **variables)
    assert (code, loaded) == (2, [])
    assert named in error


def test_missing_data_of_a_variable_are_refused_before_slow_imports() -> None:
    code, error, *loaded = ran("train", ADAM_DATA="fashion-mnst")
    assert (code, loaded) == (3, [])
    assert "did you mean fashion-mnist?" in error
