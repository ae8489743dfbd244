"""Pure: blocks on their way between two workers of a replica: numbered, kept until confirmed, taken once.

Each way between two workers is a stream of blocks numbered from 1. A link may break and another one take
its place; what the other side has not confirmed is then said again, and what it has already is left out
there. Confirmations ride on the blocks of the other way.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from adam_async.messages import Block
from transport import RemoteProtocolError


class Parcel:
    """One block with its tensor, whose memory is lent until nobody needs it any more.

    Args:
        block: What it is.
        tensor: Its values.
        give_back: Called once, from any thread, when all who hold the parcel have let it go.
    """

    __slots__ = ("_give_back", "_others", "block", "tensor")

    def __init__(self, block: Block, tensor: NDArray[Any], give_back: Callable[[NDArray[Any]], None]) -> None:
        self.block = block
        self.tensor = tensor
        self._give_back = give_back
        self._others: list[None] = []
        """One entry per holder beyond the first: taking one out is atomic, and the last finds none."""

    def hold(self) -> None:
        """One more needs it; somebody who holds it says so."""
        self._others.append(None)

    def let_go(self) -> None:
        """One needs it no more."""
        try:
            self._others.pop()
        except IndexError:
            self._give_back(self.tensor)


class SendingStream:
    """Our way to the other worker."""

    def __init__(self) -> None:
        self._open: deque[Parcel] = deque()
        self._confirmed = 0
        """Blocks that the other side has; the next in `_open` is the one behind them."""
        self._said = 0
        """Blocks that were said on the link in use, or before it."""
        self._sent = 0
        """Blocks that were ever said; on a new link some are said again."""
        self.said_again = 0

    @property
    def unconfirmed(self) -> int:
        """Blocks that are kept."""
        return len(self._open)

    @property
    def waiting(self) -> bool:
        """Whether there is something to say."""
        return self._said < self._confirmed + len(self._open)

    def add(self, parcel: Parcel) -> None:
        """Take a block, which it holds until it is confirmed."""
        self._open.append(parcel)

    def take(self, blocks: int, num_bytes: int) -> tuple[int, list[Parcel]]:
        """Give the number of the first block to say next, and those from there on that one message may hold.

        Args:
            blocks: How many at most.
            num_bytes: Of all their tensors at most; a block that alone has more is given alone.
        """
        first = self._said + 1
        at = self._said - self._confirmed
        parcels: list[Parcel] = []
        for place in range(at, min(at + blocks, len(self._open))):
            parcel = self._open[place]
            num_bytes -= parcel.tensor.nbytes
            if num_bytes < 0 and parcels:
                break
            parcels.append(parcel)
        self._said += len(parcels)
        return first, parcels

    def put_back(self, parcels: Sequence[Parcel]) -> None:
        """The link did not take the last ones."""
        self._said -= len(parcels)

    def confirm(self, received: int) -> None:
        """The other side has so many blocks; those are let go.

        Raises:
            RemoteProtocolError: It claims to have what was never sent.
        """
        sent = max(self._sent, self._said)
        if received > sent:
            raise RemoteProtocolError("blocks", f"{received} blocks confirmed, and only {sent} sent")
        while self._confirmed < received:
            self._open.popleft().let_go()
            self._confirmed += 1
        # What came by the link before is heard of on this one: that is not said again.
        self._said = max(self._said, self._confirmed)

    def resume(self, received: int) -> None:
        """There is a new link, on which the other side says how many blocks it has: go on behind those.

        Raises:
            RemoteProtocolError: It has fewer than it has confirmed, or more than were sent.
        """
        if received < self._confirmed:
            raise RemoteProtocolError(
                "blocks", f"a worker has {received} blocks, and has confirmed {self._confirmed}"
            )
        self._sent = max(self._sent, self._said)
        self.confirm(received)
        self.said_again += self._said - received
        self._said = received


class ReceivingStream:
    """The other worker's way to us."""

    def __init__(self) -> None:
        self.received = 0
        """Blocks that we have, without gaps."""
        self.duplicates = 0

    def accept(self, first: int, count: int) -> int:
        """Count blocks that came; returns how many of them, from the first on, we had already.

        Raises:
            RemoteProtocolError: Some before them are missing, or the first has no number.
        """
        if not 1 <= first <= self.received + 1:
            raise RemoteProtocolError("blocks", f"block {first} came when {self.received + 1} was next")
        known = min(self.received - first + 1, count)
        self.duplicates += known
        self.received += count - known
        return known
