"""Pure: messages and bytes of a node's links, by peer and message type, closed links included.

Each end counts the messages that it sent, so the sum over all nodes counts every message once. The
`PEERS_KEPT` peers whose links closed last keep their own counts. Counts of earlier peers are added up by
role, so the table stays bounded after thousands of peers.
"""

from collections import Counter
from functools import partial

import msgspec

from adam_async.messages.body import Count
from adam_async.runtime.timeline import Timeline
from transport import Link


class TrafficRow(msgspec.Struct, frozen=True, kw_only=True, rename={"sender": "from", "receiver": "to"}):
    """All messages of one type that one node sent to another."""

    sender: str
    receiver: str
    type: str
    messages: Count
    payload_bytes: Count
    frame_bytes: Count
    shared: bool = False
    """Whether the newest link between the two uses shared memory."""


class Traffic:
    """Totals over all links of one node."""

    def __init__(self, node: str, *, timeline: Timeline | None = None) -> None:
        self._node = node
        self._timeline = timeline
        self._live: dict[Link, None] = {}
        self._gone: dict[tuple[str, str], Counter[tuple[str, str]]] = {}
        """Counts of closed links, by node and role of the peer; the last peer is the one that left last."""
        self._sharing: set[str] = set()
        """Peers whose newest link uses shared memory."""
        self._earlier: dict[str, Counter[tuple[str, str]]] = {}
        """Counts of all earlier peers, by role."""

    def watch(self, link: Link) -> None:
        """Count a link from now on."""
        self._live[link] = None
        (self._sharing.add if link.shares else self._sharing.discard)(link.peer.node)
        if self._timeline is not None:
            link.observe(partial(self._timeline.carried, self._node, link.peer.node))

    def gone(self, link: Link) -> None:
        """Keep the totals of a link that closed."""
        if link in self._live:
            del self._live[link]
            peer = link.peer.node, link.peer.role
            counts = self._gone.pop(peer, Counter())
            counts.update(_counts(link))
            self._gone[peer] = counts
            if len(self._gone) > PEERS_KEPT:
                _, role = oldest = next(iter(self._gone))
                self._earlier.setdefault(role, Counter()).update(self._gone.pop(oldest))
                self._sharing.discard(oldest[0])

    @property
    def links(self) -> list[Link]:
        """Open links."""
        return list(self._live)

    def rows(self) -> list[TrafficRow]:
        """Return one row per peer and message type.

        Earlier peers of a role share the rows to ``earlier ROLE``.
        """
        totals = {f"earlier {role}": Counter(counts) for role, counts in self._earlier.items()}
        for (peer, _), counts in self._gone.items():
            totals.setdefault(peer, Counter()).update(counts)
        for link in self._live:
            totals.setdefault(link.peer.node, Counter()).update(_counts(link))
        return [
            TrafficRow(
                sender=self._node,
                receiver=peer,
                type=kind,
                messages=totals[peer][kind, "messages"],
                payload_bytes=totals[peer][kind, "payload_bytes"],
                frame_bytes=totals[peer][kind, "frame_bytes"],
                shared=peer in self._sharing,
            )
            for peer, kind in sorted({(peer, kind) for peer, counts in totals.items() for kind, _ in counts})
        ]


PEERS_KEPT = 64
"""Maximum number of peers without a link that keep counts of their own."""


def _counts(link: Link) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for kind, traffic in link.statistics().by_type.items():
        if traffic.messages_out:
            counts[kind, "messages"] += traffic.messages_out
            counts[kind, "payload_bytes"] += traffic.payload_bytes_out
            counts[kind, "frame_bytes"] += traffic.frame_bytes_out
    return counts
