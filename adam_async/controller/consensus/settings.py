"""Pure: times and sizes of a consensus group."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times and sizes. All nodes of a group should have the same settings; safety does not depend on them."""

    heartbeat_s: float = 0.1
    """Interval of the leader's messages to each other node, in seconds."""
    election_s: float = 1.0
    """Minimum silence of the leader before an election, in seconds; the maximum is twice that. The default of
    etcd is 1 s."""
    command_bytes: int = 1 << 20
    """Maximum size of a command, in bytes."""
    message_bytes: int = 1 << 20
    """Maximum size of the entries in one message, in bytes, unless the first alone is larger."""
    state_bytes: int = 64 << 20
    """Maximum size of a snapshot's state from another node, in bytes."""
    chunk_bytes: int = 256 << 10
    """Maximum size of the piece of a snapshot in one message, in bytes."""
    window: int = 64
    """Number of unanswered entries at which the leader stops sending entries to a node."""
    backlog: int = 128
    """Maximum number of uncommitted entries, and of waiting reads; the node refuses more."""
    catch_up: int = 64
    """Maximum number of entries that a learner lacks at its promotion."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} must be positive, not {getattr(self, field.name)}")
        if self.election_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"election_s must be at least twice heartbeat_s, {self.heartbeat_s}, or followers would give "
                f"up a leader that is well; not {self.election_s}"
            )
