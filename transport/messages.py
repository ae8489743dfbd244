"""Pure: messages, the identities of a link's two ends, and the messages that each role may send."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from transport.config import MOST_NODE_BYTES
from transport.tensors import Tensor, TensorSpec

ANY_ROLE = "*"
"""Name in a row of a role table that stands for every role."""

Row = tuple[str, str]


class Message(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A named message: encoded fields, and tensors.

        question = Message(type="add", meta=msgspec.msgpack.encode({"number": 3}))
        msgspec.msgpack.decode(question.meta)  # at the receiver, or a Decoder(type) that also validates

    Attributes:
        type: Name of the message in the role table.
        meta: Fields of the message, encoded by the sender for the receiver: at most 16 KiB with the
            descriptions of the tensors. The link passes these bytes on as they are.
        tensors: C-contiguous arrays. The caller does not write to them between sending and release.
    """

    # A struct of msgspec, because its constructor is compiled, and every request makes four messages.
    type: str
    meta: bytes = b""
    tensors: tuple[Tensor, ...] = ()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{tensor.dtype.name}{list(tensor.shape)}" for tensor in self.tensors[:4])
        more = ", ..." if len(self.tensors) > 4 else ""
        return f"<Message {self.type} {len(self.meta)} B ({shapes}{more})>"


class Placed(Message, frozen=True, kw_only=True, eq=False):
    """A message whose payload is in its sender's memory, so the sender can change it at any time.

    ``tensors`` are read-only views of the memory; they are empty until the link has chosen views or a copy.
    """

    region: int
    start: int
    """Index of the payload in the region, in bytes."""
    specs: Sequence[TensorSpec]
    payload: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of one end of a link, exchanged in the handshake.

    Attributes:
        role: Name of the role in the role table; at most 32 bytes.
        node: Name of the node, unique within its role; at most 80 bytes.
        incarnation: Number of the node's incarnation, below 2**64; a restart without memory begins a new one.
        run: Id of the run, or empty; at most 64 bytes.
    """

    role: str
    node: str
    incarnation: int
    run: str = ""

    def __post_init__(self) -> None:
        for name, value, most in (
            ("role", self.role, 32),
            ("node", self.node, MOST_NODE_BYTES),
            ("run", self.run, 64),
        ):
            if len(value.encode()) > most or "\0" in value:
                raise ValueError(f"{name} {value!r} is longer than {most} bytes or holds a zero")
        if not self.role or not self.node:
            raise ValueError("role and node must not be empty")
        if not 0 <= self.incarnation < 1 << 64:
            raise ValueError(f"incarnation must be within 64 bits, not {self.incarnation}")

    def __str__(self) -> str:
        return f"{self.role} {self.node}"


class RoleTable:
    """Table of message types, each with the (from role, to role) pairs that may send it.

    Sender and receiver refuse a message without a row. Replies are messages and need rows.
    """

    def __init__(self, rows: Mapping[str, Iterable[Row]]) -> None:
        self._rows: dict[str, frozenset[Row]] = {name: frozenset(pairs) for name, pairs in rows.items()}
        self._roles = {role for pairs in self._rows.values() for pair in pairs for role in pair}
        self._sendable: dict[Row, frozenset[str]] = {}
        for name, pairs in self._rows.items():
            for pair in pairs:
                if len(pair) != 2 or not all(isinstance(role, str) and role for role in pair):
                    raise ValueError(f"row {pair!r} of message {name!r} is not (from role, to role)")

    def allows(self, message_type: str, from_role: str, to_role: str) -> bool:
        """Return whether ``from_role`` may send ``message_type`` to ``to_role``."""
        return message_type in self.sendable(from_role, to_role)

    def sendable(self, from_role: str, to_role: str) -> frozenset[str]:
        """Return the message types that ``from_role`` may send to ``to_role``."""
        pair = from_role, to_role
        known = self._sendable.get(pair)
        if known is None:
            fits = {pair, (ANY_ROLE, to_role), (from_role, ANY_ROLE), (ANY_ROLE, ANY_ROLE)}
            known = frozenset(name for name, pairs in self._rows.items() if pairs & fits)
            if self._roles.issuperset(pair):  # an unauthenticated client may claim any role: do not keep it
                self._sendable[pair] = known
        return known

    def may_talk(self, role: str, other: str) -> bool:
        """Return whether one of two roles may send any message to the other."""
        return bool(self.sendable(role, other) or self.sendable(other, role))

    def __repr__(self) -> str:
        return f"<RoleTable {len(self._rows)} message types>"
