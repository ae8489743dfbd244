"""What a link takes in from its peer: how much it may hold, when reading waits, and for how long.

Reading waits while the inbox is full, while the link holds what its limit or the budget of the process
allows, and while an answer waits for room. Frames that were decoded before are kept by the link, undelivered.
A wait has a name (`Intake.waits`) and a deadline: if nothing is released for ``stalled_after_s`` (no message
is taken, no answer is made, the peer takes none of its bytes), the link is given up. A link that waits for
room that others hold is not given up for it, unless it holds more than its equal share.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from transport.budget import Account
from transport.config import LinkConfig
from transport.errors import LinkBroken, TransportError
from transport.messages import Identity, Message

__all__ = ["META_COST", "UNCHECKED_BYTES", "Asked", "Intake", "frame_cost"]

META_COST: Final = 72
"""Bytes of memory that a byte of packed meta can become: an empty dict in a list takes 64, its place 8."""

MESSAGE_COST_BYTES: Final = 256
"""Bytes that a message counts for beside its frame."""

UNCHECKED_BYTES: Final = 64 << 10
"""Bytes that a link may hold before its budget is looked at after each request."""

INBOX, LINK, PROCESS = "inbox", "link", "process"

MB = 1e6


def frame_cost(payload_bytes: int, frame_bytes: int) -> int:
    """Bytes of memory that a received message is charged for, at most and about."""
    return payload_bytes + META_COST * frame_bytes + MESSAGE_COST_BYTES


class Asked(Protocol):
    """What is needed of a request that waits for room for its answer."""

    message: Message

    @property
    def is_open(self) -> bool:
        """Whether an answer may still be given."""

    def begin(self, nbytes: int, then: Callable[[], object]) -> None:
        """Make the answer, for which so many bytes are charged."""


class Taker(Protocol):
    """What is needed of the link: the inbox as it is, and how reading is stopped."""

    peer: Identity
    _owed: int
    """Bytes of replies that the peer has not taken."""

    def _inbox_full(self) -> bool:
        """Whether too much waits to be received or handled."""

    def _arriving_bytes(self) -> int:
        """How much is charged for what was received and not delivered: messages in progress, kept frames."""

    def _pause_reading(self) -> None:
        """Stop delivering."""

    def _resume_reading(self) -> None:
        """Deliver again, what was kept first."""

    def _give_up(self, error: TransportError) -> None:
        """End the link."""

    def _arm_by(self, deadline: float) -> None:
        """Have `Intake.tick` called at that time or earlier."""


class Intake:
    """See the module's text. One per link; `close` it with the link.

    Attributes:
        account: What the link holds.
        reason: Why reading waits, in a word; empty while it does not.
    """

    __slots__ = (
        "_announced", "_config", "_link", "_looking", "_loop", "_mark", "_marked_at", "_over", "_waiting",
        "account", "reason",
    )  # fmt: skip

    def __init__(
        self, link: Taker, account: Account, config: LinkConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.account = account
        self._link = link
        self._config = config
        self._loop = loop
        self._waiting: deque[tuple[Asked, int, Callable[[], object]]] = deque()
        self._announced = 0
        self.reason = ""
        self._looking = False
        self._over = False
        self._mark = 0
        self._marked_at = 0.0

    # Answers

    def charge(self, request: Asked, nbytes: int, then: Callable[[], object]) -> None:
        """Begin the answer of a request as soon as there is room for it."""
        if not self._waiting and self.account.admit(nbytes):
            self._announced += nbytes
            request.begin(nbytes, then)
        else:
            self._waiting.append((request, nbytes, then))
            self.look()

    def release(self, nbytes: int, announced: int) -> None:
        """A request was answered: release what it held, of which so much was announced."""
        self._announced -= announced
        self.account.release(nbytes)
        if self.reason:
            self.look_soon()

    # Reading

    def look_soon(self) -> None:
        """Look in a later turn whether there is room."""
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        waiting = self._waiting
        while waiting:
            request, nbytes, then = waiting[0]
            if request.is_open:
                if not self.account.admit(nbytes):
                    break
                waiting.popleft()
                self._announced += nbytes
                request.begin(nbytes, then)
            else:
                waiting.popleft()
        self.look()

    def look(self) -> None:
        """Stop reading if too much is held, or read again."""
        if self._over:
            return
        account, was = self.account, self.reason
        reason = self.reason = self._why()
        if reason == PROCESS:
            arriving = self._link._arriving_bytes()
            whole = account.held_bytes - arriving <= account.budget.part_bytes
            account.wait(self.look_soon, in_line=bool(self._waiting) or (arriving > 0 and whole))
            if was != PROCESS:
                self.look_soon()  # if it is the first in line, its turn has come
        elif was == PROCESS:
            account.leave()
        if reason and not was:
            self._mark, self._marked_at = account.releases, self._loop.time()
            self._link._arm_by(self._marked_at + self._config.stalled_after_s)
            self._link._pause_reading()
        elif was and not reason:
            self._link._resume_reading()

    def _why(self) -> str:
        account, link = self.account, self._link
        if link._inbox_full():
            return INBOX
        if self._waiting:
            return LINK if account.is_full else PROCESS
        arriving = link._arriving_bytes()
        if account.held_bytes - arriving >= account.limit_bytes:
            return LINK
        return "" if account.may_go_on(arriving) else PROCESS

    @property
    def waits(self) -> str:
        """What reading waits for, as a clause; empty while it does not."""
        if not self.reason:
            return ""
        account, peer = self.account, self._link.peer.node
        held = f"{account.held_bytes / MB:.1f} MB"
        if self.reason == INBOX:
            return f"messages of {peer} ({held} in all) are not received or handled"
        if self.reason == PROCESS:
            budget = account.budget
            total, limit = budget.held_bytes / MB, budget.limit_bytes / MB
            return f"links of this process hold {total:.1f} of {limit:.1f} MB, {held} of it for {peer}"
        owed = (self._announced + self._link._owed) / MB
        return f"answers of {owed:.1f} MB are owed to {peer}, its requests make that {held}"

    # Time

    def tick(self, now: float) -> float | None:
        """Give the link up if nothing was released for too long; return when to look again."""
        if not self.reason:
            return None
        account, stalled_s = self.account, self._config.stalled_after_s
        if account.releases != self._mark or (self.reason == PROCESS and not account.is_hoarding):
            self._mark, self._marked_at = account.releases, now
        elif now >= self._marked_at + stalled_s:
            self._link._give_up(LinkBroken(f"nothing moved for {now - self._marked_at:.1f} s: {self.waits}"))
            return None
        return self._marked_at + stalled_s

    def close(self) -> None:
        """The link is over: nothing waits any more."""
        self._over = True
        self.reason = ""
        # Intake and link refer to each other: a link that is over must not keep its memory until the next
        # collection of garbage.
        del self._link
        self._waiting.clear()
        self.account.leave()
