"""The services of a server that its stores need, and the memory and rules of a store."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adam_async.errors import ConfigError
from adam_async.model.kernels import available_kernels, is_uncompiled, make_batches
from adam_async.model.rules import Rule
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.copy_host import CopyHost
from adam_async.parameter_server.pins import Pins
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.storage import ShardStorage, StoragePool, own_shards
from adam_async.parameter_server.store_disk import StoreDisk
from adam_async.run.bundle_record import Member
from adam_async.run.config import Waits
from adam_async.run.shard_table import ShardTable
from adam_async.run.store_record import ArrayRecord, StoreRecord
from adam_async.runtime.child_process import run_module
from adam_async.runtime.timeline import Timeline
from dataflow import MakePool, WaitTimedOut
from transport import BufferPool

logger = logging.getLogger(__name__)

COMPILE_S = 120.0
"""Deadline of a compilation in seconds. The end of a store kills a child that compiles, and waits for a
thread, which compiles if the disk cannot keep kernels."""

MODULE = "adam_async.model.fast.compiling"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreHost:
    """The services of a server that a store needs.

    Attributes:
        me: Node and incarnation of the server.
        waits: Deadlines.
        buffers: Memory for the copies of values in answers.
        storage_pool: Memory of runs in place.
        timeline: Notes applied batches, step reports and messages.
        make_pool: Makes the pool that loads kernels of rules; without it, NumPy applies them.
        compiling: Held during a compilation, so that the next bundle finds the kernel on the disk.
        now: Returns the time of the loop's clock, in seconds.
        spawn: Starts a task of the server, by name.
        drain_soon: Called with the `ServedStore` if it has work for a later round of the loop.
        rearm: Called if a request waits until a new deadline.
        loaded: Called once all shards have values, or the server becomes the primary of the bundle.
        left: Called with the `ServedStore` if the server is no member of the bundle any more.
        fail: Ends the server with a defect of a kernel.
        declines: Called with the `ServedStore` if the server cannot hold its copy and has to leave the
            joining members.
        copy_host: Services for bundles with a log.
        disk: The store on the disk of the server; None without one.
        pins: The pins on the disk of the server; None without one.
        at_once: Whether pushes that meet idle shards take the short way; see `at_once.py`.
    """

    me: Member
    waits: Waits
    buffers: BufferPool
    storage_pool: StoragePool
    timeline: Timeline | None
    make_pool: MakePool | None
    compiling: asyncio.Lock
    now: Callable[[], float]
    spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    drain_soon: Callable[[Any], None]
    rearm: Callable[[], None]
    loaded: Callable[[], None]
    left: Callable[[Any], None]
    fail: Callable[[Exception], None]
    declines: Callable[[Any], None]
    copy_host: CopyHost
    disk: StoreDisk | None = None
    pins: Pins | None = None
    at_once: bool = True

    @property
    def node(self) -> str:
        """Name of the server."""
        return self.me[0]


def shards_of(
    store: StoreRecord,
    home: str,
    table: ShardTable,
    arrays: Sequence[ArrayRecord],
    rules: Sequence[Rule],
    host: StoreHost,
) -> tuple[ShardStorage | None, list[Shard]]:
    """Return the shards with one home, and the storage that the server has to keep for workers in place."""
    specs = [spec for spec in table.shards if store.buckets[spec.bucket] == home]
    if not store.in_place:
        return None, own_shards(specs, rules)
    storage = host.storage_pool.provide(
        store.id, lambda: ShardStorage(arrays, rules[0], arrays[0].dtype, in_place=True)
    )
    return storage, [
        Shard(spec=spec, values=storage.values(spec), rule_state=storage.rule_state(spec)) for spec in specs
    ]


def kernels_of(store: StoreRecord) -> str:
    """Return the kernels for a store. A store of clients uses NumPy's if its own are not installed."""
    try:
        return available_kernels(store.kernels)
    except ConfigError as error:
        if store.program:
            raise
        logger.warning("NumPy applies the rules of store %s: %s", store.id, error)
        return "numpy"


async def compile_kernels(appliers: Mapping[tuple[int, str], Applier], host: StoreHost) -> None:
    """Change to compiled kernels of the rules when they are ready; they give the same bits."""
    assert host.make_pool is not None
    why = ""
    try:
        async with host.make_pool(threads=1, name=f"{host.node}-kernels", close_timeout_s=COMPILE_S) as pool:
            for applier in appliers.values():
                async with host.compiling:
                    if await pool.run(is_uncompiled, applier.rule, applier.dtype):
                        why = await run_module((MODULE, applier.dtype.name), within_s=COMPILE_S)
                    if why:
                        break
                    applier.batches = await pool.run(make_batches, applier.rule, applier.dtype, "numba")
    except (OSError, RuntimeError, WaitTimedOut) as error:
        why = str(error)
    if why:
        logger.warning("NumPy applies the rule, because compiling its kernel failed: %s", why)
