"""The options of the commands. An option of `train` that is None is set by file or environment."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, dataclass_transform, get_type_hints

from cyclopts import CoercionError, Parameter, Token, convert
from msgspec import Meta

from adam_async.cli.files import (
    check_file,
    check_folder,
    check_model_option,
    check_model_path,
    check_readable_folder,
    check_replay,
    check_result,
)
from adam_async.cli.link_speed import parse_bandwidth, parse_latency
from adam_async.errors import ConfigError
from adam_async.option_types import (
    ONE_WAY,
    SECONDS,
    UNTYPED,
    Option,
    check_bounds,
    dashed,
    option_of,
    read_option,
)
from adam_async.run.addresses import check_address
from adam_async.run.config import MAX_THREADS_PER_CORE, OPTIONS, Config, Damaged
from adam_async.run.option_sources import PLAIN, is_list, variable_of
from adam_async.runtime.machine import usable_cores
from transport.config import MOST_NODE_BYTES
from transport.sockets import parse_tcp_address

LogLevel = Literal["debug", "info", "warning", "error"]

WAIT = timedelta(seconds=60)
"""Default maximum wait for a controller."""

Wait = Annotated[timedelta, Parameter(show_default=lambda _: "60s")]

WAITING = "waiting"
"""Value of `--attach` without RUN: it means the run that waits for a driver."""

ONLY_ON = Parameter(negative="")
"""Parameter of a flag without a `--no-` form."""

ON_COMMAND_LINE = tuple(name for name in PLAIN if not OPTIONS[name].has(UNTYPED))
"""Options of a run that the command line sets."""

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
            # Path("") is the working folder; an unset shell variable must not select it.
            raise ValueError("the path is empty: name a file or folder")
    try:
        return convert(kind, words)
    except CoercionError:
        if kind is not timedelta:
            raise
        raise ValueError(f"must be a time with its unit, such as 60s or 5m, not {words[0].value!r}") from None


def addresses_of(option: str, *, everywhere: bool = False) -> Parameter:
    """Return the cyclopts parameter of an option with addresses, checked before the command's modules load.

    Args:
        everywhere: See `check_address`.
    """

    def check(addresses: str) -> None:
        for address in addresses.split(","):
            check_address(address.strip(), option, everywhere=everywhere)

    return checked_by(check)


def page_address(option: str) -> Parameter:
    """Return the cyclopts parameter for a page's address, HOST:PORT, checked before modules load."""

    def check(address: str) -> None:
        try:
            parse_tcp_address(f"tcp://{address}")
        except ValueError:
            raise ConfigError(
                f"{option} {address!r:.80} is not of the form HOST:PORT, such as 127.0.0.1:8080"
            ) from None

    return checked_by(check)


def checked_by(check: Callable[[Any], object]) -> Parameter:
    """Return the cyclopts parameter of an option whose value, unless None, is checked before modules load."""
    return Parameter(validator=lambda _, value: None if value is None else check(value))


def node_named(option: str) -> Parameter:
    """Return the cyclopts parameter for a node's name, checked before modules load."""

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
    """Return the cyclopts parameter for a result file, checked before modules load."""
    return checked_by(lambda file: check_result(file, option))


def folder_of(option: str) -> Parameter:
    """Return the cyclopts parameter of a folder to write to, checked before modules load; empty for none."""

    def check(folder: Path | str) -> None:
        if folder:
            check_folder(Path(folder), option)

    return checked_by(check)


def within(option: str, least: float, most: float | None) -> Parameter:
    """Return the cyclopts parameter for a number, checked before modules load; None: no maximum."""
    permitted = option_of(option, Annotated[int, Meta(ge=least, le=most)])
    return checked_by(lambda value: read_option(permitted, value, option))


def of_run(name: str) -> Parameter:
    """Return the cyclopts parameter of a value, checked as the option of a run with this name."""
    return of_field(OPTIONS[name])


def of_field(option: Option) -> Parameter:
    """Return the cyclopts parameter of a value, checked as its field."""
    return checked_by(lambda value: read_option(option, value, dashed(option.name.rstrip("_"))))


