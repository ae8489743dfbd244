"""Prepares a run: checks its data and model, and makes the network, its partitions and its transforms.

A run's first values come from a checkpoint that it continues or from a saved model, or are drawn from its
seed. A run takes those tensors of the saved model that have the names and shapes of its own model, and draws
all others. The servers have no model: they wait until the driver has loaded the values of all their shards.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from adam_async.checkpoint.checkpoint import Manifest, StoredCheckpoint, check_data, resumed_transforms
from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.checkpoint.tensors import ShardSource, WholeTensors
from adam_async.checkpoint.trained_model import Model
from adam_async.data_server.dataset import check_validation
from adam_async.data_server.transforms.recipe import Recipe, default_steps
from adam_async.driver.calibration import calibrate
from adam_async.driver.readiness import Readiness
from adam_async.driver.settings import RunInputs
from adam_async.driver.takeover import SavedRun
from adam_async.errors import ConfigError, RunFailed, ShardUnavailable, first_cause
from adam_async.model.keyed_random import Dice
from adam_async.model.network import Network
from adam_async.model.rules import rule_of
from adam_async.model.spec import ModelSpec
from adam_async.run.config import Config, Waits
from adam_async.run.model_selection import check_fits, check_size, choose_model
from adam_async.run.partition import arrays_of, check_crossings, plan_run, table_of
from adam_async.run.shard_table import ShardTable
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.store_record import ArrayRecord, StoreRecord
from adam_async.run.train_step import StepSpec
from adam_async.run.training_program import ProgramRecord, TrainingProgram
from adam_async.run.user_code import NamedStep, functions_for, imported_functions
from adam_async.runtime.clock import Within
from dataflow import ComputePool
from transport import LinkConfig, RemoteError, TransportError

_Done = TypeVar("_Done")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedRun:
    """The decisions on a run that need only the data of the cluster.

    Attributes:
        data: Description of the data by a data server: name, source, shape, sizes.
        plan: The partition plan, as `PartitionPlan.to_dict` returns it; None without partitions.
    """

    spec: ModelSpec | StepSpec
    model: RunModel
    data: dict[str, Any]
    plan: dict[str, Any] | None

    def table(self, config: Config) -> ShardTable:
        """Return the shards of the run's model."""
        return table_of(self.model, shard_bytes=config.shard_bytes, plan=self.plan)


def store_of(record: ProgramRecord, program: TrainingProgram, arrays: Sequence[ArrayRecord]) -> StoreRecord:
    """Return the record of a run's store, without its array list.

    Args:
        record: The run.
        program: The run's options, all decided, and its starting point.
        arrays: The arrays of its model.
    """
    config, resumed = program.config, program.resumed
    rule = rule_of(config)
    return StoreRecord(
        id=record.id,
        creator=record.driver,
        rules=(rule,),
        arrays=len(arrays),
        nbytes=sum([array.nbytes for array in arrays]),
        state_arrays=len(rule.state_names),
        pieces=0,
        shard_bytes=config.shard_bytes,
        servers=config.servers,
        copies=config.copies_in_force,
        min_in_sync=config.min_in_sync,
        slack=config.slack,
        summed_weight=config.images_per_group if config.synchronous else 0,
        most_weight=config.images_per_group * config.push_every,
        scale_by_staleness=config.scale_by_staleness,
        in_place=config.weights == "aliased",
        kernels=config.kernels,
        record=config.record,
        durable=config.ack == "durable",
        program=record.id,
        first_epoch=resumed.epoch if resumed is not None else 0,
        first_clock=resumed.clock if resumed is not None else 0,
    )


