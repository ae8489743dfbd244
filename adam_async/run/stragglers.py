"""Pure: intentional stragglers, from the texts of ``--slow``.

worker-1:0.2                    its compute threads use a fifth of a core's time each
worker-0~worker-1:5ms           messages between the two take 5 ms longer, each way
worker-0~ps-0:500us+1ms         0.5 ms longer, and up to 1 ms on top, drawn for each message
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adam_async.errors import ConfigError

FORM = "NODE:SHARE, as in worker-1:0.2, or NODE~NODE:DELAY, as in worker-0~worker-1:5ms or ...:5ms+1ms"
UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

MOST_DELAY_S = 1.0
"""Maximum delay, in seconds: two round trips must fit into `Waits`, or the link counts as broken."""

_NODE = r"[^\s:~,]+"
_TIME = r"(\d+(?:\.\d*)?|\.\d+)(us|ms|s)?"
_PACE = re.compile(rf"({_NODE}):([\d.eE+-]+)")
_LINK = re.compile(rf"({_NODE})~({_NODE}):{_TIME}(?:\+{_TIME})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A slow path between two nodes.

    Attributes:
        delay_s: Delay of each message, each way, in seconds.
        jitter_s: Maximum random delay on top, in seconds.
    """

    nodes: tuple[str, str]
    delay_s: float
    jitter_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """A node that computes slowly.

    Attributes:
        pace: Share of a core's time that each compute thread of the node may use.
    """

    node: str
    pace: float


Slowed = SlowLink | SlowNode


def read_slow(texts: Iterable[str], name: str = "slow") -> list[Slowed]:
    """Read the texts of ``--slow``, in order.

    Args:
        name: The option in the spelling of its source.

    Raises:
        ConfigError: A text has another form, is out of range, or names the same nodes as another.
    """
    slowed = [_read(text, name) for text in texts]
    known: set[frozenset[str]] = set()
    for each in slowed:
        nodes = nodes_of(each)
        if nodes in known:
            raise ConfigError(f"{name} names {' and '.join(sorted(nodes))} twice: name each once")
        known.add(nodes)
    return slowed


def _read(text: str, name: str) -> Slowed:
    found = _LINK.fullmatch(text.strip())
    if found is not None:
        one, other, number, unit, more, unit_of_more = found.groups()
        delay_s = _seconds(text, number, unit, name)
        jitter_s = _seconds(text, more, unit_of_more, name) if more else 0.0
        if one == other:
            raise ConfigError(f"{name} {text!r:.200}: a node has no link to itself; name two nodes")
        if not 0 < delay_s + jitter_s <= MOST_DELAY_S:
            raise ConfigError(
                f"{name} {text!r:.200}: the delay must be above 0 and at most {MOST_DELAY_S:g}s"
            )
        return SlowLink(nodes=(one, other), delay_s=delay_s, jitter_s=jitter_s)
    found = _PACE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{name} {text!r:.200} is not of the form {FORM}")
    try:
        pace = float(found[2])
    except ValueError:
        raise ConfigError(f"{name} {text!r:.200} is not of the form {FORM}") from None
    if not 0 < pace <= 1:
        raise ConfigError(
            f"{name} {text!r:.200}: the share of a core must be above 0 and at most 1, not {found[2]:.80}"
        )
    return SlowNode(node=found[1], pace=pace)


def _seconds(text: str, number: str, unit: str | None, name: str) -> float:
    if unit is None:
        raise ConfigError(
            f"{name} {text!r:.200}: {number} has no unit; write {number}us, {number}ms or {number}s"
        )
    return float(number) * UNITS_S[unit]


def nodes_of(slowed: Slowed) -> frozenset[str]:
    """Return the nodes that a straggler names."""
    return frozenset(slowed.nodes if isinstance(slowed, SlowLink) else (slowed.node,))


def check_names(
    texts: Iterable[str],
    *,
    workers: int,
    servers: int,
    data_servers: int = 1,
    controllers: Iterable[str] = ("controller",),
) -> None:
    """Check that a cluster of this size has the named nodes, and that nodes with a pace compute.

    Raises:
        ConfigError: The cluster has no such node; the error lists its nodes.
    """
    computing = [f"worker-{number}" for number in range(workers)]
    others = [
        *controllers,
        "driver",
        *(f"data-{number}" for number in range(data_servers)),
        *(f"ps-{number}" for number in range(servers)),
    ]
    for slowed in read_slow(texts):
        known = computing if isinstance(slowed, SlowNode) else [*others, *computing]
        for node in sorted(nodes_of(slowed)):
            if node not in known:
                what = "no worker" if isinstance(slowed, SlowNode) else "no node"
                raise ConfigError(f"slow: there is {what} {node!r} here; there are {', '.join(known)}")


def texts_for(texts: Iterable[str], node: str) -> list[str]:
    """Return the texts that name a node."""
    return [text for text in texts if node in nodes_of(_read(text, "slow"))]


def check_own(texts: Sequence[str], node: str, *, computes: bool) -> None:
    """Check that each text names this role, which was started alone.

    Raises:
        ConfigError: A text names only other nodes, or gives a pace to a role without compute threads.
    """
    for text, slowed in zip(texts, read_slow(texts), strict=True):
        if node not in nodes_of(slowed):
            raise ConfigError(
                f"--slow {text}: this node is {node} (see --id); give it to the nodes that it names"
            )
        if isinstance(slowed, SlowNode) and not computes:
            raise ConfigError(f"--slow {text}: only workers have a pace; slow the links of {node} instead")


def pace_of(texts: Iterable[str], node: str) -> float:
    """Return the pace of a node's compute threads; 1 by default."""
    paces = [each.pace for each in read_slow(texts) if isinstance(each, SlowNode) and each.node == node]
    return paces[0] if paces else 1.0


def slow_links(texts: Iterable[str]) -> list[SlowLink]:
    """Return the slow links."""
    return [each for each in read_slow(texts) if isinstance(each, SlowLink)]


def describe(texts: Iterable[str]) -> str:
    """Describe the stragglers in one line; empty without stragglers."""
    return ", ".join(_describe(each) for each in read_slow(texts))


def _describe(slowed: Slowed) -> str:
    if isinstance(slowed, SlowNode):
        return f"{slowed.node} computes {slowed.pace:.3g} of the time"
    jitter = f" and up to {slowed.jitter_s * 1e3:g} ms" if slowed.jitter_s else ""
    return f"messages between {' and '.join(slowed.nodes)} are {slowed.delay_s * 1e3:g} ms{jitter} late"
