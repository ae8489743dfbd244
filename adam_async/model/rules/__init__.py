"""Pure: the update rules, from a gradient to new values, one file per rule.

    rule.py      start here: the interface of a rule, and the blocks in which it works
    sgd.py       gradient descent, momentum, Nesterov's momentum
    adagrad.py   Adagrad
    adam.py      Adam, AdamW
    imported.py  rules of users: their base class, their record, the checks of their results

To add a rule, write a class in such a file, and add it to `BuiltinRule` below and to the names of
`adam_async`. `model/fast/rules.py` may have a compiled kernel for it. Options, records of the cluster map,
messages and disks take their constants and bounds from the fields of the class.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

import msgspec

from adam_async.errors import ConfigError
from adam_async.model.rules.adagrad import Adagrad
from adam_async.model.rules.adam import Adam, AdamW
from adam_async.model.rules.imported import ImportedRule, UserRule
from adam_async.model.rules.rule import BLOCK, Rule, RuleState, new_scratch
from adam_async.model.rules.sgd import Sgd, plain_step

BuiltinRule = Sgd | Adagrad | Adam | AdamW
"""A rule of this package."""

AnyRule = BuiltinRule | ImportedRule
"""A rule in a message or record, selected by its field ``rule``."""

RULES: Mapping[str, type[BuiltinRule]] = MappingProxyType(
    {str(rule.__struct_config__.tag): rule for rule in get_args(BuiltinRule)}
)
"""Rules of this package by their names."""

CONSTANTS = tuple(
    dict.fromkeys(name for rule in RULES.values() for name in rule.__struct_fields__ if name != "rate")
)
"""Names of the constants that these rules have."""


def rule_of(options: Any) -> AnyRule:
    """Return the rule of a run.

    Args:
        options: A struct with the name of the rule, and the constants of all rules (`Config`). For a user's
            rule it has the rule's record as JSON text.

    Raises:
        ConfigError: A constant is out of range, the rule does not have it, or the record of a user's rule is
            missing or wrong.
    """
    if ":" in options.rule:
        return _imported_rule(options)
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


def _imported_rule(options: Any) -> ImportedRule:
    """Return the record of the user's rule that a run names."""
    try:
        rule = msgspec.json.decode(options.rule_record, type=ImportedRule)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"rule_record of rule {options.rule} is no record: {error}") from None
    if rule.path != options.rule:
        raise ConfigError(f"rule_record is that of rule {rule.path}, not of {options.rule}")
    return rule
