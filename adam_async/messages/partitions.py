"""Pure: worker and worker of one replica: what crosses from one part of the model to another."""

from typing import Annotated

import msgspec

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import (
    MOST_IN_A_META,
    Attempt,
    Count,
    DrawnId,
    Epoch,
    GroupNumber,
    Partition,
    ReplicaNumber,
    RunId,
)


class Greet(Body, frozen=True, kw_only=True):
    """First message on a link between two workers of a replica, from either side; no others before it."""

    run: RunId
    replica: ReplicaNumber
    replica_generation: DrawnId
    partition: Partition
    """Of the sender."""
    received: Count
    """Blocks that it has from the other: sending goes on behind them."""
    begun: Count
    """As in `Blocks`."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """What one tensor is: activations, error gradients or a partial weight gradient of one group."""

    crossing: Partition
    """Number of the crossing in the plan."""
    epoch: Epoch
    number: GroupNumber
    attempt: Attempt


class Blocks(Body, frozen=True, kw_only=True):
    """Blocks of any groups that became ready together. Tensors: one per block, in order."""

    first: Count
    """Number of the first block, from 1 without gaps on the way from this worker to that one in this life."""
    blocks: Annotated[tuple[Block, ...], msgspec.Meta(max_length=MOST_IN_A_META)]
    received: Count
    """Blocks that the sender has from the receiver: those need not be kept any longer."""
    begun: Count
    """Groups that the sender has begun in this life: nobody who sends to it goes far ahead of that."""


ROWS: Rows = {
    Greet: frozenset({("worker", "worker")}),
    Blocks: frozenset({("worker", "worker")}),
}
