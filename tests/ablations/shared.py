"""Safeguards of links in shared memory, and their removals."""

from functools import partial

from tests.ablations.ablation import Ablation

TESTS = "tests/test_simulation/test_shared.py::"

_row = partial(
    Ablation,
    guard=TESTS + "test_held_requests_and_answers_keep_their_values",
    scenario="pushes",
    seldom="a server applies or copies most pushes in the step that takes them, and clients check the values "
    "that they pull at once",
)

SHARED = (
    _row(
        "a request is copied before its block is returned",
        "transport/decoder.py",
        "memory[:total] = placed.payload",
        "whole = np.frombuffer(placed.payload, _UINT8)",
    ),
    _row(
        "a block is returned with the last view of it",
        "transport/regions.py",
        "self._lent[key] = weakref.ref(whole, gone)",
        "gone(None)",
    ),
    _row(
        "a block is written again after its return",
        "transport/regions.py",
        "block = free.pop() if free else self._make(size)",
        "block = free[-1] if free else self._make(size)",
    ),
)
