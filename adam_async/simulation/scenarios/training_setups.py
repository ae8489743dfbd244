"""Pure: how a simulated cluster trains: which options of a run a seed draws, beside its faults.

One seed in twenty keeps to plain asynchronous training. The others draw how far replicas may be apart, how
models are cut, what is pushed how often, which rule the servers apply, which of four small networks learns,
whether the run is interrupted and resumed, whether a worker joins late, and whether roles note what they do.
The settings of a plan are options of `Config`, and four of this scenario's own: `resumed`, `late_s`,
`network` and `profiled`. A plan without settings trains plainly.

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
from adam_async.runtime.random_streams import Dice
from adam_async.simulation.plan import Setting

OWN = ("resumed", "late_s", "network", "profiled")
"""Settings that are no options of a run."""

PLAIN = 0.05
"""Share of the seeds that draw no options."""

Draw = Mapping[str, Setting]

MODES: tuple[Draw, ...] = (
    {},
    {},
    {"consistency": "ssp:1"},
    {"consistency": "ssp:4"},
    {"consistency": "bsp"},
    {"consistency": "bsp", "lag": 1},
)
"""How far replicas may be apart."""

CUT: Draw = {"partitions": 2, "replicas": 1, "images_per_group": 12, "in_flight": 6, "rate": 0.2}
"""One replica whose model is cut over both workers: every group crosses the network."""

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
"""Gradients so large that messages of a step leave while the rest of it is computed."""

WHOLE = ("push_every", "pull_every", "clip", "layer_rate")
"""Options for which a step has to be whole before it leaves."""

RULES: tuple[Draw, ...] = (
    {},
    {"network": "conv"},
    {"momentum": 0.5, "rate": 0.05},
    {"weight_decay": 0.001},
    {"rule": "adagrad", "rate": 0.05},
    {"rule": "adam", "rate": 0.005},
)
"""Update rules, each with a rate at which digits are learnt in four epochs."""

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
"""So many of these are drawn; what cannot be with those before is left out."""

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
"""What learns; the first where a plan says nothing. The worker with what is frozen hears nothing back of its
groups, and could run away from the other one."""

PACE, PACE_CUT = 0.01, 0.05
"""Share of a core that a worker has: training lasts as long as faults strike. What is cut has more, smaller
jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How one run is set up."""

    config: Config
    plain: bool
    """Whether neither the run's options nor the network were drawn: how well these learn is known."""
    resumed: bool
    """Whether the run ends half way, and a second one goes on from its checkpoint."""
    late_s: float
    """When a worker that nobody waits for joins; 0 for never."""
    spec: ModelSpec
    """What learns."""
    profiled: bool
    """Whether roles note what they do, and the driver asks them for it."""

    @property
    def pace(self) -> float:
        """Share of a core that a worker has."""
        return PACE_CUT if self.config.partitions > 1 else PACE


def setup_of(settings: Draw, plain: Config) -> Setup:
    """What the settings of a plan mean.

    Args:
        settings: The plan's.
        plain: What is in force where they say nothing.

    Raises:
        ConfigError: Options that cannot be together; no draw has such.
    """
    options = {name: value for name, value in settings.items() if name not in OWN}
    config = msgspec.structs.replace(plain, **options)
    network = str(settings.get("network", ""))
    return Setup(
        config=config,
        plain=config == plain and not network,
        resumed=bool(settings.get("resumed", False)),
        late_s=float(settings.get("late_s", 0.0)),
        spec=NETWORKS[network],
        profiled=bool(settings.get("profiled", False)),
    )


def draw_setup(dice: Dice, plain: Config) -> dict[str, Setting]:
    """Draw the settings of a plan.

    Args:
        dice: A stream that nothing else uses.
        plain: What is in force where settings say nothing.
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
        settings |= {"resumed": True, "checkpoint_every": 20}
    elif dice.chance(0.25):
        settings |= {"late_s": round(dice.between(2.0, 6.0), 3)}
    if dice.chance(0.4):
        settings |= {"profiled": True}
    for extra in [dice.choose(EXTRAS) for _ in range(MORE)]:
        more = {**settings, **extra}
        if _fits(more, plain):
            settings = more
    if settings.get("network") == "conv" and "partitions" in settings and "push_every" in settings:
        settings["rate"] = 0.1  # faster, it jumps about: 24 to 49 % with and without faults
    return settings


def _fits(settings: Draw, plain: Config) -> bool:
    """Whether such options can be together in one run."""
    if settings.get("resumed") and ("record" in settings or settings.get("evaluation") == "concurrent"):
        return False
    if settings.get("network") == "wide" and any(name in settings for name in WHOLE):
        return False
    try:
        setup_of(settings, plain)
    except ConfigError:
        return False
    return True
