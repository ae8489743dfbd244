"""Links: conversations that carry messages with tensors, in one process or over TCP, with equal behaviour."""

from transport.budget import Budget
from transport.buffers import BufferPool, PoolStatistics
from transport.config import LinkConfig
from transport.errors import (
    BindRefused,
    CallTimeout,
    DialFailed,
    HandshakeRejected,
    LinkBroken,
    LinkClosed,
    LocalProtocolError,
    ProtocolError,
    RemoteError,
    RemoteProtocolError,
    TransportError,
    WouldBlock,
)
from transport.keys import RoleKeys, Secret
from transport.link import Link, LinkStatistics, Observer, Request, TypeTraffic
from transport.messages import ANY_ROLE, Identity, Message, RoleTable
from transport.network import Listener, LocalNetwork, Network, RetrySchedule, TcpNetwork

__all__ = [
    "ANY_ROLE",
    "BindRefused",
    "Budget",
    "BufferPool",
    "CallTimeout",
    "DialFailed",
    "HandshakeRejected",
    "Identity",
    "Link",
    "LinkBroken",
    "LinkClosed",
    "LinkConfig",
    "LinkStatistics",
    "Listener",
    "LocalNetwork",
    "LocalProtocolError",
    "Message",
    "Network",
    "Observer",
    "PoolStatistics",
    "ProtocolError",
    "RemoteError",
    "RemoteProtocolError",
    "Request",
    "RetrySchedule",
    "RoleKeys",
    "RoleTable",
    "Secret",
    "TcpNetwork",
    "TransportError",
    "TypeTraffic",
    "WouldBlock",
]
