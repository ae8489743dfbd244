"""Pure: a user's rule: its class, its record, and the checks of its results.

A `UserRule` is code in a module of the user. Servers get the rule's `ImportedRule`, which has the class's
import path and all other facts. So only the servers that apply the rule import the module. All copies of a
shard apply a rule to the same arrays and cut the shard at the same places. So a rule that depends only on its
arguments gives the same bits, or the same refusal, on each copy.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.errors import AdamError, ConfigError
from adam_async.model.rules.rule import Array, Rule, RuleState, Shape
from adam_async.option_types import MOST_RULE_PATH, Amount, brief, check_types, fault_of_path

MOST_CONSTANTS_TEXT = 4096
"""Maximum length of a rule's constants as JSON text, in characters."""

MOST_STATE_ARRAYS = 8
"""Maximum number of state arrays that a rule may have."""

MOST_FIRST = 1e38
"""Maximum absolute first value of a state array."""

MOST_STATE_NAME = 64
"""Maximum length of a state array's name, in characters."""


class RuleRefused(AdamError):
    """A rule of the user raised, or returned a result that the shard does not take."""


class UserRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of users' rules: a frozen value whose fields are its constants.

        class SignSgd(UserRule):
            decay: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0

            def step(self, values, gradient, state, *, rate):
                return values - rate * (np.sign(gradient) + self.decay * values), state

    A rule is elementwise: the servers cut shards into ranges, and call `step` for each range.

    Args:
        rate: Default rate of pushes. Each client, and each push, may have another rate.

    Raises:
        ConfigError: A constant has the wrong type, or is out of bounds.
    """

    rate: Amount = 0.01

    def __post_init__(self) -> None:
        check_types(self, f"{type(self).__name__}: ")

    @property
    def arrays(self) -> Mapping[str, float]:
        """State arrays, which are as long as the values: their names, each with its first value."""
        return {}

    @abstractmethod
    def step(
        self, values: Array, gradient: Array, state: Mapping[str, Array], *, rate: float
    ) -> tuple[Array, Mapping[str, Array]]:
        """Return new values, and the new state arrays by name.

        The result must depend on the arguments alone. The servers refuse a push whose result is not finite,
        has the wrong shape or type, or is an error. Values and state then do not change.

        Args:
            values: Flat values of a shard's range, float32 or float64; read-only.
            gradient: Gradient of the values, of the same shape and type; read-only.
            state: State arrays of the same range; read-only.
            rate: Learning rate of this application.
        """


class ImportedRule(Rule, frozen=True, kw_only=True, tag="imported"):
    """The record of a user's rule.

    Args:
        path: Import path of its class, ``package.module:Class``.
        digest: SHA-256 of the module's file, as 64 hexadecimal digits.
        arrays: Names of its state arrays, each with its first value.
        constants: Constants of the rule except its rate, as a JSON object in text.

    Raises:
        ConfigError: A field is out of bounds.
    """

    path: Annotated[str, msgspec.Meta(max_length=MOST_RULE_PATH)]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    arrays: Annotated[tuple[tuple[str, float], ...], msgspec.Meta(max_length=MOST_STATE_ARRAYS)] = ()
    constants: Annotated[str, msgspec.Meta(max_length=MOST_CONSTANTS_TEXT)] = "{}"

    def __post_init__(self) -> None:
        super().__post_init__()
        shown = f"rule {self.path!r:.80}"
        if fault := fault_of_path(self.path):
            raise ConfigError(f"{shown}: {fault}")
        if len(self.digest) != 64 or not set(self.digest) <= set("0123456789abcdef"):
            raise ConfigError(f"{shown}: its digest is {self.digest!r:.80}, expected 64 hexadecimal digits")
        if self.weight_decay:
            raise ConfigError(
                f"{shown}: weight_decay={self.weight_decay}: a constant of yours is in constants"
            )
        names = [name for name, _ in self.arrays]
        if len(set(names)) < len(names):
            raise ConfigError(f"{shown}: it has state arrays {names!r:.200}: give each another name")
        for name, first in self.arrays:
            if not name.isascii() or not name.isidentifier() or len(name) > MOST_STATE_NAME:
                raise ConfigError(f"{shown}: state array {name!r:.80}: give it the name of a Python variable")
            if not abs(first) <= MOST_FIRST:  # neither does a NaN
                raise ConfigError(
                    f"{shown}: the first value of state array {name} is {first}: give a finite one"
                )

    @property
    def name(self) -> str:
        """See `Rule.name`: the import path."""
        return self.path

    @property
    def text(self) -> str:
        """The rule with its constants, and the first digits of its file's digest."""
        return f"{self.path} {self.constants} (file {self.digest[:12]})"

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple([name for name, _ in self.arrays])

    def new_state(self, shape: Shape, dtype: DTypeLike) -> RuleState:
        """Allocate the arrays at their first values."""
        # Fresh pages of zeros take no memory before their first use.
        return {
            name: np.full(shape, first, dtype) if first else np.zeros(shape, dtype)
            for name, first in self.arrays
        }

    def apply(self, values: Array, state: RuleState, gradient: Array, *, rate: float, scratch: Array) -> None:
        """Raise: only the servers that allow the rule have its code; see `UserApplier`."""
        raise ConfigError(f"rule {self.path} is a rule of the user, and its code is not here")


