"""Pure: the order in which a recorded run is repeated, such that every read finds its recorded version.

Theory of operation
-------------------
Each client trained its groups one after the other, and each shard applied its batches of pushes one after the
other. A group depends on the batches that made its shards' versions; a batch depends on the groups whose
gradients are in its pushes. So groups and batches are the nodes of a graph, and in the run each node came
after the nodes that it depends on. The playback works on demand. The playback requests a shard's next batch;
the batch requests the clients' groups with its pushes; the groups request the versions that they read, and so
on. The open requests form a stack. A request for a node that is already on the stack can never be served: the
replay refuses the record, and the error names the whole cycle.

Work on demand keeps memory small: a client trains no further ahead of its servers than in the run. Before a
batch changes a shard, the playback copies the version only if a group or an evaluation has yet to read it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from adam_async.driver.replay.recording import Numbers, Order, Reads, Recording
from adam_async.errors import RecordError


class Player(Protocol):
    """The arithmetic that `Playback` orders."""

    def train(self, client: int, group: int) -> None:
        """Compute the gradient of a client's next group from the versions that the group read."""
        ...

    def apply(self, shard: int, batch: int) -> None:
        """Apply a shard's next batch of pushes, all of them computed."""
        ...

    def keep(self, shard: int, version: int) -> None:
        """Copy the current version of a shard before its next batch, for later reads."""
        ...

    def drop(self, shard: int, version: int) -> None:
        """Forget a version without further readers, whether it was copied or not."""
        ...


SHARD, CLIENT = "shard", "client"

Demand = tuple[str, int, int]
"""Request for progress: `SHARD` or `CLIENT`, the shard's or client's number, and the number of batches or
groups that it must reach."""


