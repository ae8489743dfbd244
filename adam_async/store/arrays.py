"""Pure: checks of the arrays that a caller gives a store: specifications, gradients and factors.

Letters: K rows of a batch, I inputs, R outputs.
"""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from adam_async.errors import ConfigError, StoreError
from adam_async.model.rules import RULES, AnyRule, UserRule
from adam_async.run.arrays import ArraySpec, Factors
from adam_async.run.store_record import DTYPES, ArrayRecord, check_arrays
from adam_async.run.user_rules import record_of

Gradient = ArrayLike | Factors

StoreRule = AnyRule | UserRule
"""An update rule of a store."""

InitialArrays = Mapping[str, NDArray[Any] | ArraySpec]
"""By name, arrays with their initial values, or specifications of arrays that begin at zero."""


def records_of(
    arrays: InitialArrays, rule: StoreRule | Mapping[str, StoreRule]
) -> tuple[tuple[ArrayRecord, ...], tuple[AnyRule, ...]]:
    """Return the records of arrays and of their rules; for user rules, the rules' own records.

    Raises:
        ConfigError: An array is not float32 or float64, or has a value that is not finite; a name is not
            text, not UTF-8 or too long; the mapping of rules and the arrays differ in names; or servers
            cannot import a user rule.
    """
    if not isinstance(arrays, Mapping):
        raise ConfigError(f"arrays is a mapping of names to arrays, not {type(arrays).__name__}")
    rules: dict[AnyRule, int] = {}
    found = []
    if isinstance(rule, Mapping) and (superfluous := sorted(map(repr, set(rule) - set(arrays)))):
        raise ConfigError(f"rule names {', '.join(superfluous[:3])}, which are not in arrays")
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise ConfigError(f"the name of an array is text, not {name!r:.80}")
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise ConfigError(
                f"array {name[:80]!r}: its name has a lone surrogate, which UTF-8 cannot encode"
            )
        mine = rule.get(name) if isinstance(rule, Mapping) else rule
        if mine is None:
            raise ConfigError(f"rule names no rule for array {name[:80]!r}")
        used: Any = record_of(mine) if isinstance(mine, UserRule) else mine
        if not isinstance(used, AnyRule):
            known = ", ".join(kind.__name__ for kind in RULES.values())
            raise ConfigError(f"the rule of array {name[:80]!r} is {mine!r:.200}; use {known} or a UserRule")
        spec = array if isinstance(array, ArraySpec) else _spec_of(name, array)
        number = rules.setdefault(used, len(rules))
        found.append(ArrayRecord(name, spec.shape, spec.dtype, number, spec.split))
    check_arrays(found, rules=len(rules))
    return tuple(found), tuple(rules)


def user_rules_in(rule: StoreRule | Mapping[str, StoreRule]) -> tuple[type[UserRule], ...]:
    """Return the classes of the user rules among a store's rules."""
    rules = rule.values() if isinstance(rule, Mapping) else (rule,)
    return tuple(dict.fromkeys([type(each) for each in rules if isinstance(each, UserRule)]))


def _spec_of(name: str, array: Any) -> ArraySpec:
    if isinstance(array, np.ma.MaskedArray) or not (isinstance(array, np.ndarray) or np.isscalar(array)):
        raise ConfigError(
            f"array {name[:80]!r} is {type(array).__name__}, and no plain NumPy array: {_cure(array)}; an "
            "ArraySpec stands for zeros"
        )
    values = np.asarray(array)
    if values.dtype.name not in DTYPES or not values.dtype.isnative:
        raise ConfigError(
            f"array {name[:80]!r} has values of type {values.dtype}; convert it to {' or '.join(DTYPES)}"
        )
    _check_finite(np.ascontiguousarray(values).reshape(-1), f"array {name[:80]!r}")
    return ArraySpec(values.shape, values.dtype.name)


def flat_values(record: ArrayRecord, array: Any, what: str) -> NDArray[Any]:
    """Return the values of an array, flat and C-contiguous; a view if the array is C-contiguous.

    Args:
        record: The array of the store.
        array: The values.
        what: Kind of values, for errors, such as ``gradient``.

    Raises:
        StoreError: Shape or type differs, or a value is not finite; the function converts no type.
    """
    name = repr(record.name[:80])
    values = _as_array(array, record, f"{what} of {name}")
    if values.dtype != record.dtype:
        raise StoreError(
            f"{what} of {name} has values of type {values.dtype}, the array {record.dtype}: "
            f"{_cure(array, record.dtype)}"
        )
    if values.shape != record.shape:
        raise StoreError(
            f"{what} of {name} has shape {values.shape}, the array {record.shape}: reshape or transpose it"
        )
    flat = np.ascontiguousarray(values).reshape(-1)
    _check_finite(flat, f"{what} of {name}")
    return flat


