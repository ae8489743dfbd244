"""Pure: the first values of a run that begins with a saved model.

The run takes each tensor of the saved model whose name and shape its own model has. It draws all others from
its seed, as it does without a saved model.
"""

from adam_async.checkpoint.tensors import RunTensors
from adam_async.checkpoint.trained_model import Model
from adam_async.errors import ConfigError
from adam_async.messages import ShardState
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network
from adam_async.run.cluster_map import ResumeRecord

FROM_THE_START = ResumeRecord(epoch=1, finished=(), clock=0)
"""Starting point of a run that has trained nothing, but whose servers wait for their shards."""


def fill_from(tensors: RunTensors, network: Network, init: Model, *, seed: int) -> str:
    """Set the tensors of a run to those of a saved model, and its rule's arrays to zero.

    Args:
        tensors: The run's tensors; filled in place.
        network: The run's model.
        init: The saved model.
        seed: Seed of the run; draws the tensors that the saved model lacks.

    Returns:
        A sentence with the number of tensors taken, and the names of the fresh ones.

    Raises:
        ConfigError: The models have no tensor in common.
    """
    fresh = []
    dice = Dice(seed)
    for name, array in tensors.weights.items():
        saved = init.weights.get(name)
        if saved is not None and saved.shape == array.shape:
            array[...] = saved
        else:
            array[...] = network.initial_values(dice, name)
            fresh.append(f"{name} {list(array.shape)}")
    for state in tensors.state.values():
        state[...] = 0
    taken = len(tensors.weights) - len(fresh)
    saved_name = init.network.spec.name
    if not taken:
        raise ConfigError(
            f"the saved model {saved_name!r} has no tensor with a name and shape of model "
            f"{network.spec.name!r}: leave init out, or train a model with the same layers"
        )
    left = f"fresh: {', '.join(fresh)}" if fresh else "no fresh tensors"
    return f"{taken} of {len(tensors.weights)} tensors come from the saved model {saved_name!r}; {left}"


def first_states(tensors: RunTensors) -> tuple[ShardState, ...]:
    """Return the tables of all shards before any step."""
    return tuple(ShardState(shard=int(shard.id), version=0, clocks={}) for shard in tensors.table.shards)
