"""The random streams of the process that a module may draw from: those of PyTorch, Python and NumPy.

All threads of a process share these streams, so a block that seeds the streams excludes other such blocks.
The functions see no other source: no generator object of the module's own, no stream of an accelerator.
"""

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
import torch

_SEEDED = RLock()
"""Lock that a block holds while it has seeded the streams."""


def _numpy_state() -> tuple[Any, ...]:
    state = np.random.get_state(legacy=False)
    inner = state["state"]
    return (inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"])


_STATES: dict[str, Callable[[], Any]] = {
    "PyTorch": lambda: torch.get_rng_state().numpy().tobytes(),
    "Python": random.getstate,
    "NumPy": _numpy_state,
}

_SEEDS: dict[str, Callable[[int], object]] = {
    "PyTorch": torch.manual_seed,
    "Python": random.seed,
    "NumPy": lambda seed: np.random.seed(seed % (1 << 32)),
}

ALL = frozenset(_STATES)
"""Names of the streams."""


@contextmanager
def seeded(seed: int) -> Iterator[Callable[[], frozenset[str]]]:
    """Seed the streams for a block, and restore them at its end.

    Args:
        seed: Seed, at least 0.

    Yields a function that returns the names of the streams from which the block has drawn. Draws of other
    threads count too.
    """
    with _SEEDED, torch.random.fork_rng(devices=[]):
        python, numpy = random.getstate(), np.random.get_state()
        try:
            _seed(ALL, seed)
            begin = {name: state() for name, state in _STATES.items()}
            yield lambda: frozenset(name for name, state in _STATES.items() if state() != begin[name])
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def drawing(names: Collection[str], seed: int) -> Iterator[None]:
    """Seed some of the streams for a block, without restoring them.

    All threads share the streams, so other such blocks wait; a block without names waits for none.
    """
    if not names:
        yield
        return
    with _SEEDED:
        _seed(names, seed)
        yield


def _seed(names: Collection[str], seed: int) -> None:
    for name in names:
        _SEEDS[name](seed)
