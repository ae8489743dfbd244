"""Pure: limits the memory that the links of a process hold for their peers, and shares it among the links.

Each link has an `Account`. The link charges its account for memory held for the peer: requests until it
answers them, messages until the application receives them, a large message while it arrives, and answers from
the call of `charge` until the peer has taken their bytes. All accounts of a process belong to one `Budget`.

Half of the limit is reserved for the parts of links. A new link gets a fraction of what is left of this half
as its part, and always has room within its part. So links that hold much cannot block others. A part never
changes. If parts shrank with each new link, a part could already be full at that moment, and the parts would
exceed the reserved half. The other half is shared: beyond its part a link may hold as many bytes as remain
free in this half (dynamic thresholds, as in switches with shared buffers).

A link that does not fit waits in a queue. The first link in the queue may exceed the limit by one answer or
message. So all links together exceed the budget by at most one largest message, and links that each hold a
part of a message cannot deadlock.
"""

from collections.abc import Callable

RESERVED = 2
"""Divisor of the limit; the quotient is reserved for the parts of links."""

PART = 64
"""Divisor of the unassigned bytes in the reserved half; the quotient is a new link's part. With 512 MiB the
first link gets 4.2 MB and the hundredth 0.9 MB."""


class Budget:
    """Bytes that the links of one process hold together.

    Attributes:
        limit_bytes: Maximum of `held_bytes`, except for one largest message.
        held_bytes: Bytes held now: the sum over all open accounts.
        reserved_bytes: Sum of all open accounts' parts.
        beyond_bytes: Bytes that accounts hold beyond their parts.
        links: Number of open accounts.
    """

    __slots__ = ("_line", "_passed", "beyond_bytes", "held_bytes", "limit_bytes", "links", "reserved_bytes")

    def __init__(self, limit_bytes: int = 512 << 20) -> None:
        if limit_bytes <= 0:
            raise ValueError(f"a budget must be positive, not {limit_bytes} bytes")
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.reserved_bytes = 0
        self.beyond_bytes = 0
        self.links = 0
        self._line: dict[Account, tuple[Callable[[], None], bool]] = {}
        self._passed: Account | None = None

    @property
    def shared_bytes(self) -> int:
        """Bytes that links may hold together beyond their parts."""
        return self.limit_bytes - self.limit_bytes // RESERVED

    def __repr__(self) -> str:
        waiting = f", {len(self._line)} wait" if self._line else ""
        return f"<Budget {self.held_bytes} of {self.limit_bytes} B held by {self.links} links{waiting}>"


class Account:
    """Bytes that one link holds for its peer.

    Args:
        budget: Budget of the process.
        limit_bytes: Maximum of `held_bytes`, except for one largest message.

    Attributes:
        held_bytes: Bytes held now.
        part_bytes: Bytes that this link may hold independently of the others.
        releases: Number of releases, which shows progress.
    """

    __slots__ = ("_open", "budget", "held_bytes", "limit_bytes", "part_bytes", "releases")

    def __init__(self, budget: Budget, limit_bytes: int) -> None:
        self.budget = budget
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.releases = 0
        self._open = True
        self.part_bytes = (budget.limit_bytes // RESERVED - budget.reserved_bytes) // PART
        budget.reserved_bytes += self.part_bytes
        budget.links += 1

    def charge(self, nbytes: int) -> None:
        """Hold ``nbytes`` more, even above the limits, because they are in memory.

        A closed account holds nothing.
        """
        if self._open:
            budget = self.budget
            self.held_bytes += nbytes
            budget.held_bytes += nbytes
            if (beyond := self.held_bytes - self.part_bytes) > 0:
                budget.beyond_bytes += min(beyond, nbytes)

    def release(self, nbytes: int) -> None:
        """Hold ``nbytes`` less.

        Raises:
            ValueError: The account holds fewer.
        """
        if not self._open:
            return
        if nbytes > self.held_bytes:
            raise ValueError(f"{nbytes} bytes are released of {self.held_bytes} that are held")
        budget = self.budget
        if (beyond := self.held_bytes - self.part_bytes) > 0:
            budget.beyond_bytes -= min(beyond, nbytes)
        self.held_bytes -= nbytes
        budget.held_bytes -= nbytes
        self.releases += 1
        if budget._passed is self and self.fits(0):
            budget._passed = None
        if budget._line:
            self._wake()

    def fits(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more fit into the budget of the process."""
        beyond = self.held_bytes + nbytes - self.part_bytes
        return beyond <= 0 or beyond <= self.budget.shared_bytes - self.budget.beyond_bytes

    @property
    def is_full(self) -> bool:
        """Whether the link has reached its own limit."""
        return self.held_bytes >= self.limit_bytes

    @property
    def is_hoarding(self) -> bool:
        """Whether the link holds more than an equal share of the process's limit."""
        return self.held_bytes > self.budget.limit_bytes // max(self.budget.links, 1)

    def admit(self, nbytes: int, *, alone: bool = False) -> bool:
        """Charge for an answer if it fits, or if the account is first in the queue; return whether it
        charged.

        With ``alone`` the link may exceed its own limit, because it releases nothing before this answer.
        """
        held = self.held_bytes
        if held + nbytes <= self.part_bytes and held < self.limit_bytes:  # the usual case, in one test
            self.charge(nbytes)
            return True
        if (self.is_full and not alone) or not (self.fits(nbytes) or self._pass()):
            return False
        self.charge(nbytes)
        return True

    def may_go_on(self, arriving_bytes: int) -> bool:
        """Return whether the link may receive more of a message with ``arriving_bytes`` already charged."""
        if self.fits(0):
            return True
        budget = self.budget
        if self.held_bytes - arriving_bytes > self.part_bytes:
            return False
        return budget._passed is self or self._pass()

    def _pass(self) -> bool:
        """Let the first account in the queue exceed the limit if no other does; return whether it may."""
        budget = self.budget
        passed = budget._passed
        if passed is not None and not passed.fits(0):
            return False
        if next((one for one, (_, in_line) in budget._line.items() if in_line), None) is not self:
            return False
        budget._passed = self
        return True

    def wait(self, on_room: Callable[[], None], *, in_line: bool) -> None:
        """Call ``on_room`` whenever the account may have room, until `leave`.

        ``on_room`` must not raise, charge or release. With ``in_line`` the account waits for one answer or
        message, which it gets in its turn even without room. A repeated call keeps its position.
        """
        self.budget._line[self] = (on_room, in_line)

    def leave(self) -> None:
        if self.budget._line.pop(self, None) is not None:
            self._wake()

    def _wake(self) -> None:
        for on_room, _ in list(self.budget._line.values()):
            on_room()

    def close(self) -> None:
        """Release everything; later charges and releases have no effect."""
        if not self._open:
            return
        budget = self.budget
        budget.beyond_bytes -= max(self.held_bytes - self.part_bytes, 0)
        budget.held_bytes -= self.held_bytes
        budget.reserved_bytes -= self.part_bytes
        budget.links -= 1
        self.held_bytes = 0
        self._open = False
        if budget._passed is self:
            budget._passed = None
        budget._line.pop(self, None)
        self._wake()

    def __repr__(self) -> str:
        return f"<Account {self.held_bytes} of {self.limit_bytes} B{'' if self._open else ', closed'}>"
