"""The pushes, ticks and pulls of one client of a store, in the order of the calls.

A push waits in the queue while a server owes too many answers, and the calls after it wait behind it. A
queued call is independent of its caller, so that a cancelled push keeps its place. In bsp a push names its
step; in ssp the tick at the end of a step names it, so that a step may have any number of pushes.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.controller.client import Membership
from adam_async.errors import StoreError
from adam_async.parameter_server.client import ParameterClient
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.store_record import StoreRecord
from adam_async.runtime.machine import available_bytes
from adam_async.store.arrays import Gradient, out_memory
from adam_async.store.calls import Call, Calls, Gathered, Tick
from adam_async.store.layout import StoreLayout
from adam_async.store.pushing import Outgoing, PushMessages, Rate
from adam_async.store.values import PushOutcome, ReadVersions, Values
from adam_async.store.wish import StoreWish

LARGE_BYTES = 1 << 28
"""Size of all arrays of a store up to which a pull does not check the available memory, in bytes."""


def check_loop(name: str, loop: asyncio.AbstractEventLoop) -> None:
    """Check that the running loop is the one in which a store was opened. Raises StoreError: it is not."""
    if asyncio.get_running_loop() is not loop:
        raise StoreError(
            f"store {name!r} was opened in another event loop: call it there, for example with "
            "asyncio.run_coroutine_threadsafe, or open it with adam_async.sync"
        )


class StoreClient(Calls):
    """The pushes, ticks and pulls of one client of a store. For arguments see `Calls`."""

    def __init__(
        self,
        wish: StoreWish,
        store: StoreRecord,
        layout: StoreLayout,
        rates: tuple[float, ...],
        servers: ParameterClient,
        membership: Membership,
    ) -> None:
        super().__init__(wish, store, layout, servers, membership)
        self.name = wish.name
        self._prepare_s = wish.waits.prepare_s
        self._messages = PushMessages(layout, rates, is_summed=self.is_summed)
        self._has_begun = self.slack is None
        """Whether the clocks of the store have begun."""
        self._started = self.slack is None or wish.reader
        """Whether the clock of this client has begun at the clock of the others."""

    def check(self) -> None:
        """Check that the client is open, and in this loop.

        Raises:
            StoreError: It is not.
            Exception: The error with which the client has failed.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        # A future of another loop would never wake its caller.
        if asyncio.get_running_loop() is not self.loop:
            check_loop(self.name, self.loop)

    async def settled(self) -> None:
        """See `ParameterStore.settled`."""
        self.check()
        await self.until_settled()

    # --- pushes --------------------------------------------------------------------------------

    async def push(
        self,
        gradients: Mapping[str, Gradient],
        *,
        read: Values | ReadVersions | None = None,
        rate: Rate = None,
        weight: int = 1,
        assign: bool = False,
    ) -> PushOutcome:
        """See `ParameterStore.push`."""
        self.check()
        if not self._has_begun or self._is_reader:
            await self._begin_push()
        _, messages = self._messages.messages(gradients, rate, weight, assign)
        call = self._new_push(messages, read, weight, assign)
        self.put(call)
        await call.done
        return call.outcome()

    async def push_pull(
        self,
        gradients: Mapping[str, Gradient],
        names: Sequence[str] | None,
        *,
        out: Mapping[str, NDArray[Any]] | None,
        read: Values | ReadVersions | None,
        rate: Rate,
        weight: int,
    ) -> Values:
        """See `ParameterStore.push_pull`."""
        self.check()
        if not self._has_begun or self._is_reader:
            await self._begin_push()
        plan, messages = self._messages.messages(gradients, rate, weight, False)
        if self.slack is None and plan is not None and names is None:
            # One message each way: the answer to the push brings the values.
            targets = {} if out is None else out_memory(self.layout.arrays, plan.names, out)
            push = self._gathered(messages, read, weight, False)
            both = Call(calls=self, done=self.loop.create_future(), push=push, plan=plan, targets=targets)
            self.put(both)
            both.prepare()
            await both.done
            return both.values()
        pull = self._new_pull(gradients if names is None else names, out)
        pushing = self._new_push(messages, read, weight, False)
        # No wait between push, tick and pull: a push of the next call must not come before this tick.
        self.put(pushing)
        tick = None
        if self.slack is not None:
            tick = Tick(calls=self, done=self.loop.create_future(), after=pushing)
            self.put(tick)
        self.put(pull)
        if tick is not None:
            try:
                await tick.done
            except BaseException:
                pull.done.cancel()
                raise
        values = await self._pulled(pull)
        await pushing.done
        return values

    async def _begin_push(self) -> None:
        """Wait for the first step, and refuse the push of a reader."""
        if not self._has_begun:
            await self._begin()
            self.check()
        if self._is_reader:
            raise StoreError("this client is a reader: open the store without reader=True to push")

    async def _begin(self) -> None:
        """Wait until the clocks of the store have begun: they wait for `replicas` clients."""
        name, id, wanted = self.name, self.store.id, self.store.replicas

        def has_begun(cluster: ClusterMap) -> bool:
            store = cluster.stores.get(name)
            return store is None or store.id != id or store.epoch > 0

        what = f"{wanted} clients of store {name!r}, with which its first step begins"
        limit = asyncio.timeout(None)
        self._beginning.add(limit)
        try:
            async with limit:
                await self._membership.wait_for(has_begun, what, self._prepare_s)
        except TimeoutError:
            if limit.expired():
                self.check()
            raise
        finally:
            self._beginning.discard(limit)
        self._has_begun = True

    def _new_push(
        self, messages: Sequence[Outgoing], read: Values | ReadVersions | None, weight: int, assign: bool
    ) -> Call:
        push = self._gathered(messages, read, weight, assign)
        return Call(calls=self, done=self.loop.create_future(), push=push)

    def _gathered(
        self, messages: Sequence[Outgoing], read: Values | ReadVersions | None, weight: int, assign: bool
    ) -> Gathered:
        """Add to messages the versions that their gradients were computed from.

        Unread shards count with the newest version seen.
        """
        seen = self._seen
        own: Mapping[str, int] = {}
        if read is not None:
            versions = read.read if isinstance(read, Values) else read
            if not isinstance(versions, ReadVersions):
                raise StoreError(
                    f"read takes the values of a pull, or their versions, not {type(read).__name__}"
                )
            if versions.store != self.store.id:
                raise StoreError("read holds versions of another store: pull from this one")
            seen, own = np.where(versions.of_shards < 0, seen, versions.of_shards), versions.own
        # Copied, because versions in later answers must not count as read before this call.
        known = [tuple(seen[message.shards.index].tolist()) for message in messages]
        return Gathered(messages=messages, versions=known, own=own, weight=weight, assign=assign)

    # --- clocks --------------------------------------------------------------------------------

    async def tick(self) -> None:
        """See `ParameterStore.tick`."""
        self.check()
        if self.slack is None:
            return
        if self._is_reader:
            raise StoreError("this client is a reader: it has no place in the clocks")
        if not self._has_begun:
            await self._begin()
        await asyncio.sleep(0)  # a loop of ticks lets other tasks run
        tick = Tick(calls=self, done=self.loop.create_future())
        self.put(tick)
        await tick.done

    async def start(self) -> None:
        """Begin at the clock of the other clients: end the steps on all shards up to it.

        On each shard a late client begins at the slowest clock of the other clients there. Its own clock is
        the highest of these clocks. Without these ticks its first pull would wait for its own steps.
        """
        if not self._started:
            await self.pull(None, None)
            if self.clock:
                self._tick_all()

    # --- pulls ---------------------------------------------------------------------------------

    async def pull(self, names: Iterable[str] | None, out: Mapping[str, NDArray[Any]] | None) -> Values:
        """See `ParameterStore.pull`."""
        self.check()
        if names is None:
            self._check_room()
        call = self._new_pull(self.layout.arrays if names is None else names, out)
        self.put(call)
        return await self._pulled(call)

    def _check_room(self) -> None:
        """Refuse a pull of all arrays if they do not fit into memory: another client may have chosen them.

        Raises:
            StoreError: The arrays take more than the available memory.
        """
        nbytes = self.store.nbytes
        if nbytes > LARGE_BYTES and nbytes > (available := available_bytes()):
            raise StoreError(
                f"store {self.name!r} has arrays of {nbytes / 1e9:.1f} GB, and {available / 1e9:.1f} GB of "
                "memory are available here: pull arrays by their names, or use a larger machine"
            )

    def _new_pull(self, names: Iterable[str], out: Mapping[str, NDArray[Any]] | None) -> Call:
        """Check a pull, and return it."""
        if isinstance(names, str):
            raise StoreError(f"names is a sequence of names: [{names!r}]")
        wanted = tuple(dict.fromkeys(names))
        plan = self.layout.plan(wanted)
        targets = {} if out is None else out_memory(self.layout.arrays, wanted, out)
        return Call(calls=self, done=self.loop.create_future(), plan=plan, targets=targets)

    async def _pulled(self, pull: Call) -> Values:
        """Wait for a pull."""
        pull.prepare()
        await pull.done
        if not self._started:
            self.clock, self._started = max(pull.clocks, default=0), True
        return pull.values()
