"""Runs a model worker."""

from contextlib import AbstractAsyncContextManager

from adam_async.cluster.roles.place import Place, listening
from adam_async.worker.run_session import ComputeSettings
from adam_async.worker.service import ModelWorker


def model_worker(
    place: Place, *, threads: int, in_flight: int, pace: float = 1.0
) -> AbstractAsyncContextManager[ModelWorker]:
    """Run a model worker; for errors see `listening`.

    Args:
        place: Place of the worker.
        threads: Compute threads.
        in_flight: Number of groups in flight; see `ComputeSettings`.
        pace: Share of a core's time that each thread may use.
    """
    role = ModelWorker(
        place.settings("worker"),
        ComputeSettings(threads=threads, in_flight=in_flight, pace=pace),
        buffers=place.buffers,
        entropy=place.entropy,
        layers=place.layers,
        steps=place.steps,
    )
    return listening(role, place)
