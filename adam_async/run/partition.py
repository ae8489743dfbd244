"""Pure: the partition plan of a run's model, its arrays and their shards."""

from typing import Any

from adam_async.errors import ConfigError, ModelError
from adam_async.model.network import Network
from adam_async.model.partition.plan import Layout, PartitionPlan, planned_cuts
from adam_async.model.partition.planner import LayerTimes, layers_plan, vertical_plan
from adam_async.run.config import SHARD_BYTES, Config
from adam_async.run.shard_table import ShardTable, shard_table
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.store_record import ArrayRecord


def plan_run(network: Network, config: Config, times: LayerTimes | None = None) -> PartitionPlan | None:
    """Cut a run's model over the workers of a replica; None if the model is not cut.

    Raises:
        ConfigError: The model cannot be cut over this many workers.
    """
    if config.partitions == 1:
        return None
    try:
        if config.plan == "layers":
            return layers_plan(network, config.partitions, times=times)
        return vertical_plan(network, config.partitions, halo=config.halo, times=times)
    except ModelError as error:
        raise ConfigError(f"partitions={config.partitions}: {error}") from error


def check_crossings(network: Network, plan: dict[str, Any], config: Config, *, most_bytes: int) -> None:
    """Check that each tensor between workers fits into one message.

    Raises:
        ConfigError: A tensor is larger; the error has the layer and the remedy.
    """
    layout = Layout(network.topology, network.input_shape, PartitionPlan.from_dict(plan))
    for crossing in layout.crossings:
        images = 1 if crossing.kind == "gradient" else config.images_per_group
        size = images * crossing.values * network.dtype.itemsize
        if size <= most_bytes:
            continue
        layer = network.layers[crossing.layer].name
        each = size // images
        what = "weight gradients" if crossing.kind == "gradient" else "outputs"
        advice = (
            f"set images_per_group to at most {most_bytes // each}"
            if crossing.kind != "gradient" and each <= most_bytes
            else "cut it with the other plan, or not at all"
        )
        raise ConfigError(
            f"partitions={config.partitions}: workers would send each other {size} bytes at once ({what} of "
            f"layer {layer!r}), and a message holds {most_bytes}: {advice}"
        )


def arrays_of(network: RunModel, plan: dict[str, Any] | None) -> tuple[ArrayRecord, ...]:
    """Return a model's arrays for its store: no shard crosses a border between two parts of the plan.

    Args:
        network: The model, or a step of the user's, which has no plan.
        plan: Partition plan of the run, from `PartitionPlan.to_dict`; None without partitions.
    """
    if isinstance(network, StepModel):
        return tuple(
            ArrayRecord(name, spec.shape, spec.dtype, split=spec.split)
            for name, spec in network.arrays.items()
        )
    cuts = planned_cuts(plan, network.layers)
    dtype = network.dtype.name
    return tuple(
        ArrayRecord(spec.name, spec.shape, dtype, cuts=tuple(cuts.get(spec.name, ())), frozen=spec.frozen)
        for spec in network.parameters
    )


def table_of(
    network: RunModel, *, shard_bytes: int = SHARD_BYTES, plan: dict[str, Any] | None = None
) -> ShardTable:
    """Return the shards of a model: a function of its parameters, `shard_bytes` and its partition plan."""
    return shard_table(arrays_of(network, plan), shard_bytes=shard_bytes)
