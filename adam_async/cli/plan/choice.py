"""Pure: which plans there are for a model and some machines, how fast each would train, and which to take.

A *candidate* is a number of workers, a kind of plan and a number of images per group. Recommended is the
fastest, as `model/prediction.py` predicts it; of those within `NEAR` of it the one with the fewest workers,
then the fewest images per group, then the fewest bytes. How well a network learns from groups of one size
or another is not looked at.

Workers on machines of their own push every group's gradients to the servers and pull values over links like
those between them. On one machine a worker that has the whole model trains in place, and sends nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from adam_async.model.errors import ModelError
from adam_async.model.network import Network
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PartitionPlan
from adam_async.model.partition.planner import Halo, layers_plan, vertical_plan
from adam_async.model.partition.prediction import LayerTimes, LinkCost, Prediction, crossing_bytes, predict
from adam_async.model.working_set import WorkingSet, working_sets
from adam_async.run.config import default_in_flight
from adam_async.run.ids import NodeId
from adam_async.run.shard_table import assign_buckets, part_table, shard_table
from adam_async.worker.push_plan import ProtocolChoice, choose_protocol, factorable_tensors

PlanKind = Literal["vertical", "layers"]

NEAR = 1.05
"""A candidate may be slower than the fastest one by so much if it asks for less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Where plans are to run."""

    link: LinkCost
    """Between workers, and between workers and servers."""
    cores: int
    """Of a machine."""
    own_machines: bool
    """Whether each worker has a machine of its own; otherwise all share one."""
    threads: int = 0
    """Compute threads per worker; 0 shares the cores of a machine out to the workers on it."""
    in_flight: int = 0
    """Groups in flight; 0 is twice the threads of a replica."""
    servers: int = 1
    """Parameter servers."""
    halo: Halo = "auto"
    """Of vertical plans."""

    def threads_of(self, workers: int) -> int:
        """Compute threads of each of so many workers."""
        return self.threads or max(1, self.cores // (1 if self.own_machines else workers))

    def in_flight_of(self, workers: int) -> int:
        """Groups in flight of a replica of so many workers."""
        return self.in_flight or default_in_flight(self.threads_of(workers), workers)


class Candidate:
    """A plan under some conditions, and what is to be expected of it.

    Args:
        network: The whole network.
        plan: How it is cut.
        times: Of its layers, for groups of the size in question.
        conditions: Where it runs.
    """

    def __init__(
        self, network: Network, plan: PartitionPlan, times: LayerTimes, conditions: Conditions
    ) -> None:
        self.network = network
        self.plan = plan
        self.times = times
        self.conditions = conditions
        self.parts = tuple(Partition(network, plan, worker) for worker in range(plan.workers))
        self.protocols = tuple(self._protocols())
        """For each worker, how the gradients of what it pushes travel."""
        self.prediction: Prediction = predict(
            self.parts,
            times,
            conditions.link,
            threads=min(self.threads, conditions.cores),
            in_flight=conditions.in_flight_of(plan.workers),
            pushed=[self.pushed_bytes(worker) for worker in range(plan.workers)],
            pulled=[self.pulled_bytes(worker) for worker in range(plan.workers)],
            servers=conditions.servers,
            shared_cores=None if conditions.own_machines else conditions.cores,
        )

    @property
    def images(self) -> int:
        """Of a group."""
        return self.times.images

    @property
    def threads(self) -> int:
        """Compute threads per worker."""
        return self.conditions.threads_of(self.plan.workers)

    @property
    def in_place(self) -> bool:
        """Whether the one worker trains on the servers' own memory."""
        return self.plan.workers == 1 and not self.conditions.own_machines

    def pushed_bytes(self, worker: int) -> int:
        """Bytes of the gradients that one worker sends to the servers per group."""
        if self.in_place:
            return 0
        rows = self.protocols[worker]
        return sum(row.delta_bytes if row.chosen == "delta" else row.factor_bytes or 0 for row in rows)

    def pulled_bytes(self, worker: int) -> int:
        """Bytes of the values that one worker gets from the servers per group."""
        if self.in_place:
            return 0
        return sum(p.size for p in self.parts[worker].network.trained) * self.network.dtype.itemsize

    @cached_property
    def crossing_bytes(self) -> int:
        """Bytes that cross between workers per group, all together."""
        item_bytes = self.network.dtype.itemsize
        return sum(crossing_bytes(c, self.images, item_bytes) for c in self.parts[0].layout.crossings)

    @cached_property
    def working_sets(self) -> tuple[WorkingSet, ...]:
        """What one group walks through at each worker. Allocates a context for each."""
        return tuple(working_sets(part.network, self.images)[-1] for part in self.parts)

    def fits_in(self, l3_kb: int | None) -> bool:
        """Whether what the threads of each worker walk through lies in its third-level cache, if known."""
        if l3_kb is None:
            return True
        at_once = [each.total * self.threads for each in self.working_sets]
        return (max(at_once) if self.conditions.own_machines else sum(at_once)) <= l3_kb << 10

    def _protocols(self) -> Iterator[tuple[ProtocolChoice, ...]]:
        network, count = self.network, self.conditions.servers
        table = shard_table(
            network.parameters,
            item_bytes=network.dtype.itemsize,
            cuts=self.plan.row_cuts(network.layers),
        )
        buckets = assign_buckets(table, [NodeId(f"ps-{number}") for number in range(count)])
        for part in self.parts:
            own, factorable = part_table(table, part.network.parameters), factorable_tensors(part.network)
            yield tuple(
                choose_protocol(
                    own, buckets, p.name, p.shape, images=self.images, factorable=p.name in factorable
                )
                for p in part.network.trained
                if p.name in part.owned
            )


