"""The options of the commands. An option of `train` that is None is set by file or environment."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from cyclopts import Parameter, Token, convert

from adam_async.cli.files import check_file, check_model_path, check_replay
from adam_async.errors import ConfigError
from adam_async.run.addresses import check_address
from adam_async.run.cache_size import cache_limits, read_budget
from adam_async.run.config import FIELDS, FLUSH_S, Config
from adam_async.run.option_sources import variable_of
from adam_async.run.stragglers import read_slow
from transport.config import MOST_NODE_BYTES, Checksum

LoopName = Literal["uvloop", "asyncio"]
Damaged = Literal["error", "skip"]
LogLevel = Literal["debug", "info", "warning", "error"]

WAIT = timedelta(seconds=60)
"""Default maximum wait for a controller."""

Wait = Annotated[timedelta, Parameter(show_default=lambda _: "60s")]

WAITING = "waiting"
"""Value of `--attach` without RUN: it stands for the run that waits for a driver."""

ONLY_ON = Parameter(negative="")
"""Parameter of a flag without a `--no-` form."""

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

    def check(_: Any, value: str | None) -> None:
        for address in [] if value is None else value.split(","):
            check_address(address.strip(), option, everywhere=everywhere)

    return Parameter(validator=check)


def checked_by(check: Callable[[Any], object]) -> Parameter:
    """Return the cyclopts parameter of an option whose value a function checks before modules load."""
    return Parameter(validator=lambda _, value: check(value))


def node_named(option: str) -> Parameter:
    """Return the cyclopts parameter of the name of a node, checked before modules load."""

    def check(name: str | None) -> None:
        size = 1 if name is None else len(name.encode(errors="surrogateescape"))
        if not 0 < size <= MOST_NODE_BYTES:
            raise ConfigError(f"{option} {name!r} must be a name of 1 to {MOST_NODE_BYTES} bytes")

    return checked_by(check)


def to_read(option: str, check_path: Callable[[str, Path], None] = check_file) -> Parameter:
    """Return the cyclopts parameter of a file or folder to read, which must exist before modules load.

    Args:
        option: Name of the option or argument in the error.
        check_path: Checks the path, with this name in its error.
    """

    def check(_: Any, value: Path | tuple[Path, ...] | None) -> None:
        for path in value if isinstance(value, tuple) else () if value is None else (value,):
            check_path(option, path)

    return Parameter(validator=check)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(kind: type[_Options]) -> type[_Options]:
    """Make a class of options, with `value_of` as the converter of their words.

    The application's own converter serves the arguments of commands; fields do not inherit it.
    """
    parameter = Parameter(converter=value_of)
    made = dataclass(frozen=True, slots=True, kw_only=True)(kind)
    made.__annotations__ = {name: Annotated[of, parameter] for name, of in made.__annotations__.items()}
    return Parameter(name="*")(made)


def check_within(option: str, value: int, least: int, most: float) -> None:
    """Check that the value of an option lies within two bounds.

    Raises:
        ConfigError: The value lies outside.
    """
    if not least <= value <= most:
        raise ConfigError(f"{option} must be within {least} and {most}, not {value}")


def set_by_variable(option: str) -> Parameter:
    """Return the cyclopts parameter of a role's option; an environment variable can set the option."""
    return Parameter(env_var=variable_of(option))


def shown_default(default: Any) -> Any:
    """Return the text for a default in the help, or None if the help omits the default."""
    return None if default is False or default in (None, "", ()) else str(default)


def _with_defaults(options: type[_Options]) -> type[_Options]:
    """Let the help show the defaults of a run; the options themselves default to None."""
    plain = Config()

    def kind_of(name: str, kind: Any) -> Any:
        """Return the type of an option, with the run's default for the help."""
        default = getattr(plain, name, "")
        # The option is a file and the field of a run a flag, whose default would be misleading.
        if name == "record" or default in ("", ()):
            return kind
        return Annotated[kind, Parameter(show_default=lambda _: str(default))]

    options.__annotations__ = {name: kind_of(name, kind) for name, kind in options.__annotations__.items()}
    return options


