"""Notices of incidents that cost a run something, for the program that drives it and for the controllers."""

import asyncio
import logging
from collections.abc import Callable

from adam_async.controller.client import Membership
from adam_async.controller.status_log import NOTICE
from adam_async.errors import AdamError
from adam_async.run.cluster_map import MOST_REASON
from transport import TransportError

logger = logging.getLogger(__name__)


class Notices:
    """Notices of one driver.

    Args:
        membership: Sets the newest notice in the driver's record of the map, where controllers see it.

    Attributes:
        on_event: Called with each incident of the run as it happens.

    The owner runs `run` as a task of its group.
    """

    def __init__(self, membership: Membership) -> None:
        self.on_event: Callable[[str], None] | None = None
        self._membership = membership
        self._unsent: asyncio.Queue[str] = asyncio.Queue()

    def event(self, what: str) -> None:
        """Report an incident to the listener."""
        if self.on_event is not None:
            self.on_event(what)

    def warn(self, what: str) -> None:
        """Report an incident that costs the run something to the controllers; log it without a listener."""
        if self.on_event is None:
            logger.warning("%s", what)
        self._unsent.put_nowait(what)

    async def run(self) -> None:
        """Send notices until cancelled."""
        while True:
            notice = await self._unsent.get()
            try:
                await self._membership.set_node(info={NOTICE: notice[:MOST_REASON]})
            except (AdamError, TransportError) as error:
                logger.info("a notice did not reach the controllers: %s", error)

    def __repr__(self) -> str:
        return f"<Notices {self._unsent.qsize()} unsent>"
