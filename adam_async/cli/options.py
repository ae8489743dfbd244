"""The options of the commands. An option of `train` that is None is set by file or environment."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, dataclass_transform, get_type_hints

from cyclopts import Parameter, Token, convert

from adam_async.cli.files import (
    check_file,
    check_folder,
    check_model_path,
    check_replay,
    check_result,
)
from adam_async.errors import ConfigError
from adam_async.option_types import check_bounds
from adam_async.run.addresses import check_address
from adam_async.run.cache_size import cache_limits, read_budget
from adam_async.run.config import BOUNDS, FLUSH_S, MAX_THREADS_PER_CORE, Config
from adam_async.run.image_size import read_image_size
from adam_async.run.option_sources import PLAIN, variable_of
from adam_async.run.stragglers import read_slow
from adam_async.runtime.machine import usable_cores
from transport.config import MOST_NODE_BYTES, Checksum

Damaged = Literal["error", "skip"]
LogLevel = Literal["debug", "info", "warning", "error"]

WAIT = timedelta(seconds=60)
"""Default maximum wait for a controller."""

Wait = Annotated[timedelta, Parameter(show_default=lambda _: "60s")]

WAITING = "waiting"
"""Value of `--attach` without RUN: it stands for the run that waits for a driver."""

ONLY_ON = Parameter(negative="")
"""Parameter of a flag without a `--no-` form."""

ON_COMMAND_LINE = tuple(name for name in PLAIN if name not in ("dtype", "read_ahead"))
"""Options of a run that the command line sets; the other ones are for tests."""

_Options = TypeVar("_Options")

_WHOLE = re.compile(r"[+-]?\d+(_\d+)*")
"""Text of a whole number in Python's notation."""


def value_of(kind: Any, words: Sequence[Token]) -> Any:
    """Convert words as cyclopts does, but refuse fractions for whole numbers, and empty paths.

    Args:
        kind: The option's type.

    Raises:
        ValueError: A word is not a value of the type; cyclopts names the option.
    """
    for word in words:
        if kind is int and not _WHOLE.fullmatch(word.value):
            raise ValueError(f"must be a whole number, not {word.value!r}")
        if kind is Path and not word.value:
            # Path("") is the working folder; an unset variable of a shell must not select it.
            raise ValueError("the path is empty: name a file or folder")
    return convert(kind, words)


def addresses_of(option: str, *, everywhere: bool = False) -> Parameter:
    """Return the cyclopts parameter of an option with addresses, checked before the command's modules load.

    Args:
        everywhere: See `check_address`.
    """

    def check(addresses: str) -> None:
        for address in addresses.split(","):
            check_address(address.strip(), option, everywhere=everywhere)

    return checked_by(check)


def checked_by(check: Callable[[Any], object]) -> Parameter:
    """Return the cyclopts parameter of an option whose value, unless None, is checked before modules load."""
    return Parameter(validator=lambda _, value: None if value is None else check(value))


def node_named(option: str) -> Parameter:
    """Return the cyclopts parameter of the name of a node, checked before modules load."""

    def check(name: str) -> None:
        if not 0 < len(name.encode(errors="surrogateescape")) <= MOST_NODE_BYTES:
            raise ConfigError(f"{option} {name!r} must be a name of 1 to {MOST_NODE_BYTES} bytes")

    return checked_by(check)


def to_read(option: str, check_path: Callable[[str, Path], None] = check_file) -> Parameter:
    """Return the cyclopts parameter of a file or folder to read, which must exist before modules load.

    Args:
        option: Name of the option or argument in the error.
        check_path: Checks the path, with this name in its error.
    """

    def check(value: Path | tuple[Path, ...]) -> None:
        for path in value if isinstance(value, tuple) else (value,):
            check_path(option, path)

    return checked_by(check)


def to_write(option: str) -> Parameter:
    """Return the cyclopts parameter of the file of a result, checked before modules load."""
    return checked_by(lambda file: check_result(file, option))


def folder_of(option: str) -> Parameter:
    """Return the cyclopts parameter of a folder to write to, checked before modules load; empty for none."""

    def check(folder: Path | str) -> None:
        if folder:
            check_folder(Path(folder), option)

    return checked_by(check)