@_with_defaults
@options
class TrainOptions:
    """Options of `train`."""

    config: Annotated[Path | None, to_read("--config")] = None
    """TOML file with any of the options below (images_per_group = 64), and the table [waits]."""
    model: str | None = None
    """Model: auto (fits the data), mnist-adam, digits, mlp, cifar-conv, or FILE.toml with a spec."""
    data: str | None = None
    """Training data: auto, mnist, digits, fashion-mnist, cifar-10, synthetic, a folder or file
    (docs/reference/data.md), package.module:function that returns a data set, or tcp://HOST:PORT of a data
    server that stands alone; several addresses with commas."""
    damaged: Damaged | None = None
    """Damaged images: error stops at the first one, skip leaves out up to one in twenty."""
    size: str | None = None
    """Size to scale and cut images to, ROWSxCOLUMNS such as 48x64; by default the model or the images
    decide."""
    cache: str | None = None
    """Memory for images: auto, half of the available memory, or a size such as 4G, with immediate service."""
    spill: str | None = None
    """Folder for decoded images that do not fit into the cache."""
    augment: bool | None = None
    """Change training images at random, differently in each epoch."""
    transforms: str | None = None
    """TOML file with the transforms of --augment; by default transforms that suit the images."""
    allow_functions: Annotated[bool, ONLY_ON] = False
    """Import the functions that the checkpoint of --resume or the record of --replay names."""
    epochs: int | None = None
    """Passes over the training images; 0 is as many as have 1,500 steps, at least 3 and at most 100. A step
    is one push, of one group by default."""
    replicas: int | None = None
    """Model replicas; each has its own workers."""
    partitions: int | None = None
    """Workers over which the model of each replica is cut."""
    plan: Literal["vertical", "layers"] | None = None
    """Cut of the model: vertical, each layer over all workers, or layers, consecutive layers to each
    worker."""
    halo: Literal["auto", "exchange", "recompute"] | None = None
    """With plan vertical: send image rows needed by two workers (exchange), or compute them twice
    (recompute)."""
    epoch_fraction: float | None = None
    """Share of the replicas that must finish to end an epoch; skipped images come first in the next epoch."""
    epoch_rule: Literal["replicas", "images"] | None = None
    """Unit of --epoch-fraction: replicas that have finished, or images of one pool; asp only."""
    threads: int | None = None
    """Compute threads per worker; 0 divides the cores among the workers."""
    pin_threads: bool | None = None
    """Keep each compute thread on one core; helps if the system moves threads between cores."""
    images_per_group: int | None = None
    """Images per group; 1 is the paper's flow."""
    in_flight: int | None = None
    """Groups in flight per replica; 0 is twice its threads, or in place as many as keep the threads busy."""
    servers: int | None = None
    """Parameter servers."""
    data_servers: int | None = None
    """Data servers; each has the whole data set."""
    controllers: int | None = None
    """Controllers: 1, or 3 or 5, which survive the loss of one or two."""
    copies: int | None = None
    """Servers with each shard; 0 is 3, or all servers if fewer, with several controllers, else 1. With
    --record or --weights aliased 0 is always 1."""
    min_in_sync: int | None = None
    """Copies that must have a push before it is applied; 0 is 2, or 1 with one copy."""
    slow: Annotated[tuple[str, ...] | None, ONLY_ON] = None
    """Slow down a worker (worker-1:0.2, a share of its cores) or a link (worker-0~ps-0:5ms+1ms);
    repeatable."""
    processes: bool | None = None
    """Run each role as a child process over loopback TCP, instead of all roles in this process."""
    rule: Literal["auto", "sgd", "adagrad", "adam", "adamw"] | None = None
    """Update rule; auto is adam for the model that --model auto makes for photographs, with smaller groups of
    few of them, else sgd."""
    rate: float | None = None
    """Learning rate; 0 is the rule's default."""
    momentum: float | None = None
    """Momentum of rule sgd."""
    nesterov: bool | None = None
    """Use Nesterov's momentum, with gradients one step of the momentum ahead."""
    weight_decay: float | None = None
    """Weight decay: of the gradient, or with rule adamw of the values."""
    push_every: int | None = None
    """Groups whose gradients are summed into one push."""
    pull_every: int | None = None
    """Steps between two pulls."""
    consistency: str | None = None
    """Bound on the distance of replicas: asp (none), ssp:S (S steps), or bsp (lockstep)."""
    lag: int | None = None
    """Steps by which values may be behind in bsp, 0 or 1; with 1 sums travel during the next step."""
    warm_start: int | None = None
    """Groups that one replica trains alone, before the others begin."""
    schedule: Literal["auto", "constant", "step", "cosine"] | None = None
    """Schedule of the rate: constant, step (by --decay every --decay-every epochs), or cosine (half a cosine,
    to 0)."""
    warm_up: float | None = None
    """Epochs over which the rate rises from 0, before its schedule."""
    decay: float | None = None
    """Factor of schedule step."""
    decay_every: float | None = None
    """Epochs between two falls of schedule step."""
    clip: float | None = None
    """Maximum norm of a pushed gradient over all tensors; 0 for no limit."""
    layer_rate: float | None = None
    """Maximum rate of each tensor, in multiples of |weights| / |gradient|; 0 is off."""
    scale_by_staleness: bool | None = None
    """Divide a push's rate by 1 + its staleness."""
    checkpoint_every: int | None = None
    """Groups between two checkpoints within an epoch; 0: at epoch ends only."""
    checkpoint_misses: int | None = None
    """Failed checkpoints in a row that end the run; 0: train on without checkpoints."""
    keep: int | None = None
    """Number of newest checkpoints that stay in the folder; older ones go once a new one is on the disk."""
    weights: Literal["auto", "copy", "aliased"] | None = None
    """Train on a copy, or in place on the servers' memory (aliased); auto is in place if possible."""
    protocol: Literal["auto", "delta", "factors"] | None = None
    """Form of the weight gradients of dense layers in messages; auto takes the smaller one."""
    kernels: Literal["auto", "numpy", "numba"] | None = None
    """Implementation of the layers; auto is numba, of the extra `fast`, if installed."""
    validation: int | None = None
    """Training images to hold back as validation images, in proportion from each class; --patience,
    --keep-best and --until-accuracy use the accuracy on them."""
    patience: int | None = None
    """Epochs in a row without a better validation accuracy that end the run; 0: no limit."""
    keep_best: bool | None = None
    """Keep the weights of the epoch with the best validation accuracy instead of the last epoch."""
    keep_going: Annotated[bool | None, ONLY_ON] = None
    """Train on even if the loss is not finite, or more than ten times that of guessing."""
    seed: int | None = None
    """Seed of every random value of the run."""
    until_accuracy: float | None = None
    """Accuracy on validation images, else on test images, that ends the run at the end of an epoch; 0 trains
    all epochs."""
    evaluation: Literal["wait", "concurrent"] | None = None
    """Whether training waits for the evaluation of an epoch, or continues during it."""
    shard_bytes: int | None = None
    """Maximum size of a shard, in bytes."""
    memory: Annotated[tuple[str, ...] | None, ONLY_ON] = None
    """Memory that each process of a role asks of its engine: ROLE=SIZE, such as worker=2G; repeatable. Roles
    are controller, ps, data, worker and driver."""
    copies_bind: str | None = None
    """tcp://HOST:PORT on which the parameter servers listen for each other, with --processes."""
    memory_budget: str | None = None
    """Maximum memory of each process for its peers: their requests, and answers to these."""
    checksum: Checksum | None = None
    """CRC-32C of tensors sent between processes: on, off, or auto (to other hosts)."""
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
    the run after the loss of all servers. With --controller the folder has the notes of the run only, and
    each server has its own --dir."""
    flush_s: float | None = None
    """Seconds between two rounds in which a server writes its changed shards to its disk."""
    ack: Literal["auto", "single", "replicated", "durable"] | None = None
    """When a push is acknowledged: in the memory of one server (single), of all copies in sync (replicated),
    or on their disks too (durable)."""
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
    the run that waits for a driver; if none waits, continue from --resume, or begin a new run. SIGTERM leaves
    the run to the next driver."""
    replace: Annotated[bool, ONLY_ON] = False
    """Begin a new run in place of a run that waits for a driver; the weights of that run are lost."""
    token_file: Annotated[Path | None, to_read("--token-file")] = None
    """File with the token (or the keys for role driver) of that cluster, of the data servers at --data, or of
    the agents of `launch torchrun`; by default ADAM_TOKEN."""
    quiet: Annotated[bool, ONLY_ON] = False
    """Print only the last line, and errors."""
    wait: Wait = WAIT
    """Maximum wait for the controller at --controller, or for the agents of `launch`, such as 60s or 5m."""
    log_level: LogLevel | None = None
    """Lowest level of log lines; by default warning, or info with --verbose."""
    log_json: Annotated[bool, ONLY_ON] = False
    """Write each line of the log as one JSON object: time, level, node, logger, message."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the actions of the roles in this process; those of --processes log warnings and errors only."""
    health: Annotated[str | None, addresses_of("--health")] = None
    """tcp://HOST:PORT for probes: GET /healthz and /readyz over HTTP."""
    loop: LoopName = "uvloop"
    """The event loop."""

    def layer(self) -> dict[str, Any]:
        """Return the options of the run on the command line."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name in FIELDS}
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
    loop: LoopName = "uvloop"
    """The event loop."""
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
    dir: Path | None = None
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

    copies_bind: Annotated[str, set_by_variable("copies_bind")] = ""
    """tcp://HOST:PORT to listen on for the other servers, such as on a network of their own; by default that
    of --bind."""
    dir: Path | None = None
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
    spill: Annotated[str, set_by_variable("spill")] = ""
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
    loop: LoopName = "uvloop"
    """The event loop."""


@options
class PlanOptions:
    """Options of `plan`."""

    model: str | None = None
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
    bandwidth: str | None = None
    """Bandwidth of links, each way, such as 1Gbit/s or 125MB/s; each worker then has a machine like this
    one."""
    latency: str | None = None
    """Latency of links, one way, such as 0.1ms; each worker then has a machine like this one."""
    threads: int = 0
    """Compute threads per worker; 0 divides the cores of a machine among its workers."""
    in_flight: int = 0
    """Groups in flight per replica; 0 is twice its threads."""
    servers: int = 1
    """Parameter servers."""
    json: Path | None = None
    """Write the report, with layers, workers and cuts, to this file, as JSON (docs/reference/plan.md)."""
    calibrate: bool = True
    """Measure the layers on this machine, about half a second per group size, instead of an estimate."""
    loop: LoopName = "uvloop"
    """The event loop."""


@options
class PredictOptions:
    """Options of `predict`."""

    top: int = 3
    """Number of classes per image, the likeliest first."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print one JSON object instead of a table."""
    png: Path | None = None
    """Draw the first hundred images into this file, each above its class; needs the extra `data`."""
    damaged: Damaged = "error"
    """Damaged images: error stops at the first one, skip leaves them out and lists them."""
    loop: LoopName = "uvloop"
    """The event loop."""


