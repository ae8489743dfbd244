"""Pure: the plan of a simulated run as data: its options, and its faults.

A plan and a seed determine a run. A plan can therefore be printed, saved, shrunk while it still fails, and
run again after a change of the code. The seed alone may then draw another plan.

    at 3.250 s crash worker-2 for 5.500 s
    at 9.125 s cut worker-1 controller for 0.750 s, amount 1
"""

import math
from collections.abc import Sequence

import msgspec

from adam_async.errors import ConfigError
from adam_async.runtime.random_streams import RandomStream
from adam_async.simulation.wire import Conditions

Setting = bool | int | float | str


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planned fault."""

    at_s: float
    """Earliest start in seconds of the run; the fault waits while another fault with the same targets
    lasts."""
    kind: str
    """Kind of the fault: one of `faults.KINDS`, or a kind of the scenario."""
    targets: tuple[str, ...] = ()
    """Machines of the fault; for a fault of one direction of the network, its source and its target."""
    lasts_s: float = 0.0
    """Duration in seconds, after which the fault is undone; 0 for a fault that cannot be undone."""
    amount: float = 0.0
    """Degree of the fault, in the unit of its kind; 0 for a kind without degrees."""

    def __post_init__(self) -> None:
        for name in ("at_s", "lasts_s", "amount"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} of a fault must be a number from 0 on, not {value}")

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.3f} s" if self.lasts_s else ""
        amount = f", amount {self.amount:g}" if self.amount else ""
        return f"at {self.at_s:.3f} s {' '.join((self.kind, *self.targets))}{lasts}{amount}"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions of a run."""

    shuffled: bool = False
    """Whether ready steps run in any order; otherwise they run first in, first out."""
    unkind: bool = False
    """Whether the fault points of product code are on; see `fault_points`."""
    network: Conditions = Conditions()
    """Behaviour of each direction between two machines."""
    settings: dict[str, Setting] = {}
    """Options of the scenario, such as the number of machines."""

    def __str__(self) -> str:
        network = {name: getattr(self.network, name) for name in self.network.__dataclass_fields__}
        pairs = {"shuffled": self.shuffled, "unkind": self.unkind, **network, **self.settings}
        return ", ".join(f"{name} {value}" for name, value in pairs.items())


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All inputs that determine a run, except its seed."""

    options: Options
    faults: tuple[Fault, ...]


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One repeatable run: the content of FILE in `simulate --plan FILE`."""

    scenario: str
    seed: int
    plan: Plan


def draw_options(dice: RandomStream, settings: dict[str, Setting]) -> Options:
    """Draw the conditions of a run, mild for half of the runs and rough for the others.

    Args:
        dice: A random stream only for this call.
    """
    rough = dice.chance(0.5)
    network = Conditions(
        delay_s=dice.choose([0.0001, 0.001, 0.005]),
        jitter_s=dice.choose([0.0005, 0.005, 0.02]),
        ragged=rough and dice.chance(0.7),
        duplicate=0.05 if rough and dice.chance(0.5) else 0.0,
        refuse=0.05 if rough and dice.chance(0.3) else 0.0,
    )
    return Options(
        shuffled=dice.chance(0.5), unkind=dice.chance(0.5), network=network, settings=dict(settings)
    )


def in_order(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Return faults in the order of a plan: by their starts."""
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def read_case(data: bytes, *, origin: str) -> Case:
    """Read a saved run.

    Args:
        data: JSON of a `Case`.

    Raises:
        ConfigError: The data is no saved run.
    """
    try:
        return msgspec.json.decode(data, type=Case)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{origin} is no plan of a simulated run: {error}") from None
