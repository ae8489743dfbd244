"""The command `worker`."""

import dataclasses
from collections.abc import Mapping

from adam_async.cli.options import WorkerOptions
from adam_async.cli.roles.serving import serve_member
from adam_async.cluster.roles.worker import model_worker
from adam_async.run.stragglers import pace_of
from adam_async.run.user_code import allow_steps, import_layers, read_layers
from adam_async.runtime.health import Health
from adam_async.runtime.machine import usable_cores


async def serve_worker(options: WorkerOptions, environment: Mapping[str, str], health: Health) -> int:
    """Run a model worker until cancelled."""
    config = options.config()
    steps = allow_steps(options.allow_step)
    layers = import_layers(read_layers(options.layers))
    return await serve_member(
        "worker",
        options,
        environment,
        health,
        lambda place: model_worker(
            dataclasses.replace(place, layers=layers, steps=steps),
            threads=config.threads or usable_cores(),
            in_flight=config.in_flight,
            pace=pace_of(config.slow, place.node),
        ),
    )
