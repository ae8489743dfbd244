"""Places in product code where a simulated run may be unkind, and marks of what runs have come across.

    if buggify.ON and buggify.fires("ps.answer.late"):        # or a tiny buffer, a batch of one
        await asyncio.sleep(1.0)
    if buggify.ON:
        buggify.sometimes("a push came again after its server was asked for values")

`ON` is False in production, so that such a place costs one test of a name. In a simulated run each place is
enabled or not for the whole of it, and an enabled one fires now and then: that finds more than a little of
everything in every run. A mark that no run of many ever sets shows a blind spot of the scenarios.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from adam_async.runtime.random_streams import Dice

ENABLED = 0.25
"""Share of the places that are enabled in a run."""

FIRES = 0.25
"""Share of the times at which an enabled place fires."""

ON = False

_dice = Dice("")
_enabled: dict[str, bool] = {}
_marks: Counter[str] = Counter()


def fires(place: str) -> bool:
    """Whether this place is unkind now. Only where `ON`."""
    enabled = _enabled.get(place)
    if enabled is None:
        enabled = _enabled[place] = _dice.fork(place).random() < ENABLED
    fired = enabled and _dice.random() < FIRES
    if fired:
        _marks[place] += 1
    return fired


def sometimes(mark: str) -> None:
    """Note that a run has come across something that not every run does. Only where `ON`."""
    _marks[mark] += 1


@contextmanager
def unkind(dice: Dice) -> Iterator[Counter[str]]:
    """Switch all places on for a block; gives the marks that are set and the places that fire in it."""
    global ON, _dice, _enabled, _marks
    before = ON, _dice, _enabled, _marks
    ON, _dice, _enabled, _marks = True, dice, {}, Counter()
    try:
        yield _marks
    finally:
        ON, _dice, _enabled, _marks = before
