"""The options of the commands. What is not given is None, so that file and environment may say it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter, Token, convert

from adam_async.run.config import FIELDS, Config
from adam_async.run.option_sources import variable_of
from transport.config import Checksum

LoopName = Literal["uvloop", "asyncio"]
Damaged = Literal["error", "skip"]
LogLevel = Literal["debug", "info", "warning", "error"]

WAIT = timedelta(seconds=60)
"""Default maximum wait for a controller."""

Wait = Annotated[timedelta, Parameter(show_default=lambda _: "60s")]

_OnlyOn = Parameter(negative="")

_Options = TypeVar("_Options")

_WHOLE = re.compile(r"[+-]?\d+(_\d+)*")


def value_of(kind: Any, words: Sequence[Token]) -> Any:
    """Convert words as cyclopts does, but refuse fractions for whole numbers, and empty paths.

    Args:
        kind: The option's type.
        words: The words that the user typed.

    Raises:
        ValueError: A word is no value of the type; cyclopts names the option.
    """
    for word in words:
        if kind is int and not _WHOLE.fullmatch(word.value):
            raise ValueError(f"must be a whole number, not {word.value!r}")
        if kind is Path and not word.value:
            # Path("") is the working folder; an unset variable of a shell must not select it.
            raise ValueError("the path is empty: name a file or folder")
    return convert(kind, words)


def strict(options: type[_Options]) -> type[_Options]:
    """Let `value_of` convert the words for each field of a class of options.

    The application's own converter serves the arguments of commands; fields do not inherit it.
    """
    parameter = Parameter(converter=value_of)
    options.__annotations__ = {
        name: Annotated[kind, parameter] for name, kind in options.__annotations__.items()
    }
    return options


def set_by_variable(option: str) -> Parameter:
    """Let the variable of an option set it for a role, too."""
    return Parameter(env_var=variable_of(option))


def worth_saying(default: Any) -> Any:
    """What the help says of a default; None where it is nothing, and so the line says none."""
    return None if default is False or default in (None, "", ()) else str(default)


def _with_defaults(options: type[_Options]) -> type[_Options]:
    """Let the help name the defaults of a run, which are not those of its options: these are None."""
    plain = Config()

    def kind_of(name: str, kind: Any) -> Any:
        default = getattr(plain, name, "")
        # A file to record to is none by default, whatever a run calls it.
        if name == "record" or default in ("", ()):
            return kind
        return Annotated[kind, Parameter(show_default=lambda _: str(default))]

    options.__annotations__ = {name: kind_of(name, kind) for name, kind in options.__annotations__.items()}
    return options


@_with_defaults
@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What `train` can be told."""

    config: Path | None = None
    """TOML file with any of the options below (images_per_group = 64), and [waits]."""
    model: str | None = None
    """auto (what fits the data), mnist-adam, digits, mlp, cifar-conv, or FILE.toml with a spec."""
    data: str | None = None
    """auto, mnist, digits, fashion-mnist, cifar-10, synthetic, a folder or file (docs/data.md), or
    tcp://HOST:PORT of a data server that was started alone; several with commas between them."""
    damaged: Damaged | None = None
    """Damaged images: stop at the first, or leave out up to one in twenty."""
    size: str | None = None
    """ROWSxCOLUMNS such as 48x64 to scale and cut images to; by default the model or the images decide."""
    cache: str | None = None
    """Memory for images: auto, half of what is available, or a size such as 4G, which also serves at once."""
    spill: str | None = None
    """Folder on whose disk decoded images are kept that do not fit into the cache."""
    augment: bool | None = None
    """Change training images at random, in another way each epoch."""
    transforms: str | None = None
    """TOML file that says how; without it as suits the images."""
    allow_functions: Annotated[bool, _OnlyOn] = False
    """Import the functions that the checkpoint of --resume or the record of --replay names."""
    epochs: int | None = None
    """Passes over the training images; 0 is 3, or of the shipped digits 12."""
    replicas: int | None = None
    """Model replicas; each has its own worker."""
    partitions: int | None = None
    """Workers that the model of each replica is cut over."""
    plan: Literal["vertical", "layers"] | None = None
    """How it is cut: each layer over all workers, or consecutive layers to each."""
    halo: Literal["auto", "exchange", "recompute"] | None = None
    """With plan vertical: send image rows that two workers need, or compute them twice."""
    epoch_fraction: float | None = None
    """An epoch ends when this share of the replicas has finished; what is skipped comes first in the next."""
    epoch_rule: Literal["replicas", "images"] | None = None
    """What epoch-fraction counts: replicas that have finished, or images out of one pool; asp only."""
    threads: int | None = None
    """Compute threads per worker; 0 shares the cores out."""
    pin_threads: bool | None = None
    """Each compute thread keeps to one core; helps where others move threads about."""
    images_per_group: int | None = None
    """Images that flow through the graph as one group; 1 is the paper's flow."""
    in_flight: int | None = None
    """Groups in flight of a replica; 0 is twice its threads."""
    servers: int | None = None
    """Parameter servers."""
    data_servers: int | None = None
    """Data servers; all have the whole data set."""
    controllers: int | None = None
    """Controllers: 1, or 3 or 5, of which one or two may be lost."""
    slow: Annotated[tuple[str, ...] | None, _OnlyOn] = None
    """Slow a worker (worker-1:0.2 of its cores) or a link (worker-0~ps-0:5ms+1ms) on purpose; repeat."""
    processes: bool | None = None
    """Each role a child process over loopback TCP, instead of all in this one."""
    rule: Literal["sgd", "adagrad", "adam"] | None = None
    """Update rule."""
    rate: float | None = None
    """Learning rate; 0 is the rule's default."""
    momentum: float | None = None
    """Momentum of rule sgd."""
    weight_decay: float | None = None
    """Weight decay."""
    push_every: int | None = None
    """Groups whose gradients are summed into one push."""
    pull_every: int | None = None
    """Steps between two pulls."""
    consistency: str | None = None
    """How far replicas may be apart: asp (any distance), ssp:S (S steps), or bsp (in lockstep)."""
    lag: int | None = None
    """With bsp: steps by which values may be behind, 0 or 1; sums travel while the next step computes."""
    warm_start: int | None = None
    """Groups that one replica trains alone, before the others begin."""
    schedule: Literal["auto", "constant", "step", "cosine"] | None = None
    """How the rate changes: not, by a factor every so many epochs, or along half a cosine to 0."""
    warm_up: float | None = None
    """Epochs over which the rate rises from 0, before its schedule."""
    decay: float | None = None
    """Factor of schedule step."""
    decay_every: float | None = None
    """Epochs between two falls of schedule step."""
    clip: float | None = None
    """Largest norm of the gradient that a worker pushes, over all tensors; 0 leaves it as it is."""
    layer_rate: float | None = None
    """Keep each tensor's rate at most so many times |weights| / |gradient|; 0 is off."""
    scale_by_staleness: bool | None = None
    """Divide a push's rate by 1 + its staleness."""
    checkpoint_every: int | None = None
    """Groups between two checkpoints in an epoch; 0: at epoch ends only."""
    checkpoint_misses: int | None = None
    """End the run after this many failed checkpoints in a row; 0: train on without checkpoints."""
    weights: Literal["auto", "copy", "aliased"] | None = None
    """Train on a copy, or in place on the servers' memory; auto does that in one process where it can."""
    protocol: Literal["auto", "delta", "factors"] | None = None
    """How weight gradients of dense layers travel; auto takes the fewer bytes."""
    kernels: Literal["auto", "numpy", "numba"] | None = None
    """What computes the layers; auto takes numba, of the extra `fast`, where it is installed."""
    validation: int | None = None
    """Training images to hold back, in proportion from each class; --patience, --keep-best and
    --until-accuracy go by accuracy on them."""
    patience: int | None = None
    """Stop after this many epochs in a row without a better accuracy on the validation images; 0: never."""
    keep_best: bool | None = None
    """Keep the weights of the epoch with the best validation accuracy, not of the last one."""
    keep_going: Annotated[bool | None, _OnlyOn] = None
    """Train on even if the loss is not finite, or more than ten times that of guessing."""
    seed: int | None = None
    """Seed of every random value of the run."""
    until_accuracy: float | None = None
    """Stop after the first epoch whose accuracy on validation images, else on test images, reaches this; 0
    trains all epochs."""
    evaluation: Literal["wait", "concurrent"] | None = None
    """Whether training waits while an epoch is evaluated."""
    shard_bytes: int | None = None
    """Largest shard, in bytes."""
    memory_budget: str | None = None
    """Maximum memory that each process holds for its peers: their requests, and answers to them."""
    checksum: Checksum | None = None
    """Send tensors between processes with a CRC-32C: on, off, or auto (to other hosts)."""
    report: Path | None = None
    """Write the run's report to this file, as JSON; adds about 6 s for its baseline."""
    profile: Path | None = None
    """Write a timeline of the run to this file, as Trace Event JSON; ui.perfetto.dev opens it."""
    record: Path | None = None
    """Write what a replay of the run needs to this file; workers then have one compute thread each."""
    replay: Path | None = None
    """Repeat the run that this file is the record of, in this process, to the last bit."""
    out: Path | None = None
    """Write the trained model to model.safetensors in this folder."""
    checkpoint: Path | None = None
    """Write checkpoints to this folder, at the end of each epoch; without it --resume says where."""
    resume: Path | None = None
    """Continue the run of the newest checkpoint in this folder, with its options and model."""
    init: Path | None = None
    """Begin with the tensors of this saved model that have the same name and shape; others begin fresh."""
    controller: str | None = None
    """tcp://HOST:PORT of a cluster whose roles were started by hand; of several controllers all, with commas
    between them; starts none."""
    token_file: Path | None = None
    """File with the token of that cluster (or its keys for role driver), or of the data servers at --data;
    without it ADAM_TOKEN."""
    quiet: Annotated[bool, _OnlyOn] = False
    """Print only the last line, and errors."""
    wait: Wait = WAIT
    """Maximum wait for the controller at --controller, such as 60s or 5m."""
    log_level: LogLevel | None = None
    """Lowest level of log lines; by default warning, or info with --verbose."""
    log_json: Annotated[bool, _OnlyOn] = False
    """Write each line of the log as one JSON object: time, level, node, logger, message."""
    verbose: Annotated[bool, _OnlyOn] = False
    """Say what the roles do."""
    loop: LoopName = "uvloop"
    """The event loop."""

    def layer(self) -> dict[str, Any]:
        """What the command line says of the run's configuration."""
        said = {field.name: getattr(self, field.name) for field in fields(self) if field.name in FIELDS}
        return {**said, "record": None if self.record is None else True}


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOptions:
    """What every role can be told."""

    id: str | None = None
    """Name of this node, unique in its cluster; by default role, host and process id."""
    token_file: Path | None = None
    """File with the cluster's token, or the keys of this role (`token derive`); without it ADAM_TOKEN."""
    slow: Annotated[
        tuple[str, ...],
        Parameter(
            negative="", env_var=variable_of("slow"), env_var_split=lambda _, text, **__: text.split(",")
        ),
    ] = ()
    """Be slow on purpose: NODE:SHARE of its cores, or NODE~NODE:DELAY of what it says to another; repeat."""
    advertise: str | None = None
    """tcp://HOST:PORT that others dial to reach --bind tcp://0.0.0.0:PORT; port 0 is that of --bind."""
    memory_budget: Annotated[str, set_by_variable("memory_budget")] = "512M"
    """Maximum memory that this process holds for its peers: their requests, and answers to them."""
    checksum: Annotated[Checksum, set_by_variable("checksum")] = "auto"
    """Send tensors with a CRC-32C: on, off, or auto (to other hosts); receivers always check one."""
    log_level: LogLevel | None = None
    """Lowest level of log lines; by default warning, or info with --verbose."""
    log_json: Annotated[bool, _OnlyOn] = False
    """Write each line of the log as one JSON object: time, level, node, logger, message."""
    verbose: Annotated[bool, _OnlyOn] = False
    """Say what the role does."""
    loop: LoopName = "uvloop"
    """The event loop."""
    supervised: Annotated[bool, Parameter(negative="", show=False)] = False
    """Started by another process: orders come by stdin, whose end is ours."""


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions(RoleOptions):
    """What a controller can be told."""

    id: str | None = None
    """With --peers which of them this is, such as 1; alone its name, by default role, host and process id."""
    bind: str | None = None
    """tcp://HOST:PORT to listen on; by default its own of --peers, or tcp://127.0.0.1:7070."""
    peers: str = ""
    """The controllers of its group, the same for all: 1=tcp://HOST:PORT,2=tcp://HOST:PORT,3=tcp://..."""
    dir: Path | None = None
    """Folder of its own where it keeps the cluster map; without it, it forgets when it ends."""


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions(RoleOptions):
    """What a role that joins a controller can be told."""

    controller: str
    """tcp://HOST:PORT of the controller; of several all, with commas between them."""
    wait: Wait = WAIT
    """Maximum wait for a controller, such as 60s or 5m; roles may start in any order."""
    bind: str | None = None
    """tcp://HOST:PORT to listen on; by default any port on the way to the controller."""


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DataServerOptions(RoleOptions):
    """What a data server can be told."""

    controller: str | None = None
    """tcp://HOST:PORT of the controller, or of several with commas between them; without it, it waits until
    `train --data` asks for it."""
    wait: Wait = WAIT
    """Maximum wait for a controller, such as 60s or 5m; roles may start in any order."""
    bind: str | None = None
    """tcp://HOST:PORT to listen on; by default any port, on the way to the controller or of this machine."""
    cache: Annotated[str, set_by_variable("cache")] = "auto"
    """Memory for images: auto, half of what is available, or a size such as 4G, which also serves at once."""
    spill: Annotated[str, set_by_variable("spill")] = ""
    """Folder on whose disk decoded images are kept that do not fit into the cache."""


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """How a data server copies its source before it loads it."""

    stage: Path | None = None
    """Copy --data, a shared folder or file, into this folder first, and load it from there."""
    stage_peers: str = ""
    """tcp://HOST:PORT of each server that copies this source, with commas between; the same list for all."""
    stage_wait: float = 60.0
    """Seconds after which others read the files of a server that has not come."""


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(MemberOptions):
    """What a model worker can be told."""

    controller: Annotated[str, Parameter(name=("--join", "--controller"))]
    """tcp://HOST:PORT of the controller, or of several with commas between them; a training that goes on
    there is joined in the middle."""


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What `plan` can be told."""

    model: str | None = None
    """A named model, FILE.toml with a spec, or auto: what fits the data; by default auto with --data, else
    mnist-adam."""
    data: str | None = None
    """Data that the model must fit, as `train --data`."""
    partitions: int | None = None
    """Workers that a replica is cut over; without it, 1 to 4 are tried."""
    plan: Literal["vertical", "layers"] | None = None
    """Each layer over all workers, or consecutive layers to each; without it both are tried."""
    halo: Literal["auto", "exchange", "recompute"] = "auto"
    """With plan vertical: whether rows that two workers need are sent, or computed twice."""
    images_per_group: int | None = None
    """Images of a group; without it, 1, 16 and 64 are tried."""
    bandwidth: str | None = None
    """Of links, each way, such as 1Gbit/s or 125MB/s; workers then have a machine each, like this one."""
    latency: str | None = None
    """Of links, one way, such as 0.1ms; likewise."""
    threads: int = 0
    """Compute threads per worker; 0 shares the cores of a machine out."""
    in_flight: int = 0
    """Groups in flight; 0 is twice the threads of a replica."""
    servers: int = 1
    """Parameter servers that gradients are pushed to."""
    json: Path | None = None
    """Write what was found out to this file, as JSON (docs/plan.md)."""
    calibrate: bool = True
    """Measure what layers take here, about half a second for each size of group; else it is estimated."""
    loop: LoopName = "uvloop"
    """The event loop."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """Options of `predict`."""

    top: int = 3
    """Number of classes listed for each image, the likeliest first."""
    json: Annotated[bool, Parameter(negative="")] = False
    """Print one JSON object instead of a table."""
    png: Path | None = None
    """Draw the first hundred images into this file, each with its class under it; needs the extra `data`."""
    damaged: Damaged = "error"
    """Damaged images: stop at the first, or leave them out and list them."""
    loop: LoopName = "uvloop"
    """The event loop."""


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """What `data inspect` can be told."""

    damaged: Damaged = "skip"
    """Damaged images: leave out and list up to one in twenty, or stop at the first."""
    size: str = ""
    """ROWSxCOLUMNS such as 48x64 to scale and cut images to; by default the images decide."""
    png: Path | None = None
    """Draw a contact sheet of the training images into this file, a row for each class."""
    augment: Annotated[bool, _OnlyOn] = False
    """Show one image of each class, and what the default transforms make of it epoch by epoch."""
    transforms: Path | None = None
    """The same with the transforms of this TOML file instead."""
    seed: int = 0
    """Seed of the run whose variants are shown."""
    epoch: int = 1
    """First epoch that is shown."""
    samples: int = 8
    """Variants of an image, one an epoch; without transforms, images of a class beside its first."""
    classes: int = 10
    """Most classes that are listed and drawn; --json lists all."""
    json: Annotated[bool, _OnlyOn] = False
    """Print what was found as one JSON object."""
    loop: LoopName = "uvloop"
    """The event loop."""


@strict
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What `simulate` can be told."""

    scenario: Annotated[tuple[str, ...], _OnlyOn] = ()
    """What the cluster goes through: a name of --list, or all; repeat for several. All if none is named."""
    seed: int | None = None
    """Run this seed alone; with --trace a file shows what happened in it."""
    seeds: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """Run seeds A..B, from 0 on, both included; without this and --seed, 0..9, or with --soak all of them."""
    jobs: int = 0
    """Child processes; 0 is one per core."""
    trace: Path | None = None
    """Write what happened in the one run into this file, which Perfetto opens (ui.perfetto.dev)."""
    plan: Path | None = None
    """Run the plan in this file, as a failed run prints it, instead of one drawn from a seed."""
    soak: Path | None = None
    """Keep in this file which seeds are done, and go on behind them, until interrupted."""
    list: Annotated[bool, _OnlyOn] = False
    """List the scenarios."""
    supervised: Annotated[bool, Parameter(negative="", show=False)] = False
    """For child processes: take work on stdin."""
    loop: LoopName = "uvloop"
    """The event loop of the command; what is simulated has its own."""
