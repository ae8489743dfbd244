"""Rules of a user for tests: one that computes, one that refuses some pushes, and one that makes mistakes."""

from asyncio import CancelledError
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from adam_async.model.rules import UserRule

Array = NDArray[Any]
Share = Annotated[float, Meta(ge=0.0, lt=1.0)]


class Means(UserRule):
    """Steps along a mean of the gradients, which begins at `first`; `apply_means` is the same in a loop."""

    share: Share = 0.9
    first: float = 0.25

    @property
    def arrays(self) -> Mapping[str, float]:
        return {"mean": self.first}

    def step(
        self, values: Array, gradient: Array, state: Mapping[str, Array], *, rate: float
    ) -> tuple[Array, Mapping[str, Array]]:
        mean = self.share * state["mean"] + (1.0 - self.share) * gradient
        return values - rate * np.tanh(mean), {"mean": mean}


def apply_means(
    values: Array, gradients: list[Array], *, rate: float, share: float = 0.9, first: float = 0.25
) -> tuple[Array, Array]:
    """The values and means after pushes of these gradients."""
    mean = np.full_like(values, first)
    for gradient in gradients:
        mean = share * mean + (1.0 - share) * gradient
        values = values - rate * np.tanh(mean)
    return values, mean


class Picky(Means):
    """`Means`, and refuses a range with a gradient above `most` in one of several ways, by its size."""

    most: float = 1.0

    def step(
        self, values: Array, gradient: Array, state: Mapping[str, Array], *, rate: float
    ) -> tuple[Array, Mapping[str, Array]]:
        new, kept = super().step(values, gradient, state, rate=rate)
        if gradient.max(initial=0.0) > 2 * self.most:
            raise ValueError("too large")
        if gradient.max(initial=0.0) > self.most:
            new[-1] = np.inf
        return new, kept


class Wrong(UserRule):
    """Makes the mistake `how`, for gradients above 0 only."""

    how: str = ""

    @property
    def arrays(self) -> Mapping[str, float]:
        return {"kept": 0.0}

    def step(
        self, values: Array, gradient: Array, state: Mapping[str, Array], *, rate: float
    ) -> tuple[Array, Mapping[str, Array]]:
        new, kept = values - rate * gradient, state["kept"] + gradient
        if gradient.max(initial=0.0) <= 0:
            return new, {"kept": kept}
        return MISTAKES[self.how](new, kept, values, gradient, state)


def _write(array: Array) -> Any:
    array[:] = 7


def _raise(error: BaseException) -> Any:
    raise error  # the frame has the error, and the error the frame


def _unlock(array: Array) -> Any:
    array.flags.writeable = True


class _Endless(Mapping[str, Array]):
    """State whose names cannot be read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, name: str) -> Array:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        raise OSError("closed")


class _Wordless(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def _masked(array: Array) -> Any:
    """Return the array with a NaN that a mask hides."""
    array[-1] = np.nan
    return np.ma.masked_invalid(array)


KEPT: list[Array] = []
"""Arguments that a rule keeps."""


MISTAKES: Mapping[str, Any] = {
    "raises": lambda *_: _raise(KeyError("lost")),
    "exits": lambda *_: _raise(SystemExit(3)),
    "cancels": lambda *_: _raise(CancelledError()),
    "ends a generator": lambda *_: _raise(GeneratorExit()),
    "raises without words": lambda *_: _raise(_Wordless()),
    "lets values be written": lambda new, kept, values, gradient, state: _unlock(values),
    "lets state be written": lambda new, kept, values, gradient, state: _unlock(state["kept"]),
    "masks a NaN": lambda new, kept, *_: (_masked(new), {"kept": kept}),
    "other class": lambda new, kept, *_: (new, {"kept": kept.view(np.recarray)}),
    "unreadable state": lambda new, *_: (new, _Endless()),
    "writes values": lambda new, kept, values, gradient, state: _write(values),
    "writes the gradient": lambda new, kept, values, gradient, state: _write(gradient),
    "writes state": lambda new, kept, values, gradient, state: _write(state["kept"]),
    "no tuple": lambda new, *_: new,
    "other shape": lambda new, kept, *_: (np.append(new, new[:1]), {"kept": kept}),
    "other type": lambda new, kept, *_: (new.astype(np.float16), {"kept": kept}),
    "no array": lambda new, kept, *_: (new.tolist(), {"kept": kept}),
    "short state": lambda new, kept, *_: (new, {"kept": kept[1:]}),
    "no state": lambda new, *_: (new, {}),
    "more state": lambda new, kept, *_: (new, {"kept": kept, "other": kept}),
    "keeps its arguments": lambda new, kept, values, gradient, state: KEPT.extend((values, gradient)),
    "NaN": lambda new, kept, *_: (new * np.nan, {"kept": kept}),
    "infinite state": lambda new, kept, *_: (new, {"kept": kept + np.inf}),
}
"""Mistakes by name."""

RAISES, WRITES = _raise.__code__.co_firstlineno + 1, _write.__code__.co_firstlineno + 1
UNLOCKS, ENDS = _unlock.__code__.co_firstlineno + 1, _Endless.__iter__.__code__.co_firstlineno + 1
UNLOCKED = f"step raised ValueError('cannot set WRITEABLE flag to True of this array') in line {UNLOCKS}"
WRITTEN = f"step raised ValueError('assignment destination is read-only') in line {WRITES}"

SAID = {
    "raises": f"step raised KeyError('lost') in line {RAISES}",
    "exits": f"step raised SystemExit(3) in line {RAISES}",
    "cancels": f"step raised CancelledError() in line {RAISES}",
    "ends a generator": f"step raised GeneratorExit() in line {RAISES}",
    "raises without words": f"step raised _Wordless in line {RAISES}",
    "lets values be written": UNLOCKED,
    "lets state be written": UNLOCKED,
    "masks a NaN": "step returned values as MaskedArray, expected float32 of (5,)",
    "other class": "step returned state kept as recarray, expected float32 of (5,)",
    "unreadable state": f"step raised OSError('closed') in line {ENDS}",
    "writes values": WRITTEN,
    "writes the gradient": WRITTEN,
    "writes state": WRITTEN,
    "no tuple": "step returned <class 'numpy.ndarray'>, expected (values, state)",
    "other shape": "step returned values as float32 of (6,), expected float32 of (5,)",
    "other type": "step returned values as float16 of (5,), expected float32 of (5,)",
    "no array": "step returned values as list, expected float32 of (5,)",
    "short state": "step returned state kept as float32 of (4,), expected float32 of (5,)",
    "no state": "step returned state [], expected the arrays ['kept']",
    "more state": "step returned state ['kept', 'other'], expected the arrays ['kept']",
    "keeps its arguments": "step returned <class 'NoneType'>, expected (values, state)",
    "NaN": "step returned values with a value that is not finite",
    "infinite state": "step returned state kept with a value that is not finite",
}
"""The refusal of each mistake on five values of float32."""
