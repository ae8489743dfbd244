"""Runs a parameter server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from adam_async.cluster.roles.place import Place, listening
from adam_async.parameter_server.server_disk import opened_disk
from adam_async.parameter_server.service import ParameterServer
from adam_async.parameter_server.storage import StoragePool
from adam_async.run.config import FLUSH_S
from adam_async.run.user_rules import RuleSource
from adam_async.runtime.machine import apply_numerics, available_bytes
from dataflow import ComputePool
from transport import Region


@asynccontextmanager
async def parameter_server(
    place: Place, *, folder: Path | None = None, flush_s: float = FLUSH_S, rules: RuleSource | None = None
) -> AsyncIterator[ParameterServer]:
    """Run a parameter server; for errors see `listening` and, with a folder, `opened_disk`.

    Args:
        place: Place of the server.
        folder: Folder in which the server keeps its shards; None: only in memory.
        flush_s: Time between two rounds of writing to the folder, in seconds.
        rules: User rules that the server may apply; None: none.
    """
    async with AsyncExitStack() as stack:
        disk = None
        if folder is not None:
            disk = await stack.enter_async_context(opened_disk(folder, flush_s=flush_s, rules=rules))
        role = ParameterServer(
            place.settings("ps"),
            make_pool=ComputePool,
            buffers=place.buffers,
            storage_pool=StoragePool(partial(Region.allocate, is_common=True)),
            available_bytes=available_bytes,
            numerics=apply_numerics(),
            copies=place.copies,
            disk=disk,
            rules=rules,
        )
        yield await stack.enter_async_context(listening(role, place))
