"""Parameter servers over TCP in a thread of their own, because a training loop blocks its thread."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from adam_async.run.config import Waits
from tests.adam_async.store.servers import WAITS, StoreServers, store_servers


@contextmanager
def cluster(count: int = 3, *, token: str | None = None, waits: Waits = WAITS) -> Iterator[StoreServers]:
    """Run a controller and parameter servers until the end of the block."""
    started: Future[tuple[StoreServers, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with store_servers(count, token=token, waits=waits) as running:
            ending = asyncio.Event()
            started.set_result((running, asyncio.get_running_loop(), ending))
            await ending.wait()

    with ThreadPoolExecutor(1) as executor:
        serving = executor.submit(lambda: asyncio.run(serve()))
        running, loop, ending = started.result(20.0)
        try:
            yield running
        finally:
            loop.call_soon_threadsafe(ending.set)
            serving.result(20.0)
