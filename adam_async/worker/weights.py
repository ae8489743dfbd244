"""The worker's copy of the model: compute threads read it, and pulled values replace it.

Theory of operation
-------------------
The copy is a dictionary from tensor to `TensorCopy`. A compute thread takes a snapshot of the dictionary at
the start of a group, and uses its arrays to the end. A pull arrives in new memory and is *installed* by new
entries in the dictionary. The installation copies no value and takes no lock, and no reader sees a tensor
half replaced. The old memory returns to its pool when the last group that reads it has ended.

Local steps (plain SGD between pulls) write into the current arrays, from several threads at once and without
locks; updates are additive, and the servers have the authoritative values (AD-11, AD-14). A local step into
an array that is being replaced is lost with the array; a later pull contains its push, as in Downpour.

In ssp and bsp each copy also has a clock: the values contain all pushes of live replicas up to it.
`WorkerWeights.clock` is the clock of the whole copy, and only rises: answers of different servers may arrive
in any order, and the values with the newer clock stay.

Answers also cross if steps overtake one another: the thread that sent its piece of a split tensor first may
send the next piece last. Each of the two pulls then has a newer version of one shard. The values of the first
complete pull stay, so that no shard returns to an older version, unless the second pull raises the clock of
the tensor. The next step ends this state: an answer to a request made after a copy was installed is no older
in any shard, so it replaces the copy.

Only the event loop changes the dictionary; reading or copying it is one atomic operation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import le, lt
from typing import Any

from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class TensorCopy:
    """One version of one tensor."""

    array: NDArray[Any]
    versions: tuple[int, ...]
    """Version of each of the tensor's shards."""
    clock: int = 0
    """Clock up to which the tensor contains all pushes of live replicas; 0 in asp."""
    own_applied: int = 0
    """Number of own pushes that a local step has put into this array since its installation."""
    local: int = 0
    """Number of local steps in the array; exact with one compute thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The arrays that one group reads, and their age."""

    copies: dict[str, TensorCopy]
    own_applied: dict[str, int]
    """Values of `TensorCopy.own_applied` at the snapshot, by tensor."""
    clock: int
    """Clock up to which the arrays contain all pushes of live replicas; 0 in asp."""
    local: dict[str, int] | None = None
    """Values of `TensorCopy.local` at the snapshot, by tensor; None if the run is not recorded."""

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Values of each tensor by its name, for the layers."""
        return {name: copy.array for name, copy in self.copies.items()}


class WorkerWeights:
    """The current copy of every tensor of the partition.

    Args:
        recorded: Whether snapshots also count local steps, for a record of the run.
    """

    def __init__(self, *, recorded: bool = False) -> None:
        self._current: dict[str, TensorCopy] = {}
        self._recorded = recorded
        self.installed = 0
        self.clock = 0
        """Clock up to which all trained copies contain all pushes of live replicas; 0 in asp."""
        self.newest = 0
        """Highest clock of any values that arrived."""

    def snapshot(self) -> Snapshot:
        """Take the current copies. Safe from any thread."""
        clock = self.clock  # read before the copies, whose clock is then equal or newer
        copies = self._current.copy()
        local = {name: copy.local for name, copy in copies.items()} if self._recorded else None
        return Snapshot(copies, {name: copy.own_applied for name, copy in copies.items()}, clock, local)

    def current(self, tensor: str) -> TensorCopy:
        """Return the newest copy of one tensor. Safe from any thread."""
        return self._current[tensor]

    def install(self, tensor: str, array: NDArray[Any], versions: Sequence[int], clock: int = 0) -> None:
        """Replace a tensor, unless the new copy is not newer or is older in some shard. For the loop only."""
        old = self._current.get(tensor)
        if old is not None:
            if all(map(le, versions, old.versions)):
                old.clock = max(old.clock, clock)
                return
            if clock < old.clock or (clock == old.clock and any(map(lt, versions, old.versions))):
                return
        self._current[tensor] = TensorCopy(array, tuple(versions), clock)
        self.installed += 1

    def landed(self, clock: int) -> None:
        """Raise the clock: values of all trained tensors up to it are installed. For the loop only."""
        self.clock = max(self.clock, clock)

    def count_local_steps(self, copies: Mapping[str, TensorCopy]) -> None:
        """Count a sent push whose local step changed these copies. For the loop only."""
        for copy in copies.values():
            copy.own_applied += 1

    def __repr__(self) -> str:
        return f"<WorkerWeights {len(self._current)} tensors, {self.installed} installed>"