async def prepare_model(
    data: dict[str, Any], config: Config, inputs: RunInputs, pool: ComputePool
) -> tuple[ModelSpec | StepSpec, RunModel]:
    """Choose a run's model, and make its network; or check its step.

    Args:
        pool: Makes the network, on one of its threads.

    Raises:
        CheckpointError: The data differ from the data of the resumed checkpoint.
        ConfigError: The model, the image size or the validation split does not fit the data; or the step is
            invalid, or not deterministic although the run is recorded.
        StepFailed: The `arrays` of the step raised.
    """
    resume = inputs.resume
    # The controllers compare the data of a run in the map with those of each data server that joins.
    if resume is not None and not (isinstance(resume, SavedRun) and resume.store is None):
        check_data(resume.manifest, data)
    check_size(config.size, data)
    check_validation(config.validation, data)
    if inputs.step is not None:
        step, model = await _step_model(inputs.step, data, config, pool)
        if config.record and not getattr(model.step, "deterministic", False):
            raise ConfigError(
                f"record needs a step that gives equal bits for equal arguments, and step {step.name} is not "
                "deterministic: leave record out, or set the step's attribute `deterministic` (a TorchStep "
                "sets it, unless the module draws random numbers or changes buffers in training)"
            )
        return step, model
    if inputs.spec is not None:
        check_fits(inputs.spec, data, layers=inputs.layers)
    init = inputs.init.network.spec if inputs.init is not None else None
    spec = inputs.spec or choose_model(
        config.model, data, text=inputs.model_text, init=init, layers=inputs.layers
    )
    # On a thread, because the first network of a process imports the compiled kernels slowly.
    new_model = partial(Network, spec, dtype=config.dtype, kernels=config.kernels, layers=inputs.layers)
    return spec, await pool.run(new_model, cost="model")


async def _step_model(
    named: NamedStep, data: dict[str, Any], config: Config, pool: ComputePool
) -> tuple[StepSpec, StepModel]:
    """Prepare a step for the data, on a thread of the pool because `TrainStep.prepare` may compute."""
    spec = named.spec(data)
    new_model = partial(StepModel, named.step, spec, keep_going=config.keep_going)
    model = await pool.run(new_model, cost="model")
    if (check := getattr(named.step, "check_group", None)) is not None:
        await pool.run(partial(_check_last_group, check, data["train_images"] - config.validation, config))
    return spec, model


def _check_last_group(check: Callable[[int], None], images: int, config: Config) -> None:
    """Check that a step can train on an epoch's last group, which may be short.

    Raises:
        ConfigError: The step cannot; the error has the remedy.
    """
    size = config.images_per_group
    last = images % size or size
    try:
        check(last)
    except ConfigError as error:
        fits = next((more for more in range(size + 1, images) if (images % more or more) > last), images)
        raise ConfigError(
            f"the last group of an epoch has {last} of the {images:,} training images, "
            f"images_per_group={size}: {error}; give --images-per-group {fits}"
        ) from error


async def in_time(folder: CheckpointFolder, opening: Awaitable[_Done], waits: Waits) -> _Done:
    """Await the preparation of a folder.

    Raises:
        DeadlineExceeded: The disk did not answer within `checkpoint_s`.
    """
    async with Within(waits.checkpoint_s, f"the disk to make {folder.path} ready for checkpoints"):
        return await opening


