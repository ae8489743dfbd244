"""One direction between two simulated hosts: its conditions, and the deliveries that a cut delays."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Behaviour of one direction between two hosts.

    A connection keeps the latency, jitter and bandwidth of its start; other changes apply at once.

    Attributes:
        delay_s: Least latency in seconds.
        jitter_s: Greatest random latency in seconds on top of `delay_s`, drawn for each piece.
        bytes_per_s: Bandwidth of each connection in bytes per second; None for no limit.
        window_bytes: Maximum number of bytes in flight or unread.
        segment_bytes: Maximum number of bytes in one piece.
        ragged: Whether pieces are cut at random, down to single bytes.
        refuse: Share of refused connections.
        duplicate: Share of connections that reach the listener twice; the second one has no client.
        reset_after_bytes: Bytes after which a connection is reset; None for never.
    """

    delay_s: float = 0.0005
    jitter_s: float = 0.0005
    bytes_per_s: float | None = None
    window_bytes: int = 256 << 10
    segment_bytes: int = 64 << 10
    ragged: bool = False
    refuse: float = 0.0
    duplicate: float = 0.0
    reset_after_bytes: int | None = None


class Wire:
    """One direction between two hosts.

    Attributes:
        conditions: Present behaviour; existing connections keep their latency and bandwidth.
        cut: Whether the direction delays all data until the end of a cut.
        waiting: Deliveries that wait for the end of the cut.
        made: Number of connections on the wire.
        broken: Number of connections reset at `reset_after_bytes`.
        damages: Number of coming pieces in which a bit flips; see `SimulatedNetwork.damaged`.
    """

    __slots__ = ("broken", "conditions", "cut", "damages", "made", "waiting")

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.cut = False
        self.waiting: list[Callable[[], object]] = []
        self.made = self.broken = self.damages = 0
