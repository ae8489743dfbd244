"""Pure: draws the options of a simulated training run from its seed.

One seed in twenty draws plain asynchronous training. The others draw the consistency mode, the partitions,
the push intervals, the update rule, one of four small networks, an interruption with a resume, a late worker,
and profiling. Almost half of the seeds also draw copies of each shard. A plan's settings are options of
`Config`, and five of this scenario: `resumed`, `late_s`, `network`, `profiled` and `stores`. A plan without
settings trains plainly.

    settings = draw_setup(dice, TRAINING)      # {"consistency": "bsp", "rule": "adam", "rate": 0.005}
    setup = setup_of(settings, TRAINING)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from adam_async.errors import ConfigError
from adam_async.model.named import mlp
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.config import Config
from tests.simulation.plan import Setting
from tests.simulation.random_streams import RandomStream

OWN = ("resumed", "late_s", "network", "profiled", "stores")
"""Settings that are not options of a run."""

PLAIN = 0.05
"""Share of the seeds that draw no options."""

COPIED = 0.7
"""Share of the seeds without a record or a resume that keep several copies of each shard."""

Draw = Mapping[str, Setting]

MODES: tuple[Draw, ...] = (
    {},
    {},
    {"consistency": "ssp:1"},
    {"consistency": "ssp:4"},
    {"consistency": "bsp"},
    {"consistency": "bsp", "lag": 1},
)
"""Consistency modes."""

CUT: Draw = {"partitions": 2, "replicas": 1, "images_per_group": 12, "in_flight": 6, "rate": 0.2}
"""Options for one replica with a partition on each worker, so that every group crosses the network."""

CUTS: tuple[Draw, ...] = (
    {**CUT, "network": "frozen", "plan": "layers", "consistency": "asp", "lag": 0},
    {**CUT, "plan": "layers"},
    {**CUT, "network": "conv", "in_flight": 3},
    {**CUT, "network": "conv", "in_flight": 3, "plan": "layers"},
    CUT,
)

WIDE: Draw = {
    "network": "wide",
    "protocol": "delta",
    "shard_bytes": 1 << 20,
    "images_per_group": 20,
    "rate": 0.2,
}
"""Options with gradients so large that a step's messages are sent while it is computed."""

WHOLE = ("push_every", "pull_every", "clip", "layer_rate")
"""Options for which a step must be complete before its push."""

RULES: tuple[Draw, ...] = (
    {},
    {"network": "conv"},
    {"momentum": 0.5, "rate": 0.05},
    {"weight_decay": 0.001},
    {"rule": "adagrad", "rate": 0.05},
    {"rule": "adam", "rate": 0.005},
)
"""Update rules, each with a rate that learns digits in four epochs."""

EXTRAS: tuple[Draw, ...] = (
    {"record": True},
    {"record": True, "pull_every": 2},
    {"clip": 1.0},
    {"layer_rate": 0.05},
    {"warm_start": 10},
    {"evaluation": "concurrent"},
    {"schedule": "cosine", "warm_up": 0.5},
    {"protocol": "delta"},
    {"protocol": "factors"},
    {"dtype": "float64"},
    {"epoch_fraction": 0.75, "epoch_rule": "images"},
    {"epoch_fraction": 0.5},
    {"push_every": 2},
    {"pull_every": 2},
    {"push_every": 2, "pull_every": 3},
    {"push_every": 2, "pull_every": 2, "layer_rate": 0.05},
    {"push_every": 2, "clip": 1.0},
    {"scale_by_staleness": True},
)

MORE = 3
"""Number of drawn extras; an extra that conflicts with earlier options is left out."""

NETWORKS: dict[str, ModelSpec] = {
    "": mlp((64, 32, 10), input_shape=(1, 8, 8)),
    "conv": ModelSpec(
        name="conv",
        input_shape=(1, 8, 8),
        layers=(
            LayerSpec.of("conv1", "conv2d", filters=8, kernel=3, padding=1),
            LayerSpec.of("relu1", "relu"),
            LayerSpec.of("pool1", "max_pool", kernel=2),
            LayerSpec.of("flat", "flatten"),
            LayerSpec.of("fc1", "dense", outputs=32),
            LayerSpec.of("relu2", "relu"),
            LayerSpec.of("fc2", "dense", outputs=10, init="lecun"),
            LayerSpec.of("loss", "softmax_cross_entropy"),
        ),
    ),
    "frozen": ModelSpec(
        name="frozen",
        input_shape=(1, 8, 8),
        layers=(
            LayerSpec.of("flat", "flatten"),
            LayerSpec.of("fc1", "dense", outputs=128, frozen=True),
            LayerSpec.of("relu1", "relu"),
            LayerSpec.of("fc2", "dense", outputs=10, init="lecun"),
            LayerSpec.of("loss", "softmax_cross_entropy"),
        ),
    ),
    "wide": mlp((64, 256, 256, 10), input_shape=(1, 8, 8)),
}
"""Networks by name; the first is the default. In a partitioned `frozen` network no gradients return to the
first partition, which could run ahead of the second one."""

