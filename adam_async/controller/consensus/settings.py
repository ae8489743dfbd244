"""Pure: the times and sizes that a group works with."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All nodes of a group should have the same; safety does not depend on it."""

    heartbeat_s: float = 0.1
    """Between two words of the leader to each of the others."""
    election_s: float = 1.0
    """Least silence after which a leader is looked for; at most twice that. etcd's default is 1 s as well."""
    command_bytes: int = 1 << 20
    """Largest command that is taken."""
    message_bytes: int = 1 << 20
    """Entries in one message, unless the first alone is larger."""
    state_bytes: int = 64 << 20
    """Maximum size of a snapshot's state from another node, in bytes."""
    chunk_bytes: int = 256 << 10
    """Piece of a snapshot in one message."""
    window: int = 64
    """Entries that are sent to a node ahead of its answers."""
    backlog: int = 128
    """Entries that may wait to be committed, and reads that may wait for an answer; more are refused."""
    catch_up: int = 64
    """A learner may lack so many entries when it is made a voter."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} must be positive, not {getattr(self, field.name)}")
        if self.election_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"election_s must be at least twice heartbeat_s, {self.heartbeat_s}, or followers would give "
                f"up a leader that is well; not {self.election_s}"
            )
