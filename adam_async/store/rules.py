"""Pure: the update rules of a store, each with its constants and the default rate of pushes.

    rule = Sgd(rate=0.05, momentum=0.9)
    rules = {"embedding": Adagrad(rate=0.1), "weights": Adam(rate=1e-3)}

The servers apply them (Project Adam, section 3.5). `adam_async.model.rules` has their arithmetic.
"""

import math
from dataclasses import dataclass, fields

import numpy as np

from adam_async.errors import ConfigError, check_flags
from adam_async.run.store_record import RuleRecord


def _check(rule: object, *names: str, below_one: tuple[str, ...] = ()) -> None:
    """Check numbers of a rule, and turn those of NumPy into Python's, which a message can hold."""
    name = type(rule).__name__
    for field in names:
        value = getattr(rule, field)
        if isinstance(value, np.generic):
            value = value.item()
            object.__setattr__(rule, field, value)
        most = 1.0 if field in below_one else 1e12
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 <= value <= most or (most == 1.0 and value == 1):
            bound = "at least 0 and less than 1" if field in below_one else "a number from 0 to 1e12"
            raise ConfigError(f"{name}: {field} must be {bound}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Gradient descent with momentum m and weight decay w.

    g = gradient + w * values;  buffer = m * buffer + g;  values -= rate * buffer, or with `nesterov`
    values -= rate * (g + m * buffer).

    Raises:
        ConfigError: A number is out of range, or `nesterov` has no momentum.
    """

    rate: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "rate", "momentum", "weight_decay", below_one=("momentum",))
        check_flags(nesterov=self.nesterov)
        if self.nesterov and not self.momentum:
            raise ConfigError("Sgd: nesterov needs a momentum above 0")

    def record(self) -> RuleRecord:
        """Return the record of the rule in the cluster map."""
        return RuleRecord(
            rule="sgd",
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            rate=self.rate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adaptive:
    """A rule with a rate and a weight decay, and no other constants."""

    rate: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "rate", "weight_decay")

    def record(self) -> RuleRecord:
        """Return the record of the rule in the cluster map."""
        return RuleRecord(rule=type(self).__name__.lower(), weight_decay=self.weight_decay, rate=self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(_Adaptive):
    """Adagrad (DistBelief, section 4.1): each value's rate falls with the sum of its squared gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(_Adaptive):
    """Adam: bias-corrected means of the gradient and its square; weight decay is added to the gradient."""

    rate: float = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(_Adaptive):
    """Adam with decoupled weight decay: values lose rate * weight_decay of themselves at each push."""

    rate: float = 0.001
    weight_decay: float = 0.01


Rule = Sgd | Adagrad | Adam | AdamW
"""An update rule of a store."""

RULES: dict[str, type[Rule]] = {"sgd": Sgd, "adagrad": Adagrad, "adam": Adam, "adamw": AdamW}
"""Rules by their names in the cluster map."""


def rule_of(record: RuleRecord, rate: float) -> Rule:
    """Return the rule of a record, with another default rate."""
    rule = RULES[record.rule]
    constants = {each.name: getattr(record, each.name) for each in fields(rule)}
    return rule(**{**constants, "rate": rate})


def rule_text(record: RuleRecord) -> str:
    """Return a rule as a Python expression, without its rate and defaults: ``Sgd(momentum=0.9)``."""
    rule = RULES[record.rule]
    constants = [
        f"{field.name}={value!r}"
        for field in fields(rule)
        if field.name != "rate" and (value := getattr(record, field.name)) != field.default
    ]
    return f"{rule.__name__}({', '.join(constants)})"
