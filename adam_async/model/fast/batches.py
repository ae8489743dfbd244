"""Pure: batches of gradients, applied by the compiled kernels of `adam_async.model.fast.rules`."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import ModelError
from adam_async.model.fast.memory import CACHE, compile_kept, kept_name
from adam_async.model.fast.rules import ADAGRAD, ADAM, MOMENTUM, NESTEROV, SGD, apply_rule, rule_signature
from adam_async.model.rule_batches import NumpyBatches, Target
from adam_async.model.rules import Adagrad, Adam, Rule, Sgd

SMALL = 1024
"""Maximum size, in values, of a gradient to which NumPy applies plain SGD: for larger gradients the compiled
kernel is faster."""

MOST_TABLES = 256
"""Maximum number of cached address tables, one per combination of shards in a push. A bound is necessary,
because peers choose these combinations."""


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A target's arrays and their addresses; holding the arrays keeps their memory alive."""

    arrays: tuple[NDArray[Any], ...]
    addresses: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Table:
    """Addresses of several targets, as an argument of the kernel."""

    arrays: tuple[_Arrays, ...]
    table: NDArray[np.int64]


def is_missing(dtype: "np.dtype[Any]") -> bool:
    """Return whether the disk can keep the kernel but lacks it, so that another process can compile it."""
    return CACHE.is_kept and not CACHE.has(_kernel_name(dtype))


def has_kernel(rule: Rule) -> bool:
    """Return whether a compiled kernel applies a rule of this package."""
    return isinstance(rule, Sgd | Adagrad | Adam)


def _kernel_name(dtype: "np.dtype[Any]") -> str:
    return kept_name(apply_rule.__name__, dtype)


