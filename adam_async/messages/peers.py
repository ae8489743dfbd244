"""Pure: messages between two workers: tensors between the parts of a model, and pieces of L-BFGS.

A worker of L-BFGS, a client of the store, asks the coordinator for a piece to compute, and names the piece
whose gradient it has. The worker also asks for its turn to push, and names the pieces that the servers have
now. The answer waits until there are pieces. A piece is some batches, and messages name it by them.
"""

from typing import Annotated

import msgspec

from adam_async.messages.body import (
    MOST_IN_A_META,
    Attempt,
    Body,
    Count,
    DrawnId,
    Epoch,
    GroupNumber,
    Loss,
    Partition,
    ReplicaNumber,
    Rows,
    RunId,
    StoreId,
)


class Greet(Body, frozen=True, kw_only=True):
    """First message from both sides of a link between two workers of a replica."""

    run: RunId
    replica: ReplicaNumber
    replica_generation: DrawnId
    partition: Partition
    """Partition of the sender."""
    received: Count
    """Number of blocks that the sender has received from the other side, which continues after these."""
    begun: Count
    """Number of groups that the sender has begun in this replica generation; see `Blocks`."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Description of one tensor: activations, error gradients or a partial weight gradient of one group."""

    crossing: Partition
    """Number of the crossing in the plan."""
    epoch: Epoch
    number: GroupNumber
    attempt: Attempt


class Blocks(Body, frozen=True, kw_only=True):
    """Blocks that became ready together, of one group or several. Tensors: one per block, in order."""

    first: Count
    """Number of the first block, from 1 without gaps, per direction and replica generation."""
    blocks: Annotated[tuple[Block, ...], msgspec.Meta(max_length=MOST_IN_A_META)]
    received: Count
    """Number of blocks that the sender has received from the receiver, which may drop its copies of these."""
    begun: Count
    """Number of groups that the sender has begun in this replica generation; it limits how many more its
    peers may begin."""


class AskPieces(Body, frozen=True, kw_only=True):
    """Request for pieces to compute or to push, with the result of the last answer."""

    store: StoreId
    pushes: bool
    """Whether the worker asks for pieces to push; otherwise for a piece to compute."""
    evaluation: Epoch = 0
    """Evaluation that the result belongs to; 0 without a result."""
    batch: GroupNumber = 0
    """First batch of the computed piece, or one past the last batch of the pushed pieces."""
    loss: Loss = 0.0
    """Loss of the computed piece."""


class Pieces(Body, frozen=True, kw_only=True):
    """Batches of an evaluation: one piece to compute, or pieces to push in order."""

    evaluation: Epoch
    first: GroupNumber
    stop: GroupNumber


ROWS: Rows = {
    Greet: frozenset({("worker", "worker")}),
    Blocks: frozenset({("worker", "worker")}),
    AskPieces: frozenset({("client", "client")}),
    Pieces: frozenset({("client", "client")}),
}
