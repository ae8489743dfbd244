"""The parameters of a PyTorch module as arrays of a store: names, shapes, types and values, checked.

An array has the parameter's name in `named_parameters()`, which is its name in `state_dict()`. A tied
parameter is one array, with its first name. Frozen parameters are arrays too: a client pulls them and never
pushes their gradients. Parameter groups, and an optimizer's entry in its `state_dict`, are checked too.
"""

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from adam_async.errors import ConfigError, StoreError
from adam_async.model.rules import CONSTANTS
from adam_async.run.arrays import ArraySpec
from adam_async.store.arrays import fault_of_values
from adam_async.store.sync import ParameterStore
from adam_async.store.values import MOST_RATE

DTYPES = {torch.float32: "float32", torch.float64: "float64"}
"""Types of parameters that a store can hold, with their names in the store."""


class ModuleParameters:
    """A module's parameters, by array name.

    Args:
        module: The module. The module's parameters may be on any device.

    Attributes:
        named: Parameters by name, each parameter once, in the order of `named_parameters()`.
        specs: Shape and type of each parameter, by name.

    Raises:
        ConfigError: The module has no parameter, or one that a store cannot hold; the error has its name, the
            cause and the remedy.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module is a torch.nn.Module, not {type(module).__name__}")
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise ConfigError(
                "a module of torch.jit has no parameters that a program can watch: train the module itself, "
                "or torch.compile(module), and call torch.jit.script or trace after the training"
            )
        self.named: dict[str, nn.Parameter] = dict(module.named_parameters())
        if not self.named:
            raise ConfigError(f"module {type(module).__name__} has no parameters: a store needs one or more")
        for name, parameter in self.named.items():
            if problem := _problem(parameter):
                raise ConfigError(f"parameter {name!r} {problem}")
        _check_memory(self.named)
        _check_embeddings(module)
        self.specs: dict[str, ArraySpec] = {
            name: ArraySpec(tuple(parameter.shape), DTYPES[parameter.dtype])
            for name, parameter in self.named.items()
        }

    def values(self) -> dict[str, NDArray[np.floating]]:
        """Return copies of the values by name, in the memory of the CPU."""
        return {
            name: np.array(parameter.detach().cpu().numpy(), order="C")
            for name, parameter in self.named.items()
        }

    def check_store(self, arrays: Mapping[str, ArraySpec], store: str) -> None:
        """Check that a store has these parameters, with the same shapes and types. Other arrays are allowed.

        Raises:
            StoreError: A parameter is absent, or has another shape or type; the error has the remedy.
        """
        remedy = (
            "build the same module as the creator of the store; if the module has changed since, open "
            "another store, under another name, with parameter_arrays(module)"
        )
        for name, spec in self.specs.items():
            found = arrays.get(name)
            if found is None:
                some = ", ".join(map(repr, list(arrays)[:5]))
                raise StoreError(
                    f"store {store!r} has no array for parameter {name!r}; it has {len(arrays)}: {some}; "
                    f"{remedy}"
                )
            if (found.shape, found.dtype) != (spec.shape, spec.dtype):
                raise StoreError(
                    f"parameter {name!r} is {spec.dtype}{list(spec.shape)}, and its array in store {store!r} "
                    f"is {found.dtype}{list(found.shape)}: {remedy}"
                )


def parameter_arrays(module: nn.Module) -> dict[str, NDArray[np.floating]]:
    """Return the first values of a module's parameters, for `ParameterStore.open(..., arrays)`.

    Returns:
        Copies of the values by name; float32 or float64, with the parameters' shapes.

    Raises:
        ConfigError: See `ModuleParameters`.
    """
    return ModuleParameters(module).values()


def check_values(values: Mapping[str, NDArray[np.floating]], store: str) -> None:
    """Check that pulled values are finite, before the first of them reaches the module.

    Raises:
        StoreError: A value is not finite; the error has its array, its index and the remedy.
    """
    cure = (
        "the training of the store has diverged, or a server is faulty; the module keeps its values: begin a "
        "store under another name, with a lower rate"
    )
    for name, array in values.items():
        if fault := fault_of_values(array.reshape(-1), f"array {name!r} of store {store!r}", cure):
            raise StoreError(fault)


def _problem(parameter: nn.Parameter) -> str:
    """Return the cause and the remedy if a store cannot hold a parameter; otherwise an empty text."""
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet: run the module once on an example before you open the store"
    if parameter.is_meta:
        return "is on the device 'meta' and has no values: call module.to_empty and set its values first"
    if parameter.is_inference():
        return "was made in torch.inference_mode(), so nothing can train it: make the module outside of it"
    if parameter.is_complex():
        return (
            f"has complex values ({parameter.dtype}): keep torch.view_as_real of it as the parameter, and "
            "call torch.view_as_complex in forward"
        )
    if parameter.layout is not torch.strided:
        return f"has the layout {parameter.layout}: make it dense with .to_dense()"
    if parameter.is_neg() or torch._debug_has_internal_overlap(parameter) == 1:
        return (
            "is a view whose values have no memory of their own: make it of tensor.contiguous().resolve_neg()"
        )
    if parameter.dtype not in DTYPES:
        return (
            f"has values of type {parameter.dtype}, and a store holds float32 and float64: keep parameters "
            "in float32, and use torch.autocast for passes in lower precision"
        )
    return ""


def _check_memory(named: Mapping[str, nn.Parameter]) -> None:
    """Refuse two parameters with one memory: it would have only the values pulled last."""
    first: dict[tuple[torch.device, int], str] = {}
    for name, parameter in named.items():
        other = first.setdefault((parameter.device, parameter.data_ptr()), name)
        if other != name and parameter.numel():
            raise ConfigError(
                f"parameters {other!r} and {name!r} are two objects with one memory: tie them as one "
                "parameter (part.weight = other.weight), or give each values of its own by .clone()"
            )


def _check_embeddings(module: nn.Module) -> None:
    """Refuse modules that make sparse gradients, before the first step."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ConfigError(
                f"parameter {f'{name}.weight'.lstrip('.')!r} would get sparse gradients, which a store "
                f"cannot apply: make the {type(part).__name__} with sparse=False"
            )


Parameters = Iterable[nn.Parameter] | Iterable[str] | Iterable[Mapping[str, Any]]
"""Parameters, their names, or groups of them with ``params`` and ``lr``."""

OF_RULES = (*CONSTANTS, "dampening", "lr_decay")
"""Group keys of PyTorch's optimizers for update rule constants, which the servers have."""

GROUP_KEYS = frozenset(
    {"params", "lr", "name", "param_names"}
    | {"initial_lr", "min_lr", "max_lr", "swa_lr"}  # of schedulers
    | {"foreach", "fused", "capturable"}  # ways to compute one result in PyTorch, which have no effect here
)
"""Keys that a parameter group may have."""


def check_keys(group: Mapping[str, Any]) -> None:
    """Check that a parameter group is a mapping with known keys only.

    Raises:
        ConfigError: The argument is not a group, or has another key; the error has its value and the cure.
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
        lr: Rate of groups without an `lr`; None for the rates of the store's rules.
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
        """Identities of all groups' parameters, in order."""

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
        """Return a new group with its parameters and rate, and its parameters' names.

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
