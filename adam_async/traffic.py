"""Pure: what a node's links carried, by peer and message type, also of links that are gone.

Each end counts what it sent, so that adding up all nodes counts every message once.
"""

from collections import Counter
from functools import partial
from typing import Any

from adam_async.timeline import Timeline
from transport import Link


class Traffic:
    """Totals over all links of one node.

    Args:
        node: Whose links these are.
        timeline: Where each of their messages is noted.
    """

    def __init__(self, node: str, *, timeline: Timeline | None = None) -> None:
        self._node = node
        self._timeline = timeline
        self._live: dict[Link, None] = {}
        self._gone: Counter[tuple[str, str, str]] = Counter()

    def watch(self, link: Link) -> None:
        """Count a link from now on."""
        self._live[link] = None
        if self._timeline is not None:
            link.observe(partial(self._timeline.carried, self._node, link.peer.node))

    def gone(self, link: Link) -> None:
        """The link is closed; keep its totals."""
        if link in self._live:
            del self._live[link]
            self._gone.update(_counts(link))

    @property
    def links(self) -> list[Link]:
        """The links that are open."""
        return list(self._live)

    def rows(self) -> list[dict[str, Any]]:
        """One row per peer and message type: messages, payload_bytes and frame_bytes sent."""
        totals = Counter(self._gone)
        for link in self._live:
            totals.update(_counts(link))
        table: dict[tuple[str, str], dict[str, Any]] = {}
        for (peer, kind, field), count in totals.items():
            row = table.setdefault(
                (peer, kind), {"from": self._node, "to": peer, "type": kind, **dict.fromkeys(FIELDS, 0)}
            )
            row[field] = count
        return [table[key] for key in sorted(table)]


FIELDS = ("messages", "payload_bytes", "frame_bytes")


def _counts(link: Link) -> Counter[tuple[str, str, str]]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for kind, traffic in link.statistics().by_type.items():
        if traffic.messages_out:
            peer = link.peer.node
            counts[peer, kind, "messages"] += traffic.messages_out
            counts[peer, kind, "payload_bytes"] += traffic.payload_bytes_out
            counts[peer, kind, "frame_bytes"] += traffic.frame_bytes_out
    return counts