def within(option: str, least: float, most: float | None, below: float | None = None) -> Parameter:
    """Return the cyclopts parameter of a number, checked before modules load; None: no maximum."""
    return checked_by(lambda value: check_bounds(option, value, least, most, below))


def bounded(name: str) -> Parameter:
    """Return the cyclopts parameter of a number with the bounds of this option of a run."""
    return within(f"--{name.replace('_', '-')}", *BOUNDS[name])


def check_threads(threads: int) -> None:
    """Check a number of compute threads; 0 is one per core. Raises ConfigError: it is out of range."""
    check_bounds("--threads", threads, 0, MAX_THREADS_PER_CORE * usable_cores())


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(kind: type[_Options]) -> type[_Options]:
    """Make a class of options, with `value_of` as the converter of their words, and the bounds of a run.

    The application's own converter serves the arguments of commands; fields do not inherit it.
    """
    parameter = Parameter(converter=value_of)
    made = dataclass(frozen=True, slots=True, kw_only=True)(kind)
    made.__annotations__ = {
        name: Annotated[of, parameter, bounded(name)] if name in BOUNDS else Annotated[of, parameter]
        for name, of in made.__annotations__.items()
    }
    return Parameter(name="*")(made)


def set_by_variable(option: str) -> Parameter:
    """Return the cyclopts parameter of a role's option; an environment variable can set the option."""
    return Parameter(env_var=variable_of(option))


def shown_always(default: Any, _: Any) -> str:
    """Return the text for a default of a run, in place of the None of its option."""
    return str(default)


def shown_default(default: Any) -> Any:
    """Return the text for a default in the help, or None if the help omits the default."""
    return None if default is False or default in (None, "", ()) else str(default)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _with_options_of_run(kind: type[_Options]) -> type[_Options]:
    """Add an option for each field of `Config` that the class lacks; the help has its text and default.

    An option is None if the command line does not set it.
    """
    own, plain = kind.__annotations__, Config()
    found: dict[str, Any] = {"config": own["config"]}
    for name, of in get_type_hints(Config).items():
        if name in ON_COMMAND_LINE and name not in own:
            default = getattr(plain, name)
            parameter = Parameter(
                show_default=None if default in ("", (), None) else partial(shown_always, default),
                negative="" if of is not bool or name == "keep_going" else None,
            )
            found[name] = Annotated[of | None, parameter]
            setattr(kind, name, None)
    kind.__annotations__ = {**found, **own}
    return options(kind)


