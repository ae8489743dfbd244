"""Preparation of a run: the checks of its data and model, the network, and the plan of its partitions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from adam_async.checkpoint.manifest import check_data
from adam_async.data_server.validation_split import check_validation
from adam_async.driver.calibration import calibrate
from adam_async.driver.settings import RunInputs
from adam_async.model.network import Network
from adam_async.model.rules import rule_of
from adam_async.model.spec import ModelSpec
from adam_async.run.config import Config
from adam_async.run.model_selection import check_fits, check_size, choose_model
from adam_async.run.partition import check_crossings, plan_run, table_of
from adam_async.run.program_record import ProgramRecord
from adam_async.run.shard_table import ShardTable
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.store_record import ArrayRecord, RuleRecord, StoreRecord
from adam_async.run.train_step import StepSpec
from adam_async.run.training_program import TrainingProgram
from dataflow import ComputePool
from transport import LinkConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedRun:
    """The decisions on a run that need only the data of the cluster.

    Attributes:
        data: Description of the data by a data server: name, source, shape, sizes.
        plan: The partition plan, as `PartitionPlan.to_dict` returns it; None without partitions.
        trained_again: Groups that a resumed run trains a second time.
    """

    spec: ModelSpec | StepSpec
    model: RunModel
    data: dict[str, Any]
    plan: dict[str, Any] | None
    trained_again: int

    def table(self, config: Config) -> ShardTable:
        """Return the shards of the run's model."""
        return table_of(self.model, shard_bytes=config.shard_bytes, plan=self.plan)


def store_of(record: ProgramRecord, program: TrainingProgram, arrays: Sequence[ArrayRecord]) -> StoreRecord:
    """Return the record of the store of a run, without its list of arrays.

    Args:
        record: The run.
        program: Its options, all decided, and its starting point.
        arrays: The arrays of its model.
    """
    config, resumed = program.config, program.resumed
    rule = rule_of(config)
    return StoreRecord(
        id=record.id,
        creator=record.driver,
        rules=(
            RuleRecord(
                rule=config.rule,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
            ),
        ),
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
            invalid.
        StepFailed: The `arrays` of the step raised.
    """
    if inputs.resume is not None:
        check_data(inputs.resume.manifest, data)
    check_size(config.size, data)
    check_validation(config.validation, data)
    if inputs.step is not None:
        step = inputs.step.spec(data)
        return step, StepModel(inputs.step.step, step, keep_going=config.keep_going)
    if inputs.spec is not None:
        check_fits(inputs.spec, data, layers=inputs.layers)
    init = inputs.init.network.spec if inputs.init is not None else None
    spec = inputs.spec or choose_model(config.model, data, text=inputs.model_text, init=init)
    # On a thread, because the first network of a process imports the compiled kernels slowly.
    new_model = partial(Network, spec, dtype=config.dtype, kernels=config.kernels, layers=inputs.layers)
    return spec, await pool.run(new_model, cost="model")


async def prepare_plan(
    model: RunModel, config: Config, inputs: RunInputs, pool: ComputePool
) -> dict[str, Any] | None:
    """Return the partition plan of a run: the checkpoint's or a new one; None without partitions.

    Raises:
        ConfigError: The model cannot be partitioned over so many workers, or values between partitions do not
            fit into one message.
    """
    if isinstance(model, StepModel):
        return None
    resume = inputs.resume
    plan = resume.manifest.plan if resume is not None else await plan_here(model, config, pool)
    if plan is not None and not inputs.together:
        check_crossings(model, plan, config, most_bytes=LinkConfig().max_message_bytes)
    return plan


async def plan_here(model: Network, config: Config, pool: ComputePool) -> dict[str, Any] | None:
    """Plan the partitions of a run's model from measured layer times; None without partitions.

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