def check_threads(threads: int) -> None:
    """Check a number of compute threads; 0 is one per core. Raises ConfigError: out of range."""
    check_bounds("--threads", threads, 0, MAX_THREADS_PER_CORE * usable_cores())


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(kind: type[_Options]) -> type[_Options]:
    """Make a class of options; `value_of` converts their words, and their bounds are checked.

    The bounds are those of the option's type, else those of the run's option with the same name. The
    application's own converter serves the arguments of commands; fields do not inherit it.
    """
    made = dataclass(frozen=True, kw_only=True)(kind)
    for name, of in made.__annotations__.items():
        option = option_of(name, of)
        bounded = option if option.bounds is not None else OPTIONS.get(name, option)
        checks = (of_field(bounded),) if bounded.bounds is not None else ()
        made.__annotations__[name] = Annotated[of, Parameter(converter=value_of), *checks]
    return Parameter(name="*")(made)


def shown_always(default: Any, _: Any) -> str:
    """Return the text for a run's default, in place of the option's None."""
    return str(default)


def shown_default(default: Any) -> Any:
    """Return the text for a default in the help, or None if the help omits the default."""
    return None if default is False or default in (None, "", ()) else str(default)


_KINDS = get_type_hints(Config)
"""Type of each option of a run."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _with_options_of_run(kind: type[_Options]) -> type[_Options]:
    """Add an option for each `Config` field that the class lacks; the help has its text and default.

    An option is None if the command line does not set it.
    """
    own = kind.__annotations__
    found: dict[str, Any] = {"config": own["config"]}
    for name in ON_COMMAND_LINE:
        if name not in own:
            default, is_switch = (
                OPTIONS[name].default,
                _KINDS[name] is bool and not OPTIONS[name].has(ONE_WAY),
            )
            parameter = Parameter(
                show_default=None if default in ("", (), None) else partial(shown_always, default),
                negative=None if is_switch else "",
            )
            found[name] = Annotated[_KINDS[name] | None, parameter, of_run(name)]
            setattr(kind, name, None)
    kind.__annotations__ = {**found, **own}
    return options(kind)


def _split(_: Any, text: str, **__: Any) -> list[str]:
    return text.split(",")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def with_options(names: Iterable[str] = (), **defaults: Any) -> Callable[[type[_Options]], type[_Options]]:
    """Return a decorator that adds a run's options by name, or by name and another default.

    A variable can set each of those without a default. The help has the text of `Config`, unless the class
    has another one.
    """

    def add(kind: type[_Options]) -> type[_Options]:
        for name in (*names, *defaults):
            facts: dict[str, Any] = {"env_var": variable_of(name)} if name not in defaults else {}
            facts |= {"env_var_split": _split} if is_list(name) else {}
            parameter = Parameter(negative="", **facts)
            kind.__annotations__[name] = Annotated[_KINDS[name], parameter, of_run(name)]
            setattr(kind, name, defaults.get(name, OPTIONS[name].default))
        return options(kind)

    return add


def _of(role: str) -> list[str]:
    """Return the run's options that a role's command has, but not every role."""
    return [name for name, option in OPTIONS.items() if role in option.roles and name not in _OF_EVERY_ROLE]


_OF_EVERY_ROLE = [name for name, option in OPTIONS.items() if {"controller", "ps"} <= {*option.roles}]


class RunPart:
    """Options of a command that has some options of a run."""

    def config(self, **others: Any) -> Config:
        """Return these options of a run; those that the command lacks have their defaults, or `others`."""
        names = [each.name for each in fields(self) if each.name in OPTIONS]  # type: ignore[arg-type]
        return Config(**{name: getattr(self, name) for name in names}, **others)


@options
class LogOptions:
    """Options of a process that logs and answers probes."""

    log_level: LogLevel | None = None
    """Lowest level of log lines; by default warning, or info with --verbose."""
    log_format: Literal["text", "json"] = "text"
    """Form of the lines of the log; json: one object a line, with time, level, node, role, run, stores,
    logger and message."""
    health: Annotated[str | None, addresses_of("--health")] = None
    """tcp://HOST:PORT for probes: GET /healthz and /readyz over HTTP."""
    metrics: Annotated[bool, ONLY_ON] = False
    """Answer GET /metrics at the address of --health, too, with the counts of the role for Prometheus. Train
    answers for all roles that it starts."""


