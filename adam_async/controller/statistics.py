"""Pure: the statistics of a controller, with the names that reports read.

The answer omits unset fields, such as the term of a controller whose consensus core has not started.
"""

import msgspec
from msgspec import UNSET, UnsetType

from adam_async.runtime.traffic import CommonStatistics


class GroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A controller's position in its group."""

    group: str
    """Name of the group; empty until this controller has the state of a group."""
    role: str
    """Role in consensus, or ``founding``."""
    term: int | UnsetType = UNSET
    leader: str | UnsetType = UNSET
    """Node id of the known leader; empty for none."""
    commit: int | UnsetType = UNSET
    """Index of the last committed entry."""
    log: int | UnsetType = UNSET
    """Number of log entries after the snapshot."""
    voters: list[str] | UnsetType = UNSET
    learners: list[str] | UnsetType = UNSET


class ControllerStatistics(CommonStatistics, kw_only=True):
    """Statistics of a controller."""

    version: int
    """Version of the controller's copy of the map."""
    controllers: GroupStatistics
