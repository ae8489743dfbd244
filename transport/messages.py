"""Pure: what travels over a link, and who the two ends are."""

from dataclasses import dataclass
from typing import Any

import msgspec

from transport.tensors import Tensor

__all__ = ["Identity", "Message"]


class Message(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A named message: small builtins, and tensors beside them.

    Attributes:
        type: Its name in the role table.
        meta: What msgpack carries (None, bool, int, float, str, bytes, list, dict with str keys), at most
            8 levels deep and 16 KiB packed. Over TCP a tuple arrives as a list.
        tensors: C-contiguous arrays. Not written to between sending and release.
    """

    # A struct of msgspec, because its constructor is compiled, and every request makes four messages.
    type: str
    meta: dict[str, Any] = {}
    tensors: tuple[Tensor, ...] = ()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{tensor.dtype.name}{list(tensor.shape)}" for tensor in self.tensors[:4])
        more = ", ..." if len(self.tensors) > 4 else ""
        return f"<Message {self.type} {list(self.meta)[:8]} ({shapes}{more})>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One end of a link, as told in the handshake.

    Attributes:
        role: What it is, in the words of the role table; at most 32 bytes.
        node: Which one, unique in its role; at most 80 bytes.
        incarnation: Which life of it; a restart without memory is a new one. Below 2**64.
        run: Which run it belongs to, or empty; at most 64 bytes.
    """

    role: str
    node: str
    incarnation: int
    run: str = ""

    def __post_init__(self) -> None:
        for name, value, most in (("role", self.role, 32), ("node", self.node, 80), ("run", self.run, 64)):
            if len(value.encode()) > most or "\0" in value:
                raise ValueError(f"{name} {value!r} is longer than {most} bytes or holds a zero")
        if not self.role or not self.node:
            raise ValueError("role and node must not be empty")
        if not 0 <= self.incarnation < 1 << 64:
            raise ValueError(f"incarnation must be within 64 bits, not {self.incarnation}")

    def __str__(self) -> str:
        return f"{self.role} {self.node}"
