"""Pure: making partition plans.

A **vertical** plan cuts every layer over all workers (the paper's partition, AD-10): images by rows,
features into equal ranges. Where a row of a later layer needs rows of two workers, the cut of the earlier
one lies in the middle of what both need, so that equally many rows cross both ways. Such a *halo* is sent,
or computed on both sides together with all that it needs, whichever takes less time; the rows that are
computed twice grow towards the images. Losses, and layers that cannot be cut, are whole on one worker.

A **layers** plan gives each worker consecutive layers, so that the slowest worker is as fast as can be; of
plans that are within `BALANCE` of the best the one that sends the fewest bytes is taken. A part begins with
a layer that has parameters, as long as there are enough of them.

What plans cost is predicted by `prediction.py`, from times that somebody measured or that are estimated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Literal

from adam_async.model.errors import ModelError
from adam_async.model.layer import Layer, Loss, extent
from adam_async.model.network import Network
from adam_async.model.plan import LayerPlan, Layout, PartitionPlan
from adam_async.model.prediction import LayerTimes, LinkCost, estimated_times, predicted_seconds
from adam_async.model.topology import Topology

Halo = Literal["auto", "exchange", "recompute"]

BALANCE = 1.05
"""A plan may be slower than the best one by so much if it sends fewer bytes."""


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
        workers: How many, at least 1.
        halo: Whether rows that two workers need are sent or computed twice; ``auto`` takes what is faster.
        times: Of the layers, to choose by.
        link: What crossings cost, to choose by.

    Raises:
        ModelError: There is no worker.
    """
    _check_workers(workers)
    topology = network.topology
    planned: list[LayerPlan] = []
    for number in reversed(range(len(topology.layers))):
        planned.insert(0, _cut_vertically(topology, number, workers, planned))
    plan = PartitionPlan(
        kind="vertical", workers=workers, layers=tuple(planned), owners=_owners(topology, workers - 1)
    )
    times = times or estimated_times(network, 16)
    return _choose_halos(network, plan, halo, times, link or LinkCost())


def _cut_vertically(topology: Topology, number: int, workers: int, later: Sequence[LayerPlan]) -> LayerPlan:
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
    """Edges of blocks that differ by one row at most, the larger ones first."""
    least, more = divmod(rows, workers)
    edges = [0]
    for worker in range(workers):
        edges.append(edges[-1] + least + (worker < more))
    return edges


def _middles(reader: Layer, position: int, blocks: Sequence[range], rows: int) -> list[int]:
    """Edges in the middle of what two neighbours read."""
    edges = [0]
    for upper, lower in pairwise(blocks):
        first, last = reader.needs(lower, position).start, reader.needs(upper, position).stop
        edges.append(min(max((first + last + 1) // 2, edges[-1]), rows))
    return [*edges, rows]


def _all_at(worker: int, rows: int, workers: int) -> tuple[tuple[int, int], ...]:
    return tuple((0, rows) if each == worker else (0, 0) for each in range(workers))


def _owners(topology: Topology, worker: int) -> dict[str, int]:
    """Have partial gradients added up at one worker: fewer messages than if every worker had some of them."""
    return {layer.name: worker for layer in topology.layers if layer.parameters and layer.cut_by != "outputs"}


def _choose_halos(
    network: Network, plan: PartitionPlan, halo: Halo, times: LayerTimes, link: LinkCost
) -> PartitionPlan:
    """Decide for each halo, from the last one to the images, whether it is sent or computed twice."""
    if halo == "exchange" or plan.workers == 1:
        return plan
    item_bytes = network.dtype.itemsize
    topology = network.topology

    def seconds(candidate: PartitionPlan) -> float:
        layout = Layout(topology, network.input_shape, candidate)
        return predicted_seconds(layout, times, link, item_bytes=item_bytes)

    for number in reversed(range(len(plan.layers))):
        if not _has_halo(Layout(topology, network.input_shape, plan), number):
            continue
        candidate = _recompute(topology, plan, number)
        if candidate is not None and (halo == "recompute" or seconds(candidate) < seconds(plan)):
            plan = candidate
    return plan


def _has_halo(layout: Layout, number: int) -> bool:
    """Whether some worker reads rows of an image that others compute, but not all of them."""
    layer = layout.topology.layers[number]
    if len(layer.output_shape) != 3 or layer.cut_by != "rows":
        return False
    rows = extent(layer.output_shape)
    crosses = any(layout.piece(number, s, t) for s in layout.workers for t in layout.workers)
    return crosses and all(len(need) < rows for need in layout.needs[number])


def _recompute(topology: Topology, plan: PartitionPlan, number: int) -> PartitionPlan | None:
    """Have a layer and all that it is made from computed by all who read it; None if one is whole."""
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
        workers: How many, at least 1.
        times: Of the layers, to balance by.
        link: What crossings cost.

    Raises:
        ModelError: There are fewer layers with parameters than workers.
    """
    _check_workers(workers)
    topology = network.topology
    starts = _starts(topology, workers)
    times = times or estimated_times(network, 16)
    link = link or LinkCost()
    found = []
    for cuts in _candidates(starts, workers - 1):
        plan = _consecutive(topology, (0, *cuts, len(topology.layers)))
        layout = Layout(topology, network.input_shape, plan)
        seconds = predicted_seconds(layout, times, link, item_bytes=network.dtype.itemsize)
        found.append((seconds, sum(crossing.values for crossing in layout.crossings), plan))
    best = min(seconds for seconds, _, _ in found)
    near = [entry for entry in found if entry[0] <= best * BALANCE]
    return min(near, key=lambda entry: (entry[1], entry[0]))[2]


def _starts(topology: Topology, workers: int) -> list[int]:
    """Where a part may begin: at a layer with parameters, or where there are too few of them at any that
    computes."""
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
"""Ways to cut that are looked at."""


def _candidates(starts: Sequence[int], cuts: int) -> Iterator[tuple[int, ...]]:
    """Ways to cut; of a very deep network those whose cuts lie on an even grid of its layers."""
    while len(starts) > cuts and _choices(len(starts), cuts) > MOST_CANDIDATES:
        starts = starts[::2] if len(starts) // 2 >= cuts else starts[:cuts]
    yield from combinations(starts, cuts)


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


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ModelError(f"a model is cut over at least 1 worker, not {workers}")
