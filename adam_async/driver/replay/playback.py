"""Pure: in which order a recorded run is repeated, so that everyone finds what they once found.

Theory of operation
-------------------
Each worker trained its groups one after the other, and each shard had its batches of pushes applied one
after the other. A group needs the versions of all shards that it read, so it comes after the batches that
made them; a batch needs the pushes in it, so it comes after the groups whose gradients those carried. In
the run time itself saw to that. Here nothing is done before somebody asks for it: a shard is asked for its
next batch, it asks the workers for the pushes in it, those ask the shards for the versions read, and so on.
Whoever asks stands on a stack; a question that leads back to one who stands on it could never be
answered, and the record is refused with the names of all in that circle.

Asking, instead of doing whatever can be done, keeps memory small: a worker trains no further ahead of its
servers than it did in the run. A version of a shard is kept, when the next batch is to change it, only as
long as there is a group left that read it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from adam_async.driver.replay.recording import Numbers, Order, Reads, Recording
from adam_async.errors import RecordError


class Player(Protocol):
    """Does the arithmetic that `Playback` puts in order."""

    def train(self, replica: int, group: int) -> None:
        """Compute the gradient of a worker's next group from the versions that it read."""
        ...

    def apply(self, shard: int, batch: int) -> None:
        """Apply a shard's next batch of pushes; all of them are computed."""
        ...

    def keep(self, shard: int, version: int) -> None:
        """Copy a shard as it is now: its next batch follows, and this version is still to be read."""
        ...

    def drop(self, shard: int, version: int) -> None:
        """The version has no reader left; whether it was ever copied or not."""
        ...


SHARD, REPLICA = "shard", "replica"

Asked = tuple[str, int, int]
"""Who is asked, and how many batches, or groups, there shall be."""


