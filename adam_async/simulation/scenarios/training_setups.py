"""Pure: how a simulated cluster trains: which options of a run a seed draws, beside its faults.

A quarter of the seeds keep to plain asynchronous training. The others draw how far replicas may be apart, how
models are cut, what is pushed how often, which rule the servers apply, whether the run is interrupted and
resumed, and whether a worker joins late. The settings of a plan are options of `Config`, and two of this
scenario's own: `resumed` and `late_s`. A plan without settings trains plainly.

    settings = draw_setup(dice, TRAINING)      # {"consistency": "bsp", "rule": "adam", "rate": 0.005}
    setup = setup_of(settings, TRAINING)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from adam_async.config import Config
from adam_async.errors import ConfigError
from adam_async.simulation.dice import Dice
from adam_async.simulation.plan import Setting

OWN = ("resumed", "late_s")
"""Settings that are no options of a run."""

PLAIN = 0.25
"""Share of the seeds that draw no options."""

Draw = Mapping[str, Setting]

MODES: tuple[Draw, ...] = (
    {},
    {"consistency": "ssp:1"},
    {"consistency": "ssp:4"},
    {"consistency": "bsp"},
    {"consistency": "bsp", "lag": 1},
)
"""How far replicas may be apart."""

CUT: Draw = {"partitions": 2, "replicas": 1, "images_per_group": 12, "in_flight": 6, "rate": 0.2}
"""One replica whose model is cut over both workers: every group crosses the network."""

CUTS: tuple[Draw, ...] = (CUT, {**CUT, "plan": "layers"})

RULES: tuple[Draw, ...] = (
    {},
    {"momentum": 0.5, "rate": 0.05},
    {"weight_decay": 0.001},
    {"rule": "adagrad", "rate": 0.05},
    {"rule": "adam", "rate": 0.005},
)
"""Update rules, each with a rate at which digits are learnt in four epochs."""

EXTRAS: tuple[Draw, ...] = (
    {"record": True},
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
    {"push_every": 2, "pull_every": 3},
    {"scale_by_staleness": True},
)

PACE, PACE_CUT = 0.01, 0.05
"""Share of a core that a worker has: training lasts as long as faults strike. What is cut has more, smaller
jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How one run is set up."""

    config: Config
    resumed: bool
    """Whether the run ends half way, and a second one goes on from its checkpoint."""
    late_s: float
    """When a worker that nobody waits for joins; 0 for never."""

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
    return Setup(
        config=msgspec.structs.replace(plain, **options),
        resumed=bool(settings.get("resumed", False)),
        late_s=float(settings.get("late_s", 0.0)),
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
    if dice.chance(0.3):
        settings |= dice.choose(CUTS)
    else:
        settings |= dice.choose(RULES)
    if dice.chance(0.25):
        settings |= {"resumed": True, "checkpoint_every": 20}
    elif dice.chance(0.25):
        settings |= {"late_s": round(dice.between(2.0, 6.0), 3)}
    for extra in (dice.choose(EXTRAS), dice.choose(EXTRAS)):
        more = {**settings, **extra}
        if _fits(more, plain):
            settings = more
    return settings


def _fits(settings: Draw, plain: Config) -> bool:
    """Whether such options can be together in one run."""
    if settings.get("resumed") and ("record" in settings or settings.get("evaluation") == "concurrent"):
        return False
    try:
        setup_of(settings, plain)
    except ConfigError:
        return False
    return True
