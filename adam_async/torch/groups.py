"""Parameter groups, and the entry of an optimizer in its `state_dict`, checked."""

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor, nn

from adam_async.errors import ConfigError
from adam_async.model.rules import CONSTANTS
from adam_async.store.sync import ParameterStore
from adam_async.store.values import MOST_RATE

Parameters = Iterable[nn.Parameter] | Iterable[str] | Iterable[Mapping[str, Any]]
"""Parameters, their names, or groups of them with ``params`` and ``lr``."""

OF_RULES = (*CONSTANTS, "dampening", "lr_decay")
"""Keys of groups of PyTorch's optimizers for constants of update rules, which the servers have."""

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
    for word in OF_RULES:
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


def checked_counters(state: Any, **cadence: int) -> Mapping[str, Any]:
    """Return the counters of an optimizer's entry in a `state_dict`.

    Raises:
        ConfigError: The entry is absent or damaged, or has another `push_every` or `pull_every` than
            `cadence`.
    """
    if state is None:
        raise ConfigError(
            "the state_dict is of another optimizer, and a store cannot take its momentum: leave this "
            "call out, and load the module's values before its arrays create the store"
        )
    for name in ("push_every", "pull_every", "steps", "pushes"):
        if not isinstance(state.get(name), int) or state[name] < 0:
            raise ConfigError(f"the state_dict has {name}={state.get(name)!r:.80}: take an undamaged one")
    for name, mine in cadence.items():
        if state[name] != mine:
            raise ConfigError(
                f"the state_dict has {name}={state[name]}, and this optimizer {name}={mine}: make the "
                f"optimizer with {name}={state[name]}"
            )
    checked: Mapping[str, Any] = state
    return checked


class ParameterGroups:
    """The parameters of a module, resolved to groups with rates.

    Args:
        module: The module.
        named: Its parameters by name.
        store: The store of their values.
        lr: Rate of groups without one; None for the rates of the store's rules.
    """

    def __init__(
        self, module: nn.Module, named: Mapping[str, nn.Parameter], store: ParameterStore, lr: float | None
    ) -> None:
        self._module = module
        self._named = named
        self._store = store
        self._lr = lr
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._members: list[int] = []
        """Identities of the parameters of all groups, in order."""

    def first(self, params: Parameters | None) -> list[dict[str, Any]]:
        """Return the groups of an optimizer's `params`."""
        if isinstance(params, Tensor | str):
            params = [params]
        if params is not None and not isinstance(params, Iterable):
            raise ConfigError(
                f"params is {params!r:.80}: give parameters, their names or groups of them, and a rate as "
                "lr=..., by its name"
            )
        found: list[Any] = list(self._named.values() if params is None else params)
        if not found:
            raise ConfigError("params is empty: name at least one parameter, or leave params out")
        if isinstance(found[0], Mapping):
            return found
        if self._lr is not None:
            return [{"params": found}]
        # The rates of the store's rules may differ: make a group for each rate.
        groups: dict[float, list[nn.Parameter]] = {}
        for name in self.names(found):
            groups.setdefault(self._store.rules[name].rate, []).append(self._named[name])
        return [{"params": group, "lr": rate} for rate, group in groups.items()]

    def checked(self, param_group: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return a new group with its parameters and rate, and the names of its parameters.

        Raises:
            ConfigError: See `RemoteOptimizer.add_param_group`.
        """
        check_keys(param_group)
        group = dict(param_group)
        if "params" not in group:
            raise ConfigError(f"a parameter group has no 'params', only {', '.join(map(repr, group))}")
        members = group["params"]
        names = self.names([members] if isinstance(members, Tensor | str) else list(members))
        group["params"] = [self._named[name] for name in names]
        if "lr" not in group:
            rates = {self._store.rules[name].rate for name in names} if self._lr is None else {self._lr}
            if len(rates) > 1:
                raise ConfigError(
                    f"a parameter group without lr has parameters whose rules have the rates "
                    f"{', '.join(map(str, sorted(rates)))}: give it an lr, or make a group for each rate"
                )
            group["lr"] = rates.pop() if rates else 0.0
        check_group(group)
        return group, names

    def added(self, group: Mapping[str, Any]) -> None:
        """Take note of a group that an optimizer has added."""
        self._members += map(id, group["params"])

    def names(self, members: Iterable[Any]) -> list[str]:
        """Return the names of parameters that are given as such or by name, each once."""
        found: dict[str, None] = {}
        for member in members:
            if isinstance(member, tuple) and len(member) == 2:  # of `named_parameters()`
                member = member[1]
            parameter = self._named.get(member) if isinstance(member, str) else member
            if not isinstance(parameter, Tensor) or id(parameter) not in self._names:
                self._check_is_no_newcomer(member)
                shown = f"of shape {tuple(member.shape)}" if isinstance(member, Tensor) else f"{member!r:.80}"
                some = ", ".join(map(repr, list(self._named)[:5]))
                raise ConfigError(
                    f"parameter {shown} is not of the module, which has {len(self._named)} parameters, such "
                    f"as {some}: build params from this module's named_parameters()"
                )
            found[self._names[id(parameter)]] = None
        return list(found)

    def _check_is_no_newcomer(self, member: Any) -> None:
        """Refuse a parameter that the module got after its optimizer was made, with its cure."""
        for name, parameter in self._module.named_parameters():
            if parameter is member or name == member:
                has = "that of an earlier one" if name in self._store.arrays else "no array for it"
                raise ConfigError(
                    f"parameter {name!r} came to the module after its optimizer was made, and store "
                    f"{self._store.name!r}, opened before, has {has}. The arrays of a store stay the same: "
                    "open another store with parameter_arrays(module), and make its RemoteOptimizer"
                )

    def rates(self, groups: list[dict[str, Any]]) -> list[float]:
        """Return the rate of each group, which the program may have changed.

        Raises:
            ConfigError: A rate is invalid, a group has a key that it must not have, or other parameters.
        """
        for group in groups:
            check_group(group)
        if [id(parameter) for group in groups for parameter in group["params"]] != self._members:
            raise ConfigError(
                "param_groups has other parameters, or another order, than add_param_group has added: add "
                "parameters by add_param_group, and freeze others with requires_grad_(False)"
            )
        return [float(group["lr"]) for group in groups]