class Playback:
    """Repeats a recording step by step.

    Args:
        recording: What was recorded.
        player: Does the arithmetic.
        tensors: Shape (shards,): which tensor each shard is of; numbered from 0.

    Raises:
        RecordError: A push or a version that the record speaks of is not in it.
    """

    def __init__(self, recording: Recording, player: Player, tensors: Numbers) -> None:
        self._reads = recording.reads
        self._orders = recording.orders
        self._player = player
        self._applied = np.zeros(len(self._orders), np.int64)
        """Batches applied, by shard."""
        self._trained = dict.fromkeys(self._reads, 0)
        """Groups trained, by replica."""
        self._pushed = [_groups_behind(order, self._reads) for order in self._orders]
        self._needs = {
            replica: self._batches_behind(reads, tensors) for replica, reads in self._reads.items()
        }
        evaluated = np.array([epoch.versions for epoch in recording.header.epochs], np.int64)
        evaluated = evaluated.reshape(-1, len(self._orders))
        self._readers = [
            _count_readers([evaluated[:, shard], *(r.versions[:, shard] for r in self._reads.values())])
            for shard in range(len(self._orders))
        ]
        self.kept = 0
        """Versions of shards that are copied now."""
        self.most_kept = 0
        """The most there were at once."""
        self._copied: set[tuple[int, int]] = set()

    # --- what needs what ---------------------------------------------------------------------

    def _batches_behind(self, reads: Reads, tensors: Numbers) -> Numbers:
        """Shape (groups, shards): batches that must be applied before each group can be trained.

        With local steps a group's own step goes into the copy that is current when its gradient is done. If
        the next group found that step in a newer copy than this group read, that one must be there too.
        """
        columns = [
            self._batches_of(reads, shard, reads.versions[:, shard]) for shard in range(len(self._orders))
        ]
        behind = np.stack(columns, axis=1) if columns else np.zeros((len(reads.clocks), 0), np.int64)
        stepped = reads.steps[1:, tensors] > 0
        behind[:-1] = np.where(stepped, np.maximum(behind[:-1], behind[1:]), behind[:-1])
        return behind

    def _batches_of(self, reads: Reads, shard: int, versions: Numbers) -> Numbers:
        """Batches of a shard that lead to each of these versions."""
        made = np.concatenate([[0], self._orders[shard].versions])
        batches = np.searchsorted(made, versions)
        wrong = np.flatnonzero(made[np.minimum(batches, len(made) - 1)] != versions)
        if len(wrong):
            group = int(wrong[0])
            raise RecordError(
                f"the record is damaged: {_group(reads, group)} read version {versions[group]} of shard "
                f"{shard}, which that shard never showed"
            )
        return batches

    # --- doing it ----------------------------------------------------------------------------

    def advance(self, versions: Numbers | None = None) -> Iterator[None]:
        """Go on until each shard has come to a version, or with None to the end of the record.

        A shard may come further, where another asked for that. Versions that the record says were evaluated
        are kept until they are released.

        Whoever iterates sets the pace: between two batches of a shard the iterator rests.

        Args:
            versions: Shape (shards,).

        Raises:
            RecordError: The record leads nowhere: it asks in a circle, or for a version that never was.
        """
        goals = np.array([len(order.versions) for order in self._orders], np.int64)
        if versions is not None:
            for shard, order in enumerate(self._orders):
                made = np.concatenate([[0], order.versions])
                goals[shard] = np.searchsorted(made, versions[shard])
                if goals[shard] == len(made) or made[goals[shard]] != versions[shard]:
                    raise RecordError(
                        f"the record is damaged: version {versions[shard]} of shard {shard} was evaluated, "
                        f"which that shard never showed"
                    )
        while (behind := np.flatnonzero(self._applied < goals)).size:
            for shard in behind.tolist():
                self._ask((SHARD, shard, min(int(self._applied[shard]) + 1, int(goals[shard]))))
                yield

    def _ask(self, asked: Asked) -> None:
        """Do what is asked for, and before it all that it needs."""
        stack = [asked]
        while stack:
            kind, who, wanted = stack[-1]
            done = int(self._applied[who]) if kind == SHARD else self._trained[who]
            if done >= wanted:
                stack.pop()
                continue
            needed = self._missing_push(who, done) if kind == SHARD else self._missing_version(who, done)
            if needed is None and kind == SHARD:
                self._apply(who, done)
            elif needed is None:
                self._train(who, done)
            else:
                if any(other[:2] == needed[:2] for other in stack):
                    raise RecordError(f"the record is damaged: it goes in a circle: {self._circle(stack)}")
                stack.append(needed)

    def _missing_push(self, shard: int, batch: int) -> Asked | None:
        entry = self._open_push(shard, batch)
        if entry is None:
            return None
        return REPLICA, int(self._orders[shard].replicas[entry]), int(self._pushed[shard][entry])

    def _open_push(self, shard: int, batch: int) -> int | None:
        """The first push of a batch that is still to be computed."""
        order = self._orders[shard]
        for entry in range(int(order.bounds[batch]), int(order.bounds[batch + 1])):
            if self._trained[int(order.replicas[entry])] < self._pushed[shard][entry]:
                return entry
        return None

    def _missing_version(self, replica: int, group: int) -> Asked | None:
        needs = self._needs[replica][group]
        missing = np.flatnonzero(needs > self._applied)
        return (SHARD, int(missing[0]), int(needs[missing[0]])) if missing.size else None

    def _apply(self, shard: int, batch: int) -> None:
        version = int(self._orders[shard].versions[batch - 1]) if batch else 0
        if version in self._readers[shard] and (shard, version) not in self._copied:
            self._copied.add((shard, version))
            self.kept += 1
            self.most_kept = max(self.most_kept, self.kept)
            self._player.keep(shard, version)
        self._player.apply(shard, batch)
        self._applied[shard] += 1

    def _train(self, replica: int, group: int) -> None:
        self._player.train(replica, group)
        self._trained[replica] += 1
        self.release(self._reads[replica].versions[group])

    def release(self, versions: Numbers) -> None:
        """One who read these versions, one of each shard, has done so."""
        for shard, version in enumerate(versions.tolist()):
            readers = self._readers[shard]
            readers[version] -= 1
            if readers[version]:
                continue
            del readers[version]
            self._player.drop(shard, version)
            if (shard, version) in self._copied:
                self._copied.remove((shard, version))
                self.kept -= 1

    def _circle(self, stack: list[Asked]) -> str:
        """Name those on the stack, each with what it cannot go on without."""
        said = []
        for kind, who, _ in stack:
            if kind == SHARD:
                order = self._orders[who]
                entry = self._open_push(who, int(self._applied[who]))
                said.append(
                    f"shard {who} at push {entry} (clock {order.clocks[entry]} of replica "
                    f"{order.replicas[entry]})"
                )
            else:
                said.append(_group(self._reads[who], self._trained[who]))
        return ", which waits for ".join([*said, "what already waits"])


def _groups_behind(order: Order, reads: Mapping[int, Reads]) -> Numbers:
    """Shape (pushes,): groups that the pushing worker must have trained, for each push of a shard."""
    behind = np.zeros(len(order.clocks), np.int64)
    for replica in np.unique(order.replicas).tolist():
        mine = np.flatnonzero(order.replicas == replica)
        clocks = order.clocks[mine]
        known = reads[replica].clocks if replica in reads else np.zeros(0, np.int64)
        groups = np.searchsorted(known, clocks, side="right")
        found = np.zeros(len(mine), bool)
        found[groups > 0] = known[groups[groups > 0] - 1] == clocks[groups > 0]
        again = np.ones(len(mine), bool)
        again[np.unique(clocks, return_index=True)[1]] = False
        for what, wrong in (("no worker's record has", ~found), ("it applied before", again)):
            if wrong.any():
                clock = int(clocks[np.flatnonzero(wrong)[0]])
                raise RecordError(
                    f"the record is damaged: shard {order.shard} applied the push of replica {replica} with "
                    f"clock {clock}, which {what}"
                )
        behind[mine] = groups
    return behind


def _count_readers(read: Sequence[Numbers]) -> dict[int, int]:
    """How often each version of a shard is read."""
    versions, counts = np.unique(np.concatenate(read), return_counts=True)
    return dict(zip(versions.tolist(), counts.tolist(), strict=True))


def _group(reads: Reads, group: int) -> str:
    return f"group {reads.numbers[group]} of epoch {reads.epochs[group]} at replica {reads.replica}"
