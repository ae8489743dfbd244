"""The refusal of peers that send in the name of another peer, and the end of their links."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from transport import Link, Request

logger = logging.getLogger(__name__)


class RefusedSenders:
    """Refuses requests to one server, and closes the links of their senders.

    Args:
        node: Name of the server.
        spawn: Starts a task of the server, by name.
    """

    def __init__(
        self, node: str, spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    ) -> None:
        self._node = node
        self._spawn = spawn
        self._closing: set[Link] = set()

    def refuse(self, request: Request, text: str) -> None:
        """Refuse a request, and close its link once the peer has the refusal.

        A peer with an old identity learns the reason.
        """
        request.fail("not-yours", text)
        link = request.link
        if link not in self._closing:
            self._closing.add(link)
            logger.warning("%s: %s; its link is closed", self._node, text)
            closing = self._spawn(f"closes {link.peer.node}", link.aclose())
            closing.add_done_callback(lambda _: self._closing.discard(link))
