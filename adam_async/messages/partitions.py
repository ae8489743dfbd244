"""Pure: messages of workers of one replica: tensors between the parts of the model."""

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
    """First message of both sides of a link between two workers of a replica."""

    run: RunId
    replica: ReplicaNumber
    replica_generation: DrawnId
    partition: Partition
    """Partition of the sender."""
    received: Count
    """Number of blocks that the sender has received from the other side; the other side continues after
    these."""
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
    """Number of blocks that the sender has received from the receiver; the receiver may drop its copies of
    these."""
    begun: Count
    """Number of groups that the sender has begun in this replica generation; it limits how many more its
    peers may begin."""


ROWS: Rows = {Greet: frozenset({("worker", "worker")}), Blocks: frozenset({("worker", "worker")})}
