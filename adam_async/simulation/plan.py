"""Pure: what a simulated run is to be, as data: its options, and the faults that strike it.

A plan and a seed are the whole of a run. So a plan can be printed, written down for good, made smaller while
it still fails, and run again after the code has changed, when its seed alone would mean something else.

    at 3.250 s crash worker-2 for 5.500 s
    at 9.125 s cut worker-1 controller for 0.750 s, amount 1
"""

import math
from collections.abc import Sequence

import msgspec

from adam_async.errors import ConfigError
from adam_async.runtime.random_streams import Dice
from adam_async.simulation.wire import Conditions

Setting = bool | int | float | str


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something bad that happens."""

    at_s: float
    """Seconds after the run begins, or later if another fault is still at its targets."""
    kind: str
    """What: one of `faults.KINDS`, or of the scenario's own."""
    targets: tuple[str, ...] = ()
    """To which machines; for a direction of the network from the first to the second."""
    lasts_s: float = 0.0
    """After this long it is undone; 0 for what cannot be."""
    amount: float = 0.0
    """How much, where the kind knows degrees."""

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
    """Under which conditions a run takes place."""

    shuffled: bool = False
    """Whether steps that are ready run in any order, or first in, first out."""
    unkind: bool = False
    """Whether the places of product code that may be unkind are; see `buggify`."""
    network: Conditions = Conditions()
    """How each direction between two machines behaves."""
    settings: dict[str, Setting] = {}
    """The scenario's own, such as how many machines there are."""

    def __str__(self) -> str:
        network = {name: getattr(self.network, name) for name in self.network.__dataclass_fields__}
        pairs = {"shuffled": self.shuffled, "unkind": self.unkind, **network, **self.settings}
        return ", ".join(f"{name} {value}" for name, value in pairs.items())


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of a run, but for its seed."""

    options: Options
    faults: tuple[Fault, ...]


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run that can be made again: what `simulate --plan FILE` reads."""

    scenario: str
    seed: int
    plan: Plan


def draw_options(dice: Dice, settings: dict[str, Setting]) -> Options:
    """Draw the conditions of a run: an even mixture of kind and unkind ones.

    Args:
        dice: A stream that nothing else uses.
        settings: The scenario's own.
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
    """Faults by the time at which they strike, as a plan has them."""
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def read_case(data: bytes, *, origin: str) -> Case:
    """Read a run that was written down.

    Args:
        data: JSON, as `msgspec.json.encode` writes a `Case`.
        origin: What an error calls it.

    Raises:
        ConfigError: It is none.
    """
    try:
        return msgspec.json.decode(data, type=Case)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{origin} is no plan of a simulated run: {error}") from None
