"""Pure: every limit and every waiting time of a link, in one frozen record."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

__all__ = ["PROBES", "Checksum", "LinkConfig"]

KIB = 1 << 10
MIB = 1 << 20

Checksum = Literal["auto", "on", "off"]
"""Permitted values of `LinkConfig.checksum`."""

PROBES = 3
"""Number of unanswered probes after which the kernel ends a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Limits (bytes, counts) and waiting times (seconds) of a link. Both sides may differ.

    Raises:
        ValueError: A value is out of range; the message names the field.
    """

    max_message_bytes: int = 64 * MIB
    """Largest payload of one message, padding included; the sender refuses more, the receiver disconnects."""

    max_meta_bytes: int = 16 * KIB
    """Largest packed meta; bounds what decoding one can allocate (about 72 times its size)."""

    chunk_bytes: int = 512 * KIB
    """Payload of a frame; others pass between. 512 to 768 KiB measured best, 1 MiB 1.3 times slower."""

    gather_bytes: int = 16 * KIB
    """Payloads up to this size are copied into one write; larger ones are sent from the caller's arrays."""

    scratch_bytes: int = 8 * KIB
    """Offered to the kernel while a header is awaited; what of a payload lands here is moved once."""

    high_water_bytes: int = 4 * MIB
    """With this much unsent, `send` waits and `send_nowait` raises `WouldBlock`."""

    low_water_bytes: int = 1 * MIB
    """Waiting senders go on when no more than this is unsent."""

    inbox_bytes: int = 4 * MIB
    """With this much received and not yet taken by `receive`, reading from the peer stops."""

    inbox_messages: int = 1024
    """The same as a count."""

    link_budget_bytes: int = 64 * MIB
    """Bytes held for the peer (requests, messages, unsent answers) at which reading from it stops; one
    largest message may exceed this."""

    max_requests: int = 4096
    """Unanswered requests of the peer; one more is refused with code ``busy``."""

    handshake_s: float = 5.0
    """Seconds from connection to the end of the handshake."""

    first_record_s: float = 1.0
    """Seconds from connection to the end of the client's first record; `handshake_s` limits this too."""

    max_unauthenticated: int = 256
    """Maximum number of connections of one listener in their handshake; `admission` closes excess ones."""

    backlog: int = 4096
    """Maximum number of connections that the kernel accepts for a listener before its loop does."""

    ping_every_s: float = 5.0
    """A peer not heard for this long is sent a ping."""

    dead_after_s: float = 15.0
    """A peer not heard for this long is given up."""

    stalled_after_s: float = 10.0
    """Seconds without progress after which a link ends: the peer takes none of the bytes waiting for it, or
    sends no more of a message in progress, or reading waits and the link releases no held bytes."""

    probe_after_s: float = 15.0
    """Seconds without a byte after which the kernel probes whether the peer's machine answers."""

    probe_every_s: float = 5.0
    """Seconds between two probes; after `PROBES` unanswered ones the kernel ends the connection."""

    unacknowledged_s: float = 30.0
    """Seconds after which the kernel ends a connection whose peer acknowledges none of the bytes sent."""

    checksum: Checksum = "auto"
    """Whether sent payloads carry a CRC-32C; ``auto``: unless the peer is on the same host. The receiver
    always checks a payload that has one."""

    close_s: float = 5.0
    """For the bytes still unsent when a link is closed; what is left is dropped."""

    socket_buffer_bytes: int = 0
    """SO_SNDBUF and SO_RCVBUF; 0 leaves the kernel's own tuning, which measured best."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "checksum":
                if value not in get_args(Checksum):
                    raise ValueError(
                        f"checksum must be one of {', '.join(get_args(Checksum))}, not {value!r}"
                    )
            elif value <= 0 and field.name != "socket_buffer_bytes":
                raise ValueError(f"{field.name} must be positive, not {value}")
        if not 0 < self.max_meta_bytes <= 16 * KIB:
            raise ValueError(f"max_meta_bytes must be at most {16 * KIB}, not {self.max_meta_bytes}")
        if self.chunk_bytes > 1 * MIB or self.chunk_bytes % 64:
            raise ValueError(f"chunk_bytes must be a multiple of 64 up to {MIB}, not {self.chunk_bytes}")
        if self.gather_bytes > self.chunk_bytes:
            raise ValueError(f"gather_bytes {self.gather_bytes} exceeds chunk_bytes {self.chunk_bytes}")
        if self.low_water_bytes > self.high_water_bytes:
            raise ValueError(
                f"low_water_bytes {self.low_water_bytes} exceeds high_water_bytes {self.high_water_bytes}"
            )
        if self.ping_every_s >= self.dead_after_s:
            raise ValueError(
                f"ping_every_s {self.ping_every_s} must be below dead_after_s {self.dead_after_s}"
            )
