"""The services of a process that the disks of its stores need."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from adam_async.persistence.keys import FlushSettings, State
from adam_async.run.user_rules import RuleSource
from adam_async.runtime.clock import Clock
from adam_async.runtime.disk import Disk

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class DiskPorts:
    """The services of a process that the disk of a store needs.

    Attributes:
        states: Disk of the states.
        entries: Disk of log entries, with a thread of its own.
        clock: Clock of the loop.
        wall_clock: Returns the time in seconds since 1970.
        settings: Times and sizes.
        observe: Called with each state that goes to the disk, and the id of its store.
        notice: Reports a text to the operator.
        rules: The rules of users that the server may apply.
    """

    states: Disk
    entries: Disk
    clock: Clock
    wall_clock: Clock
    settings: FlushSettings
    observe: Callable[[State, str], None] | None = None
    notice: Callable[[str], None] = lambda text: logger.warning("%s", text)
    rules: RuleSource = field(default_factory=RuleSource)

    def notice_left(self, folder: Path, error: OSError) -> None:
        """Report an unused folder that cannot be removed; the server goes on."""
        self.notice(
            f"{folder} is no longer needed and cannot be removed: {error.strerror or error}; remove it by "
            "hand, or the next start reads it again"
        )