PACE, PACE_CUT = 0.01, 0.05
"""Share of a core that a worker uses, small enough that training lasts as long as the faults; the second one
is for a partitioned model, which has more and smaller jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Options of one run."""

    config: Config
    plain: bool
    """Whether the run has the default options and network, whose accuracy is known."""
    resumed: int
    """Checkpoint that a second run resumes after half of the epochs: 1 for the newest, 2 for the previous
    one, which usually is within an epoch; 0 if the run is not resumed."""
    late_s: float
    """Start of an additional worker, in seconds; 0 for none."""
    spec: ModelSpec
    """The network."""
    profiled: bool
    """Whether roles record profiles, and the driver collects them."""
    stores: str
    """Consistency of the stores beside the run."""

    @property
    def has_copies(self) -> bool:
        """Whether each shard has several copies, so that a server may be lost."""
        return self.config.copies > 1

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the parameter servers."""
        return tuple(f"ps-{number}" for number in range(self.config.servers))

    @property
    def pace(self) -> float:
        """A worker's share of a core."""
        return PACE_CUT if self.config.partitions > 1 else PACE


def setup_of(settings: Draw, plain: Config) -> Setup:
    """Return the setup for the settings of a plan.

    Raises:
        ConfigError: The options conflict; drawn options never do.
    """
    options = {name: value for name, value in settings.items() if name not in OWN}
    config = msgspec.structs.replace(plain, **options)
    network = str(settings.get("network", ""))
    one_copy = msgspec.structs.replace(config, servers=plain.servers, copies=plain.copies)
    return Setup(
        config=config,
        plain=one_copy == plain and not network,
        resumed=int(settings.get("resumed", 0)),
        late_s=float(settings.get("late_s", 0.0)),
        spec=NETWORKS[network],
        profiled=bool(settings.get("profiled", False)),
        stores=str(settings.get("stores", "asp")),
    )


def draw_setup(dice: RandomStream, plain: Config) -> dict[str, Setting]:
    """Draw the settings of a plan.

    Args:
        dice: A random stream only for this call.
    """
    if dice.chance(PLAIN):
        return {}
    settings: dict[str, Setting] = {**dice.choose(MODES)}
    shape = dice.below(20)
    if shape < 8:
        settings |= dice.choose(CUTS)
    elif shape < 10:
        settings |= WIDE
    else:
        settings |= dice.choose(RULES)
    if dice.chance(0.25):
        settings |= {"resumed": dice.choose((1, 2, 2)), "checkpoint_every": 20}
    elif dice.chance(0.25):
        settings |= {"late_s": round(dice.between(2.0, 6.0), 3)}
    if dice.chance(0.4):
        settings |= {"profiled": True}
    for extra in [dice.choose(EXTRAS) for _ in range(MORE)]:
        more = {**settings, **extra}
        if _fits(more, plain):
            settings = more
    if settings.get("network") == "conv" and "partitions" in settings and "push_every" in settings:
        settings["rate"] = 0.1  # a higher rate gives 24 to 49 % accuracy, with and without faults
    return settings


def draw_copies(dice: RandomStream, settings: Draw) -> dict[str, Setting]:
    """Draw the number of copies of each shard; return no setting for one copy.

    A recorded run needs one copy. A resumed run also has one copy, because a server's loss ends the run while
    its second store gets values.

    Args:
        dice: A random stream only for this call.
        settings: Settings from `draw_setup`.
    """
    if "record" in settings or "resumed" in settings or not dice.chance(COPIED):
        return {}
    return {"servers": dice.choose([3, 4]), "copies": dice.choose([2, 3])}


def _fits(settings: Draw, plain: Config) -> bool:
    """Return whether one run can have all these options."""
    if settings.get("resumed") and ("record" in settings or settings.get("evaluation") == "concurrent"):
        return False
    if settings.get("network") == "wide" and any(name in settings for name in WHOLE):
        return False
    try:
        setup_of(settings, plain)
    except ConfigError:
        return False
    return True
