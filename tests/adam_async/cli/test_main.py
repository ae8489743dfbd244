"""The command line becomes a configuration, or an error; no role starts."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cyclopts import CycloptsError
from rich.console import Console

from adam_async.cli import commands
from adam_async.cli.commands import app
from adam_async.cli.files import make_folder, read_file
from adam_async.cli.main import one_blas_thread
from adam_async.cli.options import ServerOptions, TrainOptions, WorkerOptions
from adam_async.cli.terminal import explain, reader_left
from adam_async.cli.train import configure, needs_data
from adam_async.errors import BindFailed, ConfigError, DataError, RoleDied
from adam_async.run.config import FIELDS, Config
from adam_async.runtime.disk import Disk
from transport import BindRefused, HandshakeRejected, LinkBroken, RemoteProtocolError


def parsed(*words: str) -> tuple[str, dict[str, Any]]:
    """The command and the arguments that words come to."""
    command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    return command.__name__, bound.arguments


def train_options(*words: str) -> TrainOptions:
    _, arguments = parsed("train", *words)
    options = arguments.get("options", TrainOptions())
    assert isinstance(options, TrainOptions)
    return options


async def configured(*words: str, environment: dict[str, str] | None = None) -> Config:
    async with Disk() as disk:
        return await configure(train_options(*words), environment or {}, disk)


async def test_the_command_line_outranks_the_environment_the_file_and_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "adam.toml"
    file.write_text("epochs = 5\nservers = 2\nimages_per_group = 32\n[waits]\ndrain_s = 1.5\n")

    config = await configured(
        "--config",
        str(file),
        "--epochs",
        "7",
        environment={"ADAM_EPOCHS": "6", "ADAM_SERVERS": "3", "ADAM_DATA_DIR": "/somewhere"},
    )

    assert (config.epochs, config.servers, config.images_per_group) == (7, 3, 32)
    assert config.waits.drain_s == 1.5
    assert config.replicas == Config().replicas
    assert config.data == "auto"


async def test_a_wrong_type_is_named_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "adam.toml"
    file.write_text('epochs = "many"\n')

    with pytest.raises(ConfigError, match=rf"epochs must be a whole number, not 'many' \(set in {file}\)"):
        await configured("--config", str(file))
    with pytest.raises(ConfigError, match=r"not 'x' \(set by ADAM_EPOCHS\)"):
        await configured("--config", str(file), environment={"ADAM_EPOCHS": "x"})


async def test_threads_of_all_replicas_are_counted_here_and_not_on_other_machines() -> None:
    with pytest.raises(ConfigError, match="for each of replicas=1000 is more than"):
        await configured("--replicas", "1000")
    assert (await configured("--replicas", "1000", "--controller", "tcp://10.0.0.1:7070")).replicas == 1000


async def test_without_options_the_defaults_hold() -> None:
    assert await configured() == Config()


def test_every_option_of_a_run_is_on_the_command_line_but_those_of_tests() -> None:
    assert set(FIELDS) - set(TrainOptions().layer()) == {"dtype", "read_ahead", "rule_record", "waits"}


@pytest.mark.parametrize("command", ["controller", "ps", "data serve", "worker", "simulate"])
def test_the_help_names_no_default_that_is_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    app([*command.split(), "--help"], console=Console(width=400))
    said = capsys.readouterr().out
    assert "[default: " in said
    for nothing in ("]", "()]", '""]', "False]", "None]"):
        assert f"[default: {nothing}" not in said


def test_the_help_names_the_defaults_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    app(["train", "--help"], console=Console(width=400))
    text = capsys.readouterr().out

    said = {}
    for name in set(FIELDS) & set(TrainOptions().layer()):
        found = re.search(rf"^│ --{name.replace('_', '-')} (.*)│$", text, re.MULTILINE)
        assert found is not None, name
        said[name] = found[1].strip().removesuffix("]").partition("[default: ")[2]
    without = ("spill", "transforms", "slow", "memory", "record", "betas")
    assert said == {name: "" if name in without else str(getattr(Config(), name)) for name in said}


def test_a_command_ends_without_a_collection_of_what_lives_to_the_end() -> None:
    program = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 0))
from adam_async.cli.main import main
main(["token", "new"])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "True"


def test_options_are_written_with_dashes() -> None:
    options = train_options("--images-per-group", "64", "--processes", "--rule", "adam", "--rate", "0.01")

    assert options.layer()["images_per_group"] == 64
    assert options.layer()["processes"] is True
    assert options.layer()["rate"] == 0.01


async def test_each_straggler_is_given_once() -> None:
    said = ("--slow", "worker-1:0.2", "--slow", "worker-0~worker-1:5ms+1ms")
    assert (await configured(*said)).slow == ("worker-1:0.2", "worker-0~worker-1:5ms+1ms")
    assert (await configured(environment={"ADAM_SLOW": "worker-0:0.5"})).slow == ("worker-0:0.5",)
    with pytest.raises(
        ConfigError, match=r"--slow .* excludes roles started by hand .*: it is for roles that"
    ):
        await configured(*said, "--controller", "tcp://10.0.0.1:7070")


async def test_a_mode_and_a_schedule_are_asked_for_in_words() -> None:
    bounded = await configured("--consistency", "ssp:4", "--warm-start", "100", "--scale-by-staleness")
    together = await configured(
        "--consistency", "bsp", "--lag", "1", "--clip", "2.5", "--layer-rate", "0.002"
    )
    falling = await configured(
        "--schedule", "step", "--decay", "0.1", "--decay-every", "2", "--warm-up", "0.5"
    )
    kept = await configured("--checkpoint-every", "500", "--checkpoint", "folder")

    assert bounded == Config(consistency="ssp:4", warm_start=100, scale_by_staleness=True)
    assert together == Config(consistency="bsp", lag=1, clip=2.5, layer_rate=0.002)
    assert falling == Config(schedule="step", decay=0.1, decay_every=2.0, warm_up=0.5)
    assert kept == Config(checkpoint_every=500)


async def test_a_folder_for_shards_is_refused_with_a_controller_whose_servers_have_their_own() -> None:
    with pytest.raises(
        ConfigError, match=r"--store is for servers that this command starts.*--attach goes on"
    ):
        await configured("--store", "shards", "--controller", "tcp://10.0.0.1:7070")


def test_a_role_is_told_where_its_controller_is() -> None:
    command, arguments = parsed("ps", "--controller", "tcp://10.0.0.1:7070")

    assert command == "ps"
    assert arguments["options"] == ServerOptions(controller="tcp://10.0.0.1:7070")


def test_a_server_is_told_its_address_for_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, copies = "tcp://10.0.0.1:7070", "tcp://10.1.0.1:0"
    _, given = parsed("ps", "--controller", controller, "--copies-bind", copies)
    monkeypatch.setenv("ADAM_COPIES_BIND", copies)
    _, set_by_variable = parsed("ps", "--controller", controller)

    assert given["options"] == set_by_variable["options"]
    assert given["options"].config().copies_bind == copies


@pytest.mark.parametrize("option", ["--join", "--controller"])
def test_a_worker_is_told_what_to_join(option: str) -> None:
    command, arguments = parsed("worker", option, "tcp://10.0.0.1:7070", "--threads", "3")

    assert command == "worker"
    assert arguments["options"].config().threads == 3
    assert arguments["options"].controller == WorkerOptions(controller="tcp://10.0.0.1:7070").controller


def test_reports_are_named_one_after_the_other() -> None:
    command, arguments = parsed("report", "README.md", "CHANGELOG.md")

    assert command == "report"
    assert arguments["files"] == (Path("README.md"), Path("CHANGELOG.md"))


@pytest.mark.parametrize(
    ("words", "claim"),
    [
        (["train", "--epoch", "3"], "Unknown option"),
        (["train", "--rule", "sdg"], "--rule"),
        (["train", "--replicate", "3"], "Unknown option"),
        (["train", "--epochs", "2.4"], "must be a whole number, not '2.4'"),
        (["train", "--checkpoint-misses=1.5"], "must be a whole number, not '1.5'"),
        (["worker", "--join", "tcp://127.0.0.1:1", "--threads=1.5"], "must be a whole number, not '1.5'"),
        (["simulate", "--seed", "1.5"], "must be a whole number, not '1.5'"),
        (["train", "--memory-budget", "1K"], "--memory-budget must be at least 1M, not '1K'"),
        (["train", "--checkpoint", ""], "the path is empty: name a file or folder"),
        (["train", "--out="], "the path is empty: name a file or folder"),
    ],
)
def test_words_fractions_and_empty_paths_that_mean_nothing_are_named(words: list[str], claim: str) -> None:
    with pytest.raises(CycloptsError) as raised:
        parsed(*words)

    assert claim in str(raised.value)


def test_variables_set_the_options_of_roles_and_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAM_THREADS", "3")
    monkeypatch.setenv("ADAM_SLOW", "worker-1:0.2,worker-1~ps-0:5ms")
    _, arguments = parsed("worker", "--join", "tcp://10.0.0.1:7070")
    config = arguments["options"].config()
    assert (config.threads, config.slow) == (3, ("worker-1:0.2", "worker-1~ps-0:5ms"))

    monkeypatch.setenv("ADAM_CACHE", "4G")
    monkeypatch.setenv("ADAM_DAMAGED", "skip")
    _, arguments = parsed("data", "--cache", "2G")
    config = arguments["options"].config()
    assert (config.cache, config.damaged) == ("2G", "skip")

    monkeypatch.setenv("ADAM_THREADS", "many")
    with pytest.raises(CycloptsError, match="ADAM_THREADS"):
        parsed("worker", "--join", "tcp://10.0.0.1:7070")


def test_every_command_refuses_a_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADAM_THREAD", "3")
    assert commands.run_command(["worker", "--join", "tcp://127.0.0.1:1"]) == 2
    assert "ADAM_THREAD sets no option; did you mean ADAM_THREADS?" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "claim"),
    [
        (["--checkpoint-misses", "1"], "--checkpoint-misses 1 has no effect without a folder for the"),
        (["--threads", "100000"], "per core"),
        (["--consistency", "bsp", "--pull-every", "2"], "--pull-every 2 excludes --consistency bsp"),
        (["--schedule", "cosine", "--decay", "0.1"], "or leave --decay out"),
        (["--processes", "--controller", "tcp://127.0.0.1:1"], "--processes excludes roles started by hand"),
        (["--token-file", __file__], "all roles share this one: leave it"),
        (["--memory-budget", "1G"], "--memory-budget 1G has no effect without links between processes"),
        (["--checksum", "on"], "--checksum on has no effect without links between processes"),
    ],
)
async def test_values_that_cannot_be_are_named(words: list[str], claim: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(claim)):
        await configured(*words)


async def test_a_model_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_bytes(b"\xff\xfe\x00")

    async with Disk() as disk:
        with pytest.raises(ConfigError, match="not text in UTF-8"):
            await read_file(file, "--model", disk)


def test_a_folder_for_results_is_made_before_the_work(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b", "--out")
    (tmp_path / "file").touch()

    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(ConfigError, match="cannot be made"):
        make_folder(tmp_path / "file" / "c", "--out")


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ([], True),
        (["--processes"], False),
        (["--processes", "--report", "r.json"], True),
        (["--controller", "tcp://127.0.0.1:1", "--report", "r.json"], False),
    ],
)
async def test_images_are_loaded_only_where_they_are_needed(words: list[str], needed: bool) -> None:
    assert needs_data(train_options(*words), await configured(*words)) is needed


def test_blas_gets_one_thread_unless_the_user_says_otherwise() -> None:
    environment = {"OMP_NUM_THREADS": "4"}

    one_blas_thread(environment)

    assert environment == {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (DataError("x"), 3),
        (RoleDied("ps-0", "killed by signal 9"), 4),
        (LinkBroken("x"), 5),
        (HandshakeRejected("token", "x"), 6),
        (RemoteProtocolError("handshake", "x"), 6),
        (BindRefused("x"), 7),
        (BindFailed("tcp://127.0.0.1:1", "x"), 7),
        (MemoryError("x"), 2),
        (KeyError("x"), 1),
    ],
)
def test_each_error_has_its_code_also_deep_in_groups(error: Exception, code: int) -> None:
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [error]), ValueError("later")])

    assert explain(error)[0] == code
    assert explain(group)[0] == code


def test_a_reader_that_left_is_told_from_one_that_is_there() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        assert not reader_left(stream)
        os.close(reading)
        assert reader_left(stream)
    assert not reader_left(io.StringIO())


def test_a_broken_pipe_that_is_not_our_output_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> int:
        raise BrokenPipeError("a socket")

    monkeypatch.delenv("ADAM_TRACEBACK", raising=False)
    bound = SimpleNamespace(args=(), kwargs={})
    app = SimpleNamespace(
        parse_args=lambda *_, **__: (broken, bound, {}),
        parse_commands=lambda _: ((), (), []),
        help_flags=("--help",),
    )
    monkeypatch.setattr(commands, "app", app)
    assert commands.run_command([]) == 1
    assert "unexpected BrokenPipeError: a socket" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["train", "--help"], 0),
        (["data", "inspect", "digits"], 0),
        (["unknown"], 2),
        (["train", "--epochs", "x"], 2),
    ],
)
def test_a_reader_that_left_ends_a_command_without_a_word_or_an_error_of_its_own(
    words: list[str], code: int
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        command = [sys.executable, "-m", "adam_async", *words]
        told = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
        alone = subprocess.run(command, stdout=pipe, stderr=pipe)
    assert (told.returncode, alone.returncode) == (code, code)
    assert "Traceback" not in told.stderr
    assert bool(told.stderr) == bool(code)


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["token", "new"], ["simulate", "--list"]])
def test_standard_output_on_a_full_disk_is_named(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "adam_async", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr) == (
        2,
        "adam-async: standard output cannot be written: No space left on device; send it to another place\n",
    )


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert explain(FileNotFoundError(2, "No such file"))[0] == 1
    gone.rmdir()
    error = FileNotFoundError(2, "No such file")
    assert explain(error) == (2, "the working directory no longer exists: change to another folder")
