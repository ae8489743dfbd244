"""Pure: all options of a run, with their checks. `option_sources.py` reads and merges the options.

In the modes of a run some options have an effect and others do not. `Only`, `Not` and `Idle` at the fields of
`Config` name the modes. `check_modes` makes the errors, and the page of options (docs/reference/options.md)
shows the modes as a table.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from adam_async.errors import ConfigError
from adam_async.option_types import (
    BYTES,
    CHANGES,
    DECIDED,
    OF_DRIVER,
    OF_ROLES,
    ONE_WAY,
    SECONDS,
    UNTYPED,
    Amount,
    Check,
    Fraction,
    Idle,
    Mode,
    Not,
    Of,
    Only,
    check_modes,
    check_types,
    excluded_options,
    fault_of_path,
    options_of,
)
from adam_async.run.addresses import addresses_in, check_address, check_controllers, named_once
from adam_async.run.image_size import read_image_size
from adam_async.run.memory_sizes import cache_limits, read_budget, read_memory
from adam_async.run.stragglers import read_slow, slow_links
from transport.config import Checksum, LinkKind

MOST_COPIES = 8
"""Maximum number of copies of each shard in a store."""

DEFAULT_COPIES = 3
"""Default number of servers with each shard, in a cluster with several controllers."""

# Modes that an option selects.
ASP = Mode("asp", "consistency", ("asp",), enter="give {consistency=asp}")
BSP = Mode("bsp", "consistency", ("bsp",), "give {consistency=bsp} too", "take another {consistency}")
IN_PLACE = Mode("in place", "weights", ("aliased",), leave="leave {weights} at auto")
CUT = Mode("a cut model", "partitions", (), "give {partitions=2} or more too", "train with {partitions=1}")
VERTICAL = Mode("plan vertical", "plan", ("vertical",), enter="give {plan=vertical}")
SGD = Mode("rule sgd", "rule", ("auto", "sgd"), enter="give {rule=sgd}")
STEPS = Mode("schedule step", "schedule", ("step",), enter="give {schedule=step} too")
VALIDATION = Mode(
    "validation images", "validation", enter="hold training images back, such as {validation=5000}"
)
AUGMENTED = Mode("augmented images", "augment", enter="give {augment=True}")
RECORDED = Mode("a record", "record", leave="record nothing")
PROCESSES = Mode("processes", "processes", enter="give {processes=True}")

# Modes that only the command or the cluster knows.
CHECKPOINTS = Mode("a folder for the checkpoints", enter="give --checkpoint DIR")
ON_DISK = Mode("a folder for the shards", enter="give --store DIR")
LINKED = Mode("links between processes", enter="give --processes")
BY_HAND = Mode("roles started by hand (--controller)", leave="leave --controller out")
DATA_HOSTS = Mode("data servers that stand alone", leave="give it where these are started")
STEP = Mode("a step of yours", leave="train a network")

MODES = tuple(mode for mode in globals().values() if isinstance(mode, Mode))
"""All modes, in the order above."""


MAX_THREADS_PER_CORE = 8
"""Maximum number of compute threads per core, above which threads would only wait for each other."""

FLUSH_S = 1.0
"""Default time in seconds between two rounds in which a server writes its changed shards to disk."""

MOST_GROUPS_OF_STEP = 512
"""Maximum number of groups in a step: a push names them in `messages.body.MOST_RANGES` ranges."""

SHARD_BYTES = 1 << 20
"""Default maximum size of a run's or store's shard, in bytes. The paper has shards of 1 MB (AD-40)."""

MOST_SLACK = 1 << 20
"""Maximum number of steps by which a client may be ahead of the slowest."""

GROUP_IMAGES = 16
"""Default number of training images per group."""

AHEAD_BYTES = 32 << 20
"""Maximum size of the images that a worker reads ahead, in bytes, unless one group or the groups in flight
have more."""


_Wait = Annotated[float, Meta(gt=0.0), SECONDS]
"""A deadline."""


class Waits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines of all waits above the transport, in seconds; errors use these names."""

    dial_s: _Wait = 10.0
    """Deadline of the first connection to a peer."""
    meet_s: Annotated[float, Meta(ge=0.0), SECONDS] = 0.0
    """Maximum wait of a starting role or driver for a controller; 0 is `dial_s`."""
    call_s: _Wait = 10.0
    """Deadline of one request to a controller or data server."""
    answer_s: _Wait = 5.0
    """Deadline of one push or pull; the worker then reconnects and sends its open requests again."""
    patience_s: _Wait = 30.0
    """Deadline of all a worker's attempts to reach a shard's primary."""
    controller_s: _Wait = 3600.0
    """Deadline of servers and store clients for a controller's return; pushes and pulls go on meanwhile.
    Other roles wait for `patience_s`."""
    copies_s: _Wait = 3600.0
    """Deadline that replaces `patience_s` while too few copies of a shard are in sync (`min_in_sync`)."""
    prepare_s: _Wait = 120.0
    """Deadline for all roles of a run to join and to prepare."""
    grace_s: _Wait = 2.0
    """Deadline for the reconnection of a node with a broken link, after which the node counts as lost."""
    clock_s: _Wait = 120.0
    """Deadline for an advance of the slowest clock while a worker waits for it."""
    replica_s: _Wait = 60.0
    """Deadline for the next replica or data server of a run without a live one."""
    checkpoint_s: _Wait = 120.0
    """Deadline for the writing of a checkpoint, before the next one or the end of the run."""
    drain_s: _Wait = 5.0
    """Deadline for groups in flight to finish at an orderly end of a run."""

    def __post_init__(self) -> None:
        check_types(self, "waits.")

    @property
    def start_s(self) -> float:
        """Maximum wait of a starting role or driver for a controller, in seconds."""
        return self.meet_s or self.dial_s


