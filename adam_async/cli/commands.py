"""The commands of `adam-async`, with the exit code of each call.

This file imports only the modules that `--help` needs; each command imports its other modules when it runs.
"""

import difflib
import os
import sys
from collections.abc import Callable, Coroutine
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from attrs import evolve
from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.help import HelpEntry, HelpPanel, InlineText
from cyclopts.help.formatters import DefaultFormatter
from docstring_parser import parse_from_object
from rich.console import Console, ConsoleOptions
from rich.text import Text

import adam_async
from adam_async.cli.checkout import add_commands, check_command
from adam_async.cli.files import check_checkpoints, check_model_option, check_model_path, check_present
from adam_async.cli.launch_commands import launch_commands
from adam_async.cli.options import (
    WAITING,
    Action,
    ControllerOptions,
    DashboardOptions,
    DataServerOptions,
    ExportOptions,
    FromEnvironmentOptions,
    InspectOptions,
    JsonOptions,
    LayerOptions,
    OperatorOptions,
    PlanOptions,
    PredictOptions,
    ServerOptions,
    StageOptions,
    StatusOptions,
    StoreOptions,
    TrainOptions,
    WorkerOptions,
    check_threads,
    checked_by,
    node_named,
    of_run,
    shown_default,
    to_read,
    value_of,
    within,
)
from adam_async.cli.options import check_words as check_store_words
from adam_async.cli.running import run_driver, run_in_loop, run_role
from adam_async.cli.signals import EARLY
from adam_async.cli.terminal import EscapingConsole, Terminal, explain, reader_left
from adam_async.errors import ConfigError, counted, first_cause
from adam_async.option_types import UNTYPED, check_modes
from adam_async.run.addresses import own_peer, read_peers
from adam_async.run.config import FIELDS, MOST_WORKERS, OPTIONS, Config, Damaged
from adam_async.run.option_sources import PLAIN, variable_of

CheckpointsPath = Annotated[
    Path,
    to_read("checkpoint", check_checkpoints),
    Parameter(help="Folder of `train --checkpoint`, or one checkpoint in it."),
]

checkpoint_commands = App(name="checkpoint", help="List, verify and export the checkpoints of a run.")


@checkpoint_commands.command(name="list")
def checkpoint_list(folder: CheckpointsPath, /, *, options: JsonOptions = JsonOptions()) -> int:
    """List checkpoints: epoch, groups, run, mode, model, time, bytes, and whether all files are there."""
    from adam_async.cli.checkpoint import list_checkpoints

    return run_in_loop(lambda terminal: list_checkpoints(folder, options, terminal))


@checkpoint_commands.command(name="verify")
def checkpoint_verify(folder: CheckpointsPath, /, *, options: JsonOptions = JsonOptions()) -> int:
    """Read every byte of checkpoints, and report damage; exit code 3 if one is damaged."""
    from adam_async.cli.checkpoint import verify_checkpoints

    return run_in_loop(lambda terminal: verify_checkpoints(folder, options, terminal))


@checkpoint_commands.command(name="export")
def checkpoint_export(
    folder: CheckpointsPath, file: Path, /, *, options: LayerOptions = LayerOptions()
) -> int:
    """Write the model of the newest whole checkpoint, or of one that you name, as `train --out` does.

    Parameters
    ----------
    file
        File for the model, in the safetensors format; `evaluate`, `predict` and `export` take it.
    """
    from adam_async.cli.checkpoint import export_checkpoint

    return run_in_loop(lambda terminal: export_checkpoint(folder, file, options, terminal))


USAGE = 2

ModelPath = Annotated[Path, to_read("model", check_model_path)]