@_with_options_of_run
class TrainOptions:
    """Options of `train`: those of a run, each a field of `Config`, and further ones."""

    if TYPE_CHECKING:  # those that commands read and change before a run has a `Config`
        model: str | None = None
        data: str | None = None
        processes: bool | None = None
        slow: tuple[str, ...] | None = None
        memory: tuple[str, ...] | None = None
        flush_s: float | None = None
    config: Annotated[Path | None, to_read("--config")] = None
    """TOML file with any option of a run (images_per_group = 64), and the table [waits]."""
    allow_functions: Annotated[bool, ONLY_ON] = False
    """Import the functions that the checkpoint of --resume or the record of --replay names."""
    report: Path | None = None
    """Write the run's report to this file, as JSON; adds about 7 s for its baseline."""
    profile: Path | None = None
    """Write a timeline of the run to this file, as Trace Event JSON; ui.perfetto.dev opens it."""
    record: Path | None = None
    """Write a record of the run, for --replay, to this file; workers then have one compute thread each."""
    replay: Annotated[Path | None, to_read("--replay", check_replay)] = None
    """Repeat the run of this record in this process, to the last bit."""
    out: Path | None = None
    """Write the trained model to model.safetensors in this folder."""
    checkpoint: Path | None = None
    """Write checkpoints to this folder at the end of each epoch; by default to the folder of --resume."""
    resume: Path | None = None
    """Continue the run of the newest checkpoint in this folder, or of one checkpoint DIR/checkpoint-..., with
    its options and model."""
    store: Path | None = None
    """Keep the shards of each server on disk, in folders below this one; the same command again continues
    the run after the loss of all servers. Servers at --controller have a --dir of their own."""
    init: Annotated[Path | None, to_read("--init", check_model_path)] = None
    """Begin with the tensors of this saved model with the same names and shapes; other tensors get initial
    values."""
    step: str | None = None
    """Train this step of yours in place of a network: package.module:factory
    (docs/how-to/train-your-own-step.md)."""
    step_args: str | None = None
    """Arguments of the factory of --step, as a JSON object such as '{"hidden": 64}'."""
    layers: Annotated[tuple[str, ...], Parameter(name="--layer", negative="")] = ()
    """Layer of yours that the model may use: KIND=package.module:Class; repeatable."""
    step_path: Annotated[tuple[Path, ...], ONLY_ON] = ()
    """Folder with the modules of --step and --layer, added to Python's sys.path; repeatable."""
    controller: Annotated[str | None, addresses_of("--controller")] = None
    """tcp://HOST:PORT of the controller of a cluster started by hand, or of several controllers, with commas
    between them; the command then starts no role."""
    attach: str | None = None
    """Take over run RUN, which has lost its driver, of the cluster at --controller. Without RUN: take over
    the run that waits for a driver; if none waits, continue the run on the disks of the servers, or that of
    --resume, or begin a new run. SIGTERM leaves the run to the next driver."""
    replace: Annotated[bool, ONLY_ON] = False
    """Begin a new run in place of a run that waits for a driver; the weights of that run are lost."""
    token_file: Annotated[Path | None, to_read("--token-file")] = None
    """File with the token (or the keys for role driver) of that cluster, of the data servers at --data, or of
    the ranks of `launch`; by default ADAM_TOKEN."""
    quiet: Annotated[bool, ONLY_ON] = False
    """Print only the last line, and errors."""
    wait: Wait = WAIT
    """Maximum wait for the controller at --controller or in rank 0 of `launch`, such as 60s or 5m."""
    log_level: LogLevel | None = None
    """Lowest level of log lines; by default warning, or info with --verbose."""
    log_json: Annotated[bool, ONLY_ON] = False
    """Write each line of the log as one JSON object: time, level, node, logger, message."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the actions of the roles in this process; those of --processes log warnings and errors only."""
    health: Annotated[str | None, addresses_of("--health")] = None
    """tcp://HOST:PORT for probes: GET /healthz and /readyz over HTTP."""

    def layer(self) -> dict[str, Any]:
        """Return the options of the run on the command line."""
        given = {name: getattr(self, name) for name in ON_COMMAND_LINE}
        return {**given, "record": None if self.record is None else True}


@options
class RoleOptions:
    """Options of every role."""

    id: Annotated[str | None, node_named("--id")] = None
    """Name of this node, unique in its cluster; by default role, host and process id."""
    token_file: Annotated[Path | None, to_read("--token-file")] = None
    """File with the cluster's token, or the keys of this role (`token derive`); by default ADAM_TOKEN."""
    slow: Annotated[
        tuple[str, ...],
        Parameter(
            negative="", env_var=variable_of("slow"), env_var_split=lambda _, text, **__: text.split(",")
        ),
        checked_by(read_slow),
    ] = ()
    """Slow down this node: NODE:SHARE of its cores, or NODE~NODE:DELAY of messages to another node;
    repeatable."""
    advertise: Annotated[str | None, addresses_of("--advertise")] = None
    """tcp://HOST:PORT at which other hosts reach --bind tcp://0.0.0.0:PORT; port 0 is the port of --bind."""
    memory_budget: Annotated[
        str,
        set_by_variable("memory_budget"),
        checked_by(lambda budget: read_budget("--memory-budget", budget)),
    ] = "512M"
    """Maximum memory of this process for its peers: their requests, and answers to these."""
    checksum: Annotated[Checksum, set_by_variable("checksum")] = "auto"
    """CRC-32C of sent tensors: on, off, or auto (to other hosts); receivers always check a CRC."""
    log_level: LogLevel | None = None
    """Lowest level of log lines; by default warning, or info with --verbose."""
    log_json: Annotated[bool, ONLY_ON] = False
    """Write each line of the log as one JSON object: time, level, node, logger, message."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the actions of the role."""
    health: Annotated[str | None, addresses_of("--health")] = None
    """tcp://HOST:PORT for probes: GET /healthz and /readyz over HTTP."""
    supervised: Annotated[bool, Parameter(negative="", show=False)] = False
    """Started by a parent process: orders arrive on stdin; the end of stdin ends the role."""


