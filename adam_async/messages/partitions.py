"""Pure: worker and worker of one replica: what crosses from one part of the model to another."""

import msgspec

from adam_async.messages.body import Body, Rows


class Greet(Body, frozen=True, kw_only=True):
    """First message on a link between two workers of a replica, from either side; no others before it."""

    run: str
    replica: int
    life: int
    partition: int
    """Of the sender."""
    received: int
    """Blocks that it has from the other: sending goes on behind them."""
    begun: int
    """As in `Blocks`."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """What one tensor is: activations, error gradients or a partial weight gradient of one group."""

    crossing: int
    """Number of the crossing in the plan."""
    epoch: int
    number: int
    attempt: int


class Blocks(Body, frozen=True, kw_only=True):
    """Blocks of any groups that became ready together. Tensors: one per block, in order."""

    first: int
    """Number of the first block, from 1 without gaps on the way from this worker to that one in this life."""
    blocks: tuple[Block, ...]
    received: int
    """Blocks that the sender has from the receiver: those need not be kept any longer."""
    begun: int
    """Groups that the sender has begun in this life: nobody who sends to it goes far ahead of that."""


ROWS: Rows = {
    Greet: frozenset({("worker", "worker")}),
    Blocks: frozenset({("worker", "worker")}),
}
