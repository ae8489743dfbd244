"""Pure: the messages between the driver of a batch job and its agents, on a listener of their own.

    agent - driver     Hello; RoleListens, RoleLine, RoleEnded
    driver - agent     StartRole, EndRole, KillRole; Finish

No message has a key. Both sides have the cluster's token, and the agent derives the keys of each role.
"""

from typing import Annotated

from msgspec import Meta

from adam_async.messages import Body
from adam_async.messages.body import Rows
from adam_async.messages.bounds import Addresses, Count, Name, NodeId, Packed, RoleName
from transport import RoleTable

AGENT, DRIVER = "agent", "driver"
"""Roles of the two sides of a link."""

LINE_CHARACTERS = 4000
"""Maximum length of a line in one message, in characters: a line of this length in UTF-8 fits into the meta
of a frame."""

Line = Annotated[str, Meta(max_length=LINE_CHARACTERS)]
"""One line of output, or the reason of a refusal."""

Word = Annotated[str, Meta(max_length=4096)]
"""Word of a command line, or value of a variable."""

Words = Annotated[tuple[Word, ...], Meta(max_length=1000)]
"""Words of a command line."""

Variables = Annotated[dict[Name, Word], Meta(max_length=1000)]
"""Variables of a process."""

Code = Annotated[int, Meta(ge=-255, le=255)]
"""Exit code of a process; a negative code is a signal."""


class Hello(Body, frozen=True, kw_only=True):
    """First message of an agent."""

    version: Name
    """Version of the agent's package."""
    machine: Name
    """Name of the agent's machine."""
    folder: Word
    """Working folder of the agent."""
    host: Name
    """Address of the agent's machine in the network of the driver."""
    cores: Count
    """Number of cores for the roles of the agent."""


class StartRole(Body, frozen=True, kw_only=True):
    """Order to start a role."""

    number: Count
    """Number of the process, unique in the run."""
    role: RoleName
    node: NodeId
    words: Words
    """Words after ``adam-async``."""
    environment: Variables
    """Variables in addition to those of the agent."""
    orders: Packed
    """First line of the role's stdin, without its keys."""


class EndRole(Body, frozen=True, kw_only=True):
    """Order to close the stdin of a role."""

    number: Count


class KillRole(Body, frozen=True, kw_only=True):
    """Order to kill a role."""

    number: Count


class RoleListens(Body, frozen=True, kw_only=True):
    """Report of the address of a role."""

    number: Count
    address: Addresses


class RoleLine(Body, frozen=True, kw_only=True):
    """A line of a role's stderr."""

    number: Count
    text: Line


class RoleEnded(Body, frozen=True, kw_only=True):
    """Report of the end of a role's process."""

    number: Count
    code: Code


class Finish(Body, frozen=True, kw_only=True):
    """Last message to an agent: the end of the run, or the reason of a refusal."""

    code: Code
    """Exit code of the agent."""
    reason: Line = ""


ROWS: Rows = {
    Hello: frozenset({(AGENT, DRIVER)}),
    RoleListens: frozenset({(AGENT, DRIVER)}),
    RoleLine: frozenset({(AGENT, DRIVER)}),
    RoleEnded: frozenset({(AGENT, DRIVER)}),
    StartRole: frozenset({(DRIVER, AGENT)}),
    EndRole: frozenset({(DRIVER, AGENT)}),
    KillRole: frozenset({(DRIVER, AGENT)}),
    Finish: frozenset({(DRIVER, AGENT)}),
}


def agent_table() -> RoleTable:
    """Return the table of the links between driver and agents."""
    return RoleTable({cls.__name__: pairs for cls, pairs in ROWS.items()})
