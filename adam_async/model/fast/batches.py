"""Pure: batches of gradients applied by compiled kernels; see `adam_async.model.fast.rules`."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.model.errors import ModelError
from adam_async.model.fast.memory import CACHE, kept_name
from adam_async.model.fast.rules import ADAGRAD, ADAM, MOMENTUM, SGD, apply_rule, rule_signature
from adam_async.model.rule_batches import Target
from adam_async.model.rules import Adagrad, Adam, Rule, Sgd


@dataclass(frozen=True, slots=True)
class _Place:
    """Addresses of a target's arrays. Holding the arrays keeps them alive."""

    arrays: tuple[NDArray[Any], ...]
    addresses: tuple[int, int, int]


class CompiledBatches:
    """`adam_async.model.rule_batches.Batches` by a compiled kernel, with the bits of `NumpyBatches`.

    Args:
        rule: The update rule.
        dtype: float32 or float64.

    Making one compiles the kernel, or reads it from the disk.

    Raises:
        ModelError: There is no kernel for the rule.
    """

    def __init__(self, rule: Rule, dtype: "np.dtype[Any]") -> None:
        constants: tuple[float, ...]
        match rule:
            case Sgd():
                self._kind, constants = MOMENTUM if rule.momentum else SGD, (rule.weight_decay, rule.momentum)
            case Adagrad():
                self._kind, constants = ADAGRAD, (rule.weight_decay, rule.epsilon)
            case Adam():
                betas = (rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2)
                self._kind, constants = ADAM, (rule.weight_decay, *betas, rule.epsilon)
            case _:
                raise ModelError(f"no kernel applies {rule!r}")
        name = kept_name(apply_rule.__name__, dtype)
        with nullcontext() if CACHE.has(name) else CACHE.turn():
            apply_rule.compile(rule_signature(dtype))
        CACHE.note(name)
        self._rule = rule
        self._dtype = dtype
        self._like = dtype.type(0)
        self._constants = np.array([*constants, *[0.0] * (6 - len(constants))])
        self._places: dict[Target, _Place] = {}

    def apply(
        self, targets: Sequence[Target], gradients: Sequence[NDArray[Any]], rates: Sequence[float]
    ) -> None:
        """See `Batches.apply`."""
        stops = list(accumulate([len(target.values) for target in targets], initial=0))
        if self._kind == ADAM and len(targets) > 1:  # each counts its own steps
            for target, start, stop in zip(targets, stops, stops[1:], strict=False):
                self.apply([target], [gradient[start:stop] for gradient in gradients], rates)
            return
        rows = [
            (len(target.values), *self._addresses(target), start)
            for target, start in zip(targets, stops, strict=False)
        ]
        self._run(rows, stops[-1], gradients, self._both_rates(targets[0], rates))
        if self._kind == ADAM:
            targets[0].rule_state["steps"] += len(gradients)

    def _run(
        self,
        rows: Sequence[tuple[int, ...]],
        size: int,
        gradients: Sequence[NDArray[Any]],
        both_rates: Sequence[float],
    ) -> None:
        sources = [self._readable(gradient, size) for gradient in gradients]
        addresses = np.array([source.ctypes.data for source in sources], np.int64)
        shards = np.array(rows, np.int64)
        apply_rule(self._kind, self._like, shards, addresses, self._constants, np.array(both_rates))

    def _readable(self, gradient: NDArray[Any], size: int) -> NDArray[Any]:
        if gradient.shape != (size,) or gradient.dtype != self._dtype:
            raise ModelError(
                f"a gradient has {size} values of {self._dtype}, not {gradient.dtype} of {gradient.shape}"
            )
        flags = gradient.flags
        return gradient if flags.c_contiguous and flags.aligned else gradient.copy()

    def _both_rates(self, target: Target, rates: Sequence[float]) -> list[float]:
        """For each gradient the rate that its values are multiplied with, and Adam's root."""
        both: list[float] = []
        rule = self._rule
        steps = int(target.rule_state["steps"][0]) if isinstance(rule, Adam) else 0
        for number, rate in enumerate(rates, start=steps + 1):
            if isinstance(rule, Adam):
                both += (float(rate) / (1.0 - rule.beta1**number), sqrt(1.0 - rule.beta2**number))
            else:
                both += (float(rate), 1.0)
        return both

    def _addresses(self, target: Target) -> tuple[int, int, int]:
        place = self._places.get(target)
        arrays = (target.values, *[target.rule_state[name] for name in self._rule.state_names])
        if place is None or any(a is not b for a, b in zip(place.arrays, arrays, strict=True)):
            for array in arrays:
                if array.shape != target.values.shape or array.dtype != self._dtype:
                    raise ModelError(f"values and state are {self._dtype} of one shape, not {array.dtype}")
                if not array.flags.c_contiguous or not array.flags.aligned or not array.flags.writeable:
                    raise ModelError("values and state must be C-contiguous, aligned and writeable")
            found = [array.ctypes.data for array in arrays] + [0, 0]
            place = self._places[target] = _Place(arrays, (found[0], found[1], found[2]))
        return place.addresses
