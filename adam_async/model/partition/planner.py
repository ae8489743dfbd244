"""Pure: a planner of partitions.

A **vertical** plan cuts every layer over all workers (the paper's partition, AD-10): images by rows, features
into equal ranges. If two workers need the same rows of an earlier layer, the cut is in the middle of these
rows, so equally many rows cross in both directions. The planner takes the faster of two ways: workers send
such a *halo*, or both sides compute it with all its inputs. The number of rows computed twice grows towards
the images. Losses, and layers that cannot be cut, are whole on one worker.

A **layers** plan gives each worker consecutive layers. The planner compares a bounded number of cuts, and
minimises the time of the slowest worker or link; of the plans within `BALANCE` of the best, it takes the plan
that sends the fewest bytes. A part begins with a layer that has parameters, if the model has enough of them.

`prediction.py` predicts the cost of plans, from measured or estimated times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from math import inf, prod
from typing import Literal

from adam_async.errors import ModelError
from adam_async.model.layer import Layer, Loss, extent
from adam_async.model.network import Network
from adam_async.model.partition.plan import LayerPlan, Layout, PartitionPlan
from adam_async.model.partition.prediction import LayerTimes, LinkCost, estimated_times, predicted_seconds
from adam_async.model.topology import Topology

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
    """Cut a layer evenly, or if its reader is cut by rows, in the middle of rows that two workers read."""
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
    """Make one worker add up all partial gradients; several such workers would need more messages."""
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
    network: Network,
    workers: int,
    *,
    times: LayerTimes | None = None,
    link: LinkCost | None = None,
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
