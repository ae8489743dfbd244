"""Pure: client and client: the pieces of an evaluation of L-BFGS, between a worker and the coordinator.

A worker asks for a piece to compute, and names the piece whose gradient it has now. Beside this it asks for
its turn to push, and names the pieces that the servers have now. The answer waits until there are pieces.
"""

from adam_async.messages.body import Body, Rows
from adam_async.messages.bounds import Epoch, GroupNumber, Loss, StoreId


class AskPieces(Body, frozen=True, kw_only=True):
    """Request for pieces to compute or to push, with the result of the last answer."""

    store: StoreId
    pushes: bool
    """Whether the worker asks for pieces to push; otherwise for a piece to compute."""
    evaluation: Epoch = 0
    """Evaluation of the result; 0 without one."""
    piece: GroupNumber = 0
    """The computed piece, or one past the last pushed piece."""
    loss: Loss = 0.0
    """Loss of the computed piece."""


class Pieces(Body, frozen=True, kw_only=True):
    """Pieces of an evaluation, to compute or to push in their order."""

    evaluation: Epoch
    first: GroupNumber
    stop: GroupNumber


ROWS: Rows = {AskPieces: frozenset({("client", "client")}), Pieces: frozenset({("client", "client")})}