Damaged = Literal["error", "skip"]
"""Treatment of damaged images."""

SUMS_BYTES = 64 << 20
"""Maximum size in bytes of a model whose workers send sums in one process by default."""


_NO_PUSHES = "nothing is pushed or pulled"
_ONE_MEMORY = "all roles share one memory"
_READ_ONLY = "it trains in place, and a step gets read-only values"
_WHOLE_NORM = "it is about the norm of a whole gradient, which no worker has"
_OTHER_RULES = "other rules divide by the gradient's size themselves"
_READS_SUM = "every step reads the sum of the one before; {push_every} makes steps longer"
_LAST_WEIGHTS = "a replay ends with the last weights"
_NO_CUTS = "no record has the messages between its workers"
_AS_STALE = "every step is as stale as {lag}; lower the {rate}"
_NO_LAYERS = "a step has no layers to cut; add replicas"
_PUSHES = "it is about pushes, each of which goes to the disk"
_ONE_CLOCK = "the disks keep all shards at one clock, so that the run goes on with the same bits"
"""Reasons of modes, for the fields below."""

_OF_ALL = Of("controller", "ps", "data", "worker")
_ONLY_ASP = Only(ASP, "ssp and bsp skip no images", if_typed=True)
_ONLY_VERTICAL = Only(VERTICAL, "plan layers cuts no layer", if_typed=True)
_ONLY_VALIDATED = Only(VALIDATION, "test images must not decide")
_NOT_BY_HAND = Not(BY_HAND, "it is for roles that this command starts, and those have their own options")
_NOT_IN_PLACE = Not(IN_PLACE, "threads apply each whole gradient at once")
_NOT_WITH_HOSTS = Not(DATA_HOSTS, "they are started with their own")
_NOT_WITH_STEP = Not(STEP, "it is about a cut network, and a step has no layers")
_DURABLE = ("durable",)
_SEVERAL = tuple(range(2, MOST_COPIES + 1))
_CHECK_SIZE = Check(lambda name, text: read_image_size(text, name))
_CHECK_SLOW = Check(lambda name, texts: read_slow(texts, name))
_CHECK_MEMORY = Check(lambda name, texts: read_memory(texts, name))
_CHECK_CACHE = Check(lambda name, text: cache_limits(text, "", available_bytes=0, name=name))
"""Facts that several fields share, or that are too long for their fields."""

_Halo = Literal["auto", "exchange", "recompute"]
_Protocol = Literal["auto", "delta", "factors"]
_Weights = Literal["auto", "copy", "aliased"]
_Ack = Literal["auto", "single", "replicated", "durable"]


def _check_rule(name: str, rule: str) -> None:
    if rule == "auto" or (":" in rule and not fault_of_path(rule)):
        return
    from adam_async.model.rules import RULES  # imports NumPy

    if rule not in RULES:
        raise ConfigError(
            f"{name} must be auto, {', '.join(RULES)}, or package.module:Class of a rule of yours, not "
            f"{rule!r:.80}"
        )