@options
class ImportOptions:
    """Options of a command that imports modules of the user."""

    step_path: Annotated[tuple[Path, ...], ONLY_ON] = ()
    """Folder with modules that other options name, added to Python's sys.path; repeatable."""


@options
class LayerOptions(ImportOptions):
    """Options of a command that builds models."""

    layers: Annotated[tuple[str, ...], Parameter(name="--layer", negative="")] = ()
    """Layer of yours that models may use: KIND=package.module:Class; repeatable. The process imports the
    module and runs it."""


@options
class JsonOptions:
    """Options of a command with a result that programs read."""

    json: Annotated[bool, ONLY_ON] = False
    """Print the result as one JSON object."""


@_with_options_of_run
class TrainOptions(LogOptions, LayerOptions):
    """Options of `train`: those of a run, each a field of `Config`, and further ones."""

    if TYPE_CHECKING:  # those that commands read and change before a run has a `Config`
        model: str | None = None
        data: str | None = None
        rule: str | None = None
        processes: bool | None = None
        slow: tuple[str, ...] | None = None
        memory: tuple[str, ...] | None = None
    config: Annotated[Path | None, to_read("--config")] = None
    """TOML file with any option of a run (images_per_group = 64), and the table [waits]."""
    allow_functions: Annotated[bool, ONLY_ON] = False
    """Import the functions that the checkpoint of --resume or the record of --replay names."""
    events: Path | None = None
    """Write the events of the run to this file as they happen, one JSON object a line
    (docs/how-to/watch-a-run.md)."""
    tensorboard: Annotated[Path | None, folder_of("--tensorboard")] = None
    """Write scalars of the run for TensorBoard into this folder."""
    dashboard: Annotated[str | None, page_address("--dashboard")] = None
    """HOST:PORT of a page that shows the run in a browser; 127.0.0.1:0 is any free port. Needs the extra
    `dashboard`."""
    dashboard_token_file: Annotated[Path | None, to_read("--dashboard-token-file")] = None
    """File with the token of the page's visitors; without one the printed address has a random token."""
    allow_operations: Annotated[bool, ONLY_ON] = False
    """Let visitors of the page, and operators with the keys of a driver, kill, freeze and add roles that this
    command starts."""
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
    optimizer: Literal["rule", "lbfgs", "lbfgs-worker"] = "rule"
    """rule trains push by push, by --rule; lbfgs minimises by L-BFGS, whose steps use all training images: an
    epoch is one step, and --replicas are threads of this process (docs/how-to/minimise-with-lbfgs.md).
    lbfgs-worker computes gradients for such a command at --controller, with its options of data and model."""
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
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the actions of the roles in this process; those of --processes log warnings and errors only."""

    def given(self) -> list[str]:
        """Return the names of the options of the run that the command line sets."""
        return [name for name, value in self.layer().items() if value is not None]

    def layer(self) -> dict[str, Any]:
        """Return the options of the run on the command line."""
        given = {name: getattr(self, name) for name in ON_COMMAND_LINE}
        return {**given, "record": None if self.record is None else True}


@with_options(_OF_EVERY_ROLE)
class RoleOptions(RunPart, LogOptions):
    """Options of every role."""

    id: Annotated[str | None, node_named("--id")] = None
    """Name of this node, unique in its cluster; by default role, host and process id."""
    token_file: Annotated[Path | None, to_read("--token-file")] = None
    """File with the cluster's token, or the keys of this role (`token derive`); by default ADAM_TOKEN."""
    advertise: Annotated[str | None, addresses_of("--advertise")] = None
    """tcp://HOST:PORT at which other hosts reach --bind tcp://0.0.0.0:PORT; port 0 is the port of --bind."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the actions of the role."""
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