async def unless_stopped(work: Coroutine[Any, Any, _Done], stopping: asyncio.Event) -> _Done:
    """Do a part of a run's preparation, unless the run is to end.

    Args:
        stopping: Event that is set when the run is to end; the function then cancels the work.

    Raises:
        RunFailed: The run was stopped.
    """
    try:
        async with asyncio.TaskGroup() as group:
            doing = group.create_task(work, name="driver/preparation")
            stop = group.create_task(stopping.wait(), name="driver/stop")
            await asyncio.wait((doing, stop), return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            doing.cancel()
    except ExceptionGroup as errors:
        cause = first_cause(errors)
        raise cause from cause.__cause__
    if doing.cancelled():
        raise RunFailed("the run was stopped before its first epoch")
    return doing.result()


async def prepare_plan(
    model: RunModel, config: Config, inputs: RunInputs, pool: ComputePool
) -> dict[str, Any] | None:
    """Return a run's partition plan: the checkpoint's or a new one; None without partitions.

    Raises:
        ConfigError: The model cannot be partitioned over so many workers, or values between partitions do not
            fit into one message.
    """
    if isinstance(model, StepModel):
        return None
    resume = inputs.resume
    plan = resume.manifest.plan if resume is not None else await plan_here(model, config, pool)
    if plan is not None:
        check_crossings(model, plan, config, most_bytes=LinkConfig().max_message_bytes)
    return plan


async def plan_here(model: Network, config: Config, pool: ComputePool) -> dict[str, Any] | None:
    """From measured layer times, plan the partitions of a run's model; None without partitions.

    A synchronous run uses estimates, because plans from measured times differ from run to run.

    Args:
        pool: Measures the layers, which takes about half a second; their compilation may take longer.

    Raises:
        ConfigError: The model cannot be partitioned over so many workers.
    """
    times = None
    if config.partitions > 1 and not config.synchronous:
        await pool.run(model.warm_up)
        times = await pool.run(partial(calibrate, model, config.images_per_group, clock=pool.clock))
    plan = plan_run(model, config, times)
    return plan.to_dict() if plan is not None else None


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
        self, run: str, config: Config, prepared: PreparedRun, source: StoredCheckpoint | Model | None
    ) -> None:
        """Load all shards; no server is ready before its shards are loaded.

        Args:
            source: The resumed checkpoint, the saved model, or None.

        Raises:
            CheckpointError: A shard of the checkpoint is missing or damaged.
            ConfigError: The run and the saved model have no tensor in common.
            DeadlineExceeded: The shards were not placed, or the servers took no further shard, within
                `prepare_s`.
            TransportError, ShardUnavailable: A server refused its shards, or did not answer.
            RunFailed, RoleDied: The run is over.
            StepFailed: The run's step did not return its first values.
        """
        shards: ShardSource
        if isinstance(source, StoredCheckpoint):
            shards = source.source
        else:
            shards = tensors = WholeTensors(arrays_of(prepared.model, prepared.plan), prepared.table(config))
            fill = partial(fill_from, tensors, prepared.model, source, seed=config.seed)
            if note := await self._pool.run(fill):
                self._note(note)
        cluster = await self._readiness.wait_placed(run)
        waits, loop = config.waits, asyncio.get_running_loop()
        try:
            async with Within(waits.prepare_s, "the servers to take up their shards") as limit:

                def loaded() -> None:
                    """Begin the wait anew: a large checkpoint on a slow disk may take longer in all."""
                    if not limit.expired():
                        limit.reschedule(loop.time() + waits.prepare_s)

                store = cluster.run_store
                assert store is not None, "a placed run has a store"
                await self._copies.load(store, shards, loaded=loaded)
        except (ShardUnavailable, TransportError) as error:
            if not isinstance(error, RemoteError):
                # The loss of a server fails the run in the map, which names the server.
                await self._readiness.wait_failure(run, waits.dial_s + waits.grace_s)
            raise


def fill_from(tensors: WholeTensors, network: RunModel, init: Model | None, *, seed: int) -> str:
    """Set a run's tensors to those of a saved model, or draw them.

    Args:
        init: The saved model, if any.
        seed: Seed of the run; draws the tensors that the saved model lacks.

    Returns:
        A sentence with the number of tensors from the saved model, and the drawn tensors' names; empty
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


async def transforms_of(
    config: Config,
    resumed: Manifest | None,
    asked: Sequence[Mapping[str, Any]] | None,
    image_shape: Sequence[int],
    functions: Mapping[str, Callable[..., Any]] = {},
) -> tuple[dict[str, Any], ...]:
    """Choose the transforms of a run that may continue another run; imports run outside the event loop.

    Args:
        resumed: Manifest of the checkpoint that the run continues; None for a new run.
        asked: See `steps_for`. With `resumed`, the steps come from the checkpoint, and `asked` only lists
            functions that the run may import.

    Raises:
        ConfigError: See `steps_for` and `resumed_transforms`.
        DeadlineExceeded: An import took too long.
    """
    if not config.augment:
        return ()
    if resumed is not None:
        steps = resumed_transforms(resumed, asked, functions)
        # Data servers import the functions: refuse here a function that this process cannot find.
        await imported_functions(steps, functions)
        return steps
    return steps_for(asked, image_shape, await imported_functions(asked or (), functions))


def steps_for(
    asked: Sequence[Mapping[str, Any]] | None,
    image_shape: Sequence[int],
    functions: Mapping[str, Callable[..., Any]] = {},
) -> tuple[dict[str, Any], ...]:
    """Choose the transforms of a run, and check that they fit the images.

    Args:
        asked: Steps of the caller; None: defaults for the images.
        image_shape: (C, H, W) of every image.

    Raises:
        ConfigError: A step is invalid, or the steps change the images' shape, which must stay that of test
            images.
    """
    channels, rows, columns = image_shape
    shape = (int(channels), int(rows), int(columns))
    steps = default_steps(shape) if asked is None else [dict(step) for step in asked]
    recipe = Recipe.of(steps, shape, kernels="numpy", functions=functions_for(steps, functions))
    recipe.check_shape_kept()
    return tuple(steps)
