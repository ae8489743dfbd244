"""First values of a run: from a checkpoint that it continues, from a saved model, or drawn from its seed.

A run takes the tensors of the saved model with the names and shapes of its own model, and draws all others.
The servers have no model: they wait until the driver has loaded the values of all their shards.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from adam_async.checkpoint.manifest import Checkpoint
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.checkpoint.tensors import RunTensors
from adam_async.checkpoint.trained_model import Model
from adam_async.checkpoint.writer import make_tensors
from adam_async.driver.preparation import PreparedRun
from adam_async.driver.readiness import Readiness
from adam_async.errors import ConfigError, DeadlineExceeded, ShardUnavailable
from adam_async.messages import ShardState
from adam_async.model.keyed_random import Dice
from adam_async.run.config import Config
from adam_async.run.step_model import RunModel, StepModel
from dataflow import ComputePool
from transport import RemoteError, TransportError


class StartingValues:
    """Loads the first values of a run into its parameter servers."""

    def __init__(
        self, *, copies: ShardCopies, readiness: Readiness, pool: ComputePool, note: Callable[[str], None]
    ) -> None:
        self._copies = copies
        self._readiness = readiness
        self._pool = pool
        self._note = note

    async def load(
        self, run: str, config: Config, prepared: PreparedRun, source: Checkpoint | Model | None
    ) -> None:
        """Load all shards; no server is ready before its shards are loaded.

        Args:
            source: The resumed checkpoint, the saved model, or None.

        Raises:
            ConfigError: The run and the saved model have no tensor in common.
            CheckpointError: The checkpoint has other tensors than the run.
            DeadlineExceeded: The shards were not placed, or not taken by the servers, within `prepare_s`.
            TransportError, ShardUnavailable: A server refused its shards, or did not answer.
            RunFailed, RoleDied: The run is over.
            StepFailed: The run's step did not return its first values.
        """
        if isinstance(source, Checkpoint):
            tensors = make_tensors(prepared.model, config, prepared.plan)
            tensors.fill(source)
            states = source.manifest.shards
        else:
            tensors = RunTensors(prepared.model, prepared.table(config), None)
            fill = partial(fill_from, tensors, prepared.model, source, seed=config.seed)
            if note := await self._pool.run(fill):
                self._note(note)
            states = first_states(tensors)
        cluster = await self._readiness.wait_placed(run)
        waits = config.waits
        try:
            async with asyncio.timeout(waits.prepare_s):
                store = cluster.run_store
                assert store is not None, "a placed run has a store"
                await self._copies.load(store, prepared.table(config), tensors, states)
        except (ShardUnavailable, TransportError) as error:
            if not isinstance(error, RemoteError):
                # The loss of a server fails the run in the map, which names the server.
                await self._readiness.wait_failure(run, waits.dial_s + waits.grace_s)
            raise
        except TimeoutError:
            raise DeadlineExceeded("the servers to take up their shards", waits.prepare_s) from None


def fill_from(tensors: RunTensors, network: RunModel, init: Model | None, *, seed: int) -> str:
    """Set the tensors of a run to those of a saved model, or draw them.

    Args:
        init: The saved model, if any.
        seed: Seed of the run; draws the tensors that the saved model lacks.

    Returns:
        A sentence with the number of tensors from the saved model, and the names of the drawn ones; empty
        without a saved model.

    Raises:
        ConfigError: The models have no tensor in common.
        StepFailed: A step did not return its first values.
    """
    if isinstance(network, StepModel):
        for name, array in network.initial(seed).items():
            tensors.weights[name][...] = array
        return ""
    fresh = []
    dice = Dice(seed)
    for name, array in tensors.weights.items():
        saved = init.weights.get(name) if init is not None else None
        if saved is not None and saved.shape == array.shape:
            array[...] = saved
        else:
            array[...] = network.initial_values(dice, name)
            fresh.append(f"{name} {list(array.shape)}")
    if init is None:
        return ""
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
    """Return the states of all shards before any step."""
    return tuple(ShardState(shard=int(shard.id), version=0, clocks={}) for shard in tensors.table.shards)