@with_options(_of("ps"))
class ServerOptions(MemberOptions, ImportOptions):
    """Options of a parameter server."""

    allow_rule: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Update rule package.module:Class that stores and runs may use (`train --rule`); repeatable. The server
    imports the module and runs it."""

    dir: Annotated[Path | None, folder_of("--dir")] = None
    """Folder of this server for its shards, which survive the loss of all servers; without it they are in
    memory only."""


@with_options(_of("data"))
class DataServerOptions(RoleOptions, ImportOptions):
    """Options of a data server."""

    data: str = "auto"
    """Images: auto, mnist, digits, fashion-mnist, cifar-10, synthetic, or a folder or file
    (docs/reference/data.md)."""
    controller: Annotated[str | None, addresses_of("--controller")] = None
    """tcp://HOST:PORT of the controller, or of several with commas between them; without it the data server
    waits for a `train --data`."""
    wait: Wait = WAIT
    """Maximum wait for a controller, such as 60s or 5m; roles may start in any order."""
    bind: Annotated[str | None, addresses_of("--bind", everywhere=True)] = None
    """tcp://HOST:PORT to listen on; by default any port of the interface towards the controller, or of
    loopback."""
    allow_transform: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Function package.module:function that the transforms of a run may call; repeatable. The data server
    imports the module and runs it."""


@options
class StageOptions:
    """Options of a data server that copies its source before it loads it."""

    stage: Path | None = None
    """Folder into which the data server copies --data, a shared folder or file; it loads the copy."""
    stage_peers: Annotated[str | None, addresses_of("--stage-peers")] = None
    """tcp://HOST:PORT of each server that copies this source, with commas between them; the same list for
    each."""
    stage_wait: Annotated[float, Meta(gt=0.0), SECONDS] = 60.0
    """Seconds after which other servers read the files of a server that has not connected."""


@with_options(_of("worker"))
class WorkerOptions(MemberOptions, LayerOptions):
    """Options of a model worker."""

    controller: Annotated[str, Parameter(name=("--join", "--controller")), addresses_of("--join")]
    """tcp://HOST:PORT of the controller, or of several with commas between them; the worker joins a run in
    progress."""
    allow_step: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Module package.module whose steps this worker may train (`train --step`); repeatable. The worker
    imports the module and runs it."""


@options
class FromEnvironmentOptions(LayerOptions):
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
    allow_rule: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Update rule package.module:Class that the parameter servers may apply, beside the `rule` of the run;
    repeatable, as for `ps`."""
    allow_transform: Annotated[tuple[str, ...], ONLY_ON] = ()
    """Function package.module:function that transforms may call, beside those of `transforms` in --config;
    repeatable, as for `data`."""
    health: Annotated[str | None, addresses_of("--health")] = None
    """tcp://HOST:PORT for probes of the only role: GET /healthz and /readyz over HTTP."""
    metrics: Annotated[bool, ONLY_ON] = False
    """Answer GET /metrics there, too, with the counts of the role for Prometheus."""
    print: Annotated[bool, ONLY_ON] = False
    """Print the roles of this process, one per line, and run none."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the actions of the roles."""


@options
class PredictOptions(JsonOptions):
    """Options of `predict`."""

    top: Annotated[int, Meta(ge=1)] = 3
    """Number of classes per image, the likeliest first."""
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
class InspectOptions(JsonOptions):
    """Options of `data inspect`."""

    damaged: Damaged = "skip"
    """Damaged images: skip leaves out and lists up to one in twenty, error stops at the first one."""
    size: Annotated[str, of_run("size")] = ""
    """Size to scale and cut images to, ROWSxCOLUMNS such as 48x64; by default the images decide."""
    augment: Annotated[bool, ONLY_ON] = False
    """List the default transforms of these images."""
    transforms: Path | None = None
    """Check that the transforms of this TOML file fit these images, and list them."""
    classes: Annotated[int, Meta(ge=1, le=1024)] = 10
    """Maximum number of classes listed; --json lists all."""


