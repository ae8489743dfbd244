"""The command `worker`."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from adam_async.cli.options import WorkerOptions
from adam_async.cli.roles.serving import serve_member
from adam_async.cluster.roles.place import Place, listening
from adam_async.run.stragglers import pace_of
from adam_async.run.user_code import allow_steps, import_layers, read_layers
from adam_async.runtime.health import Health
from adam_async.runtime.machine import usable_cores
from adam_async.worker.run_session import ComputeSettings
from adam_async.worker.service import ModelWorker


async def serve_worker(options: WorkerOptions, environment: Mapping[str, str], health: Health) -> int:
    """Run a model worker until cancelled."""
    config = options.config()
    steps = allow_steps(options.allow_step)
    layers = import_layers(read_layers(options.layers))

    def open_worker(place: Place) -> AbstractAsyncContextManager[ModelWorker]:
        compute = ComputeSettings(
            threads=config.threads or usable_cores(),
            in_flight=config.in_flight,
            pace=pace_of(config.slow, place.node),
        )
        role = ModelWorker(
            place.settings("worker"),
            compute,
            buffers=place.buffers,
            entropy=place.entropy,
            layers=layers,
            steps=steps,
        )
        return listening(role, place)

    return await serve_member("worker", options, environment, health, open_worker)
