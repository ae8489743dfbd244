"""Pure: names for units of work."""

from typing import NamedTuple


class Tag(NamedTuple):
    """Name of one unit of work. `attempt` grows when the unit is repeated."""

    epoch: int
    number: int
    attempt: int = 1
