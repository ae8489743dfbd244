"""The server's services for its stores and their copies, and the memory and rules of a store."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from adam_async.controller.client import Confirmation
from adam_async.errors import ConfigError
from adam_async.model.kernels import (
    available_kernels,
    is_uncompiled,
    lacks_vectors,
    make_batches,
    make_vectors,
)
from adam_async.model.rules import Rule
from adam_async.model.vectors import VECTORS
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import Entry
from adam_async.parameter_server.log_entries import Part
from adam_async.parameter_server.pins import Pins
from adam_async.parameter_server.replication.local_copy import Entry as LogEntry
from adam_async.parameter_server.server_links import ServerLinks
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.storage import ShardStorage, StoragePool, own_shards
from adam_async.parameter_server.store_disk import StoreDisk
from adam_async.run.config import Waits
from adam_async.run.shard_table import ShardTable
from adam_async.run.store_record import ArrayRecord, BundleRecord, Member, StoreRecord
from adam_async.run.user_rules import RuleSource
from adam_async.runtime.child_process import run_module
from adam_async.runtime.timeline import Timeline
from dataflow import MakePool, WaitTimedOut
from transport import BufferPool

logger = logging.getLogger(__name__)

COMPILE_S = 120.0
"""Deadline of a compilation in seconds. The end of a store kills a child process that compiles, but waits for
a thread, which compiles if the disk cannot keep kernels."""

MODULE = "adam_async.model.fast.compiling"


Observe = Callable[[Any, LogEntry, Sequence[Part]], None]
"""Callback that is called before a `BundleCopy` applies an entry, with the copy, the entry and its parts."""


class BundleShards(Protocol):
    """The shards and the front of a bundle on this server."""

    @property
    def bundle(self) -> Bundle:
        """The shards; `reset` replaces them."""
        ...

    def committed(self, entry: Entry) -> None:
        """Take a committed entry, and do its work in later rounds of the loop."""
        ...

    def reset(self) -> None:
        """Begin with new, empty shards: the server joins."""
        ...

    def took_pins(self) -> None:
        """Remove pins from the disk that clients removed while this server was away."""
        ...

    def lead(self) -> None:
        """Order pushes and answer requests from now on."""
        ...

    def follow(self) -> None:
        """Refuse all requests from now on: another server is the primary."""
        ...

    def leave(self) -> None:
        """Drop the shards: the server is no member any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreHost:
    """The services of a server that a store needs.

    Attributes:
        me: Node and incarnation of the server.
        waits: Deadlines.
        buffers: Memory for the copies of values in answers.
        storage_pool: Memory of runs in place.
        timeline: Notes applied batches, step reports and messages.
        make_pool: Makes the pool that loads compiled kernels of rules; without it, NumPy applies the rules.
        make_memory_pool: Makes the pool for memory that clients read.
        compiling: Lock for the time of a compilation, so that the next bundle finds the kernel on the disk.
        now: Returns the time of the loop's clock, in seconds.
        spawn: Starts a task of the server, by name.
        drain_soon: Called with the `ServedStore` if it has work for a later round of the loop.
        rearm: Called if a request waits until a new deadline.
        loaded: Called once all shards have values, or the server becomes the primary of the bundle.
        left: Called with the `ServedStore` if the server is no member of the bundle any more.
        fail: Ends the server with a defect of a kernel.
        declines: Called with the `ServedStore` if the server cannot hold its copy and has to leave the
            joining members.
        links: Links to the other members of bundles with a log.
        call_soon: Calls a function in the next iteration of the loop.
        set_record: Sets the bundle's record in the map if the map still has the expected version; returns
            None if the server ends.
        next_member: Returns which of the possible servers to invite; None if there is none.
        is_live: Whether a server is live in the cluster map.
        notice: Reports a text to the operator: the controllers log it, and it is an event of a run.
        observe: Called before a committed entry is applied, with its copy, the entry and its parts.
        disk: The store on the server's disk; None without a disk.
        pins: The pins on the server's disk; None without a disk.
        at_once: Whether pushes that meet idle shards take the short way; see `at_once.py`.
        rules: The rules of users that the server may apply.
    """

    me: Member
    waits: Waits
    buffers: BufferPool
    storage_pool: StoragePool
    timeline: Timeline | None
    make_pool: MakePool | None
    make_memory_pool: MakePool
    compiling: asyncio.Lock
    now: Callable[[], float]
    spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    drain_soon: Callable[[Any], None]
    rearm: Callable[[], None]
    loaded: Callable[[], None]
    left: Callable[[Any], None]
    fail: Callable[[Exception], None]
    declines: Callable[[Any], None]
    links: ServerLinks
    call_soon: Callable[[Callable[[], None]], object]
    set_record: Callable[[BundleRecord, int], Coroutine[Any, Any, Confirmation | None]]
    next_member: Callable[[Callable[[Member], bool]], Member | None]
    is_live: Callable[[Member], bool]
    notice: Callable[[str], None]
    observe: Observe | None = None
    disk: StoreDisk | None = None
    pins: Pins | None = None
    at_once: bool = True
    rules: RuleSource = field(default_factory=RuleSource)

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
    """Return the shards with one home, and the storage that the server must keep for workers in place."""
    specs = [spec for spec in table.shards if store.buckets[spec.bucket] == home]
    if not store.in_place:
        return None, own_shards(specs, rules)
    storage = host.storage_pool.provide(store.id, arrays, rules[0], arrays[0].dtype)
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


async def compile_kernels(
    appliers: Mapping[tuple[int, str], Applier], host: StoreHost, *, of_vectors: bool = False
) -> None:
    """Switch to compiled kernels for rules or vectors once they are ready. The bits are the same."""
    assert host.make_pool is not None
    try:
        async with host.make_pool(threads=1, name=f"{host.node}-kernels", close_timeout_s=COMPILE_S) as pool:
            for applier in appliers.values():
                async with host.compiling:
                    if of_vectors:
                        if await pool.run(lacks_vectors, applier.dtype):
                            await run_module((MODULE, applier.dtype.name, VECTORS), within_s=COMPILE_S)
                        applier.vectors = await pool.run(make_vectors, applier.dtype)
                        continue
                    if await pool.run(is_uncompiled, applier.rule, applier.dtype):
                        await run_module((MODULE, applier.dtype.name), within_s=COMPILE_S)
                    applier.batches = await pool.run(make_batches, applier.rule, applier.dtype, "numba")
    except (OSError, RuntimeError, WaitTimedOut) as error:
        logger.warning("NumPy goes on, because compiling its kernel failed: %s", error)