def checked_step(
    rule: UserRule,
    values: NDArray[Any],
    gradient: NDArray[Any],
    state: Mapping[str, NDArray[Any]],
    *,
    rate: float,
) -> Sequence[NDArray[Any]]:
    """Call a rule on read-only arrays, and check its result.

    Args:
        state: All state arrays of the rule.

    Returns the new values, and the new state arrays in the order of `state`.

    Raises:
        RuleRefused: The rule raised, wrote into its arguments, or returned a result with the wrong form,
            shape or type or a value that is not finite.
        MemoryError: The memory is full, perhaps on only one copy of the shard.
    """
    arguments = {name: _read_only(array) for name, array in state.items()}
    try:
        # The flags of the caller come back, whichever the rule sets.
        with np.errstate(all="ignore"):
            result = rule.step(_read_only(values), _read_only(gradient), arguments, rate=float(rate))
            new, kept = _two_parts(result)
    except (MemoryError, KeyboardInterrupt, RuleRefused):
        raise
    except BaseException as error:
        # The code of a user may raise anything, also what would end the loop or a generator.
        line = _line_of(error)
        # The error's frames refer to the push's tensors, and their sender waits until nothing does.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        raise RuleRefused(f"step raised {_text_of(error)} in line {line}") from None
    if kept.keys() != state.keys():
        raise RuleRefused(f"step returned state {sorted(kept)!r:.200}, expected the arrays {sorted(state)}")
    found = {"values": new, **{f"state {name}": kept[name] for name in state}}
    for name, array in found.items():
        # A subclass has other rules: the check of a masked array skips its masked values.
        is_plain = type(array) is np.ndarray
        if not is_plain or (array.shape, array.dtype) != (values.shape, values.dtype):
            shown = f"{array.dtype} of {array.shape}" if is_plain else type(array).__name__
            raise RuleRefused(f"step returned {name} as {shown}, expected {values.dtype} of {values.shape}")
        if not np.isfinite(array).all():
            raise RuleRefused(f"step returned {name} with a value that is not finite")
    return tuple(found.values())


def _two_parts(result: Any) -> tuple[Any, dict[str, Any]]:
    """Return the values and state in a step's result; a mapping from the rule may raise anything."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise RuleRefused(f"step returned {brief(type(result))}, expected (values, state)")
    return result[0], {str(name): array for name, array in result[1].items()}


def _line_of(error: BaseException) -> int:
    """Return the line in which an error was raised; no frame stays in a variable of the caller."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_lineno if trace is not None else 0


def _text_of(error: BaseException) -> str:
    try:
        return f"{error!r:.200}"
    except Exception:  # its class may define a text
        return type(error).__name__


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view through memory that is read-only: a rule can clear the flag of another view."""
    return np.asarray(array.data.toreadonly())