class Playback:
    """Repeats a recording step by step.

    Args:
        tensors: Shape (shards,): number of each shard's tensor, from 0.

    Raises:
        RecordError: The record names a push or a version that it does not contain.
    """

    def __init__(self, recording: Recording, player: Player, tensors: Numbers) -> None:
        self._reads = recording.reads
        self._orders = recording.orders
        self._player = player
        self._applied = np.zeros(len(self._orders), np.int64)
        """Number of applied batches, by shard."""
        self._trained = dict.fromkeys(self._reads, 0)
        """Number of trained groups, by client."""
        self._pushed = [_groups_behind(order, self._reads) for order in self._orders]
        self._needs = {client: self._batches_behind(reads, tensors) for client, reads in self._reads.items()}
        evaluated = np.array([epoch.versions for epoch in recording.header.epochs], np.int64)
        evaluated = evaluated.reshape(-1, len(self._orders))
        self._readers = [
            _count_readers([evaluated[:, shard], *(r.versions[:, shard] for r in self._reads.values())])
            for shard in range(len(self._orders))
        ]
        self._copied: set[tuple[int, int]] = set()

    # --- dependencies ------------------------------------------------------------------------

    def _batches_behind(self, reads: Reads, tensors: Numbers) -> Numbers:
        """Return the batches that each group depends on, shape (groups, shards).

        A local step changes the copy that is current after the gradient. If the next group read that step in
        a newer copy, this group depends on the newer copy, too.
        """
        columns = [
            self._batches_of(reads, shard, reads.versions[:, shard]) for shard in range(len(self._orders))
        ]
        behind = np.stack(columns, axis=1) if columns else np.zeros((len(reads.clocks), 0), np.int64)
        stepped = reads.steps[1:, tensors] > 0
        behind[:-1] = np.where(stepped, np.maximum(behind[:-1], behind[1:]), behind[:-1])
        return behind

    def _batches_of(self, reads: Reads, shard: int, versions: Numbers) -> Numbers:
        """Return the number of a shard's batches that lead to each of these versions."""
        made = np.concatenate([[0], self._orders[shard].versions])
        batches = np.searchsorted(made, versions)
        wrong = np.flatnonzero(made[np.minimum(batches, len(made) - 1)] != versions)
        if len(wrong):
            group = int(wrong[0])
            raise RecordError(
                f"the record is damaged: {_group(reads, group)} read version {versions[group]} of shard "
                f"{shard}, which that shard never had"
            )
        return batches

    # --- playing -----------------------------------------------------------------------------

    def advance(self, versions: Numbers | None = None) -> Iterator[None]:
        """Play until each shard has reached a version, or with None to the record's end.

        A shard may advance further if another node depends on it. Evaluated versions are kept until
        `release`. The iterator yields after a shard's next batch, and the nodes that the batch depends on, so
        its caller sets the pace.

        Args:
            versions: Version of each shard, shape (shards,).

        Raises:
            RecordError: Nodes of the record depend on each other, or a shard never had an evaluated version.
        """
        goals = np.array([len(order.versions) for order in self._orders], np.int64)
        if versions is not None:
            for shard, order in enumerate(self._orders):
                made = np.concatenate([[0], order.versions])
                goals[shard] = np.searchsorted(made, versions[shard])
                if goals[shard] == len(made) or made[goals[shard]] != versions[shard]:
                    raise RecordError(
                        f"the record is damaged: version {versions[shard]} of shard {shard} was evaluated, "
                        f"which that shard never had"
                    )
        while (behind := np.flatnonzero(self._applied < goals)).size:
            for shard in behind.tolist():
                self._serve((SHARD, shard, min(int(self._applied[shard]) + 1, int(goals[shard]))))
                yield

    def _serve(self, demand: Demand) -> None:
        """Serve a demand after all demands that it depends on."""
        stack = [demand]
        while stack:
            kind, number, wanted = stack[-1]
            done = int(self._applied[number]) if kind == SHARD else self._trained[number]
            if done >= wanted:
                stack.pop()
                continue
            needed = (
                self._missing_push(number, done) if kind == SHARD else self._missing_version(number, done)
            )
            if needed is None and kind == SHARD:
                self._apply(number, done)
            elif needed is None:
                self._train(number, done)
            else:
                if any(other[:2] == needed[:2] for other in stack):
                    raise RecordError(f"the record is damaged: it goes in a circle: {self._circle(stack)}")
                stack.append(needed)

    def _missing_push(self, shard: int, batch: int) -> Demand | None:
        entry = self._open_push(shard, batch)
        if entry is None:
            return None
        return CLIENT, int(self._orders[shard].clients[entry]), int(self._pushed[shard][entry])

    def _open_push(self, shard: int, batch: int) -> int | None:
        """Return the first push of a batch that is not computed yet."""
        order = self._orders[shard]
        for entry in range(int(order.bounds[batch]), int(order.bounds[batch + 1])):
            if self._trained[int(order.clients[entry])] < self._pushed[shard][entry]:
                return entry
        return None

    def _missing_version(self, client: int, group: int) -> Demand | None:
        needs = self._needs[client][group]
        missing = np.flatnonzero(needs > self._applied)
        return (SHARD, int(missing[0]), int(needs[missing[0]])) if missing.size else None

    def _apply(self, shard: int, batch: int) -> None:
        version = int(self._orders[shard].versions[batch - 1]) if batch else 0
        if version in self._readers[shard] and (shard, version) not in self._copied:
            self._copied.add((shard, version))
            self._player.keep(shard, version)
        self._player.apply(shard, batch)
        self._applied[shard] += 1

    def _train(self, client: int, group: int) -> None:
        self._player.train(client, group)
        self._trained[client] += 1
        self.release(self._reads[client].versions[group])

    def release(self, versions: Numbers) -> None:
        """Count a read of these versions, one per shard; drop versions without further readers."""
        for shard, version in enumerate(versions.tolist()):
            readers = self._readers[shard]
            readers[version] -= 1
            if readers[version]:
                continue
            del readers[version]
            self._player.drop(shard, version)
            self._copied.discard((shard, version))

    def _circle(self, stack: list[Demand]) -> str:
        """List the demands on the stack, in words."""
        waiting = []
        for kind, number, _ in stack:
            if kind == SHARD:
                order = self._orders[number]
                entry = self._open_push(number, int(self._applied[number]))
                waiting.append(
                    f"shard {number} at push {entry} (clock {order.clocks[entry]} of replica "
                    f"{self._reads[int(order.clients[entry])].replica})"
                )
            else:
                waiting.append(_group(self._reads[number], self._trained[number]))
        return ", which waits for ".join([*waiting, "the first of them"])


def _groups_behind(order: Order, reads: Mapping[int, Reads]) -> Numbers:
    """For each push of a shard, return how many of its client's groups it depends on, shape (pushes,)."""
    behind = np.zeros(len(order.clocks), np.int64)
    for client in np.unique(order.clients).tolist():
        mine = np.flatnonzero(order.clients == client)
        clocks, known = order.clocks[mine], reads[client].clocks
        groups = np.searchsorted(known, clocks, side="right")
        found = np.zeros(len(mine), bool)
        found[groups > 0] = known[groups[groups > 0] - 1] == clocks[groups > 0]
        again = np.ones(len(mine), bool)
        again[np.unique(clocks, return_index=True)[1]] = False
        for what, wrong in (("has no reads", ~found), ("it applied before", again)):
            if wrong.any():
                clock = int(clocks[np.flatnonzero(wrong)[0]])
                raise RecordError(
                    f"the record is damaged: shard {order.shard} applied the push of replica "
                    f"{reads[client].replica} with clock {clock}, which {what}"
                )
        behind[mine] = groups
    return behind


def _count_readers(read: Sequence[Numbers]) -> dict[int, int]:
    """Return the number of readers of each version of a shard."""
    versions, counts = np.unique(np.concatenate(read), return_counts=True)
    return dict(zip(versions.tolist(), counts.tolist(), strict=True))


def _group(reads: Reads, group: int) -> str:
    return f"group {reads.numbers[group]} of epoch {reads.epochs[group]} at replica {reads.replica}"
