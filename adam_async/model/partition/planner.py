"""Pure: a planner of partitions.

A **vertical** plan cuts every layer over all workers (the paper's partition, AD-10): images by rows, features
into equal ranges. If two workers need the same rows of an earlier layer, the cut is in the middle of these
rows, so both directions send equally many rows. Workers can send such a *halo*, or both sides can compute it
with all its inputs; the planner takes the faster way. The number of rows computed twice grows towards the
images. Losses, and layers that cannot be cut, are whole on one worker.

A **layers** plan gives each worker consecutive layers. The planner compares a bounded number of cuts and
minimises the time of the slowest worker or link. Among plans within `BALANCE` of the best, it takes the plan
that sends the fewest bytes. A part begins with a layer that has parameters, if the model has enough such
layers.

The cost of a plan, seconds of workers and links per group and the resulting rate, is predicted from measured
or estimated times.

Theory of operation
-------------------
With many groups in flight, the slowest resource bounds the rate: a worker's threads, the link between two
workers, or the links to the servers. With few groups, *latency* bounds the rate: n groups in flight take the
time of one group. This is the time of the longest path from the group's images to its last sum, through all
workers' segments. Each crossing on a path costs the link's latency, the handling of its tensor at both ends,
and the transfer of its bytes. The largest number of crossings on a path, `longest_chain`, depends on the plan
alone.

`adam_async/driver/calibration.py` measures times. Estimates from multiply-adds and numbers of values have the
right proportions. A block of a layer takes its share of the layer's time; the prediction ignores how the
block's size affects kernels and caches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from math import ceil, inf, prod
from typing import Literal

from adam_async.errors import ModelError
from adam_async.model.layer import Layer, Loss, extent
from adam_async.model.network import Network
from adam_async.model.partition.network import Partition, Segment
from adam_async.model.partition.plan import Crossing, LayerPlan, Layout, PartitionPlan
from adam_async.model.topology import Topology

MULTIPLY_ADDS_PER_S = 25e9
"""Estimated multiply-adds per second of one thread, forward and backward."""
VALUES_PER_S = 1e9
"""Estimated number of values per second that one thread moves or compares."""
FORWARD = 1 / 3
"""Share of forward in a layer's time: one of three products, if the layer multiplies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one thread for one group, by the name of the layer: forward, backward and update."""

    images: int
    """Number of images in the group."""
    seconds: Mapping[str, float]
    measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """The cost of crossings."""

    bytes_per_s: float = 1e9
    """Bytes per second of a link, in each direction."""
    latency_s: float = 50e-6
    """Seconds from the sending of a tensor to the start of the segment that waits for the tensor."""
    tensor_s: float = 25e-6
    """Seconds of the sender's time, and of the receiver's, per tensor."""


def estimated_times(network: Network, images: int) -> LayerTimes:
    """Estimate the times of all layers from multiply-adds and sizes."""
    seconds = {}
    for layer in network.layers:
        values = sum(prod(shape) for shape in (*layer.input_shapes, layer.output_shape))
        work = 3 * images * layer.multiply_adds / MULTIPLY_ADDS_PER_S + 2 * images * values / VALUES_PER_S
        weights = sum(parameter.size for parameter in layer.parameters) / VALUES_PER_S
        seconds[layer.name] = 0.0 if layer.moves else work + weights
    return LayerTimes(images=images, seconds=seconds)


def worker_seconds(layout: Layout, times: LayerTimes) -> list[float]:
    """Return the seconds that each worker computes per group, with one thread."""
    found = []
    for worker in layout.workers:
        total = 0.0
        for number, layer in enumerate(layout.topology.layers):
            share = len(layout.computes[number][worker]) / extent(layer.output_shape)
            total += times.seconds[layer.name] * share
        found.append(total)
    return found


def crossing_bytes(crossing: Crossing, images: int, item_bytes: int) -> int:
    """Return the bytes of a crossing for a group with this number of images."""
    return crossing.values * (1 if crossing.kind == "gradient" else images) * item_bytes


