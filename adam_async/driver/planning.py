"""The plan of a run that is to be cut: from what its layers take on this machine."""

from functools import partial
from typing import Any

from adam_async.driver.calibration import calibrate
from adam_async.model.network import Network
from adam_async.run.config import Config
from adam_async.run.partition import plan_run
from dataflow import ComputePool


async def plan_here(model: Network, config: Config, pool: ComputePool) -> dict[str, Any] | None:
    """Plan how a run's model is cut, as its record says it; None if it is not.

    In lockstep it goes by estimates: a plan that goes by the clock would not be the same from run to run.

    Args:
        model: The network, with the kernels that will train it.
        config: The run.
        pool: Where layers are measured, about half a second; compiling them may take longer.

    Raises:
        ConfigError: The model cannot be cut over so many workers.
    """
    times = None
    if config.partitions > 1 and not config.synchronous:
        await pool.run(model.warm_up)
        times = await pool.run(partial(calibrate, model, config.images_per_group, clock=pool.clock))
    plan = plan_run(model, config, times)
    return plan.to_dict() if plan is not None else None