def make_plan(
    network: Network, kind: PlanKind, workers: int, times: LayerTimes, conditions: Conditions
) -> PartitionPlan:
    """Cut a network as well as is known how.

    Raises:
        ModelError: It cannot be cut over so many workers.
    """
    if kind == "layers":
        return layers_plan(network, workers, times=times, link=conditions.link)
    return vertical_plan(network, workers, halo=conditions.halo, times=times, link=conditions.link)


def candidates(
    network: Network,
    times: Sequence[LayerTimes],
    conditions: Conditions,
    *,
    workers: Sequence[int],
    kinds: Sequence[PlanKind],
) -> list[Candidate]:
    """Make every plan that can be made: one for each number of workers, kind and group size.

    One worker has everything, whatever the kind, so that kinds other than the first are left out.

    Args:
        network: The whole network.
        times: Of its layers, for each size of groups.
        conditions: Where plans are to run.
        workers: How many, each at least 1.
        kinds: Of plans.

    Raises:
        ModelError: None can be made; says why the last one cannot.
    """
    found: list[Candidate] = []
    refusal: ModelError | None = None
    for count in workers:
        for kind in kinds if count > 1 else kinds[:1]:
            for each in times:
                try:
                    plan = make_plan(network, kind, count, each, conditions)
                except ModelError as error:
                    refusal = error
                    break
                found.append(Candidate(network, plan, each, conditions))
    if not found and refusal is not None:
        raise refusal
    return found


def recommend(found: Sequence[Candidate]) -> Candidate:
    """Choose the fastest candidate, or one that is nearly as fast and asks for less."""
    fastest = max(each.prediction.images_per_s for each in found)
    near = [each for each in found if each.prediction.images_per_s * NEAR >= fastest]
    return min(near, key=lambda each: (each.plan.workers, each.images, each.crossing_bytes))


def describe(candidate: Candidate) -> str:
    """Name a candidate."""
    groups = f"{candidate.images} image{'s' * (candidate.images > 1)} per group"
    if candidate.plan.workers == 1:
        return f"one worker, {groups}"
    return f"plan {candidate.plan.kind} over {candidate.plan.workers} workers, {groups}"


def reason(best: Candidate, found: Sequence[Candidate]) -> str:
    """Say in a sentence or two why one candidate is recommended among others."""
    said = f"{describe(best)}: {_rate(best)}, bounded by {best.prediction.slowest}"
    cut = [each for each in found if each.plan.workers > 1]
    whole = [each for each in found if each.plan.workers == 1]
    if best.plan.workers == 1:
        if not cut:
            return f"{said}."
        other = max(cut, key=lambda each: each.prediction.images_per_s)
        return (
            f"Do not cut it: {said}; the best cut, {describe(other)}, makes {_rate(other)}, bounded by "
            f"{other.prediction.slowest}."
        )
    if not whole:
        return f"Take {said}."
    alone = max(whole, key=lambda each: each.prediction.images_per_s)
    times = best.prediction.images_per_s / alone.prediction.images_per_s
    said = (
        f"Take {said}; that is {times:.2f} times what one worker makes with the whole model ({_rate(alone)})"
    )
    if best.conditions.own_machines and times < best.plan.workers:
        said += (
            f", but less than {best.plan.workers} machines may make as replicas that have the whole model "
            "each, if it fits them"
        )
    return f"{said}."


def _rate(candidate: Candidate) -> str:
    return f"{candidate.prediction.images_per_s:,.0f} images/s"


def kept_whole(plan: PartitionPlan) -> Mapping[str, str]:
    """Layers that are not cut although the plan cuts the others, and why."""
    return {} if plan.workers == 1 else {each.layer: each.whole for each in plan.layers if each.whole}


def recomputed(candidate: Candidate) -> tuple[str, ...]:
    """Layers of which each worker computes all that it reads, those that only move values left out."""
    if candidate.plan.workers == 1:
        return ()
    moves = {layer.name for layer in candidate.network.layers if layer.moves}
    return tuple(e.layer for e in candidate.plan.layers if e.recomputed and e.layer not in moves)
