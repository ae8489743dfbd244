"""Pure: the update rules, from a gradient to new values, each in a file of its own.

    rule.py      start here: the interface of a rule, and the blocks in which it works
    sgd.py       gradient descent, momentum, Nesterov's momentum
    adagrad.py   Adagrad
    adam.py      Adam, AdamW

A further rule has a class in such a file, a place in `AnyRule` below, and its class among the
names of `adam_async`. `model/fast/rules.py` may have a compiled kernel for it. Options, records of the
cluster map, messages and disks take their constants and bounds from the fields of the class.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

import msgspec

from adam_async.errors import ConfigError
from adam_async.model.rules.adagrad import Adagrad
from adam_async.model.rules.adam import Adam, AdamW
from adam_async.model.rules.rule import BLOCK, Rule, RuleState, new_scratch
from adam_async.model.rules.sgd import Sgd, plain_step

AnyRule = Sgd | Adagrad | Adam | AdamW
"""A rule in a message or a record, by the name in its field ``rule``."""

RULES: Mapping[str, type[AnyRule]] = MappingProxyType(
    {str(rule.__struct_config__.tag): rule for rule in get_args(AnyRule)}
)
"""Rules by their names."""

CONSTANTS = tuple(
    dict.fromkeys(name for rule in RULES.values() for name in rule.__struct_fields__ if name != "rate")
)
"""Names of the constants of all rules."""


def rule_of(options: Any) -> AnyRule:
    """Return the rule of a run.

    Args:
        options: A struct with the name of the rule, and the constants of all rules (`Config`).

    Raises:
        ConfigError: A constant is out of range, or the rule does not have it.
    """
    given: dict[str, Any] = {"weight_decay": options.weight_decay}
    given |= {
        field.name: value
        for field in msgspec.structs.fields(options)
        if field.name in CONSTANTS and (value := getattr(options, field.name)) != field.default
    }
    # A rule that is not decided counts as sgd, as in estimates before a run.
    rule = RULES["sgd" if options.rule == "auto" else options.rule]
    for name, value in given.items():
        if name not in rule.__struct_fields__:
            takers = " or ".join(each for each, kind in RULES.items() if name in kind.__struct_fields__)
            raise ConfigError(
                f"{name}={value} has no effect with rule={options.rule}: set rule to {takers}, or leave "
                f"{name} out"
            )
    return rule(**given)
