"""Pure: the choice between NumPy's kernels and compiled ones, for networks and for update rules."""

from importlib.util import find_spec
from typing import Any

import numpy as np

from adam_async.errors import SpecError, install_command
from adam_async.model.rule_batches import Batches, NumpyBatches
from adam_async.model.rules import RULES, Rule
from adam_async.model.vectors import Vectors

KERNELS = ("numpy", "numba", "auto")
"""Known sets of kernels; `auto` is `numba` if numba is installed, else `numpy`."""


def available_kernels(kernels: str) -> str:
    """Return ``"numpy"`` or ``"numba"``: the set of kernels that a name in `KERNELS` selects.

    Raises:
        SpecError: The set is unknown, or not installed.
    """
    if kernels not in KERNELS:
        raise SpecError(f"unknown kernels {kernels!r}; known: {', '.join(KERNELS)}")
    if kernels == "numpy":
        return kernels
    if find_spec("numba") is not None:
        return "numba"
    if kernels == "numba":
        raise SpecError(
            "kernels 'numba' need the package numba, which is not installed; install the extra `fast`: "
            f"{install_command('fast')}, or choose kernels 'numpy'"
        )
    return "numpy"


def is_uncompiled(rule: Rule, dtype: "np.dtype[Any]") -> bool:
    """Return whether a rule has a compiled kernel that the disk can keep and lacks; imports numba."""
    if type(rule) not in RULES.values():
        return False
    from adam_async.model.fast.batches import has_kernel, is_missing  # importing numba is slow

    return has_kernel(rule) and is_missing(dtype)


def make_batches(rule: Rule, dtype: "np.dtype[Any]", kernels: str) -> Batches:
    """Make the `Batches` of a rule, with the kernels of this name (see `Network`).

    Raises:
        SpecError: The kernels are unknown, or not installed.
    """
    # A user's rule has no compiled kernel, even as a subclass of a rule that has one.
    if available_kernels(kernels) == "numpy" or type(rule) not in RULES.values():
        return NumpyBatches(rule, dtype)
    from adam_async.model.fast.batches import CompiledBatches, has_kernel  # importing numba is slow

    return CompiledBatches(rule, dtype) if has_kernel(rule) else NumpyBatches(rule, dtype)


def lacks_vectors(dtype: "np.dtype[Any]") -> bool:
    """Return whether the disk can keep the compiled vector kernels but lacks them; imports numba."""
    from adam_async.model.fast.sums import is_missing

    return is_missing(dtype)


def make_vectors(dtype: "np.dtype[Any]") -> Vectors:
    """Make the compiled arithmetic of vectors; numba must be installed."""
    from adam_async.model.fast.sums import CompiledVectors

    return CompiledVectors(dtype)
