"""The command `worker`."""

import dataclasses
from collections.abc import Mapping
from typing import TypedDict

from adam_async.cli.options import WorkerOptions
from adam_async.cli.roles.serving import add_folders, serve_member
from adam_async.cluster.roles.worker import model_worker
from adam_async.errors import ConfigError
from adam_async.model.layer import Layer
from adam_async.run.config import MAX_THREADS_PER_CORE, MOST
from adam_async.run.stragglers import pace_of
from adam_async.run.user_code import StepSource, allow_steps, import_layers, read_layers
from adam_async.runtime.health import Health
from adam_async.runtime.machine import usable_cores


class _Imports(TypedDict):
    """User code that a worker may run."""

    layers: Mapping[str, type[Layer]]
    steps: StepSource


async def serve_worker(
    options: WorkerOptions, threads: int, in_flight: int, environment: Mapping[str, str], health: Health
) -> int:
    """Run a model worker until cancelled."""
    cores = usable_cores()
    if not 0 <= threads <= cores * MAX_THREADS_PER_CORE or not 0 <= in_flight <= MOST["in_flight"]:
        raise ConfigError(
            f"--threads must be within 0 and {cores * MAX_THREADS_PER_CORE} on {cores} cores and --in-flight "
            f"within 0 and {MOST['in_flight']}, not {threads} and {in_flight}"
        )
    imports = _imports_of(options)
    return await serve_member(
        "worker",
        options,
        environment,
        health,
        lambda place: model_worker(
            dataclasses.replace(place, **imports),
            threads=threads or cores,
            in_flight=in_flight,
            pace=pace_of(options.slow, place.node),
        ),
    )


def _imports_of(options: WorkerOptions) -> _Imports:
    """Import the layers and the modules of steps that a worker's command line names.

    Raises:
        ConfigError: A folder, module or layer does not exist, or fails in its import.
    """
    add_folders(options)
    return {"layers": import_layers(read_layers(options.layers)), "steps": allow_steps(options.allow_step)}