class FilledHelp(DefaultFormatter):
    """Formats help as cyclopts does, and fills each paragraph: the lines of a docstring end anywhere.

    cyclopts fills only Markdown, whose modules take as long to import as all others of the help.
    """

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print a panel of commands or options."""
        entries = [evolve(entry, description=filled(_described(entry))) for entry in panel.entries]
        super().__call__(console, options, panel.copy(entries=entries))

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        super().render_description(console, options, filled(description))


def _described(entry: HelpEntry) -> Any:
    """Return the description of an entry; for an option of a run, the text at the field of `Config`."""
    names = [name.removeprefix("--").replace("-", "_") for name in entry.positive_names]
    empty = isinstance(entry.description, InlineText) and not str(entry.description.primary_renderable)
    if empty and names and names[0] in FIELDS:
        return InlineText(Text(_texts_of_run()[names[0]]))
    return entry.description


@cache
def _texts_of_run() -> dict[str, str]:
    """Return the text at each field of `Config`, which Python keeps in the source alone."""
    return {each.arg_name: each.description or "" for each in parse_from_object(Config).params}


def filled(text: Any) -> Any:
    """Return an inline text of cyclopts with each paragraph on one line, and without backquotes."""
    if not isinstance(text, InlineText) or not isinstance(text.primary_renderable, Text):
        return text
    paragraphs = text.primary_renderable.plain.replace("`", "").split("\n\n")
    line = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return InlineText(Text(line), force_empty_end=text.force_empty_end)


app = App(
    name="adam-async",
    help="Train neural networks on ordinary machines: Microsoft's Project Adam (OSDI 2014) in Python.",
    help_epilogue="Exit codes: docs/reference/exit-codes.md. Variables set options: ADAM_EPOCHS=5.",
    help_format="plaintext",
    help_formatter=FilledHelp(),
    version=lambda: adam_async.__version__,
    default_parameter=Parameter(show_default=shown_default, converter=value_of),
    result_action="return_value",
)

data_commands = App(name="data")
app.command(data_commands)

app.command(launch_commands)

app.command(checkpoint_commands)

token_commands = App(name="token", help="Make a cluster's token, or derive the keys of one role from it.")
app.command(token_commands)


def run_command(arguments: list[str]) -> int:
    """Parse and run one command; turn an error into one line and an exit code."""
    arguments = with_waiting(arguments)
    try:
        check_words(arguments)
        if not {*app.help_flags}.isdisjoint(arguments[: (*arguments, "--").index("--")]):
            # The parser would also show help, after it has resolved all options for their values.
            flags = {*app.help_flags, *app.version_flags}
            app.help_print([word for word in arguments if word not in flags], console=EscapingConsole())
            return 0
        command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
        return command(*bound.args, **bound.kwargs) or 0
    except UnusedCliTokensError as error:
        path, _, _ = app.parse_commands(arguments)
        words, unused = " ".join(path), ", ".join(error.unused_tokens or ())
        Terminal().error(
            f"{words} does not take {unused}: its options are --NAME VALUE (adam-async {words} --help)"
        )
        return USAGE
    except MissingArgumentError as error:
        Terminal().error(_missing(error))
        return USAGE
    except UnknownOptionError as error:
        Terminal().error(_unknown(error))
        return USAGE
    except CycloptsError as error:
        cause = error.__cause__
        Terminal().error(str(cause if isinstance(cause, ConfigError) else error))
        return USAGE
    except Exception as error:
        if isinstance(first_cause(error), BrokenPipeError) and reader_left(sys.stdout):
            # The reader of the output has left, as `head` does: a flush would fail again.
            EARLY.leave(0)
        if os.environ.get("ADAM_TRACEBACK"):
            raise
        code, sentence = explain(error)
        Terminal().error(sentence)
        return code


def _missing(error: MissingArgumentError) -> str:
    """Return the sentence about an option that lacks its value, or that the command line lacks."""
    words, argument = " ".join(error.command_chain or ()), error.argument
    assert argument is not None
    how = f"(adam-async {words} --help)"
    if error.keyword is not None:
        count, _ = argument.token_count()
        return f"{words}: {error.keyword} needs {counted(count, 'value') if count > 1 else 'a value'} {how}"
    if argument.index is not None:
        return f"{words} needs {argument.name.removeprefix('--').upper()} {how}"
    address = " tcp://HOST:PORT, the address that the controller printed" * ("--controller" in argument.names)
    return f"{words} needs {argument.name}{address} {how}"


def _unknown(error: UnknownOptionError) -> str:
    """Return the sentence for an unknown option, with the cure for an option that only other sources set."""
    word = (error.token.keyword or error.token.value).partition("=")[0]
    name = word.removeprefix("--").partition(".")[0].replace("-", "_")
    if name not in OPTIONS or not OPTIONS[name].has(UNTYPED):
        return str(error)
    if name not in PLAIN:
        return f"{word} is no option of a command: its table is [{name}] in the file of --config"
    return f"{word} is no option of a command: set {variable_of(name)}, or {name} in the file of --config"


def with_waiting(arguments: list[str]) -> list[str]:
    """Return the words of a command, with the value `WAITING` behind an `--attach` without RUN."""
    whole: list[str] = []
    for number, word in enumerate(arguments):
        whole.append(word)
        following = arguments[number + 1 : number + 2]
        if word == "--attach" and (not following or following[0].startswith("-")):
            whole.append(WAITING)
    return whole


def check_words(arguments: list[str]) -> None:
    """Check that the first word is a command.

    Raises:
        ConfigError: The command is unknown; the error has the nearest command, and all commands.
    """
    path, _, rest = app.parse_commands(arguments)
    groups = {
        (): app,
        ("checkpoint",): checkpoint_commands,
        ("data",): data_commands,
        ("launch",): launch_commands,
        ("token",): token_commands,
    }
    group = groups.get(path)
    if group is None or not rest or (path and rest[0].startswith("-")):
        return
    if not path:
        check_command(rest[0])
    whole = {name: " ".join((*path, name)) for name in group}
    near = difflib.get_close_matches(rest[0], list(group), n=1)
    meant = f", did you mean {whole[near[0]]!r}?" if near else ";"
    known = ", ".join(words for name, words in whole.items() if not name.startswith("-"))
    itself = f", or {path[0]} with options, which begin with --" if path == ("data",) else ""
    raise ConfigError(f"{' '.join((*path, rest[0]))!r} is no command{meant} known: {known}{itself}")


def _run(
    work: Callable[..., Coroutine[Any, Any, int]],
    *arguments: Any,
    verbose: bool = False,
    serves: bool = False,
) -> int:
    """Run the coroutine of a command, which takes the environment and the terminal after its arguments."""
    return run_in_loop(
        lambda terminal: work(*arguments, os.environ, terminal), verbose=verbose, serves=serves
    )


@app.command
def train(options: TrainOptions = TrainOptions()) -> int:
    """Train a model, with roles that this command starts, or in a cluster of roles started by hand."""

    async def work(terminal: Terminal) -> int:
        if options.replay is not None:
            from adam_async.cli.replay import run_replay

            return await run_replay(options, os.environ, terminal)
        from adam_async.cli.train import run_training

        return await run_training(options, os.environ, terminal)

    return run_driver(work, options, reads_files=True)


@app.command
def evaluate(
    model: ModelPath,
    *,
    data: str = "auto",
    damaged: Damaged = "error",
    threads: Annotated[int, checked_by(check_threads)] = 0,
) -> int:
    """Evaluate a model of `train --out` on test images.

    Parameters
    ----------
    model
        File of the model, or its folder.
    data
        auto, mnist, digits, fashion-mnist, cifar-10, synthetic, or a folder or file (docs/reference/data.md).
    damaged
        Damaged images: error stops at the first, skip leaves out up to one in twenty.
    threads
        Compute threads; 0 is one per core.
    """
    from adam_async.data_server.sources.kinds import check_source

    check_source(data)
    from adam_async.cli.inspect import run_evaluation

    return _run(run_evaluation, model, data, damaged, threads)


@app.command
def predict(
    model: ModelPath,
    *images: Annotated[Path, to_read("image", check_present)],
    options: PredictOptions = PredictOptions(),
) -> int:
    """Classify images with a model of `train --out`.

    Parameters
    ----------
    model
        File of the model, or its folder.
    images
        Image files, .npy arrays, and folders of them.
    """
    if not images:
        raise ConfigError("predict needs images: adam-async predict MODEL FILE-OR-FOLDER...")
    from adam_async.cli.predict import run_prediction

    return run_in_loop(lambda terminal: run_prediction(model, images, options, terminal))


@app.command
def export(model: ModelPath, *, options: ExportOptions = ExportOptions()) -> int:
    """Write a model of `train --out` for ONNX runtimes or PyTorch.

    Parameters
    ----------
    model
        File of the model, or its folder.
    """
    from adam_async.cli.option_checks import check_export

    check_export(model, options)
    from adam_async.cli.predict import run_export

    return run_in_loop(lambda terminal: run_export(model, options, terminal))


@app.command
def report(*files: Annotated[Path, to_read("report")]) -> int:
    """Compare reports of `train --report` in a table.

    Parameters
    ----------
    files
        The reports.
    """
    from adam_async.cli.option_checks import check_reports

    check_reports(files)
    from adam_async.cli.report import run_report

    return run_in_loop(lambda terminal: run_report(files, terminal))


@app.command
def plan(options: PlanOptions = PlanOptions()) -> int:
    """Predict the rate of a model cut over several workers, and recommend a cut."""
    from adam_async.data_server.sources.kinds import check_source

    check_threads(options.threads)
    cut = {"partitions": 2, "plan": options.plan or "vertical", "halo": options.halo}
    check_modes(Config, cut, typed=("plan", "halo"))
    check_source(options.data or "auto")
    from adam_async.cli.plan.command import run_plan

    return _run(run_plan, options)


@app.command
def doctor(
    *,
    model: Annotated[str, checked_by(check_model_option)] = "mnist-adam",
    images_per_group: Annotated[int, of_run("images_per_group")] = 16,
) -> int:
    """Check this machine: requirements of a run, causes of slowness, faults.

    Parameters
    ----------
    model
        Model whose kernels are timed and whose memory is compared with the caches: a name, or FILE.toml.
    images_per_group
        Images per group.
    """
    from adam_async.cli.inspect import run_doctor

    return _run(run_doctor, model, images_per_group)


add_commands(app)


@app.command
def controller(options: ControllerOptions = ControllerOptions()) -> int:
    """Run a controller, which keeps the cluster map; the other roles connect to it.

    Three or five controllers with the same --peers agree on the map; the cluster works while more than half
    of them run. A controller with --dir continues after a restart.
    """
    if options.peers:
        own_peer(read_peers(options.peers), options.id)
    from adam_async.cli.roles.controller import serve_controller

    return run_role(lambda _, health: serve_controller(options, os.environ, health), options)


@app.command
def ps(options: ServerOptions) -> int:
    """Run a parameter server, which stores shards of the model and applies updates to them."""
    from adam_async.cli.option_checks import check_server

    check_server(options, os.environ)
    from adam_async.cli.roles.parameter_server import serve_ps

    return run_role(lambda _, health: serve_ps(options, os.environ, health), options)


@data_commands.default
def data(options: DataServerOptions = DataServerOptions(), *, stage: StageOptions = StageOptions()) -> int:
    """Run a data server, which leases image groups to the workers.

    Without --controller it is independent of a cluster, and serves each `train --data tcp://HOST:PORT`.
    """
    from adam_async.cli.option_checks import check_data_server

    check_data_server(options, stage)
    from adam_async.cli.roles.data_server import serve_staged

    return run_role(
        lambda terminal, health: serve_staged(options, stage, os.environ, terminal, health), options
    )


@data_commands.command(name="inspect")
def inspect_data(source: str = "auto", /, options: InspectOptions = InspectOptions()) -> int:
    """Describe a source of images, and draw its images, with or without transforms.

    Parameters
    ----------
    source
        auto, mnist, digits, a folder or a file, as in `train --data`.
    """
    from adam_async.cli.option_checks import check_inspection

    check_inspection(source, options)
    from adam_async.cli.data import run_inspection

    return _run(run_inspection, source, options)


@app.command
def worker(options: WorkerOptions) -> int:
    """Run a model worker, which trains one replica of the model, or a part of it.

    A worker may join a run in progress; the run keeps its rate.
    """
    from adam_async.cli.option_checks import check_worker

    check_worker(options)
    from adam_async.cli.roles.worker import serve_worker

    return run_role(lambda _, health: serve_worker(options, os.environ, health), options)


@app.command
def role(options: FromEnvironmentOptions = FromEnvironmentOptions()) -> int:
    """Run the roles that the variables of a batch job give to this process.

    A rank with one role runs that role. A rank with several roles starts them as child processes and
    restarts lost ones.
    """
    from adam_async.cli.from_environment import Found, find_roles, show, supervise

    found: list[Found] = []

    async def find(terminal: Terminal) -> int:
        found.append(await find_roles(options, os.environ))
        return show(found[0]) if options.print else 0

    code = run_in_loop(find, verbose=options.verbose)
    if code or options.print:
        return code
    if len(found[0].assignment.roles) == 1:
        return run_command(found[0].command(options))
    return _run(supervise, found[0], options, verbose=options.verbose, serves=True)


@app.command
def store(
    action: Action, name: str | None = None, file: Path | None = None, /, *, options: StoreOptions
) -> int:
    """List the parameter stores of a cluster, or show, save or delete one.

    Parameters
    ----------
    action
        list: all stores; show NAME: arrays, versions, pins, clients and staleness; save NAME FILE: all
        values, in the safetensors format; delete NAME: end the store for all its clients.
    name
        Name of the store.
    file
        File for the values.
    """
    check_store_words(action, name, file, options)
    from adam_async.cli.store import run_store

    return _run(run_store, action, name, file, options, verbose=options.verbose)


@app.command
def status(*, options: StatusOptions) -> int:
    """Show the roles of a cluster: machines, progress, lags, versions and copies."""
    from adam_async.cli.operation import show_status

    return _run(show_status, options, verbose=options.verbose)


@app.command
def dashboard(*, options: DashboardOptions = DashboardOptions()) -> int:
    """Show a cluster, or past runs, on a page in a browser."""
    from adam_async.cli.option_checks import check_dashboard

    check_dashboard(options)
    from adam_async.cli.dashboard import serve_dashboard

    return _run(serve_dashboard, options, verbose=options.verbose, serves=True)


@app.command
def logs(node: Annotated[str, node_named("NODE")], /, *, options: OperatorOptions) -> int:
    """Print the last lines of a role's log, also after its loss.

    Parameters
    ----------
    node
        Node id of the role, as `status` shows it.
    """
    return _ask("logs", options, node=node)


@app.command
def scale(
    workers: Annotated[int, within("the number of workers", 0, MOST_WORKERS)], /, *, options: OperatorOptions
) -> int:
    """Start or end workers of the run in progress, until it has this number.

    Parameters
    ----------
    workers
        Number of workers.
    """
    return _ask("scale", options, workers=workers)


@app.command
def stop(*, options: OperatorOptions) -> int:
    """End the run in progress in order, after the groups in flight; its driver writes the results."""
    return _ask("stop", options)


def _ask(action: Literal["logs", "scale", "stop"], options: OperatorOptions, **details: Any) -> int:
    from adam_async.cli.operation import send_request

    return _run(partial(send_request, **details), action, options, verbose=options.verbose)


@token_commands.command(name="new")
def token_new(*, out: Path | None = None) -> int:
    """Write a random token for a cluster.

    Parameters
    ----------
    out
        New file for the token, readable by its owner only; by default the token goes to stdout.
    """
    from adam_async.cli.token import new_token

    return run_in_loop(lambda _: new_token(out))


@token_commands.command(name="derive")
def token_derive(*, role: str | None = None, token_file: Path | None = None, out: Path | None = None) -> int:
    """Write the keys of one role, for hosts that may join as this role only.

    Parameters
    ----------
    role
        controller, ps, data, worker, driver (`train`), client or reader (of a parameter store).
    token_file
        File with the cluster's token; by default ADAM_TOKEN.
    out
        New file for the keys, readable by its owner only; by default the keys go to stdout.
    """
    from adam_async.cli.token import derive_token

    return run_in_loop(lambda _: derive_token(role, token_file, out, os.environ))
