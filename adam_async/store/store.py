"""A parameter store: named arrays on parameter servers, for programs that push gradients and pull values.

    async with ParameterStore.open("local", {"w": np.zeros(784)}, rule=Sgd(rate=0.1)) as store:
        values = await store.pull()
        await store.push({"w": gradient(values["w"])}, read=values)

Theory of operation
-------------------
A store is a record in the cluster map and shards on servers (`run.store_record`). `open` joins the cluster as
a client, creates the store if it is absent, loads its first values, and waits until the controllers have
opened it. In stores with clocks (ssp, bsp) each client is a replica: the controllers give it a number in the
clocks, and its loss frees the number.

Every push has a number on each shard, and the client repeats it over new links until the server answers. So
the server applies a call exactly once (`client.session`). A cancelled call does not recall its messages:
`settled` waits for them.

One task owns the background work (the membership, and the links to the servers). If this task fails, every
call raises its error.
"""

import asyncio
from collections.abc import Mapping, Sequence
from math import fsum, nan, sqrt
from pathlib import Path
from typing import Any, NoReturn

from msgspec import ValidationError, convert
from numpy.typing import NDArray

from adam_async.checkpoint.tensors import WholeTensors, vector_name
from adam_async.errors import StoreError, counted
from adam_async.messages.body import NamedGroups
from adam_async.model.rules import AnyRule
from adam_async.run.arrays import ArraySpec
from adam_async.run.events import AnyEvent
from adam_async.run.group_ranges import groups_fault
from adam_async.run.store_record import PARAMETERS, VectorRecord
from adam_async.store.arguments import OpenArguments, with_arguments
from adam_async.store.arrays import Gradient
from adam_async.store.calls import MoreFields
from adam_async.store.opening import NO_COPY, Opening, StoreLink
from adam_async.store.pins import PinSummary, StorePins, check_pin_name
from adam_async.store.saved_file import write_store
from adam_async.store.values import PushOutcome, Rate, ReadVersions, Values
from adam_async.store.vectors import Combine, StoreVectors


