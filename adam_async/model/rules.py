"""Pure: update rules, from a gradient to new values.

A rule is a frozen value with its constants. Its state belongs to the owner of the values (a shard) and is a
dictionary of arrays. `state_names` names arrays of one number per value, which are cut, copied and saved with
the values. `scalar_names` names arrays of one number per shard, such as Adam's count of steps.

`apply` works in place, block by block, so a block's values, state, gradient and scratch stay in the first two
caches through all operations. Blocks are independent, so the result does not depend on their size. The caller
passes scratch memory; `apply` allocates none. Each application applies weight decay once.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import DTypeLike

from adam_async.errors import ModelError
from adam_async.model.layer import Array
from adam_async.model.spec import Shape

BLOCK = 32 * 1024
"""Number of values per block: 128 KiB of float32. Smaller blocks would need more calls of NumPy, and each
call may release the GIL."""

RuleState = dict[str, Array]


def new_scratch(dtype: DTypeLike = np.float32) -> Array:
    """Allocate the scratch for any rule's `apply`: two blocks. Each thread needs its own scratch."""
    return np.empty((2, BLOCK), dtype)


class Rule(Protocol):
    """Interface of an update rule. See the head of this file."""

    @property
    def name(self) -> str:
        """Name of the rule in configurations and reports."""
        ...

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the elementwise arrays of the state."""
        ...

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the arrays of one number per shard."""
        ...

    def new_state(self, shape: Shape, dtype: DTypeLike) -> RuleState:
        """Allocate the state for values of this shape."""
        ...

    def apply(self, values: Array, state: RuleState, gradient: Array, *, rate: float, scratch: Array) -> None:
        """Change `values` and `state` in place.

        Args:
            values: The values, C-contiguous.
            state: State of the values, from `new_state`.
            gradient: Array of the same shape and dtype, C-contiguous; not changed.
            rate: Learning rate of this application.
            scratch: Scratch of the same dtype, from `new_scratch`.

        Raises:
            ModelError: Shapes or dtypes differ, or an array is not C-contiguous.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Gradient descent with momentum m and weight decay w.

    g = gradient + w * p;  buffer = m * buffer + g;  p = p - rate * buffer. The buffer starts at zero.
    With `nesterov` the step looks ahead (Nesterov's momentum): p = p - rate * (g + m * buffer).
    """

    name: ClassVar[str] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_fraction("momentum", self.momentum)
        if self.nesterov and not self.momentum:
            raise ModelError("nesterov needs a momentum above 0; set momentum, or leave nesterov out")
        _check_decay(self.weight_decay)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The momentum buffer, if the rule has momentum."""
        return ("momentum",) if self.momentum else ()

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """An empty tuple: the state has no number per shard."""
        return ()

    def new_state(self, shape: Shape, dtype: DTypeLike) -> RuleState:
        """Allocate the buffer, zero."""
        return {name: np.zeros(shape, dtype) for name in self.state_names}

    def apply(self, values: Array, state: RuleState, gradient: Array, *, rate: float, scratch: Array) -> None:
        """See `Rule.apply`."""
        rate = float(rate)  # a NumPy scalar would drag float32 through float64
        if not self.momentum and not self.weight_decay:
            plain_step(values, gradient, rate=rate, scratch=scratch)
            return
        for p, g, kept, s, t in _blocks(values, gradient, state, self.state_names, scratch):
            step = _decayed(g, p, self.weight_decay, s)
            if self.momentum:
                (buffer,) = kept
                np.multiply(buffer, self.momentum, out=buffer)
                np.add(buffer, step, out=buffer)
                if self.nesterov:
                    np.multiply(buffer, self.momentum, out=t)
                    step = np.add(t, step, out=t)
                else:
                    step = buffer
            np.multiply(step, rate, out=s)
            np.subtract(p, s, out=p)


def plain_step(values: Array, gradient: Array, *, rate: float, scratch: Array) -> None:
    """Subtract ``rate * gradient`` in place: `Sgd` without momentum or decay, and a worker's local step."""
    rate = float(rate)
    for p, g, _, s, _ in _blocks(values, gradient, {}, (), scratch):
        np.multiply(g, rate, out=s)
        np.subtract(p, s, out=p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """Rates that shrink with the sum of the squared gradients so far.

    g = gradient + w * p;  squares = squares + g * g;  p = p - rate * g / (sqrt(squares) + epsilon).
    """

    name: ClassVar[str] = "adagrad"
    weight_decay: float = 0.0
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        _check_decay(self.weight_decay)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The sum of squares."""
        return ("squares",)

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """An empty tuple: the state has no number per shard."""
        return ()

    def new_state(self, shape: Shape, dtype: DTypeLike) -> RuleState:
        """Allocate the sums, zero."""
        return {"squares": np.zeros(shape, dtype)}

    def apply(self, values: Array, state: RuleState, gradient: Array, *, rate: float, scratch: Array) -> None:
        """See `Rule.apply`."""
        rate = float(rate)  # a NumPy scalar would drag float32 through float64
        for p, g, (squares,), s, t in _blocks(values, gradient, state, self.state_names, scratch):
            step = _decayed(g, p, self.weight_decay, s)
            np.multiply(step, step, out=t)
            np.add(squares, t, out=squares)
            np.sqrt(squares, out=t)
            np.add(t, self.epsilon, out=t)
            np.multiply(step, rate, out=s)
            np.divide(s, t, out=s)
            np.subtract(p, s, out=p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Moments of the gradient, corrected for their start at zero; t counts applications from 1.

    g = gradient + w * p;  mean = b1 * mean + (1 - b1) * g;  square = b2 * square + (1 - b2) * g * g;
    p = p - rate / (1 - b1^t) * mean / (sqrt(square) / sqrt(1 - b2^t) + epsilon).

    Two threads that train in place may leave the mean of one gradient beside the square of another; a mean
    beside a square of zero would make an unbounded step. After whole applications no mean is larger than
    `largest_mean` times sqrt(square) (the Cauchy-Schwarz inequality), so steps are clipped to this bound.
    """

    name: ClassVar[str] = "adam"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_decay(self.weight_decay)
        _check_fraction("beta1", self.beta1)
        _check_fraction("beta2", self.beta2)

    @property
    def largest_mean(self) -> float:
        """Maximum of ``|mean| / sqrt(square)`` times 1.1, for rounding; infinite if no maximum exists."""
        left = 1.0 - self.beta1**2 / self.beta2 if self.beta2 else 0.0
        return 1.1 * (1.0 - self.beta1) / math.sqrt((1.0 - self.beta2) * left) if left > 0.0 else math.inf

    @property
    def state_names(self) -> tuple[str, ...]:
        """Both moments."""
        return ("mean", "square")

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The count of applications."""
        return ("steps",)

    def new_state(self, shape: Shape, dtype: DTypeLike) -> RuleState:
        """Allocate both moments and the count, zero."""
        return {
            "mean": np.zeros(shape, dtype),
            "square": np.zeros(shape, dtype),
            "steps": np.zeros(1, np.int64),
        }

    @property
    def decay(self) -> tuple[float, float]:
        """Weight decay added to the gradient, and weight decay subtracted from values per unit of rate."""
        return self.weight_decay, 0.0

    def apply(self, values: Array, state: RuleState, gradient: Array, *, rate: float, scratch: Array) -> None:
        """See `Rule.apply`."""
        rate = float(rate)  # a NumPy scalar would drag float32 through float64
        joined, lost = self.decay
        lost *= rate
        state["steps"] += 1
        steps = int(state["steps"][0])
        scaled_rate = rate / (1.0 - self.beta1**steps)
        root = math.sqrt(1.0 - self.beta2**steps)
        largest = rate and scaled_rate * root * self.largest_mean
        for p, g, (mean, square), s, t in _blocks(values, gradient, state, self.state_names, scratch):
            step = _decayed(g, p, joined, s)
            np.multiply(step, step, out=t)
            np.multiply(t, 1.0 - self.beta2, out=t)
            np.multiply(square, self.beta2, out=square)
            np.add(square, t, out=square)
            np.multiply(step, 1.0 - self.beta1, out=s)
            np.multiply(mean, self.beta1, out=mean)
            np.add(mean, s, out=mean)
            np.sqrt(square, out=t)
            np.divide(t, root, out=t)
            np.add(t, self.epsilon, out=t)
            np.multiply(mean, scaled_rate, out=s)
            np.divide(s, t, out=s)
            np.clip(s, -largest, largest, out=s)
            if lost:
                np.multiply(p, lost, out=t)
                np.subtract(p, t, out=p)
            np.subtract(p, s, out=p)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: the decay of a value does not depend on its gradients.

    p = p - rate * w * p, then the step of `Adam` without weight decay.
    """

    name: ClassVar[str] = "adamw"

    @property
    def decay(self) -> tuple[float, float]:
        """See `Adam.decay`."""
        return 0.0, self.weight_decay


RULES: Mapping[str, type[Sgd] | type[Adagrad] | type[Adam]] = MappingProxyType(
    {"sgd": Sgd, "adagrad": Adagrad, "adam": Adam, "adamw": AdamW}
)
"""Rules by their names in configurations."""


class RuleOptions(Protocol):
    """The options of a rule, in a run or in the record of a store."""

    @property
    def rule(self) -> str:
        """Name of the rule."""
        ...

    @property
    def momentum(self) -> float:
        """Momentum of rule `sgd`."""
        ...

    @property
    def nesterov(self) -> bool:
        """Whether the momentum is Nesterov's."""
        ...

    @property
    def weight_decay(self) -> float:
        """Weight decay."""
        ...


def rule_of(options: RuleOptions) -> Rule:
    """Make the rule of a run or of a record; for errors see `make_rule`."""
    return make_rule(
        options.rule,
        momentum=options.momentum,
        nesterov=options.nesterov,
        weight_decay=options.weight_decay,
    )


def make_rule(name: str, *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Rule:
    """Make a rule from the values of a configuration.

    Raises:
        ModelError: The name is unknown, a number is out of range, the rule takes no momentum, or `nesterov`
            lacks momentum.
    """
    match name:
        case "auto" | "sgd":  # rules that are not decided count as sgd, as in estimates before a run
            return Sgd(momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        case "adagrad" | "adam" | "adamw":
            if momentum:
                raise ModelError(
                    f"rule {name!r} takes no momentum, but momentum is {momentum}; set it to 0 or use sgd"
                )
            if nesterov:
                raise ModelError(f"rule {name!r} takes no nesterov; leave it out or use sgd")
            return RULES[name](weight_decay=weight_decay)
    raise ModelError(f"unknown rule {name!r}; known rules: {', '.join(RULES)}")


_Block = tuple[Array, Array, tuple[Array, ...], Array, Array]


def _blocks(
    values: Array, gradient: Array, state: RuleState, names: tuple[str, ...], scratch: Array
) -> Iterator[_Block]:
    """Cut values, gradient, the named state and both rows of scratch into blocks."""
    kept = tuple(state[name] for name in names)
    for array in (values, gradient, *kept):
        if array.shape != values.shape or array.dtype != values.dtype or not array.flags.c_contiguous:
            raise ModelError(
                f"a rule needs C-contiguous arrays of one shape and dtype: "
                f"values are {values.dtype} of {values.shape}, but one is {array.dtype} of {array.shape}"
            )
    if scratch.dtype != values.dtype:
        raise ModelError(f"scratch is {scratch.dtype}, but values are {values.dtype}")
    flat, flat_gradient = values.reshape(-1), gradient.reshape(-1)
    flat_kept = tuple(array.reshape(-1) for array in kept)
    for start in range(0, flat.size, BLOCK):
        cut = slice(start, start + BLOCK)
        p = flat[cut]
        yield (
            p,
            flat_gradient[cut],
            tuple(a[cut] for a in flat_kept),
            scratch[0, : p.size],
            scratch[1, : p.size],
        )


def _decayed(gradient: Array, values: Array, weight_decay: float, out: Array) -> Array:
    """Return the gradient with weight decay, in `out` unless the decay is zero."""
    if not weight_decay:
        return gradient
    np.multiply(values, weight_decay, out=out)
    np.add(out, gradient, out=out)
    return out


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ModelError(f"{name} must be at least 0 and below 1, not {value}")


def _check_decay(value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ModelError(f"weight_decay must not be negative, not {value}")
