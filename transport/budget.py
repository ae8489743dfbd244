"""Pure: the memory that the links of a process may hold for their peers, and how they share it.

Each link has an `Account`. It is charged for what the link holds because of its peer: requests until they are
answered, messages until they are taken, a large message while it arrives, answers from the moment their size
is known until the peer has taken their bytes. All accounts of a process belong to one `Budget`.

Half of the limit is divided equally: within its part a link always has room, so links that hold much cannot
lock out the others. The other half is shared: beyond its part a link may hold as much as is left free of it
(dynamic thresholds, as in switches with shared buffers).

A link that does not fit waits in line. The first in line is let past the limit with one answer or one
message, so the budget is overshot by one largest message at most, and links that hold a part of a message
each do not wait for one another for ever.
"""

from collections.abc import Callable

__all__ = ["Account", "Budget"]

EQUAL_SHARE = 2
"""Divisor of the limit: this share of it is divided equally among the links."""


class Budget:
    """Bytes that the links of one process hold together.

    Attributes:
        limit_bytes: The most, but for one largest message.
        held_bytes: What they hold now: the sum over all open accounts.
        links: Number of open accounts.
    """

    __slots__ = ("_line", "_passed", "held_bytes", "limit_bytes", "links")

    def __init__(self, limit_bytes: int = 512 << 20) -> None:
        if limit_bytes <= 0:
            raise ValueError(f"a budget must be positive, not {limit_bytes} bytes")
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.links = 0
        self._line: dict[Account, tuple[Callable[[], None], bool]] = {}
        self._passed: Account | None = None

    @property
    def part_bytes(self) -> int:
        """What each link may hold whatever the others do."""
        return self.limit_bytes // EQUAL_SHARE // max(self.links, 1)

    def __repr__(self) -> str:
        waiting = f", {len(self._line)} wait" if self._line else ""
        return f"<Budget {self.held_bytes} of {self.limit_bytes} B held by {self.links} links{waiting}>"


class Account:
    """What one link holds.

    Args:
        budget: That of the process.
        limit_bytes: The most this link may hold, but for one largest message.

    Attributes:
        held_bytes: What it holds now.
        releases: How often something was released: a mark of progress.
    """

    __slots__ = ("_open", "budget", "held_bytes", "limit_bytes", "releases")

    def __init__(self, budget: Budget, limit_bytes: int) -> None:
        self.budget = budget
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.releases = 0
        self._open = True
        budget.links += 1

    def charge(self, nbytes: int) -> None:
        """Hold ``nbytes`` more, whether they fit or not: they are here. A closed account holds nothing."""
        if self._open:
            self.held_bytes += nbytes
            self.budget.held_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Hold ``nbytes`` less.

        Raises:
            ValueError: It does not hold so many.
        """
        if not self._open:
            return
        if nbytes > self.held_bytes:
            raise ValueError(f"{nbytes} bytes are released of {self.held_bytes} that are held")
        budget = self.budget
        self.held_bytes -= nbytes
        budget.held_bytes -= nbytes
        self.releases += 1
        if budget._passed is self and self.fits(0):
            budget._passed = None
        if budget._line:
            self._wake()

    def fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more are within the budget of the process."""
        budget = self.budget
        after = self.held_bytes + nbytes
        free = budget.limit_bytes - budget.limit_bytes // EQUAL_SHARE - budget.held_bytes
        return after <= free or after <= budget.part_bytes

    @property
    def is_full(self) -> bool:
        """Whether the link holds what it may by its own limit."""
        return self.held_bytes >= self.limit_bytes

    @property
    def is_hoarding(self) -> bool:
        """Whether the link holds more than an equal share of the process's limit."""
        return self.held_bytes > self.budget.limit_bytes // max(self.budget.links, 1)

    def admit(self, nbytes: int) -> bool:
        """Charge for an answer before it is made, if there is room for it; the first in line has room."""
        if self.is_full or not (self.fits(nbytes) or self._pass()):
            return False
        self.charge(nbytes)
        return True

    def may_go_on(self, arriving_bytes: int) -> bool:
        """Whether more of a message may be received of which ``arriving_bytes`` are charged already."""
        if self.fits(0):
            return True
        budget = self.budget
        if self.held_bytes - arriving_bytes > budget.part_bytes:
            return False
        return budget._passed is self or self._pass()

    def _pass(self) -> bool:
        """Let the first in line past the limit, unless another one is past it."""
        budget = self.budget
        passed = budget._passed
        if passed is not None and not passed.fits(0):
            return False
        if next((one for one, (_, in_line) in budget._line.items() if in_line), None) is not self:
            return False
        budget._passed = self
        return True

    def wait(self, on_room: Callable[[], None], *, in_line: bool) -> None:
        """Have ``on_room`` called whenever there may be room, until `leave`.

        It must not raise, nor charge or release anything at once. ``in_line`` says whether one answer or one
        message is what it waits for: then its turn comes even if no room does. Repeated, it keeps its place.
        """
        self.budget._line[self] = (on_room, in_line)

    def leave(self) -> None:
        """Wait no longer."""
        if self.budget._line.pop(self, None) is not None:
            self._wake()

    def _wake(self) -> None:
        for on_room, _ in list(self.budget._line.values()):
            on_room()

    def close(self) -> None:
        """Release everything; what is charged or released later counts for nothing."""
        if not self._open:
            return
        budget = self.budget
        budget.held_bytes -= self.held_bytes
        budget.links -= 1
        self.held_bytes = 0
        self._open = False
        if budget._passed is self:
            budget._passed = None
        budget._line.pop(self, None)
        self._wake()

    def __repr__(self) -> str:
        return f"<Account {self.held_bytes} of {self.limit_bytes} B{'' if self._open else ', closed'}>"