class ParameterStore:
    """One client of a store. `ParameterStore.open` makes the object.

    Several tasks of the loop may call methods; the servers apply the pushes in the order of the calls. Errors
    name the array and the remedy (`StoreError`), the server and its deadline (`ShardUnavailable`), or the
    missing client or the phase (`DeadlineExceeded`).
    """

    def __init__(self, link: StoreLink, opening: "Opening[ParameterStore] | None" = None) -> None:
        self._link = link
        self._opening = opening
        self._calls = link.calls
        self._vectors = StoreVectors(link.calls)
        self.name = link.name

    @classmethod
    @with_arguments(OpenArguments)
    def open(cls, arguments: OpenArguments) -> "Opening[ParameterStore]":
        """Open a store: `async with` it (`with` it in `adam_async.sync`), or `await` it and `close` it.

        `Opening` lists the errors of `async with` and `await`.
        """
        return Opening(cls, arguments)

    @property
    def link(self) -> StoreLink:
        """The client behind this object."""
        return self._link

    # --- facts ---------------------------------------------------------------------------------

    @property
    def arrays(self) -> Mapping[str, ArraySpec]:
        """The arrays of the store by name."""
        return {
            name: ArraySpec(each.shape, each.dtype, each.split)
            for name, each in self._calls.layout.arrays.items()
        }

    @property
    def clock(self) -> int:
        """Number of steps that this client has ended; a late client begins at the others' clock."""
        return self._calls.clock

    @property
    def rules(self) -> Mapping[str, AnyRule]:
        """The rule of each array by name, with the default rate of this client."""
        return self._link.rules

    @property
    def consistency(self) -> str:
        """The store's consistency, as `open` takes it."""
        return self._link.consistency

    @property
    def clients(self) -> int:
        """Number of the store's live clients, except readers, in this client's newest map; at least 1."""
        return self._link.clients

    def publish(self, event: AnyEvent) -> None:
        """Give an event of the caller to the `callbacks` of this client."""
        self._link.events.publish(event)

    # --- values --------------------------------------------------------------------------------

    async def pull(
        self,
        names: Sequence[str] | None = None,
        *,
        out: Mapping[str, NDArray[Any]] | None = None,
        vector: str = "",
    ) -> Values:
        """Pull values of all arrays, or of some.

        The values contain all earlier pushes of this client; with bsp, those of its ended steps. With clocks,
        and unless this client is a reader, the pull waits for the slowest client as the consistency demands.
        Each shard has one version; different shards may be from different moments.

        Args:
            names: Arrays to pull; None for all.
            out: Arrays to fill, by name, with the store's shapes and types; other arrays are new. The filled
                arrays stay writable.
            vector: Name of a vector to read instead of the values; `names` are arrays that it has.

        Returns:
            The values, read-only, with their versions.

        Raises:
            StoreError: A name is unknown, an array of `out` does not fit, or the store is closed.
            DeadlineExceeded: The slowest client did not reach the clock within `clock_s`; the error names the
                client.
            ShardUnavailable: A server did not answer within `patience_s`.
        """
        if not vector:
            return await self._calls.pull(names, out)
        wanted = self._vectors.arrays_of(vector) if names is None else names
        return await self._calls.pull(wanted, out, self._vectors.number_of(vector, wanted))

    async def buffers(self, names: Sequence[str] | None = None) -> Mapping[str, NDArray[Any]]:
        """Make arrays for gradients, in memory that servers of this host read without a copy.

            gradients = await store.buffers()
            while training:
                compute(out=gradients)
                values = await store.push_pull(gradients)

        The arrays are writable, of the store's shapes and types, and zeros at first. Write gradients to them,
        and push the mapping as a whole, step after step. Change the buffers only between pushes: a change
        during a push may end the link, and the store may have only part of the push. Otherwise the arrays are
        ordinary memory, so that pushes over TCP or within a process work as usual. The memory is freed with
        the last array, also after `close`. A forked child must not write to the memory.

        Args:
            names: Arrays to make; None for all. A push of some buffers copies a message's arrays that are not
                adjacent.

        Raises:
            StoreError: A name is unknown, the arrays do not fit into memory, or the store is closed.
        """
        return self._calls.buffers(names)

    async def push(
        self,
        gradients: Mapping[str, Gradient],
        *,
        read: Values | ReadVersions | None = None,
        rate: Rate = None,
        weight: int = 1,
        vector: str = "",
        groups: tuple[int, ...] = (),
    ) -> PushOutcome:
        """Push gradients of some arrays; the servers apply each exactly once, with the array's rule.

        The caller may change the buffers after the return. A cancelled push continues: leave its buffers
        unchanged until `settled`. With bsp a client pushes an array at most once in a step.

        Args:
            gradients: Names to arrays with the store's shapes and types; for a matrix (R, I) also `Factors`
                of activations (K, I) and errors (K, R).
            read: Values, or their versions, from which the gradients were computed; None means the newest
                versions that this client has seen.
            rate: Learning rate, 0 to 1e12, for all arrays or by name; None, or an absent name, means the rate
                of the array's rule.
            weight: With bsp, the weight of this client's gradients in the mean of the step, 1 to 2^32 - 1.
            vector: Name of a vector to which the servers add the gradients, instead of a step of the rule;
                not with bsp.
            groups: Names of the parts of a sum, in a store without clocks: an epoch from 1, then each range's
                first part number and one past its last. A shard counts a part once, whichever client pushes
                it, in the newest three epochs; parts of older epochs count as already pushed.

        Raises:
            StoreError: A name, shape, type or value does not fit, and nothing was applied; the store is
                closed; or this client is a reader.
            DeadlineExceeded: Fewer than `replicas` clients joined for the first step within `prepare_s`.
            ShardUnavailable: A server did not answer within `patience_s`.
        """
        return await self._push(gradients, read, rate, weight, assign=False, vector=vector, groups=groups)

    async def _push(
        self,
        gradients: Mapping[str, Gradient],
        read: Values | ReadVersions | None,
        rate: Rate,
        weight: int,
        *,
        assign: bool,
        vector: str = "",
        groups: tuple[int, ...] = (),
    ) -> PushOutcome:
        calls = self._calls
        calls.check()
        if not calls.has_begun or calls.is_reader:
            await calls.begin_push()
        if vector and not assign and (calls.is_summed or rate is not None):
            why = (
                "with bsp a push goes to the values" if calls.is_summed else "it has no rule: leave out rate"
            )
            raise StoreError(f"vector {vector[:80]!r}: {why}")
        _, messages = calls.gradients.messages(gradients, rate, weight, assign)
        more: MoreFields = {"vector": self._vectors.number_of(vector, gradients)} if vector else {}
        if groups:
            more["groups"] = _checked(groups)
        call = calls.new_push(messages, read, weight=weight, assign=assign, more=more)
        calls.put(call)
        await call.done
        return call.outcome()

    async def push_pull(
        self,
        gradients: Mapping[str, Gradient],
        names: Sequence[str] | None = None,
        *,
        out: Mapping[str, NDArray[Any]] | None = None,
        read: Values | ReadVersions | None = None,
        rate: Rate = None,
        weight: int = 1,
    ) -> Values:
        """Push gradients, end the step in a store with clocks, and pull.

        See `push` and `pull`. Refused parts are not reported. A cancelled call may have pushed and ended the
        step.

        Args:
            gradients: See `push`, also for `read`, `rate` and `weight`.
            names: Arrays to pull; None for those in `gradients`.
            out: See `pull`.
        """
        calls = self._calls
        calls.check()
        if not calls.has_begun or calls.is_reader:
            await calls.begin_push()
        plan, messages = calls.gradients.messages(gradients, rate, weight, False)
        if calls.slack is None and plan is not None and names is None:
            # One message each way: the answer to the push brings the values.
            both = calls.new_push(messages, read, weight=weight, plan=plan, out=out)
            calls.put(both)
            both.prepare()
            await both.done
            return both.values()
        pull = calls.new_pull(gradients if names is None else names, out)
        push = calls.new_push(messages, read, weight=weight)
        tick = None if calls.slack is None else calls.new_tick(push)
        # No wait between push, tick and pull: a push of the next call must not come before this tick.
        calls.put(push)
        if tick is not None:
            calls.put(tick)
        calls.put(pull)
        if tick is not None:
            try:
                await tick.done
            except BaseException:
                pull.done.cancel()
                raise
        values = await calls.pulled(pull)
        await push.done
        return values

    async def assign(self, arrays: Mapping[str, NDArray[Any]], *, vector: str = "") -> PushOutcome:
        """Replace the values of some arrays, exactly once and in the order of this client's calls.

        The state of the arrays' rules (momentum, means) stays. For errors see `push`.

        Args:
            vector: Name of a vector whose values are replaced, instead of the store's values.
        """
        return await self._push(arrays, None, None, 1, assign=True, vector=vector)

    # --- vectors -------------------------------------------------------------------------------

    @property
    def vectors(self) -> Mapping[str, VectorRecord]:
        """The store's vectors by name, as in this client's newest map."""
        return self._vectors.found

    async def add_vector(
        self, name: str, like: str | Sequence[str] | None = None, *, temporary: bool = False
    ) -> None:
        """Add a vector of zeros: further values with the shapes of some arrays, on the same servers.

        A store's disks have the vector from its first change, or a second later. A loss of all servers before
        that takes the vector back.

        Args:
            name: 1 to 64 bytes without a slash, unlike the names of all arrays and vectors.
            like: Name of an array, or names of several; None for all arrays that are pushed to.
            temporary: Whether pins and `save` leave the vector out.

        Raises:
            StoreError: The name is taken or invalid; the store has 64 vectors or lacks such an array; the
                servers lack memory; or this client is a reader, or is closed.
            DeadlineExceeded: No controller led, or answered.
        """
        await self._vectors.add(name, like, temporary=temporary)

    async def delete_vector(self, name: str) -> None:
        """Delete a vector for all clients, and free its memory. For errors see `add_vector`.

        A loss of all servers within a second can bring the vector back from the disks.
        """
        await self._vectors.delete(name)

    async def step(
        self, commands: Sequence[Combine] = (), dots: Sequence[tuple[str, str]] = ()
    ) -> list[float]:
        """Change vectors on their servers by commands, in this order; return dot products of the outcome.

        The step is one message to each server. The step has effect exactly once on each shard, after all
        earlier pushes of this client, and in a store with clocks as an assignment does. On each shard the
        step takes effect whole or not at all. The values of a sum round in a fixed order: first coefficients,
        then each product, then each sum from the first term to the last, each to the array's type. For each
        shard, a dot product sums the products, which are rounded to float64, and rounds this sum exactly;
        then it rounds the sum over all shards exactly. The bits are the same on any number of servers.

        Args:
            commands: At most 64 sums, each of at most 64 terms, and about 500 terms in all. Operands are
                names of vectors, names of arrays (for their values), or `PARAMETERS` for the values of all
                arrays that are pushed to.
            dots: At most 64 pairs of operands; in each pair one operand has all arrays of the other.

        Returns:
            The dot products; NaN for one that overflows float64.

        Raises:
            StoreError: A name is unknown, an operand lacks an array, or a coefficient is not finite, and
                nothing was changed; a shard refused the step, because a result is not finite; or this client
                is a reader, or is closed.
            ShardUnavailable: A server did not answer within `patience_s`.
        """
        return await self._vectors.step(commands, dots)

    async def combine(self, into: str, terms: Sequence[tuple[float, str]]) -> None:
        """Replace a vector by a sum of scaled ones; see `step`."""
        await self.step([Combine(into, terms)])

    async def dot(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return dot products of vectors; see `step`."""
        return await self.step((), pairs)

    async def norm(self, names: str | Sequence[str] = PARAMETERS) -> float:
        """Return the Euclidean norm of some vectors together; NaN if a sum overflows; see `step`."""
        several = (names,) if isinstance(names, str) else names
        squares = await self.dot([(name, name) for name in several])
        try:
            return sqrt(fsum(squares))
        except OverflowError:  # of the sum of several vectors
            return nan

    async def ema(self, name: str, *, of: str = PARAMETERS, decay: float) -> None:
        """Move an exponential moving average on: ``name = decay * name + (1 - decay) * of``; see `step`."""
        if not 0 <= decay <= 1:
            raise StoreError(f"decay must be within 0 and 1, not {decay}")
        await self.combine(name, [(decay, name), (1 - decay, of)])

    async def tick(self) -> None:
        """End a step of this client; without clocks this has no effect. For errors see `push`."""
        calls = self._calls
        calls.check()
        if calls.slack is None:
            return
        if calls.is_reader:
            raise StoreError("this client is a reader: it has no place in the clocks")
        if not calls.has_begun:
            await calls.begin()
        await asyncio.sleep(0)  # a loop of ticks lets other tasks run
        calls.check()
        tick = calls.new_tick()
        calls.put(tick)
        await tick.done

    async def settled(self) -> None:
        """Wait until the servers have answered all pushes of this client, also cancelled ones; see `push`."""
        self._calls.check()
        await self._calls.until_settled()

    async def save(self, path: str | Path, *, rule_state: bool = False) -> Path:
        """Pull all values into a file in the safetensors format, whole or not at all, and return its path.

        The file has the vectors that are not temporary, under names such as ``vector/mean/w``.

        Args:
            rule_state: Whether the file also has the rules' state, for `open(init=...)`.

        Raises:
            OSError: The file cannot be written.
            StoreError: The store is closed, or has an array with the name ``__metadata__``, which the format
                reserves, or with the name of a rule's state; or a reader wants this state.
            DeadlineExceeded: The slowest client did not reach the clock within `clock_s`.
            ShardUnavailable: A server did not answer within `patience_s`.
        """
        self._calls.check()
        layout = self._calls.layout
        if not rule_state:
            arrays, lasting = [*layout.arrays.values()], self._calls.newest.lasting_vectors
            tensors = WholeTensors(arrays, layout.table, values=await self.pull(), vectors=lasting)
            for vector in lasting:
                pulled = await self.pull(vector=vector.name)
                tensors.state |= {vector_name(vector, array): values for array, values in pulled.items()}
        elif self._calls.is_reader:
            raise StoreError("this client is a reader: open the store without reader=True for rule_state")
        else:
            tensors = await self._link.read_all()
        await write_store(Path(path), self._calls.newest, tensors)
        return Path(path)

    # --- pins ----------------------------------------------------------------------------------

    async def pin(self, name: str) -> None:
        """Keep the values as they are now under a name, on the disks of the servers, until `unpin`.

        Each server keeps the same state of a shard, including its rule's state; all pushes that were answered
        before the call are in it. Different shards may be from different moments. Pushes go on. The pin is
        there on return: `min_in_sync` servers have each shard, and it outlasts a loss of all servers. A store
        has at most 16 pins. After a cancelled call the pin may exist or not.

        Args:
            name: 1 to 64 letters, digits, dots, hyphens and underscores, the first a letter or a digit.

        Raises:
            StoreError: The name is invalid or taken; the store has 16 pins; a server has no folder, or its
                disk cannot take the pin, or takes no piece of it for 60 s; or this client is a reader, or is
                closed.
            DeadlineExceeded: The servers did not save the pin within `checkpoint_s`.
            ShardUnavailable: A server did not answer within `patience_s`.
        """
        await self._of_pins(reads=False).make(check_pin_name(name))

    async def unpin(self, name: str) -> None:
        """Remove a pin, also an unfinished one.

        A server that is away removes its part when it returns to the store.

        Raises:
            StoreError: The store has no such pin; or this client is a reader, or is closed.
            ShardUnavailable: A server did not answer within `patience_s`.
        """
        await self._of_pins(reads=False).remove(check_pin_name(name))

    async def pins(self) -> list[PinSummary]:
        """Return the pins on the disks of the live servers, by name."""
        return await self._of_pins(reads=True).summaries()

    async def read_pin(self, name: str, *, vector: str = "") -> Mapping[str, NDArray[Any]]:
        """Return a pin's values by name, read-only, or those of a vector in it; `assign` takes them.

        Raises:
            StoreError: No valid pin of this name is on the disks of the live servers; or this client is a
                reader, or is closed.
        """
        return await self._of_pins(reads=False).read(check_pin_name(name), vector)

    def _of_pins(self, *, reads: bool) -> StorePins:
        self._calls.check()
        if self._calls.is_reader and not reads:
            raise StoreError("this client is a reader: open the store without reader=True for its pins")
        return self._link.pins

    # --- the end -------------------------------------------------------------------------------

    async def delete(self) -> None:
        """Delete the store for all its clients, and close this client.

        Calls of other clients then raise StoreError.

        Raises:
            StoreError: This client is a reader, or is closed.
            RunFailed: The controller refused the deletion.
            DeadlineExceeded: No controller led, or answered.
        """
        await self._link.delete()
        await self.close()

    async def close(self) -> None:
        """Leave the store, which stays for other clients. Closing the store again has no effect."""
        if self._opening is not None:
            await self._opening.close()

    @property
    def closed(self) -> bool:
        """Whether this client has ended: it was closed, or has failed."""
        return self._link.closed

    def __getstate__(self) -> NoReturn:
        raise TypeError(NO_COPY.format(name=self.name))

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"clock {self.clock}"
        return f"<ParameterStore {self.name!r} {counted(len(self._calls.layout.arrays), 'array')}, {state}>"


def _checked(groups: Sequence[int]) -> tuple[int, ...]:
    """Return named groups if a message may have them: a server would refuse the push again and again.

    Raises:
        StoreError: The groups are not an epoch and ranges, or there are too many.
    """
    try:
        named = convert(tuple(groups), NamedGroups)
    except (TypeError, ValidationError) as error:
        raise StoreError(f"groups are an epoch and ranges of two numbers each: {error}") from None
    if fault := groups_fault(named):
        raise StoreError(fault)
    return named
