"""Intake of a link: limits the bytes held for the peer, and pauses reading above the limits.

Reading pauses in three cases: the inbox is full, the link holds as many bytes as its limit or the process's
budget allows, or an answer waits for room. The link keeps decoded frames until it delivers them. A pause has
a reason (`Intake.waits`) and a deadline. The link ends if ``stalled_after_s`` pass without a release: the
application receives no message, the server makes no answer, the peer takes no bytes. A link that waits for
room in the process's budget ends in this way only if it holds more than its equal share.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from transport.budget import Account
from transport.config import LinkConfig
from transport.errors import LinkBroken, TransportError
from transport.messages import Identity, Message

META_COST: Final = 72
"""Bytes charged per byte of meta: the memory of the values that any decoder makes of it, in the worst case 64
for an empty dict in a list and 8 for its slot."""

MESSAGE_COST_BYTES: Final = 256
"""Bytes charged for a message in addition to its frame."""

UNCHECKED_BYTES: Final = 64 << 10
"""Bytes that a link may hold before each further request checks its budget."""

INBOX, LINK, PROCESS = "inbox", "link", "process"

MB = 1e6


def frame_cost(payload_bytes: int, frame_bytes: int) -> int:
    """Return the bytes charged for a received message: an upper estimate of its memory."""
    return payload_bytes + META_COST * frame_bytes + MESSAGE_COST_BYTES


class Asked(Protocol):
    """Interface of a request that waits for room for its answer."""

    message: Message

    @property
    def is_open(self) -> bool:
        """Whether an answer may still be given."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the link holds for the request and its answer."""

    def begin(self, nbytes: int, then: Callable[[], object]) -> None:
        """Make the answer, after a charge of ``nbytes`` for it."""


class Taker(Protocol):
    """Interface of the link: its inbox, and a way to pause reading."""

    peer: Identity
    _owed: int
    """Bytes of answers that the peer has not taken, errors among them."""

    @property
    def _announced_bytes(self) -> int:
        """Bytes charged for the answers of open requests."""

    def _inbox_full(self) -> bool:
        """Return whether the messages not yet received or handled reach the limit of the inbox."""

    def _arriving_bytes(self) -> int:
        """Bytes charged for undelivered input: messages in progress and kept frames."""

    def _pause_reading(self) -> None:
        """Stop delivering."""

    def _resume_reading(self) -> None:
        """Deliver again, kept frames first."""

    def _give_up(self, error: TransportError) -> None:
        """End the link."""

    def _arm_by(self, deadline: float) -> None:
        """Call `Intake.tick` at ``deadline`` or earlier."""


class Intake:
    """Decides when one link reads and when it answers: see the module. `close` it with the link.

    Attributes:
        account: Account of the link.
        reason: Why reading pauses, in a word; empty while the link reads.
    """

    __slots__ = (
        "_config", "_link", "_looking", "_loop", "_mark", "_marked_at", "_over", "_waiting",
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
        self.reason = ""
        self._looking = False
        self._over = False
        self._mark = 0
        self._marked_at = 0.0

    # Answers

    def charge(self, request: Asked, nbytes: int, then: Callable[[], object]) -> None:
        """Begin the answer of a request as soon as the account has room for it."""
        if not self._waiting and self.account.admit(nbytes):
            request.begin(nbytes, then)
        else:
            self._waiting.append((request, nbytes, then))
            self.look()

    def release(self, nbytes: int) -> None:
        """Release ``nbytes`` from the account, and check for room."""
        self.account.release(nbytes)
        if self.reason:
            self.look_soon()

    # Reading

    def look_soon(self) -> None:
        """Check for room in a later iteration of the loop."""
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        waiting = self._waiting
        while waiting:
            request, nbytes, then = waiting[0]
            if request.is_open:
                if not self.account.admit(nbytes, alone=self._is_stuck()):
                    break
                waiting.popleft()
                request.begin(nbytes, then)
            else:
                waiting.popleft()
        self.look()

    def look(self) -> None:
        """Pause reading if the link holds too much, otherwise resume it."""
        if self._over:
            return
        account, was = self.account, self.reason
        reason = self.reason = self._why()
        if reason == PROCESS:
            arriving = self._link._arriving_bytes()
            whole = account.held_bytes - arriving <= account.part_bytes
            account.wait(self.look_soon, in_line=bool(self._waiting) or (arriving > 0 and whole))
            if was != PROCESS:
                self.look_soon()  # the first in the queue may proceed at once
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
            return LINK if account.is_full and not self._is_stuck() else PROCESS
        arriving = link._arriving_bytes()
        if account.held_bytes - arriving >= account.limit_bytes:
            return LINK
        return "" if account.may_go_on(arriving) else PROCESS

    def _is_stuck(self) -> bool:
        """Return whether the link is full and releases nothing before the next answer begins.

        The link then holds only undelivered input, and requests that wait for room for their answers.
        """
        account = self.account
        if not account.is_full:
            return False
        waiting = sum([request.held_bytes for request, _, _ in self._waiting if request.is_open])
        return account.held_bytes <= self._link._arriving_bytes() + waiting

    @property
    def waits(self) -> str:
        """Why reading pauses, as a clause; empty while the link reads."""
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
        owed = (self._link._announced_bytes + self._link._owed) / MB
        return f"answers of {owed:.1f} MB are owed to {peer}, its requests make that {held}"

    # Time

    def tick(self, now: float) -> float | None:
        """End the link after too long without a release; return the time of the next check."""
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
        """Drop all requests that wait for room, because the link has ended."""
        self._over = True
        self.reason = ""
        # Intake and link refer to each other: without this line, an ended link would keep its memory until
        # the next garbage collection.
        del self._link
        self._waiting.clear()
        self.account.leave()
