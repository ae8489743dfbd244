"""Pure: who may say what to whom."""

from collections.abc import Iterable, Mapping

__all__ = ["ANY_ROLE", "RoleTable"]

ANY_ROLE = "*"
"""In a row, stands for every role."""

Row = tuple[str, str]


class RoleTable:
    """A table of message types, each with the (from role, to role) pairs that may use it.

    A message without a row is refused by the sender and by the receiver. Replies are messages and need rows.
    """

    def __init__(self, rows: Mapping[str, Iterable[Row]]) -> None:
        self._rows: dict[str, frozenset[Row]] = {name: frozenset(pairs) for name, pairs in rows.items()}
        self._roles = {role for pairs in self._rows.values() for pair in pairs for role in pair}
        self._sayable: dict[Row, frozenset[str]] = {}
        for name, pairs in self._rows.items():
            for pair in pairs:
                if len(pair) != 2 or not all(isinstance(role, str) and role for role in pair):
                    raise ValueError(f"row {pair!r} of message {name!r} is not (from role, to role)")

    def allows(self, message_type: str, from_role: str, to_role: str) -> bool:
        """Whether ``from_role`` may send ``message_type`` to ``to_role``."""
        return message_type in self.sayable(from_role, to_role)

    def sayable(self, from_role: str, to_role: str) -> frozenset[str]:
        """Every message type that ``from_role`` may send to ``to_role``."""
        pair = from_role, to_role
        known = self._sayable.get(pair)
        if known is None:
            fits = {pair, (ANY_ROLE, to_role), (from_role, ANY_ROLE), (ANY_ROLE, ANY_ROLE)}
            known = frozenset(name for name, pairs in self._rows.items() if pairs & fits)
            if self._roles.issuperset(pair):  # a stranger may say that it is anything: that is not kept
                self._sayable[pair] = known
        return known

    def may_talk(self, role: str, other: str) -> bool:
        """Whether two roles have anything to say to each other, in either direction."""
        return bool(self.sayable(role, other) or self.sayable(other, role))

    def __repr__(self) -> str:
        return f"<RoleTable {len(self._rows)} message types>"