@options
class ControllerOptions(RoleOptions):
    """Options of a controller."""

    id: Annotated[str | None, node_named("--id")] = None
    """With --peers the id of this controller, such as 1; otherwise its name, by default controller with
    --dir, else role, host and process id."""
    bind: Annotated[str | None, addresses_of("--bind", everywhere=True)] = None
    """tcp://HOST:PORT to listen on; by default this controller's address in --peers, or
    tcp://127.0.0.1:7070."""
    peers: str = ""
    """All controllers of the group, the same list for each:
    1=tcp://HOST:PORT,2=tcp://HOST:PORT,3=tcp://..."""
    dir: Annotated[Path | None, folder_of("--dir")] = None
    """Folder for the copy of the cluster map, which survives a restart; without it the map ends with the
    controller."""


@options
class MemberOptions(RoleOptions):
    """Options of a role that joins a controller."""

    controller: Annotated[str, addresses_of("--controller")]
    """tcp://HOST:PORT of the controller, or of several with commas between them."""
    wait: Wait = WAIT
    """Maximum wait for a controller, such as 60s or 5m; roles may start in any order."""
    bind: Annotated[str | None, addresses_of("--bind", everywhere=True)] = None
    """tcp://HOST:PORT to listen on; by default any port of the interface towards the controller."""


@options
class ServerOptions(MemberOptions):
    """Options of a parameter server."""

    copies_bind: Annotated[
        str,
        set_by_variable("copies_bind"),
        checked_by(lambda address: address and check_address(address, "--copies-bind")),
    ] = ""
    """tcp://HOST:PORT to listen on for the other servers, such as on a network of their own; by default that
    of --bind."""
    dir: Annotated[Path | None, folder_of("--dir")] = None
    """Folder of this server for its shards, which survive the loss of all servers; without it they are in
    memory only."""
    flush_s: Annotated[float, set_by_variable("flush_s")] = FLUSH_S
    """Seconds between two rounds in which the server writes its changed shards to --dir."""


@options
class DataServerOptions(RoleOptions):
    """Options of a data server."""

    controller: Annotated[str | None, addresses_of("--controller")] = None
    """tcp://HOST:PORT of the controller, or of several with commas between them; without it the data server
    waits for a `train --data`."""
    wait: Wait = WAIT
    """Maximum wait for a controller, such as 60s or 5m; roles may start in any order."""
    bind: Annotated[str | None, addresses_of("--bind", everywhere=True)] = None
    """tcp://HOST:PORT to listen on; by default any port of the interface towards the controller, or of
    loopback."""
    cache: Annotated[
        str,
        set_by_variable("cache"),
        checked_by(lambda cache: cache_limits(cache, "", available_bytes=0)),
    ] = "auto"
    """Memory for images: auto, half of the available memory, or a size such as 4G, with immediate service."""
    spill: Annotated[str, set_by_variable("spill"), folder_of("--spill")] = ""
    """Folder for decoded images that do not fit into the cache."""
    allow_transform: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Function package.module:function that the transforms of a run may call; repeatable. The data server
    imports the module and runs it."""
    step_path: Annotated[tuple[Path, ...], ONLY_ON] = ()
    """Folder with the modules of --allow-transform, added to Python's sys.path; repeatable."""


@options
class StageOptions:
    """Options of a data server that copies its source before it loads it."""

    stage: Path | None = None
    """Folder into which the data server copies --data, a shared folder or file; it loads the copy."""
    stage_peers: Annotated[str | None, addresses_of("--stage-peers")] = None
    """tcp://HOST:PORT of each server that copies this source, with commas between them; the same list for
    each."""
    stage_wait: float = 60.0
    """Seconds after which other servers read the files of a server that has not connected."""