@options
class PlanOptions:
    """Options of `plan`."""

    model: Annotated[str | None, checked_by(check_model_option)] = None
    """Named model, FILE.toml with a spec, or auto (the one that fits the data); by default auto with --data,
    else mnist-adam."""
    data: str | None = None
    """Data that the model must fit, as in `train --data`."""
    partitions: int | None = None
    """Workers over which a replica is cut; by default the command tries 1 to 4."""
    plan: Literal["vertical", "layers"] | None = None
    """Cut of the model: vertical, each layer over all workers, or layers, consecutive layers to each worker;
    by default both."""
    halo: Literal["auto", "exchange", "recompute"] = "auto"
    """With plan vertical: send image rows needed by two workers (exchange), or compute them twice
    (recompute)."""
    images_per_group: int | None = None
    """Images per group; by default the command tries 1, 16 and 64."""
    bandwidth: Annotated[str | None, checked_by(parse_bandwidth)] = None
    """Bandwidth of links, each way, such as 1Gbit/s or 125MB/s; each worker then has a machine like this
    one."""
    latency: Annotated[str | None, checked_by(parse_latency)] = None
    """Latency of links, one way, such as 0.1ms; each worker then has a machine like this one."""
    threads: int = 0
    """Compute threads per worker; 0 divides the cores of a machine among its workers."""
    in_flight: int = 0
    """Groups in flight per replica; 0 is twice its threads."""
    servers: int = 1
    """Parameter servers."""
    json: Annotated[Path | None, to_write("--json")] = None
    """Write the report, with layers, workers and cuts, to this file, as JSON (docs/reference/plan.md)."""
    calibrate: bool = True
    """Measure the layers on this machine, about half a second per group size, instead of an estimate."""


@options
class OperatorOptions:
    """Options of `logs`, `scale` and `stop`."""

    controller: Annotated[str, addresses_of("--controller")]
    """tcp://HOST:PORT of the controller, or of several with commas between them."""
    token_file: Annotated[Path | None, to_read("--token-file")] = None
    """File with the cluster's token, or the keys of role driver; by default ADAM_TOKEN."""
    wait: Wait = WAIT
    """Maximum wait for a controller, such as 60s or 5m."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the actions of the command."""


@options
class StatusOptions(OperatorOptions, JsonOptions):
    """Options of `status`. The keys of role reader suffice for the cluster map alone."""

    all: Annotated[bool, ONLY_ON] = False
    """Show roles that have left or were lost, too."""
    check: Annotated[bool, ONLY_ON] = False
    """End with code 10 if copies, roles or replicas are lacking, and 11 if the run or a store has failed."""
    watch: Annotated[bool, ONLY_ON] = False
    """Show the state again every second, until Ctrl-C."""

    def __post_init__(self) -> None:
        if self.check and self.watch:
            raise ConfigError("--check ends with a code, and --watch does not end: leave one of them out")


@options
class DashboardOptions(OperatorOptions):
    """Options of `dashboard`."""

    controller: Annotated[str | None, addresses_of("--controller")] = None  # type: ignore[assignment]
    """tcp://HOST:PORT of the controller, or of several with commas between them, of a cluster that runs."""
    runs: Annotated[Path | None, to_read("--runs", check_readable_folder)] = None
    """Folder with reports of train --report, and files of train --events, of past runs."""
    bind: Annotated[str, page_address("--bind")] = "127.0.0.1:0"
    """HOST:PORT of the page; port 0 is any free port."""
    dashboard_token_file: Annotated[Path | None, to_read("--dashboard-token-file")] = None
    """File with the token of the page's visitors; without one the printed address has a random token."""
    allow_operations: Annotated[bool, ONLY_ON] = False
    """Let visitors kill, freeze and add roles, if the driver of the run permits it, too."""


Action = Literal["list", "show", "save", "delete"]
"""Action of the command, its first argument."""


@options
class StoreOptions(OperatorOptions, JsonOptions):
    """Options of `store`."""

    token_file: Annotated[Path | None, to_read("--token-file")] = None
    """File with the cluster's token, or the keys of role reader (of role client for delete); by default
    ADAM_TOKEN."""
    yes: Annotated[bool, ONLY_ON] = False
    """Confirm that delete removes the store for all its clients."""


def check_words(action: Action, name: str | None, file: Path | None, options: StoreOptions) -> None:
    """Check the words of `store`. Raises ConfigError: one is missing or superfluous, or is no file."""
    if action == "list" and name is not None:
        raise ConfigError(f"store list takes no name; show it with: adam-async store show {name}")
    if action != "list" and name is None:
        raise ConfigError(f"store {action} needs the name of a store; adam-async store list shows them")
    if action == "save" and file is None:
        raise ConfigError(f"store save needs a file: adam-async store save {name} FILE.safetensors")
    if action != "save" and file is not None:
        raise ConfigError(f"store {action} takes no file: leave {file} out")
    if action != "delete" and options.yes:
        raise ConfigError("--yes belongs to store delete: leave it out")
    if file is not None:
        check_result(file, "store save")
