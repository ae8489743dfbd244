"""Pure: all limits and time-outs of a link, in one frozen record."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

KIB = 1 << 10
MIB = 1 << 20

Checksum = Literal["auto", "on", "off"]
"""Permitted values of `LinkConfig.checksum`."""

LinkKind = Literal["auto", "shared", "tcp"]
"""Permitted values of `LinkConfig.link`."""

MOST_SHARED_BYTES = 128 * MIB
"""Maximum total size of the shared-memory blocks that one side of a link hands over, in bytes."""

LEND_BYTES = 16 * KIB
"""Smallest payload in bytes that is used in place in shared memory: for a smaller one the stream is as
fast."""

MOST_NODE_BYTES = 80
"""Maximum length of the name of a node, in bytes."""

PROBES = 3
"""Number of unanswered probes after which the kernel ends a connection."""


_WORDS = {"checksum": get_args(Checksum), "link": get_args(LinkKind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Limits (bytes, counts) and time-outs (seconds) of a link. The two sides may differ.

    Raises:
        ValueError: A value is out of range; the message names the field.
    """

    max_message_bytes: int = 64 * MIB
    """Maximum payload of one message, including padding, in bytes. The sender refuses a larger message, and
    the receiver closes the link."""

    max_meta_bytes: int = 16 * KIB
    """Maximum packed meta, in bytes. Decoding a meta needs at most about 72 times its size in memory."""

    chunk_bytes: int = 512 * KIB
    """Payload of a large message's frame, in bytes; frames of other messages pass between two such frames. In
    measurements 512 to 768 KiB are best, and 1 MiB is 1.3 times slower."""

    gather_bytes: int = 64 * KIB
    """Maximum payload copied into one write, in bytes, unless ``chunk_bytes`` is smaller; the link writes
    larger payloads from the caller's arrays."""

    scratch_bytes: int = 72 * KIB
    """Size of the buffer for a header, in bytes. Payload bytes that arrive in it are moved once, which for a
    message of up to ``gather_bytes`` is faster than another read."""

    high_water_bytes: int = 4 * MIB
    """Number of unsent bytes from which `send` waits and `send_nowait` raises `WouldBlock`."""

    low_water_bytes: int = 1 * MIB
    """Number of unsent bytes at which waiting senders proceed."""

    inbox_bytes: int = 4 * MIB
    """Number of bytes in messages waiting for `receive` at which the link stops reading."""

    inbox_messages: int = 1024
    """Number of messages waiting for `receive` from which the link stops reading."""

    link_budget_bytes: int = 64 * MIB
    """Bytes held for the peer (requests, messages, unsent answers) at which the link stops reading from it;
    one largest message may exceed this."""

    max_requests: int = 4096
    """Maximum number of the peer's unanswered requests; the next gets the error code ``busy``."""

    handshake_s: float = 5.0
    """Maximum time from connection to the end of the handshake, in seconds."""

    first_record_s: float = 1.0
    """Maximum time in seconds from connection to the end of the client's first record; `handshake_s` limits
    this time too."""

    max_unauthenticated: int = 256
    """Maximum number of a listener's connections in their handshake; `admission` closes excess ones."""

    backlog: int = 4096
    """Maximum number of connections that the kernel accepts for a listener before its loop does."""

    ping_every_s: float = 5.0
    """Seconds without a byte from the peer after which the link sends a ping."""

    dead_after_s: float = 15.0
    """Seconds without a byte from the peer after which the link ends."""

    stalled_after_s: float = 10.0
    """Seconds without progress after which a link ends. Progress stops if the peer takes no waiting bytes, if
    it sends no more of an incomplete message, or if reading waits and the link releases no held bytes."""

    probe_after_s: float = 15.0
    """Seconds without a byte after which the kernel probes whether the peer's machine answers."""

    probe_every_s: float = 5.0
    """Seconds between two probes; after `PROBES` unanswered ones the kernel ends the connection."""

    unacknowledged_s: float = 30.0
    """Seconds after which the kernel ends a connection whose peer acknowledges none of the sent bytes."""

    checksum: Checksum = "auto"
    """Whether sent payloads carry a CRC-32C; ``auto``: unless the peer is on the same host. The receiver
    checks every payload that has one."""

    close_s: float = 5.0
    """Seconds in which a closing link sends its unsent bytes; it drops the rest."""

    link: LinkKind = "tcp"
    """Kind of the links that this side dials. *tcp*: always TCP. *shared*: a Unix socket and shared memory
    with processes of this host, and no link to others. *auto*: shared where possible. A listener with
    *shared* or *auto* takes both kinds."""

    place_bytes: int = 160 * KIB
    """Smallest payload in bytes that travels in shared memory, on a link that has it. In measurements 128 KiB
    take less time in the stream, and 256 KiB take 1.5 times as long there."""

    lend_bytes: int = LEND_BYTES
    """Smallest payload in bytes that is used in place in a region; a smaller one takes the stream."""

    shared_bytes: int = 64 * MIB
    """Shared memory in bytes that this side of a link may fill with copies for the other, at most
    `MOST_SHARED_BYTES`; further payloads take the stream."""

    socket_buffer_bytes: int = 0
    """Size of SO_SNDBUF and SO_RCVBUF, in bytes; 0 keeps the kernel's tuning, which measured best."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _WORDS:
                if value not in _WORDS[field.name]:
                    words = ", ".join(_WORDS[field.name])
                    raise ValueError(f"{field.name} must be one of {words}, not {value!r}")
            elif value <= 0 and field.name != "socket_buffer_bytes":
                raise ValueError(f"{field.name} must be positive, not {value}")
        if not 0 < self.max_meta_bytes <= 16 * KIB:
            raise ValueError(f"max_meta_bytes must be at most {16 * KIB}, not {self.max_meta_bytes}")
        if self.chunk_bytes > 1 * MIB or self.chunk_bytes % 64:
            raise ValueError(f"chunk_bytes must be a multiple of 64 up to {MIB}, not {self.chunk_bytes}")
        if self.shared_bytes > MOST_SHARED_BYTES:
            raise ValueError(f"shared_bytes must be at most {MOST_SHARED_BYTES}, not {self.shared_bytes}")
        if self.low_water_bytes > self.high_water_bytes:
            raise ValueError(
                f"low_water_bytes {self.low_water_bytes} exceeds high_water_bytes {self.high_water_bytes}"
            )
        if self.ping_every_s >= self.dead_after_s:
            raise ValueError(
                f"ping_every_s {self.ping_every_s} must be below dead_after_s {self.dead_after_s}"
            )