@options
class WorkerOptions(MemberOptions):
    """Options of a model worker."""

    controller: Annotated[str, Parameter(name=("--join", "--controller")), addresses_of("--join")]
    """tcp://HOST:PORT of the controller, or of several with commas between them; the worker joins a run in
    progress."""
    allow_step: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Module package.module whose steps this worker may train (`train --step`); repeatable. The worker
    imports the module and runs it."""
    layers: Annotated[tuple[str, ...], Parameter(name="--layer", negative="")] = ()
    """Layer of yours that models may use: KIND=package.module:Class; repeatable."""
    step_path: Annotated[tuple[Path, ...], ONLY_ON] = ()
    """Folder with the modules of --allow-step and --layer, added to Python's sys.path; repeatable."""


@options
class FromEnvironmentOptions:
    """Options of `role`."""

    from_env: Annotated[bool, ONLY_ON] = False
    """Take the role from ADAM_ROLE, a rank of torchrun, Open MPI, PMI or Slurm, or POD_NAME of Kubernetes,
    and the controllers from ADAM_CONTROLLER, MASTER_ADDR or SLURM_STEP_NODELIST. The roles of a pod listen on
    POD_IP."""
    config: Annotated[Path | None, to_read("--config")] = None
    """TOML file with the options of the run, as for `train --config`: numbers of roles, data, threads."""
    dir: Path | None = None
    """Folder in which the controllers of this process store the cluster map."""
    token_file: Annotated[Path | None, to_read("--token-file")] = None
    """File with the cluster's token, or the keys of this role; by default ADAM_TOKEN."""
    wait: Wait = WAIT
    """Maximum wait of a process with one role for a controller, such as 60s or 5m."""
    allow_step: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Module package.module whose steps the workers may train; repeatable, as for `worker`."""
    layers: Annotated[tuple[str, ...], Parameter(name="--layer", negative="")] = ()
    """Layer of yours that models may use: KIND=package.module:Class; repeatable, as for `worker`."""
    allow_transform: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Function package.module:function that transforms may call, beside those of `transforms` in --config;
    repeatable, as for `data`."""
    step_path: Annotated[tuple[Path, ...], ONLY_ON] = ()
    """Folder with the modules of --allow-step, --layer and transforms, added to sys.path; repeatable."""
    health: Annotated[str | None, addresses_of("--health")] = None
    """tcp://HOST:PORT for probes of the only role: GET /healthz and /readyz over HTTP."""
    print: Annotated[bool, ONLY_ON] = False
    """Print the roles of this process, one per line, and run none."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the actions of the roles."""


@options
class PredictOptions:
    """Options of `predict`."""

    top: Annotated[int, within("--top", 1, None)] = 3
    """Number of classes per image, the likeliest first."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print one JSON object instead of a table."""
    damaged: Damaged = "error"
    """Damaged images: error stops at the first one, skip leaves them out and lists them."""


@options
class ExportOptions:
    """Options of `export`."""

    onnx: Annotated[Path | None, to_write("--onnx")] = None
    """Write an ONNX file, and check it with onnxruntime; needs the extra `onnx`."""
    torch: Annotated[Path | None, to_write("--torch")] = None
    """Write the weights as a safetensors file for PyTorch, and print the module; needs the extra `torch`."""


@options
class InspectOptions:
    """Options of `data inspect`."""

    damaged: Damaged = "skip"
    """Damaged images: skip leaves out and lists up to one in twenty, error stops at the first one."""
    size: Annotated[str, checked_by(read_image_size)] = ""
    """Size to scale and cut images to, ROWSxCOLUMNS such as 48x64; by default the images decide."""
    augment: Annotated[bool, ONLY_ON] = False
    """List the default transforms of these images."""
    transforms: Path | None = None
    """Check that the transforms of this TOML file fit these images, and list them."""
    classes: Annotated[int, within("--classes", 1, 1024)] = 10
    """Maximum number of classes listed; --json lists all."""
    json: Annotated[bool, ONLY_ON] = False
    """Print the result as one JSON object."""