def _check_bind(name: str, address: str) -> None:
    if address:
        check_address(address, name)


def check_consistency(name: str, text: str) -> None:
    """Check the text of a consistency. Raises ConfigError: the text is none of asp, ssp:S and bsp."""
    found = re.fullmatch(r"asp|bsp|ssp:(\d{1,9})", text)
    if found is None or int(found[1] or 0) > MOST_SLACK:
        raise ConfigError(
            f"{name} must be asp, ssp:S with a whole number S of steps up to {MOST_SLACK}, or bsp, not "
            f"{text!r:.200}"
        )


def slack_of(consistency: str) -> int | None:
    """Return the number of steps by which a client may be ahead of the slowest; None for asp, 0 for bsp."""
    return None if consistency == "asp" else int(consistency.partition(":")[2] or 0)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one training run. Field names are those of the command line, with underscores."""

    model: Annotated[str, OF_DRIVER, Not(STEP, "both name what is trained")] = "auto"
    """Model: auto (fits the data), mnist-adam, digits, mlp, cifar-conv, or FILE.toml with a spec."""
    data: Annotated[str, CHANGES, OF_ROLES, Of("data"), Idle(BY_HAND)] = "auto"
    """Training data: auto, mnist, digits, fashion-mnist, cifar-10, synthetic, a folder or file
    (docs/reference/data.md), package.module:function that returns a data set, or tcp://HOST:PORT of a
    standalone data server; several addresses with commas."""
    damaged: Annotated[Damaged, CHANGES, OF_ROLES, Of("data"), Idle(BY_HAND), _NOT_WITH_HOSTS] = "error"
    """Damaged images: error stops at the first one, skip leaves out up to one in twenty."""
    augment: bool = False
    """Change training images at random, differently in each epoch."""
    transforms: Annotated[str, CHANGES, OF_DRIVER, Only(AUGMENTED)] = ""
    """TOML file with the transforms of --augment; by default transforms that suit the images."""
    size: Annotated[str, Of("data"), _CHECK_SIZE] = ""
    """Size to scale and cut images to, ROWSxCOLUMNS such as 48x64; by default the model or the images
    decide."""
    cache: Annotated[str, CHANGES, OF_ROLES, Of("data"), Idle(BY_HAND), _NOT_WITH_HOSTS, _CHECK_CACHE] = (
        "auto"
    )
    """Memory for images: auto, half of the available memory, or a size such as 4G. A data server reads
    folders, shards and .npy files above this size on demand. With a given size a data server reads all of
    these on demand, so it serves images at once."""
    spill: Annotated[str, CHANGES, OF_ROLES, Of("data"), Idle(BY_HAND), _NOT_WITH_HOSTS] = ""
    """Folder for decoded images that do not fit into the cache."""
    epochs: Annotated[int, Meta(ge=0), CHANGES, DECIDED] = 0
    """Passes over the training images; 0 is as many as make 1,500 steps, at least 3 and at most 100. A step
    is one push, of one group by default."""
    replicas: Annotated[int, Meta(ge=1, le=1024), CHANGES] = 1
    """Model replicas; each has its own workers."""
    partitions: Annotated[int, Meta(ge=1, le=64), _NOT_IN_PLACE, Not(STEP, _NO_LAYERS)] = 1
    """Workers over which the model of each replica is cut."""
    plan: Annotated[Literal["vertical", "layers"], Only(CUT, if_typed=True), _NOT_WITH_STEP] = "vertical"
    """Cut of the model: vertical, each layer over all workers, or layers, consecutive layers to each
    worker."""
    halo: Annotated[_Halo, Only(CUT, if_typed=True), _ONLY_VERTICAL, _NOT_WITH_STEP] = "auto"
    """With plan vertical: send image rows needed by two workers (exchange), or compute them twice
    (recompute)."""
    epoch_fraction: Annotated[float, Meta(gt=0.0, le=1.0), CHANGES, _ONLY_ASP] = 0.75
    """Share of the replicas that must finish to end an epoch; skipped images come first in the next epoch. No
    effect with ssp and bsp, which skip no images."""
    epoch_rule: Annotated[Literal["replicas", "images"], CHANGES, _ONLY_ASP] = "replicas"
    """Unit of --epoch-fraction: replicas that have finished, or images of one pool; asp only."""
    slow: Annotated[tuple[str, ...], CHANGES, OF_ROLES, _OF_ALL, _NOT_BY_HAND, _CHECK_SLOW] = ()
    """Slow down a worker (worker-1:0.2, a share of its cores) or a link (worker-0~ps-0:5ms+1ms);
    repeatable."""
    threads: Annotated[int, Meta(ge=0), CHANGES, OF_ROLES, Of("worker"), Idle(BY_HAND)] = 0
    """Compute threads per worker; 0 divides the cores among the workers, or is 1 in a recorded run."""
    images_per_group: Annotated[int, Meta(ge=1, le=65_536)] = GROUP_IMAGES
    """Images per group; 1 is the paper's flow."""
    pin_threads: Annotated[bool, CHANGES, OF_ROLES] = False
    """Keep each compute thread on one core; helps if the system moves threads between cores."""
    # Each group in flight has its own memory.
    in_flight: Annotated[int, Meta(ge=0, le=4096), CHANGES, OF_ROLES, Of("worker"), Idle(BY_HAND)] = 0
    """Groups in flight per replica; 0 is twice its threads, or in place as many as keep the threads busy."""
    servers: Annotated[int, Meta(ge=1, le=64), CHANGES] = 1  # one for each bucket
    """Parameter servers."""
    data_servers: Annotated[int, Meta(ge=1, le=64), CHANGES, _NOT_WITH_HOSTS] = 1
    """Data servers; each has the whole data set."""
    controllers: Annotated[int, CHANGES, OF_ROLES, Idle(BY_HAND), Check(check_controllers)] = 1
    """Controllers: 1, or 3 or 5, which survive the loss of one or two."""
    copies: Annotated[int, Meta(ge=0, le=MOST_COPIES), Not(IN_PLACE, _ONE_MEMORY, _SEVERAL)] = 0
    """Servers with each shard; 0 is 1 with one controller, with several 3, or all servers if there are fewer.
    With --record or --weights aliased 0 is always 1."""
    min_in_sync: Annotated[int, Meta(ge=0, le=MOST_COPIES)] = 0
    """Copies that must have a push before it is applied; 0 is 2, or 1 with one copy."""
    copies_bind: Annotated[str, Of("ps"), Check(_check_bind)] = ""
    """tcp://HOST:PORT on which parameter servers listen for each other, such as on a separate network; by
    default they use one address for all. train needs --processes too."""
    processes: Annotated[bool, CHANGES, OF_ROLES, _NOT_BY_HAND] = False
    """Run each role as a child process over loopback TCP, instead of all roles in this process."""
    rule: Annotated[str, DECIDED, Check(_check_rule)] = "auto"
    """Update rule: sgd, adagrad, adam, adamw, your own as package.module:Class, or auto. auto is adam for the
    model that --model auto makes for photographs, else sgd. Fewer than 240 photographs then also train in
    groups of 4 to 15 images, one in flight, unless --in-flight, or another --images-per-group, is given."""
    rule_args: str = ""
    """Constants of your rule, as a JSON object such as '{"decay": 0.1}'."""
    rule_record: Annotated[str, DECIDED, UNTYPED] = ""
    """Record of your rule as JSON text, with its file's digest; the run sets it."""
    rate: Annotated[float, Meta(ge=0.0), DECIDED] = 0.0
    """Learning rate; 0 is the rule's default."""
    momentum: Fraction = 0.0
    """Momentum of rule sgd."""
    nesterov: bool = False
    """Use Nesterov's momentum, with gradients taken one momentum step ahead."""
    weight_decay: Amount = 0.0
    """Weight decay: of the gradient, or with rule adamw of the values."""
    betas: tuple[Fraction, Fraction] | None = None
    """Shares of the mean and of the mean square that each update keeps, for rules adam and adamw; by default
    0.9 and 0.999."""
    eps: Amount = 0.0
    """Number that is added to the root before the division, of rules adagrad, adam and adamw; 0 is the rule's
    default."""
    initial_accumulator_value: Amount = 0.0
    """First value of the sums of squares, for rule adagrad."""
    push_every: Annotated[int, Meta(ge=1, le=MOST_GROUPS_OF_STEP), Not(IN_PLACE, _NO_PUSHES)] = 1
    """Groups whose gradients are summed into one push."""
    pull_every: Annotated[int, Meta(ge=1), Not(IN_PLACE, _NO_PUSHES), Not(BSP, _READS_SUM)] = 1
    """Steps between two pulls."""
    consistency: Annotated[str, _NOT_IN_PLACE, Check(check_consistency)] = "asp"
    """Bound on the distance of replicas: asp (none), ssp:S (S steps), or bsp (lockstep)."""
    warm_start: Annotated[int, Meta(ge=0)] = 0
    """Groups that one replica trains alone, before the others begin."""
    schedule: Annotated[Literal["auto", "constant", "step", "cosine"], DECIDED] = "auto"
    """Schedule of the rate: constant, step (by --decay every --decay-every epochs), or cosine (half a cosine,
    to 0). auto is cosine after a short warm-up, but constant with --until-accuracy, whose last epoch is
    unknown."""
    warm_up: Annotated[float, Meta(ge=0.0), DECIDED] = 0.0
    """Epochs over which the rate rises from 0, before its schedule."""
    decay: Annotated[float, Meta(gt=0.0, le=1.0), Only(STEPS)] = 0.5
    """Factor of schedule step."""
    decay_every: Annotated[float, Meta(ge=0.001), Only(STEPS)] = 1.0
    """Epochs between two falls of schedule step."""
    clip: Annotated[float, Meta(ge=0.0), Not(CUT, _WHOLE_NORM), _NOT_IN_PLACE] = 0.0
    """Maximum norm of a pushed gradient over all tensors; 0 for no limit."""
    layer_rate: Annotated[
        float, Meta(ge=0.0), Only(SGD, _OTHER_RULES), Not(CUT, _WHOLE_NORM), _NOT_IN_PLACE
    ] = 0.0
    """Maximum rate of each tensor, as a multiple of |weights| / |gradient|; 0 is off."""
    scale_by_staleness: Annotated[bool, Not(BSP, _AS_STALE), _NOT_IN_PLACE] = False
    """Divide a push's rate by 1 + its staleness."""
    lag: Annotated[int, Meta(ge=0, le=1), Only(BSP)] = 0
    """Steps by which values may be behind in bsp, 0 or 1; with 1 sums travel during the next step."""
    checkpoint_every: Annotated[int, Meta(ge=0), CHANGES, Only(CHECKPOINTS)] = 0
    """Groups between two checkpoints within an epoch; 0: at epoch ends only."""
    checkpoint_misses: Annotated[int, Meta(ge=0, le=1_000_000), CHANGES, Only(CHECKPOINTS)] = 3
    """Failed checkpoints in a row that end the run; 0: train on without checkpoints."""
    keep: Annotated[int, Meta(ge=1, le=1_000_000), CHANGES, Only(CHECKPOINTS)] = 2
    """Number of newest checkpoints to keep in the folder; a new one on the disk replaces the oldest."""
    record: Annotated[bool, CHANGES, Not(CUT, _NO_CUTS), _NOT_IN_PLACE] = False
    """Whether roles record the order, read versions and batch boundaries that a replay needs."""
    protocol: Annotated[_Protocol, CHANGES, DECIDED, Not(IN_PLACE, _NO_PUSHES)] = "auto"
    """Form of dense layers' weight gradients in messages; auto takes the smaller one, but sums (delta) for
    small models in one process."""
    weights: Annotated[_Weights, CHANGES, DECIDED, Not(STEP, _READ_ONLY, ("aliased",))] = "auto"
    """Train on a copy, or in place on the servers' memory (aliased); auto is in place if possible."""
    validation: Annotated[int, Meta(ge=0)] = 0
    """Training images to hold back for validation, in proportion from each class; --patience, --keep-best and
    --until-accuracy use the accuracy on them."""
    patience: Annotated[int, Meta(ge=0), CHANGES, _ONLY_VALIDATED] = 0
    """Epochs in a row without a better validation accuracy that end the run; 0: no limit."""
    keep_best: Annotated[bool, CHANGES, _ONLY_VALIDATED, Not(RECORDED, _LAST_WEIGHTS)] = False
    """Keep the weights of the epoch with the best validation accuracy instead of the last epoch."""
    keep_going: Annotated[bool, CHANGES, ONE_WAY] = False
    """Train on even if the loss is not finite, or more than ten times that of guessing."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Seed of every random value in the run."""
    until_accuracy: Annotated[float, Meta(ge=0.0, le=1.0), CHANGES] = 0.0
    """Accuracy on validation images, else on test images, that ends the run at the end of an epoch; 0 trains
    all epochs."""
    evaluation: Annotated[Literal["wait", "concurrent"], CHANGES] = "wait"
    """Whether training waits for the evaluation of an epoch, or continues during it."""
    shard_bytes: Annotated[int, Meta(ge=64, le=1 << 25), BYTES] = SHARD_BYTES
    """Maximum size of a shard, in bytes."""
    kernels: Annotated[Literal["auto", "numpy", "numba"], CHANGES] = "auto"
    """Implementation of the layers; auto is numba, of the extra `fast`, if installed."""
    dtype: Annotated[Literal["float32", "float64"], UNTYPED] = "float32"
    """Type of parameters and gradients; float64 is for proofs."""
    memory: Annotated[tuple[str, ...], CHANGES, OF_ROLES, Only(PROCESSES, if_typed=True), _CHECK_MEMORY] = ()
    """Memory that each process of a role asks of its engine: ROLE=SIZE, such as worker=2G; repeatable. Roles
    are controller, ps, data, worker and driver. Processes on one machine are not limited, but the machine
    must have as much available."""
    memory_budget: Annotated[str, CHANGES, OF_DRIVER, _OF_ALL, Only(LINKED), Check(read_budget)] = "512M"
    """Maximum memory of each process for its peers: their requests and its answers; and as much shared memory
    again."""
    checksum: Annotated[Checksum, CHANGES, OF_DRIVER, _OF_ALL, Only(LINKED)] = "auto"
    """CRC-32C of tensors sent between processes: on, off, or auto (to other hosts)."""
    link: Annotated[LinkKind, CHANGES, OF_DRIVER, _OF_ALL, Only(LINKED)] = "auto"
    """Links between processes of one host: shared (a Unix socket, and shared memory for tensors), tcp, or
    auto (shared where possible)."""
    ack: Annotated[
        _Ack,
        CHANGES,
        Not(RECORDED, _PUSHES, _DURABLE),
        Not(IN_PLACE, _NO_PUSHES, _DURABLE),
        Not(BSP, _ONE_CLOCK, _DURABLE),
    ] = "auto"
    """When a push is acknowledged: in the memory of one server (single), of all copies in sync (replicated),
    or on their disks too (durable)."""
    flush_s: Annotated[float, Meta(ge=0.01, le=3600.0), SECONDS, CHANGES, Of("ps"), Only(ON_DISK)] = FLUSH_S
    """Seconds between two rounds in which a server writes its changed shards to its disk."""
    read_ahead: Annotated[int, Meta(ge=1, le=1024), CHANGES, UNTYPED] = 64  # memory for each
    """Number of groups that a data server prepares ahead per replica, and that a worker requests ahead; fewer
    if these exceed 32 MiB of images."""
    waits: Annotated[Waits, CHANGES, OF_DRIVER, UNTYPED] = Waits()
    """Deadlines; in a file the table ``[waits]``."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.has_user_rule:
            self._check_user_rule()
        elif self.rule_args or self.rule_record:
            raise ConfigError(
                f"rule_args={self.rule_args} has no effect with rule={self.rule}: it is for a rule of yours, "
                "package.module:Class"
            )
        elif any(getattr(self, name) for name in _OF_RULES):
            from adam_async.model.rules import rule_of  # imports NumPy

            rule_of(self)
        check_modes(Config, structs.asdict(self))
        if self.epochs and self.warm_up >= self.epochs:
            raise ConfigError(
                f"warm_up={self.warm_up} leaves nothing of epochs={self.epochs}: "
                "lower warm_up or train longer"
            )
        self._check_copies()
        if self.record:
            self._check_record()

    def _check_user_rule(self) -> None:
        for name in _OF_RULES:
            if value := getattr(self, name):
                raise ConfigError(
                    f"{name}={value} has no effect with rule={self.rule}, a rule of yours: give its "
                    f"constants as rule_args, or leave {name} out"
                )
        if self.weights == "aliased":
            raise ConfigError(
                f"weights=aliased excludes rule={self.rule}, a rule of yours, because servers check its "
                "results: leave weights at auto"
            )
        if self.rule_record:
            from adam_async.model.rules import rule_of  # imports NumPy

            rule_of(self)

    def _check_copies(self) -> None:
        if self.copies > self.servers:
            raise ConfigError(
                f"copies={self.copies} needs as many servers, and there "
                f"{'is 1' if self.servers == 1 else f'are {self.servers}'}: raise servers"
            )
        if self.min_in_sync > self.copies_in_force:
            cure = "leave one of them out" if self.weights == "aliased" else "raise copies"
            raise ConfigError(
                f"min_in_sync={self.min_in_sync} needs as many copies, and there "
                f"{'is 1' if self.copies_in_force == 1 else f'are {self.copies_in_force}'}"
                f"{' with weights=aliased' if self.weights == 'aliased' else ''}: {cure}"
            )
        if self.ack == "single" and self.copies_in_force > 1:
            raise ConfigError(
                f"ack=single is for one copy, and there are {self.copies_in_force}: set copies to 1, or "
                "leave ack out"
            )
        if self.ack == "replicated" and self.copies_in_force == 1:
            raise ConfigError(
                "ack=replicated needs several copies, and there is one: raise servers and copies"
            )

    def _check_record(self) -> None:
        if self.threads > 1:
            raise ConfigError(
                f"a run is recorded with one compute thread per worker, because no record has the order in "
                f"which several write to one copy; set threads to 1, not {self.threads}"
            )
        timed = {
            "scale_by_staleness": self.scale_by_staleness,
            "layer_rate": self.layer_rate > 0 and self.push_every > 1,
        }
        for name, depends in timed.items():
            if depends and self.local_steps:
                raise ConfigError(
                    f"{name} depends on the local steps before a push leaves, which no record has: "
                    f"record with pull_every=1, or without {name}"
                )

    def hosts(self, data: Sequence[str], *, starts_own: bool) -> tuple[str, ...]:
        """Return the addresses of a cluster's data hosts; none if it starts its own data servers.

        Args:
            data: Addresses that the caller names; empty: the addresses in the option `data`.
            starts_own: Whether the caller brings a data set.

        Raises:
            ConfigError: An address is invalid or named twice; or addresses are given together with a data
                set, or with options of data servers that the cluster starts.
        """
        if isinstance(data, str):
            raise ConfigError(f"data is a list of addresses, not {data!r}")
        if starts_own and not data:
            return ()
        hosts = named_once(data, "data") if data else addresses_in(self.data)
        if hosts and starts_own:
            raise ConfigError(f"there is a dataset, and data names {', '.join(hosts)}: give one of them")
        named = f"data servers at {', '.join(hosts)}" if hosts else ""
        check_modes(Config, structs.asdict(self), outside={DATA_HOSTS: named})
        return hosts

    @property
    def slack(self) -> int | None:
        """Maximum number of steps by which a replica may be ahead of the slowest one; None for no bound."""
        return self.lag if self.synchronous else slack_of(self.consistency)

    @property
    def copies_in_force(self) -> int:
        """Number of servers with each shard: `copies`, or the default."""
        if self.copies:
            return self.copies
        if self.controllers == 1 or self.weights == "aliased":
            return 1
        return min(DEFAULT_COPIES, self.servers)

    @property
    def fraction_in_force(self) -> float:
        """Part of an epoch after which it ends: `epoch_fraction`, or 1 if clocks are equal at its end."""
        return self.epoch_fraction if self.slack is None else 1.0

    @property
    def pooled(self) -> bool:
        """Whether replicas take groups from one pool."""
        return self.epoch_rule == "images" and self.slack is None

    @property
    def synchronous(self) -> bool:
        """Whether servers sum the pushes of a step and apply the sum once."""
        return self.consistency == "bsp"

    @property
    def local_steps(self) -> bool:
        """Whether workers apply their steps to their own copy until the next pull.

        With a pull at every step they take no local steps: the next values contain the push, and arrive
        before a local step would be useful.
        """
        return self.rule in ("auto", "sgd") and self.pull_every > 1 and not self.synchronous

    @property
    def has_user_rule(self) -> bool:
        """Whether the rule is a user's rule, given by import path."""
        return ":" in self.rule

    def weights_in(self, obstacle: str) -> Literal["copy", "aliased"]:
        """Return the mode of the workers: the wanted mode, or in place if possible.

        Args:
            obstacle: Why the workers cannot use the servers' memory, with the cure; empty if they can.

        Raises:
            ConfigError: Training in place is wanted and impossible.
        """
        if self.weights == "aliased" and obstacle:
            text = (
                f"weights=aliased needs the memory of the servers, and {obstacle}, or leave weights at auto"
            )
            raise ConfigError(text)
        is_copied = self.weights == "copy" or obstacle or self.copies_in_force > 1 or self.has_user_rule
        return "copy" if is_copied or excluded_options(self, IN_PLACE) else "aliased"

    def obstacle_of_memory(self, *, one_host: bool) -> str:
        """Return why workers in other processes cannot use the servers' memory; empty if they can.

        Args:
            one_host: Whether one command starts all roles, on one host that has shared links.
        """
        if not one_host:
            return "no single command starts all roles on one Linux host: give --processes there"
        if self.servers > 1:
            return f"{self.servers} servers have one each: give --servers 1"
        if self.link == "tcp":
            return "--link tcp shares none: give --link auto"
        if slow_links(self.slow):
            return "a slow link is about pushes: leave links out of --slow"
        return ""

    def protocol_in(self, *, one_process: bool, model_bytes: int) -> Literal["auto", "delta", "factors"]:
        """Return the form of gradients: the wanted one, or sums if fewer bytes would gain nothing.

        Args:
            one_process: Whether servers and workers share their memory.
            model_bytes: Size of the model's parameters; each push buffer takes as much with sums.
        """
        # Several compute threads form the products of factors in parallel, a server's loop one after the
        # other. But steps of several groups and logs of several copies are smaller with factors, and in bsp a
        # run's bits must not depend on links.
        is_kept = self.ack == "durable" or self.copies_in_force > 1 or self.synchronous
        is_alone = self.push_every == self.partitions == 1 and self.weights == "copy"
        sums = one_process and is_alone and not is_kept and model_bytes <= SUMS_BYTES
        return "delta" if self.protocol == "auto" and sums else self.protocol

    @property
    def workers(self) -> int:
        """Number of workers in all replicas."""
        return self.replicas * self.partitions

    def groups_ahead(self, image_bytes: int) -> int:
        """Return the number of groups to read ahead, at least one, if images have this size in bytes."""
        return max(min(self.read_ahead, AHEAD_BYTES // (image_bytes * self.images_per_group)), 1)

    def threads_per_worker(self, cores: int) -> int:
        """Return the compute threads of one worker if all workers share a machine with this many cores.

        Raises:
            ConfigError: All workers together have more than `MAX_THREADS_PER_CORE` threads per core.
        """
        threads = self.threads or (1 if self.record else max(1, cores // self.workers))
        most = MAX_THREADS_PER_CORE * cores
        if threads * self.workers > most:
            parts = f" and partitions={self.partitions}" if self.partitions > 1 else ""
            raise ConfigError(
                f"threads={threads} for each of replicas={self.replicas}{parts} is more than "
                f"{MAX_THREADS_PER_CORE} per core on {cores} cores; lower threads or replicas, "
                f"to at most {most} threads together"
            )
        return threads

    @property
    def falls(self) -> bool:
        """Whether the rate first rises and then falls to 0 at the end of the last epoch."""
        if self.schedule == "auto":
            return not self.until_accuracy
        return self.schedule == "cosine" and self.warm_up > 0

    @property
    def images_per_update(self) -> int:
        """Number of images in one rule update: in one group, or in `bsp` in a step of all replicas."""
        groups = self.replicas * self.push_every if self.synchronous else 1
        return self.images_per_group * groups


def replica_in_flight(workers: Sequence[Mapping[str, Any]], partitions: int) -> int:
    """Return a replica's number of groups in flight: as many as each of its workers can have.

    Args:
        workers: Facts of each worker: ``threads``, and ``in_flight`` if it is given.
    """
    return min(
        int(info.get("in_flight", 0)) or default_in_flight(int(info.get("threads", 1)), partitions)
        for info in workers
    )


def default_in_flight(threads: int, partitions: int) -> int:
    """Return the default groups in flight of a replica: two for each compute thread of its workers."""
    return 2 * threads * partitions


_OF_RULES = ("momentum", "nesterov", "weight_decay", "betas", "eps", "initial_accumulator_value")
"""Options that are rule constants; the rules' classes have the bounds."""

OPTIONS = options_of(Config)
"""Each option by name: its type, default, bounds and facts."""

FIELDS = tuple(OPTIONS)
"""Names of all options."""

MOST = {name: each.bounds.le for name, each in OPTIONS.items() if each.bounds and each.bounds.le is not None}
"""Maximum values of options, by name; larger values are mistakes, or would cause a less clear error later."""

MOST_WORKERS = MOST["replicas"] * MOST["partitions"]
"""Maximum number of workers that an operator may ask for."""