class CompiledBatches:
    """`adam_async.model.rule_batches.Batches` with a compiled kernel.

    The results equal those of `NumpyBatches` to the last bit. The constructor compiles the kernel, or reads
    it from disk.

    Args:
        rule: The update rule.
        dtype: float32 or float64.

    Raises:
        ModelError: The rule has no kernel.
    """

    def __init__(self, rule: Rule, dtype: "np.dtype[Any]") -> None:
        constants: tuple[float, ...]
        match rule:
            case Sgd():
                with_momentum = NESTEROV if rule.nesterov else MOMENTUM
                self._kind = with_momentum if rule.momentum else SGD
                constants = (rule.weight_decay, rule.momentum)
            case Adagrad():
                self._kind, constants = ADAGRAD, (rule.weight_decay, rule.eps)
            case Adam():
                # Subtract in float64, as `Adam.apply` does; float32 would give other bits.
                beta1, beta2 = rule.betas
                betas = (beta1, 1.0 - beta1, beta2, 1.0 - beta2)
                self._kind, constants = ADAM, (rule.decay[0], *betas, rule.eps)
            case _:
                raise ModelError(f"no kernel applies {rule!r}")
        name = _kernel_name(dtype)
        # A kernel on disk is only read, so it needs no lock.
        with nullcontext() if CACHE.has(name) else CACHE.turn():
            compile_kept(partial(apply_rule.compile, rule_signature(dtype)))
        CACHE.note(name)
        self._rule = rule
        self._dtype = dtype
        self._like = dtype.type(0)
        self._constants = np.array([*constants, *[0.0] * (6 - len(constants))])
        self._small = NumpyBatches(rule, dtype)
        self._tables: dict[tuple[Target, ...], _Table] = {}

    def apply(
        self, targets: Sequence[Target], gradients: Sequence[NDArray[Any]], rates: Sequence[float]
    ) -> None:
        if self._kind == SGD and len(gradients) == 1 and len(gradients[0]) <= SMALL:
            self._small.apply(targets, gradients, rates)
        # Each target has its own step count, which the corrections depend on, so each target needs a call.
        elif self._kind == ADAM:
            self._apply_adam(targets, gradients, rates)
        else:
            numbers = [number for rate in rates for number in (rate, 1.0, 0.0)]
            self._run(self._table(targets), gradients, numbers)

    def step(self, values: NDArray[Any], into: NDArray[Any], gradient: NDArray[Any], rate: float) -> bool:
        if len(values) <= SMALL:
            return self._small.step(values, into, gradient, rate)
        sources = [self._readable(each, len(values)) for each in (values, gradient)]
        old, new, change = (each.__array_interface__["data"][0] for each in (sources[0], into, sources[1]))
        table, numbers = np.array([(len(values), old, new, 0, 0)], np.int64), np.array((rate, 1.0, 0.0))
        changes, like = np.array([change], np.int64), self._like
        return bool(apply_rule(self._kind, like, table, changes, self._constants, numbers))

    def forget(self) -> None:
        self._tables.clear()

    def _apply_adam(
        self, targets: Sequence[Target], gradients: Sequence[NDArray[Any]], rates: Sequence[float]
    ) -> None:
        """Apply gradients with Adam, target by target, because each target has its own count of steps."""
        rule, at = self._rule, 0
        assert isinstance(rule, Adam)
        beta1, beta2 = rule.betas
        for target in targets:
            end = at + len(target.values)
            steps = int(target.rule_state["steps"][0])
            numbers: list[float] = []
            # In float64, as in `Adam.apply`; the kernel rounds the numbers to the arrays' type.
            for number, rate in enumerate(map(float, rates), start=steps + 1):
                root = sqrt(1.0 - beta2**number)
                numbers += (rate / (1.0 - beta1**number), root, rule.decay[1] * rate)
            self._run(self._table((target,)), [gradient[at:end] for gradient in gradients], numbers)
            target.rule_state["steps"] += len(gradients)
            at = end

    def _run(
        self, table: NDArray[np.int64], gradients: Sequence[NDArray[Any]], numbers: Sequence[float]
    ) -> None:
        # Start and length in the last row add up to the length of a whole gradient.
        size = int(table[-1, 0] + table[-1, 4])
        # `sources` keeps copies alive during the call: the kernel gets only addresses.
        sources = [self._readable(gradient, size) for gradient in gradients]
        addresses = np.array([source.__array_interface__["data"][0] for source in sources], np.int64)
        apply_rule(self._kind, self._like, table, addresses, self._constants, np.array(numbers, np.float64))

    def _readable(self, gradient: NDArray[Any], size: int) -> NDArray[Any]:
        if gradient.shape != (size,) or gradient.dtype != self._dtype:
            raise ModelError(
                f"a gradient has {size} values of {self._dtype}, not {gradient.dtype} of {gradient.shape}"
            )
        # The kernel trusts the address and reads aligned values without gaps from it.
        flags = gradient.flags
        return gradient if flags.c_contiguous and flags.aligned else gradient.copy()

    def _table(self, targets: Sequence[Target]) -> NDArray[np.int64]:
        """Return the addresses of the targets' arrays, as an argument of the kernel."""
        key = tuple(targets)
        known = self._tables.get(key)
        # A target may have a new array, while the table has only addresses.
        if known is not None and all(
            found.arrays[0] is target.values for found, target in zip(known.arrays, targets, strict=True)
        ):
            return known.table
        places = tuple([self._place(target) for target in targets])
        starts = accumulate([len(target.values) for target in targets], initial=0)
        rows = [
            (len(place.arrays[0]), *place.addresses, start)
            for place, start in zip(places, starts, strict=False)
        ]
        if len(self._tables) >= MOST_TABLES:
            self._tables.clear()
        table = np.array(rows, np.int64)
        self._tables[key] = _Table(places, table)
        return table

    def _place(self, target: Target) -> _Arrays:
        arrays = (target.values, *[target.rule_state[name] for name in self._rule.state_names])
        # Checked once per table, because the kernel checks nothing.
        for array in arrays:
            if array.shape != target.values.shape or array.dtype != self._dtype:
                raise ModelError(f"values and state are {self._dtype} of one shape, not {array.dtype}")
            if not array.flags.c_contiguous or not array.flags.aligned or not array.flags.writeable:
                raise ModelError("values and state must be C-contiguous, aligned and writeable")
        found = [array.ctypes.data for array in arrays] + [0, 0]
        return _Arrays(arrays, (found[0], found[1], found[2]))
