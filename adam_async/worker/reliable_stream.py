"""Pure: blocks between two workers of a replica: numbered, kept until confirmed, accepted once.

Each direction between two workers is a stream of blocks numbered from 1. When a new link replaces a broken
one, the sender repeats the unconfirmed blocks, and the receiver drops those that it already has. A message
with blocks also confirms the blocks of the other direction.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from adam_async.messages import Block
from transport import RemoteProtocolError


class Parcel:
    """One block with its tensor, whose memory is lent until the last holder releases it.

    Args:
        block: The block's crossing and group.
        tensor: Values of the block.
        give_back: Called once, from any thread, when all holders have released the parcel.
    """

    __slots__ = ("_give_back", "_others", "block", "tensor")

    def __init__(self, block: Block, tensor: NDArray[Any], give_back: Callable[[NDArray[Any]], None]) -> None:
        self.block = block
        self.tensor = tensor
        self._give_back = give_back
        self._others: list[None] = []
        """One entry per holder beyond the first: removing an entry is atomic, and the last holder finds
        none."""

    def hold(self) -> None:
        """Add a holder; only a holder may call this."""
        self._others.append(None)

    def let_go(self) -> None:
        """Remove a holder."""
        try:
            self._others.pop()
        except IndexError:
            self._give_back(self.tensor)


class SendingStream:
    """The stream to another worker."""

    def __init__(self) -> None:
        self._open: deque[Parcel] = deque()
        self._confirmed = 0
        """Number of blocks that the receiver has confirmed; `_open` begins after them."""
        self._sent = 0
        """Number of blocks sent on the link in use, or confirmed before it."""
        self._ever_sent = 0
        """Number of blocks sent on earlier links; a new link may repeat some of them."""
        self.resent = 0

    @property
    def unconfirmed(self) -> int:
        """Number of blocks in memory, which the receiver has not confirmed."""
        return len(self._open)

    @property
    def waiting(self) -> bool:
        """Whether unsent blocks exist."""
        return self._sent < self._confirmed + len(self._open)

    def add(self, parcel: Parcel) -> None:
        """Add a block, and keep it until it is confirmed."""
        self._open.append(parcel)

    def take(self, blocks: int, num_bytes: int) -> tuple[int, list[Parcel]]:
        """Take the next blocks for one message; return the number of the first, and the blocks.

        Args:
            blocks: Maximum number of blocks.
            num_bytes: Maximum total size of their tensors; a larger block is alone in its message.
        """
        first = self._sent + 1
        at = self._sent - self._confirmed
        parcels: list[Parcel] = []
        for place in range(at, min(at + blocks, len(self._open))):
            parcel = self._open[place]
            num_bytes -= parcel.tensor.nbytes
            if num_bytes < 0 and parcels:
                break
            parcels.append(parcel)
        self._sent += len(parcels)
        return first, parcels

    def put_back(self, parcels: Sequence[Parcel]) -> None:
        """Return the blocks of the last `take` to the queue, because the link did not accept them."""
        self._sent -= len(parcels)

    def confirm(self, received: int) -> None:
        """Release the blocks that the receiver has.

        Raises:
            RemoteProtocolError: The receiver confirms blocks that were never sent.
        """
        sent = max(self._ever_sent, self._sent)
        if received > sent:
            raise RemoteProtocolError("blocks", f"{received} blocks confirmed, and only {sent} sent")
        while self._confirmed < received:
            self._open.popleft().let_go()
            self._confirmed += 1
        # The receiver may have got blocks by the earlier link: these are not sent again.
        self._sent = max(self._sent, self._confirmed)

    def resume(self, received: int) -> None:
        """Continue on a new link after the blocks that the receiver has.

        Raises:
            RemoteProtocolError: The receiver has fewer blocks than it has confirmed, or more than were sent.
        """
        if received < self._confirmed:
            raise RemoteProtocolError(
                "blocks", f"a worker has {received} blocks, and has confirmed {self._confirmed}"
            )
        self._ever_sent = max(self._ever_sent, self._sent)
        self.confirm(received)
        self.resent += self._sent - received
        self._sent = received


class ReceivingStream:
    """The stream from another worker."""

    def __init__(self) -> None:
        self.received = 0
        """Number of blocks received, without gaps."""
        self.duplicates = 0

    def accept(self, first: int, count: int) -> int:
        """Count received blocks; return how many duplicates are at their start.

        Raises:
            RemoteProtocolError: An earlier block is missing, or `first` is below 1.
        """
        if not 1 <= first <= self.received + 1:
            raise RemoteProtocolError("blocks", f"block {first} arrived when {self.received + 1} was next")
        known = min(self.received - first + 1, count)
        self.duplicates += known
        self.received += count - known
        return known
