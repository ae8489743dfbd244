"""Pure: a group's membership, and the steps that change it; times and sizes.

Majorities count voters; learners only receive the log. One step adds a learner, promotes a learner to voter,
or removes one node. Two voter sets one step apart differ by at most one node, so each majority of one shares
a node with each majority of the other. So two memberships in force cannot decide against each other.

A node's *identity* is its name and a number drawn when its disk was empty. A node that lost its disk has a
new identity; votes and acknowledgements of the old one do not bind it. The node counts again only after its
new identity is added, has caught up and is promoted."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import msgspec


class MembershipError(ValueError):
    """A step that does not fit the membership, with the reason."""


class Members(msgspec.Struct, frozen=True, array_like=True):
    """The identities of the voters and the learners of a group."""

    voters: tuple[str, ...] = ()
    learners: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Voters, then learners."""
        return self.voters + self.learners

    @property
    def quorum(self) -> int:
        """Number of voters in a majority."""
        return len(self.voters) // 2 + 1

    def decided(self, values: Mapping[str, float]) -> float:
        """Return the highest value that a majority of the voters has reached; an absent value counts as 0."""
        reached = sorted((values.get(voter, 0) for voter in self.voters), reverse=True)
        return reached[self.quorum - 1]

    def changed(self, step: "Step") -> "Members":
        """Return the group after one step.

        Raises:
            MembershipError: The step does not fit this group.
        """
        node = step.node
        if step.kind == "add":
            if node in self.all:
                raise MembershipError(f"{node} is in the group already")
            return Members(self.voters, (*self.learners, node))
        if node not in self.all:
            raise MembershipError(f"{node} is not in the group {', '.join(self.all)}; add it first")
        if step.kind == "promote":
            if node in self.voters:
                raise MembershipError(f"{node} is a voter already")
            return Members((*self.voters, node), tuple(name for name in self.learners if name != node))
        if self.voters == (node,):
            raise MembershipError(f"{node} is the only voter; add another before removing it")
        return Members(
            tuple(name for name in self.voters if name != node),
            tuple(name for name in self.learners if name != node),
        )


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One change of a membership: `node` becomes a learner, becomes a voter, or leaves."""

    kind: Literal["add", "promote", "remove"]
    node: str


def identity(name: str, number: int) -> str:
    """Return the identity of a node with one disk.

    Args:
        name: Name of the node; it stays when the node restarts or its disk changes.
        number: Random number of one empty disk, never used twice.
    """
    return f"{name}/{number:x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times and sizes. All nodes of a group should have the same settings; safety does not depend on them."""

    heartbeat_s: float = 0.1
    """Interval between the leader's messages to each other node, in seconds."""
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
    """Maximum size of a snapshot piece in one message, in bytes."""
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
