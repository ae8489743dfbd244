"""Pure: the interface of an update rule, and what all rules share.

A rule is a frozen value with its constants and the default rate of pushes; the cluster map holds it
unchanged. The owner of the values (a shard) has the rule's state, a dictionary of arrays. `state_names` names
arrays with one number per value, which are cut, copied and saved with the values. `scalar_names` names arrays
with one number per shard, such as Adam's count of steps.

`apply` works in place, block by block, so a block's values, state, gradient and scratch stay in the first two
caches through all operations. Blocks are independent, so the result does not depend on their size. The caller
passes scratch memory; `apply` allocates none. Each application applies weight decay once.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.errors import ModelError
from adam_async.option_types import Amount, check_types

BLOCK = 32 * 1024
"""Number of values per block: 128 KiB of float32. Smaller blocks would need more calls of NumPy, and each
call may release the GIL."""

Epsilon = Annotated[float, msgspec.Meta(ge=1e-15, le=1e12)]
"""A number that is added to a root before the root divides. A square can be 0 beside a gradient or mean of
3e-23, the root of the least float32. A far smaller epsilon would then make an unbounded step."""

Array = NDArray[Any]
Shape = tuple[int, ...]
RuleState = dict[str, Array]


def new_scratch(dtype: DTypeLike = np.float32) -> Array:
    """Allocate the scratch for any rule's `apply`: two blocks. Each thread needs its own scratch."""
    return np.empty((2, BLOCK), dtype)


class Rule(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="rule",
):
    """An update rule. See the head of this file.

    Args:
        rate: Default rate of pushes. Each client, and each push, may have another rate.
        weight_decay: Weight decay: the gradient is added to this share of the values.

    Raises:
        ConfigError: A constant has another type, or is out of range.
    """

    rate: Amount = 0.01
    weight_decay: Amount = 0.0

    def __post_init__(self) -> None:
        check_types(self, f"{type(self).__name__}: ")

    @property
    def name(self) -> str:
        """Name of the rule in configurations and reports."""
        return str(self.__struct_config__.tag)

    @property
    def text(self) -> str:
        """The rule as a Python expression, without its rate and defaults: ``Sgd(momentum=0.9)``."""
        constants = [
            f"{field.name}={value!r}"
            for field in msgspec.structs.fields(self)
            if field.name != "rate" and (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(constants)})"

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays that have one number per value."""
        return ()

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the state arrays that have one number per shard."""
        return ()

    @property
    def is_plain(self) -> bool:
        """Whether the rule subtracts the product of rate and gradient, and does nothing else."""
        return False

    def new_state(self, shape: Shape, dtype: DTypeLike) -> RuleState:
        """Allocate the state for values of this shape."""
        state: RuleState = {name: np.zeros(shape, dtype) for name in self.state_names}
        return {**state, **{name: np.zeros(1, np.int64) for name in self.scalar_names}}

    @abstractmethod
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


_Block = tuple[Array, Array, tuple[Array, ...], Array, Array]


def blocks_of(
    values: Array, gradient: Array, state: RuleState, names: tuple[str, ...], scratch: Array
) -> Iterator[_Block]:
    """Cut values, gradient, the named state and both rows of scratch into blocks.

    Raises:
        ModelError: Shapes or dtypes differ, or an array is not C-contiguous.
    """
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


def decayed(gradient: Array, values: Array, weight_decay: float, out: Array) -> Array:
    """Return the gradient with weight decay, in `out` unless the decay is zero."""
    if not weight_decay:
        return gradient
    np.multiply(values, weight_decay, out=out)
    np.add(out, gradient, out=out)
    return out
