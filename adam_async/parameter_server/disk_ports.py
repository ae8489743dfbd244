"""The services of a process that the disks of its stores need."""

import logging
from collections.abc import Callable

from adam_async.persistence.keys import State
from adam_async.persistence.settings import FlushSettings
from adam_async.runtime.clock import Clock
from adam_async.runtime.disk import Disk

logger = logging.getLogger(__name__)


class DiskPorts:
    """The services of a process that the disk of a store needs.

    Attributes:
        states: Disk of the states.
        entries: Disk of log entries, with a thread of its own.
        clock: Clock of the loop.
        wall_clock: Returns the time in seconds since 1970.
        notice: Reports a text to the operator.
        settings: Times and sizes.
        observe: Called with each state that goes to the disk, and the id of its store.
    """

    def __init__(
        self,
        *,
        states: Disk,
        entries: Disk,
        clock: Clock,
        wall_clock: Clock,
        settings: FlushSettings,
        observe: Callable[[State, str], None] | None = None,
    ) -> None:
        self.states, self.entries = states, entries
        self.clock, self.wall_clock = clock, wall_clock
        self.settings = settings
        self.observe = observe
        self.notice: Callable[[str], None] = lambda text: logger.warning("%s", text)