def _as_array(array: Any, record: ArrayRecord, what: str) -> NDArray[Any]:
    """Return what a caller gives as an array; NumPy and the other packages' types decide what they take."""
    if array is None:
        raise StoreError(f"{what} is None: {_cure(array)}")
    if isinstance(array, np.ma.MaskedArray):
        raise StoreError(f"{what} is a masked array, whose mask a store would ignore: {_cure(array)}")
    try:
        return np.asarray(array)
    except Exception as error:  # of any type: another package converts its own objects
        # Another conversion of the same kind would fail too.
        cure = _cure("" if isinstance(array, list | tuple) else array, record.dtype)
        raise StoreError(f"{what} is no array: {error}; {cure}") from error


def _cure(array: Any, dtype: str = "float32") -> str:
    """Return the advice for an object that is no plain array of a type."""
    if array is None:
        return "leave its name out"
    if isinstance(array, np.ma.MaskedArray):
        return "use array.filled(0)"
    if hasattr(array, "detach"):  # a tensor of PyTorch, which this package does not import here
        kind = "float" if dtype == "float32" else "double"
        return f"use tensor.detach().cpu().{kind}().numpy(), in front of it .to_dense() if it is sparse"
    if isinstance(array, np.ndarray | np.generic):
        return f"convert it with .astype({dtype!r})"
    if isinstance(array, list | tuple | Real):
        return f"convert it with np.asarray(x, {dtype!r})"
    return f"give a NumPy array of {dtype}"


def flat_factors(record: ArrayRecord, factors: Factors) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return factors in the form of messages: activations (I, K) and errors (R, K), C-contiguous.

    Raises:
        StoreError: The array is not a matrix, a factor's shape or type differs, or a value is not finite.
    """
    name = repr(record.name[:80])
    if len(record.shape) != 2:
        raise StoreError(f"{name} has shape {record.shape}; Factors need a matrix: push a dense gradient")
    rows, inputs = record.shape
    found = []
    for what, array, width in (
        ("activations", factors.activations, inputs),
        ("errors", factors.errors, rows),
    ):
        values = _as_array(array, record, f"{what} of {name}")
        if values.dtype != record.dtype:
            raise StoreError(
                f"{what} of {name} have type {values.dtype}, the array {record.dtype}: "
                f"{_cure(array, record.dtype)}"
            )
        if values.ndim != 2 or values.shape[1] != width or not values.shape[0]:
            raise StoreError(f"{what} of {name} have shape {values.shape}; (K, {width}) is needed, K >= 1")
        flat = np.ascontiguousarray(values.T)
        _check_finite(flat.reshape(-1), f"{what} of {name}")
        found.append(flat)
    if found[0].shape[1] != found[1].shape[1]:
        raise StoreError(
            f"activations of {name} have {found[0].shape[1]} rows, errors {found[1].shape[1]}: both need K"
        )
    return found[0], found[1]


def fault_of_values(flat: NDArray[Any], what: str, cure: str) -> str:
    """Return an error text for the first value that is not finite; empty if all are finite."""
    # A finite sum of squares proves it fast. `vdot`, because `dot` warns of an overflow.
    if isfinite(np.vdot(flat, flat)):
        return ""
    finite = np.isfinite(flat)
    if finite.all():
        return ""
    place = int(np.argmin(finite))
    return f"{what} has the value {flat[place]} at index {place} of its flat values: {cure}"


def _check_finite(flat: NDArray[Any], what: str) -> None:
    """Refuse a value that is not finite."""
    if fault := fault_of_values(flat, what, "leave the step out, or lower the rate"):
        raise StoreError(fault)


def out_memory(
    arrays: Mapping[str, ArrayRecord], names: Collection[str], out: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the flat memory that a pull fills, for the arrays of `out`."""
    if not isinstance(out, Mapping):
        raise StoreError(f"out is a mapping of names to arrays, not {type(out).__name__}")
    found, wanted = {}, frozenset(names)
    for name, array in out.items():
        if name not in wanted:
            raise StoreError(f"out names array {str(name)[:80]!r}, which is not pulled")
        record = arrays[name]
        # `dtype.name` would run six Python functions for each array.
        if not isinstance(array, np.ndarray) or array.shape != record.shape or array.dtype != record.dtype:
            shown = f"{array.dtype}{array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            cure = (
                "tensor.detach().numpy()"
                if hasattr(array, "detach")
                else "a NumPy array of that type and shape"
            )
            raise StoreError(
                f"out of {name[:80]!r} is {shown}, the array {record.dtype}{record.shape}: give {cure}"
            )
        flags = array.flags
        if not (flags.c_contiguous and flags.writeable) or isinstance(array, np.ma.MaskedArray):
            raise StoreError(
                f"out of {name[:80]!r} must be C-contiguous, writable and without a mask: give a plain array"
            )
        found[name] = np.asarray(array).reshape(-1)  # a matrix has two dimensions in each shape
    return found


def names_in(known: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check that a store has arrays of these names.

    Raises:
        StoreError: A name is unknown; the error lists it and some of the store's names.
    """
    for name in names:
        if name not in known:
            some = ", ".join(map(repr, sorted(known)[:5]))
            raise StoreError(f"the store has no array {str(name)[:80]!r}; it has {len(known)}: {some}")
