"""Pure: who belongs to the group, and the steps in which that may change.

Voters are counted, learners are only sent everything. One step adds a learner, makes a learner a voter, or
removes one node. Two voter sets that are one step apart differ by one node, so each majority of the one
shares a node with each majority of the other: no group can be decided past another while both are in force.

A node is known by its *identity*, a name and a number drawn when its disk was empty. One that lost its disk
has a new identity and is a stranger: what its old life voted for and acknowledged is not asked of it, and it
counts again only after it was added, caught up and was made a voter."""

from collections.abc import Mapping
from typing import Literal

import msgspec


class MembershipError(ValueError):
    """A change that cannot be made to this group. The message says why."""


class Members(msgspec.Struct, frozen=True, array_like=True):
    """The identities of a group."""

    voters: tuple[str, ...] = ()
    learners: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Voters, then learners."""
        return self.voters + self.learners

    @property
    def quorum(self) -> int:
        """How many voters are a majority."""
        return len(self.voters) // 2 + 1

    def decided(self, values: Mapping[str, float]) -> float:
        """The highest value that a majority of the voters has reached; those without one have reached 0."""
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
    """One change of a group: `node` becomes a learner, a learner becomes a voter, or is removed."""

    kind: Literal["add", "promote", "remove"]
    node: str


def identity(name: str, number: int) -> str:
    """Name one life of a disk.

    Args:
        name: Of the node; a restart with the same disk or with another one keeps it.
        number: Drawn when the disk was found empty; never the same twice.
    """
    return f"{name}/{number:x}"
