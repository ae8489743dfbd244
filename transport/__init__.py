"""Links carry messages with tensors in one process, in shared memory, or over TCP, and behave the same in
each case.

`network.py` listens and dials. Over TCP `greeter.py` carries out the handshake on each new connection, and
hands the connection to a link (`stream.py`). `link.py` checks on both sides whether a role may send a
message. `protocol.py` encodes the message, and `stream.py` writes its frames. On the other side `decoder.py`
decodes the frames in place, and `link.py` delivers the message within a budget of memory.

    link.py                      start here: `Link`; order; ownership of sent arrays; calls, inbox, roles,
                                 counts, water marks (back-pressure), the end of a link
    network.py                   `TcpNetwork` and `LocalNetwork`: listeners, dialling, retries
    messages.py                  messages, identities of both ends, the table of roles and messages
    config.py, errors.py         limits and time-outs; errors by cause and by the party at fault
All links:
    intake.py, budget.py         pauses of reading (flow control); a budget of memory for all links
Bytes on the wire:
    frames.py                    format and encoder: prelude, meta, chunks of large messages, checksums
    decoder.py                   decoder, in place; bounded memory for any input, also a hostile one
    tensors.py                   description and layout of arrays in a payload; reused memory for received
                                 payloads; the call when sent arrays are free
    protocol.py                  one conversation without its stream: queue, own requests with their
                                 deadlines, pings, silent or stalled peers
Kinds of links, and their networks:
    stream.py, sockets.py        a link over a stream: joined writes, reads; addresses, socket options
    shared.py, regions.py        a link between processes of one host; its shared memory
    unix.py                      how these processes find each other: Unix sockets beside listeners
    local.py                     a link within one event loop: messages by reference, without frames
    slow.py                      simulated latency and bandwidth of links; arrival times on such a path
Authentication:
    handshake.py, greeter.py     proof of both identities by HMAC, in four records; its run on a connection
    keys.py                      a key for each pair of roles, derived from the root token
    entrance.py                  unauthenticated connections of a listener; the choice of those that it closes
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transport.budget import Budget as Budget
    from transport.config import LinkConfig as LinkConfig
    from transport.errors import BindRefused as BindRefused
    from transport.errors import CallTimeout as CallTimeout
    from transport.errors import DialFailed as DialFailed
    from transport.errors import HandshakeRejected as HandshakeRejected
    from transport.errors import LinkBroken as LinkBroken
    from transport.errors import LinkClosed as LinkClosed
    from transport.errors import LocalProtocolError as LocalProtocolError
    from transport.errors import ProtocolError as ProtocolError
    from transport.errors import RemoteError as RemoteError
    from transport.errors import RemoteProtocolError as RemoteProtocolError
    from transport.errors import TransportError as TransportError
    from transport.errors import WouldBlock as WouldBlock
    from transport.keys import RoleKeys as RoleKeys
    from transport.keys import Secret as Secret
    from transport.link import Link as Link
    from transport.link import LinkStatistics as LinkStatistics
    from transport.link import Observer as Observer
    from transport.link import Request as Request
    from transport.link import TypeTraffic as TypeTraffic
    from transport.messages import ANY_ROLE as ANY_ROLE
    from transport.messages import Identity as Identity
    from transport.messages import Message as Message
    from transport.messages import Placed as Placed
    from transport.messages import RoleTable as RoleTable
    from transport.network import Listener as Listener
    from transport.network import LocalNetwork as LocalNetwork
    from transport.network import Network as Network
    from transport.network import RetrySchedule as RetrySchedule
    from transport.network import TcpNetwork as TcpNetwork
    from transport.regions import Region as Region
    from transport.tensors import BufferPool as BufferPool
    from transport.tensors import PoolStatistics as PoolStatistics

_HOMES = {
    "budget": ("Budget",),
    "config": ("LinkConfig",),
    "errors": (
        "BindRefused",
        "CallTimeout",
        "DialFailed",
        "HandshakeRejected",
        "LinkBroken",
        "LinkClosed",
        "LocalProtocolError",
        "ProtocolError",
        "RemoteError",
        "RemoteProtocolError",
        "TransportError",
        "WouldBlock",
    ),
    "keys": ("RoleKeys", "Secret"),
    "link": ("Link", "LinkStatistics", "Observer", "Request", "TypeTraffic"),
    "messages": ("ANY_ROLE", "Identity", "Message", "Placed", "RoleTable"),
    "network": ("Listener", "LocalNetwork", "Network", "RetrySchedule", "TcpNetwork"),
    "regions": ("Region",),
    "tensors": ("BufferPool", "PoolStatistics"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    # The first use of a name loads its module, so importing addresses and errors loads no links.
    if name not in _HOME_OF:
        raise AttributeError(f"module 'transport' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"transport.{_HOME_OF[name]}"), name)
    return value
