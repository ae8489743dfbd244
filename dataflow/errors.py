"""Pure: the errors of graphs, engines and pools.

DataflowError
├── GraphError             a graph's description is wrong; raised when it is built
├── TokenError             a delivery was wrong
│   ├── UnknownPort            the graph has no such input
│   ├── DuplicateToken         a second token for one input of one tag
│   └── TooManyEarlyTokens     too many tokens for tags not yet admitted
├── TagError               a tag has another state than the caller assumed
│   ├── TagInFlight            admitted twice
│   └── TagSettled             admitted again after it finished or was abandoned
├── NodeFailed             a node's function raised; `__cause__` is its error
├── WrongOutputs           a node's function returned other outputs than it declares
├── NoRoom                 no free slot or context, in a call that does not wait
├── EngineClosed           the engine is not running
├── PoolClosed             the pool takes no more jobs
└── WaitTimedOut           a wait passed its deadline (also a `TimeoutError`)
"""

from __future__ import annotations

from collections.abc import Sequence

from dataflow.jobs import Tag


class DataflowError(Exception):
    """Base of every error that this package raises intentionally."""


class GraphError(DataflowError):
    """The description of a graph is wrong; the message has the cause, and often the node or port."""


class TokenError(DataflowError):
    """The scheduler refused a delivered token."""


class UnknownPort(TokenError):
    """The graph has no external input called `port`."""

    def __init__(self, *, port: str, inputs: Sequence[str]) -> None:
        super().__init__(f"unknown port {port!r}: the graph's inputs are {', '.join(map(repr, inputs))}")
        self.port = port


class DuplicateToken(TokenError):
    """A second token arrived at `port` for `tag`, which is live or not yet admitted."""

    def __init__(self, *, port: str, tag: Tag) -> None:
        super().__init__(
            f"second token for port {port!r} and {tag}: each input takes one token per tag; "
            "repeat a group under a higher attempt"
        )
        self.port = port
        self.tag = tag


class TooManyEarlyTokens(TokenError):
    """A token came for a `tag` not yet admitted, and `limit` such tokens wait already."""

    def __init__(self, *, port: str, tag: Tag, limit: int) -> None:
        super().__init__(
            f"token for port {port!r} and {tag} refused: {limit} tokens already wait for tags not admitted; "
            "admit or abandon those tags, or raise early_limit"
        )
        self.port = port
        self.tag = tag
        self.limit = limit


class TagError(DataflowError):
    """`tag` has another state than the caller assumed."""

    def __init__(self, message: str, *, tag: Tag) -> None:
        super().__init__(message)
        self.tag = tag


class TagInFlight(TagError):
    """`tag` is admitted already, or another caller waits to admit it."""

    def __init__(self, *, tag: Tag) -> None:
        super().__init__(f"{tag} is already admitted or about to be; use a higher attempt", tag=tag)


class TagSettled(TagError):
    """`tag` has finished, was abandoned, or belongs to an epoch that is over."""

    def __init__(self, *, tag: Tag) -> None:
        super().__init__(
            f"{tag} has already finished or been abandoned, or its epoch is over; use a higher attempt",
            tag=tag,
        )


class NodeFailed(DataflowError):
    """The function of `node` raised; its error is the `__cause__`.

    `tags` has the failed call's live tags, more than one only for a batching node; `tag` is the first.
    """

    def __init__(self, *, node: str, tags: Sequence[Tag], cause: BaseException) -> None:
        listed = ", ".join(map(str, tags))
        super().__init__(f"node {node!r} failed for {listed}: {type(cause).__name__}: {cause}")
        self.node = node
        self.tags = tuple(tags)
        self.tag = self.tags[0]
        self.__cause__ = cause


class WrongOutputs(DataflowError):
    """The function of `node` returned other outputs than the node declares."""

    def __init__(self, *, node: str, expected: str, result: object) -> None:
        if isinstance(result, tuple | list):
            got = f"a {type(result).__name__} of {len(result)}"
        else:
            got = f"a {type(result).__name__}"
        super().__init__(f"node {node!r} returned {got}, expected {expected}")
        self.node = node


class NoRoom(DataflowError):
    """Every slot, or every training context, is taken."""


class EngineClosed(DataflowError):
    """The engine has not been entered, or has stopped."""


class PoolClosed(DataflowError):
    """The pool has not been entered, or takes no more jobs."""


class WaitTimedOut(DataflowError, TimeoutError):
    """The wait called `name` passed its deadline of `timeout_s` seconds."""

    def __init__(self, *, name: str, timeout_s: float, details: str) -> None:
        super().__init__(f"{name} was not done after {timeout_s:g} s: {details}")
        self.name = name
        self.timeout_s = timeout_s