def predicted_seconds(layout: Layout, times: LayerTimes, link: LinkCost, *, item_bytes: int) -> float:
    """Return the seconds per group of the slowest worker or link, for many groups and a thread per worker."""
    bounds = _throughput(layout, times, link, item_bytes=item_bytes, threads=1)
    return max(bound.seconds for bound in bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A resource that each group occupies for some time, one group after the other."""

    what: Literal["compute", "cores", "link", "servers", "latency"]
    workers: tuple[int, ...]
    """Worker that has the resource; for a link its sender and receiver; empty if all workers share it."""
    seconds: float
    """Seconds per group."""

    def __str__(self) -> str:
        named = "-".join(map(str, self.workers))
        return {
            "compute": f"compute of worker {named}",
            "cores": "cores of the machine",
            "link": f"link {named}",
            "servers": f"link of worker {named} to the servers" if named else "links of the servers",
            "latency": "latency",
        }[self.what]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted rate of one replica under a plan, and the bounds on it."""

    images: int
    """Number of images in a group."""
    in_flight: int
    """Number of groups in flight."""
    bounds: tuple[Bound, ...]
    """The bound of each worker and link, then those of shared cores, servers and latency."""
    chain: int
    """Maximum number of crossings in sequence in one group."""
    chain_s: float
    """Seconds of one group alone."""

    @property
    def slowest(self) -> Bound:
        """The resource that bounds the rate."""
        return max(self.bounds, key=lambda bound: bound.seconds)

    @property
    def images_per_s(self) -> float:
        """Training images per second."""
        return self.images / self.slowest.seconds

    @property
    def needed_in_flight(self) -> int:
        """Smallest number of groups in flight at which latency does not bound the rate."""
        busy = max(bound.seconds for bound in self.bounds if bound.what != "latency")
        # A little less, so rounding does not add a group.
        return max(1, ceil(self.chain_s / busy * (1 - 1e-9)))


def predict(
    parts: Sequence[Partition],
    times: LayerTimes,
    link: LinkCost,
    *,
    threads: int,
    in_flight: int,
    pushed: Sequence[int],
    pulled: Sequence[int],
    servers: int,
    shared_cores: int | None = None,
) -> Prediction:
    """Predict how fast one replica trains.

    Traffic between workers and servers uses one link per worker, and one link per server.

    Args:
        parts: Parts of all workers, in order.
        times: Times of the whole network's layers.
        link: Cost of a link between any two workers, and between a worker and the servers.
        threads: Number of compute threads per worker.
        in_flight: Number of groups in flight.
        pushed: Bytes that each worker sends to the servers per group.
        pulled: Bytes that each worker receives from the servers per group.
        servers: Number of servers that share this traffic.
        shared_cores: Number of cores if all workers share one machine; None if each worker has its own
            machine.

    Raises:
        ModelError: `parts` are not the parts of all workers.
    """
    item_bytes = parts[0].network.dtype.itemsize
    bounds = _throughput(parts[0].layout, times, link, item_bytes=item_bytes, threads=threads)
    if shared_cores is not None:
        # All threads and event loops together share these cores.
        busy = sum(worker_seconds(parts[0].layout, times))
        busy += 2 * link.tensor_s * len(parts[0].layout.crossings)
        bounds.append(Bound(what="cores", workers=(), seconds=busy / shared_cores))
    bounds += _with_servers(pushed, pulled, servers, link)
    alone = chain_seconds(parts, times, link)
    bounds.append(Bound(what="latency", workers=(), seconds=alone / in_flight))
    return Prediction(
        images=times.images,
        in_flight=in_flight,
        bounds=tuple(bounds),
        chain=longest_chain(parts),
        chain_s=alone,
    )


def _with_servers(
    pushed: Sequence[int], pulled: Sequence[int], servers: int, link: LinkCost
) -> Iterator[Bound]:
    """Yield the bounds of the links to and from the servers; both directions work at once."""
    for worker, sizes in enumerate(zip(pushed, pulled, strict=True)):
        if any(sizes):
            yield Bound(what="servers", workers=(worker,), seconds=max(sizes) / link.bytes_per_s)
    total = max(sum(pushed), sum(pulled))
    if total:
        yield Bound(what="servers", workers=(), seconds=total / servers / link.bytes_per_s)


def _throughput(
    layout: Layout, times: LayerTimes, link: LinkCost, *, item_bytes: int, threads: int
) -> list[Bound]:
    """Return the bounds of each worker and of each link between workers.

    A worker handles tensors on its single event loop, however many compute threads it has.
    """
    busy = [seconds / threads for seconds in worker_seconds(layout, times)]
    sent: dict[tuple[int, int], int] = {}
    for crossing in layout.crossings:
        for worker in (crossing.source, crossing.target):
            busy[worker] += link.tensor_s
        way = (crossing.source, crossing.target)
        sent[way] = sent.get(way, 0) + crossing_bytes(crossing, times.images, item_bytes)
    bounds = [Bound(what="compute", workers=(worker,), seconds=each) for worker, each in enumerate(busy)]
    return bounds + [
        Bound(what="link", workers=way, seconds=size / link.bytes_per_s) for way, size in sorted(sent.items())
    ]


def longest_chain(parts: Sequence[Partition]) -> int:
    """Count one group's crossings in sequence, including its last weight gradients.

    The count does not depend on the number of images. n groups in flight share these latencies.

    Args:
        parts: Parts of all workers, in order.

    Raises:
        ModelError: `parts` are not the parts of all workers.
    """
    return round(_longest_way(parts, lambda part, segment: 0.0, lambda crossing: 1.0))


def chain_seconds(parts: Sequence[Partition], times: LayerTimes, link: LinkCost) -> float:
    """Predict the seconds for a single group, with one thread per worker, from its images to its last sum.

    Args:
        parts: Parts of all workers, in order.
        times: Times of the whole network's layers.
        link: Cost of a link between any two workers.

    Raises:
        ModelError: `parts` are not the parts of all workers.
    """
    item_bytes = parts[0].network.dtype.itemsize
    whole = {layer.name: extent(layer.output_shape) for layer in parts[0].layout.topology.layers}

    def layer_s(part: Partition, number: int) -> float:
        layer = part.network.layers[number]
        if layer.name not in whole:  # a departure or an arrival, which costs as much as its crossing
            return 0.0
        return times.seconds[layer.name] * extent(layer.output_shape) / whole[layer.name]

    def segment_s(part: Partition, segment: Segment) -> float:
        forward = sum(layer_s(part, number) for number in segment.forward)
        back = sum(layer_s(part, number) for number in segment.back)
        return FORWARD * forward + (1 - FORWARD) * back

    def crossing_s(crossing: Crossing) -> float:
        size = crossing_bytes(crossing, times.images, item_bytes)
        return link.latency_s + 2 * link.tensor_s + size / link.bytes_per_s

    return _longest_way(parts, segment_s, crossing_s)


def _longest_way(
    parts: Sequence[Partition],
    segment_cost: Callable[[Partition, Segment], float],
    crossing_cost: Callable[[Crossing], float],
) -> float:
    """Find one group's longest path through all segments, in each worker's order."""
    _check_complete(parts)
    crossings = parts[0].layout.crossings
    arrived: dict[int, float] = {}
    ends = [0.0] * len(parts)
    waiting = {part.worker: list(part.segments) for part in parts}
    while any(waiting.values()):
        ready = [w for w, left in waiting.items() if left and arrived.keys() >= set(left[0].receives)]
        if not ready:
            raise ModelError(
                f"segments of workers {[w for w, left in waiting.items() if left]} wait for one another"
            )
        for worker in ready:
            segment = waiting[worker].pop(0)
            begin = max(ends[worker], *(arrived[number] for number in segment.receives), 0.0)
            ends[worker] = begin + segment_cost(parts[worker], segment)
            for number in segment.sends:
                arrived[number] = ends[worker] + crossing_cost(crossings[number])
    sums = [ends[sum_.source] + crossing_cost(sum_) for part in parts for sum_ in part.partial]
    return max(*ends, *sums, 0.0)


def _check_complete(parts: Sequence[Partition]) -> None:
    workers = [part.worker for part in parts]
    wanted = list(parts[0].layout.workers) if parts else [0]
    if workers != wanted:
        raise ModelError(f"give the parts of workers {wanted}, in this order, not of {workers}")


Halo = Literal["auto", "exchange", "recompute"]

BALANCE = 1.05
"""Factor by which a plan may be slower than the best plan if it sends fewer bytes."""


def vertical_plan(
    network: Network,
    workers: int,
    *,
    halo: Halo = "auto",
    times: LayerTimes | None = None,
    link: LinkCost | None = None,
) -> PartitionPlan:
    """Cut every layer over all workers.

    Args:
        network: The model.
        workers: Number of workers, at least 1.
        halo: Whether workers send or compute twice the rows that two workers need; ``auto`` chooses the
            faster way.
        times: Times of the layers, for that choice.
        link: Cost of crossings, for that choice.

    Raises:
        ModelError: The number of workers is 0, a worker would have no layer, or times are missing.
    """
    _check_workers(workers)
    topology = network.topology
    planned: list[LayerPlan] = []
    for number in reversed(range(len(topology.layers))):
        planned.insert(0, _cut_vertically(topology, number, workers, planned))
    plan = PartitionPlan(
        kind="vertical", workers=workers, layers=tuple(planned), owners=_owners(topology, workers - 1)
    )
    layout = Layout(topology, network.input_shape, plan)
    if halo == "exchange":
        return plan
    return _choose_halos(network, layout, halo, _times_of(network, times), link or LinkCost())


def _cut_vertically(topology: Topology, number: int, workers: int, later: Sequence[LayerPlan]) -> LayerPlan:
    """Cut a layer evenly; if its reader is cut by rows, in the middle of rows that two workers read."""
    layer = topology.layers[number]
    rows = extent(layer.output_shape)
    if layer.moves:
        return LayerPlan(layer=layer.name, blocks=((0, 0),) * workers, recomputed=True)
    if layer.cut_by == "whole":
        why = "a loss reads every score" if isinstance(layer, Loss) else f"a {layer.spec.kind} cannot be cut"
        return LayerPlan(layer=layer.name, blocks=_all_at(0, rows, workers), whole=why)
    edges = _even(rows, workers)
    for reader, position in topology.consumers[number]:
        blocks = [later[reader - number - 1].block(worker) for worker in range(workers)]
        below = topology.layers[reader]
        if below.cut_by == "rows" and not below.moves and all(blocks):
            edges = _middles(below, position, blocks, rows)
            break
    whole = f"it has {rows} row{'s' * (rows > 1)}" if rows < 2 <= workers else ""
    return LayerPlan(layer=layer.name, blocks=tuple(pairwise(edges)), whole=whole)


def _even(rows: int, workers: int) -> list[int]:
    """Return the edges of blocks that differ by at most one row, larger blocks first."""
    least, more = divmod(rows, workers)
    edges = [0]
    for worker in range(workers):
        edges.append(edges[-1] + least + (worker < more))
    return edges


def _middles(reader: Layer, position: int, blocks: Sequence[range], rows: int) -> list[int]:
    """Return edges in the middle of the rows that two neighbours read."""
    edges = [0]
    for upper, lower in pairwise(blocks):
        first, last = reader.needs(lower, position).start, reader.needs(upper, position).stop
        edges.append(min(max((first + last + 1) // 2, edges[-1]), rows))
    return [*edges, rows]


def _all_at(worker: int, rows: int, workers: int) -> tuple[tuple[int, int], ...]:
    return tuple((0, rows) if each == worker else (0, 0) for each in range(workers))


def _owners(topology: Topology, worker: int) -> dict[str, int]:
    """Let one worker add up all partial gradients; several such workers would need more messages."""
    return {layer.name: worker for layer in topology.layers if layer.parameters and layer.cut_by != "outputs"}


def _choose_halos(
    network: Network, layout: Layout, halo: Halo, times: LayerTimes, link: LinkCost
) -> PartitionPlan:
    """Decide for each halo, from the last layer to the images, whether to send it or to compute it twice."""

    def seconds(layout: Layout) -> float:
        return predicted_seconds(layout, times, link, item_bytes=network.dtype.itemsize)

    for number in reversed(range(len(network.layers))):
        plan = _recompute(layout, number) if _has_halo(layout, number) else None
        if plan is None:
            continue
        try:
            candidate = Layout(network.topology, network.input_shape, plan)
        except ModelError:  # a worker would have no layer left
            continue
        if halo == "recompute" or seconds(candidate) < seconds(layout):
            layout = candidate
    return layout.plan


def _has_halo(layout: Layout, number: int) -> bool:
    """Return whether workers read image rows of other workers, and no worker reads all rows."""
    layer = layout.topology.layers[number]
    if len(layer.output_shape) != 3 or layer.cut_by != "rows":
        return False
    rows = extent(layer.output_shape)
    crosses = any(layout.piece(number, s, t) for s in layout.workers for t in layout.workers)
    return crosses and all(len(need) < rows for need in layout.needs[number])


def _recompute(layout: Layout, number: int) -> PartitionPlan | None:
    """Make every reader compute a layer and all layers before it; None if one of these layers is whole."""
    topology, plan = layout.topology, layout.plan
    wanted, layers = {number}, list(plan.layers)
    for each in reversed(range(number + 1)):
        if each in wanted:
            if topology.layers[each].cut_by != "rows" or plan.layers[each].whole:
                return None
            wanted |= {source for source in topology.producers[each] if source >= 0}
            layers[each] = replace(layers[each], recomputed=True)
    return replace(plan, layers=tuple(layers))


def layers_plan(
    network: Network, workers: int, *, times: LayerTimes | None = None, link: LinkCost | None = None
) -> PartitionPlan:
    """Give each worker consecutive layers.

    Args:
        network: The model.
        workers: Number of workers, at least 1.
        times: Times of the layers, to balance the workers.
        link: Cost of crossings.

    Raises:
        ModelError: The model has fewer layers than workers, or times are missing.
    """
    _check_workers(workers)
    topology = network.topology
    times, link = _times_of(network, times), link or LinkCost()
    spent = [0.0 if layer.moves else times.seconds[layer.name] for layer in topology.layers]
    before = [0.0, *accumulate(spent)]

    sent = [
        times.images * prod(layer.output_shape) * network.dtype.itemsize / link.bytes_per_s
        for layer in topology.layers
    ]

    def least(edges: Sequence[int]) -> float:
        """Return the seconds of the busiest worker or link, without latency, rounded to 9 digits."""
        compute = max(before[stop] - before[start] for start, stop in pairwise(edges))
        crossings = [sent[edge - 1] for edge in edges[1:-1]]
        return float(f"{max([compute, *crossings]):.9g}")

    def cost(edges: Sequence[int]) -> tuple[float, float]:
        return least(edges), sum(sent[edge - 1] for edge in edges[1:-1])

    found: list[tuple[float, int, PartitionPlan]] = []
    best = inf
    for edges in sorted(_candidates(topology, workers), key=cost)[:MOST_PREDICTED]:
        if least(edges) > best * BALANCE:  # the candidates are sorted by these seconds
            break
        plan = _consecutive(topology, edges)
        layout = Layout(topology, network.input_shape, plan)
        seconds = predicted_seconds(layout, times, link, item_bytes=network.dtype.itemsize)
        found.append((seconds, sum(crossing.values for crossing in layout.crossings), plan))
        best = min(best, seconds)
    near = [entry for entry in found if entry[0] <= best * BALANCE]
    return min(near, key=lambda entry: (entry[1], entry[0]))[2]


def _starts(topology: Topology, workers: int) -> list[int]:
    """Return the layers at which a part may begin: those with parameters, or if too few, all that compute."""
    starts = [number for number, layer in enumerate(topology.layers) if layer.parameters][1:]
    if len(starts) < workers - 1:
        starts = [number for number, layer in enumerate(topology.layers) if not layer.moves][1:]
    if len(starts) < workers - 1:
        raise ModelError(
            f"plan 'layers' gives each of {workers} workers a layer, and this model has {len(starts) + 1}: "
            "use fewer partitions"
        )
    return starts


MOST_CANDIDATES = 20_000
"""Maximum number of cuts that the planner of a layers plan compares by their busiest worker."""

MOST_PREDICTED = 256
"""Maximum number of cuts whose seconds the planner of a layers plan predicts. Models with many equal layers
have thousands of equally good cuts."""


def _candidates(topology: Topology, workers: int) -> Iterator[tuple[int, ...]]:
    """Yield the edges between the parts; above `MOST_CANDIDATES` choices, only at evenly spread layers."""
    starts, cuts = _starts(topology, workers), workers - 1
    kept = len(starts)
    while kept > cuts and _choices(kept, cuts) > MOST_CANDIDATES:
        kept -= 1
    # Divide the starts into `kept` equal ranges, and keep the middle start of each range.
    starts = [starts[(2 * number + 1) * len(starts) // (2 * kept)] for number in range(kept)]
    for chosen in combinations(starts, cuts):
        yield 0, *chosen, len(topology.layers)


def _choices(of: int, count: int) -> int:
    found = 1
    for each in range(count):
        found = found * (of - each) // (each + 1)
    return found


def _consecutive(topology: Topology, edges: Sequence[int]) -> PartitionPlan:
    workers = len(edges) - 1
    layers = []
    for worker, (start, stop) in enumerate(pairwise(edges)):
        for number in range(start, stop):
            layer = topology.layers[number]
            if layer.moves:
                layers.append(LayerPlan(layer=layer.name, blocks=((0, 0),) * workers, recomputed=True))
            else:
                blocks = _all_at(worker, extent(layer.output_shape), workers)
                layers.append(LayerPlan(layer=layer.name, blocks=blocks))
    return PartitionPlan(kind="layers", workers=workers, layers=tuple(layers), owners={})


def _times_of(network: Network, times: LayerTimes | None) -> LayerTimes:
    """Return the times of all layers, measured or estimated."""
    if times is None:
        return estimated_times(network, 16)
    missing = [layer.name for layer in network.layers if layer.name not in times.seconds]
    if missing:
        raise ModelError(f"times of the layers {', '.join(missing)} are missing: measure this very model")
    return times


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ModelError(f"a model is cut over at least 1 worker, not {workers}")
