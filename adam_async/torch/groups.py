"""The keys and rates of parameter groups, checked."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from adam_async.errors import ConfigError
from adam_async.store.pushing import MOST_RATE

CONSTANTS = ("momentum", "nesterov", "weight_decay", "betas", "eps", "dampening", "lr_decay")
"""Keys of groups of PyTorch's optimizers for constants that the servers' rules have."""

GROUP_KEYS = frozenset(
    {"params", "lr", "name", "param_names"}
    | {"initial_lr", "min_lr", "max_lr", "swa_lr"}  # of schedulers
    | {"foreach", "fused", "capturable"}  # ways to compute one result in PyTorch, without effect here
)
"""Keys that a parameter group may have."""


def check_keys(group: Mapping[str, Any]) -> None:
    """Check that a parameter group is a mapping with known keys only.

    Raises:
        ConfigError: It is none, or has another key; the error has its value and the cure.
    """
    if not isinstance(group, Mapping):
        raise ConfigError(
            f"a parameter group is a mapping with params, lr and name, not {type(group).__name__}: give "
            "either groups only, or parameters only"
        )
    if group.keys() <= GROUP_KEYS:
        return
    for word in CONSTANTS:
        if word in group:
            raise ConfigError(
                f"a parameter group has {word}={group[word]!r}, a constant of the servers' rule: leave "
                "it out, and open the store with rule={name: Sgd(...), ...}, a rule for each array"
            )
    word = next(word for word in group if word not in GROUP_KEYS)
    raise ConfigError(
        f"a parameter group has {word}={group[word]!r:.80}, which a RemoteOptimizer does not have: leave it "
        "out. A group has params, lr and name"
    )


def check_group(group: Mapping[str, Any]) -> None:
    """Check the keys of a parameter group, and its rate.

    Raises:
        ConfigError: See `check_keys`; or `lr` is missing or no rate.
    """
    check_keys(group)
    rate: Any = group.get("lr")
    is_one = (
        rate.numel() == 1 and not rate.is_complex() if isinstance(rate, Tensor) else isinstance(rate, Real)
    )
    if not is_one or not 0 <= float(rate) <= MOST_RATE:
        raise ConfigError(f"lr is a number from 0 to {MOST_RATE:g}, not {rate!r:.80}")