@options
class ExportOptions:
    """Options of `export`."""

    onnx: Path | None = None
    """Write an ONNX file, and check it with onnxruntime; needs the extra `onnx`."""
    torch: Path | None = None
    """Write the weights as a safetensors file for PyTorch, and print the module; needs the extra `torch`."""
    loop: LoopName = "uvloop"
    """The event loop."""


@options
class InspectOptions:
    """Options of `data inspect`."""

    damaged: Damaged = "skip"
    """Damaged images: skip leaves out and lists up to one in twenty, error stops at the first one."""
    size: str = ""
    """Size to scale and cut images to, ROWSxCOLUMNS such as 48x64; by default the images decide."""
    png: Path | None = None
    """Draw a contact sheet of the training images into this file, a row per class; needs the extra `data`."""
    augment: Annotated[bool, ONLY_ON] = False
    """Show one image of each class, and its variants by the default transforms, one per epoch."""
    transforms: Path | None = None
    """Show variants by the transforms of this TOML file instead."""
    seed: int = 0
    """Seed of the run with these variants."""
    epoch: int = 1
    """First epoch of the variants."""
    samples: int = 8
    """Variants of an image, one per epoch; without transforms, further images of its class."""
    classes: int = 10
    """Maximum number of classes listed and drawn; --json lists all."""
    json: Annotated[bool, ONLY_ON] = False
    """Print the result as one JSON object."""
    loop: LoopName = "uvloop"
    """The event loop."""
