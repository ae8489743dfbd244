"""L-BFGS on a store: the coordinator's program, and the program of a worker in another process.

    async with ParameterStore.open("local", {"w": np.zeros(784)}, name="regression") as store:
        result = await LBFGS(store, loss_and_gradient, batches).minimise(iterations=50)
        values = await store.pull()

Theory of operation
-------------------
The coordinator makes the moves of a `Minimiser`: it sends sums of vectors and inner products to the servers
(`ParameterStore.step`). The workers sum the pieces' gradients into one vector ("Large Scale Distributed Deep
Networks", 4.2, Sandblaster). It holds numbers only.

Before each move it writes its numbers into the *record*: a store with one array, beside the parameters'
store, with the same copies and disks. A coordinator that finds a lost coordinator's record continues with its
last move. In the middle of an evaluation, the lost coordinator may have left pushes on their way, which name
the evaluation. Servers keep the pieces of the three newest evaluations and count those of older ones as
pushed. So three evaluations of one piece follow first. Three evaluations also follow if the record was
forgotten and the vectors stayed.

Pieces of an evaluation whose number the servers know would count as pushed before, and leave no gradient. So
each evaluation has a number above all that the shards have counted; the previous step asks for it.

One coordinator minimises on a store at a time. Each adds a vector, named by its nodes, to the record's store,
and waits until no node of a vector with a lower number is live. The controllers give these numbers, and
report which nodes are live. Servers take no steps from a node that is no longer live.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.cluster.networks import address_towards
from adam_async.errors import AdamError, ConfigError, DeadlineExceeded, StoreError, first_cause
from adam_async.lbfgs.dealer import Dealer
from adam_async.lbfgs.minimiser import GRADIENT, Minimiser, Move, stored_name
from adam_async.lbfgs.worker import GradientWorker, LossAndGradient
from adam_async.messages import AskPieces, Pieces, pack, unpack
from adam_async.messages.body import Epoch
from adam_async.messages.group_sets import KEPT_EPOCHS
from adam_async.run.cluster_map import ClusterMap
from adam_async.runtime.channel import Channel, StackedTaskGroup
from adam_async.store.arguments import LOCAL
from adam_async.store.store import ParameterStore
from adam_async.store.vectors import Combine, StepRefused
from dataflow import ComputePool
from transport import LocalNetwork, RemoteError, TransportError

logger = logging.getLogger(__name__)

ANSWER_S = 86_400.0
"""Deadline in seconds of the coordinator's answer to a worker: another worker may take long for one piece. A
link ends much earlier if its other side is silent."""

MOST_EVALUATION = (1 << 32) - 1
"""Highest number of an evaluation: the bound of epochs in messages."""

RECORD_VALUES = 2560
"""Length of a record's array, in values of two bytes each: 231 inner products have less than 4 KiB."""


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """The minimisation after an accepted step, or at its end.

    Attributes:
        number: Number of accepted steps.
        value: Value of the objective.
        norm: Norm of the gradient.
        evaluations: Number of evaluations of the objective.
        reason: Why the minimisation ended; empty before its end, and if it made all wanted iterations.
    """

    number: int
    value: float
    norm: float
    evaluations: int
    reason: str = ""


class CoordinatorState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The coordinator's numbers, and its address for workers of other processes."""

    minimiser: Minimiser
    store: str = ""
    """Id of the store; it changes if the store comes back from disks."""
    evaluation: Epoch = 0
    """Number of the last evaluation that began."""
    address: str = ""


_DECODER = msgspec.msgpack.Decoder(CoordinatorState)


class LBFGS:
    """Minimises a function of a store's arrays: the sum of `function` over all batches.

    Args:
        store: The store, with consistency ``asp``. The store's values are where the minimisation begins. No
            other program may push to the store during the minimisation. Its rules have no effect.
        function: Function ``loss_and_gradient(values, batch)`` that returns the batch's part of the objective
            and its gradient, by name. Threads call the function; it does not change the values.
        batches: The batches, each for one call.
        history: Number of vector pairs that the servers keep.
        tolerance: Norm of the gradient at which the minimisation ends, as a share of the first norm.
        workers: Number of workers in this process; with 0, others must call `assist`.
        backups: Whether a piece that a slow worker computes goes to a second worker, too.
        pieces: Maximum number of pieces of an evaluation. A piece has consecutive batches, whose gradients
            its worker sums and pushes at once. Fewer pieces send fewer bytes; with 8 or more per worker, a
            slow worker delays the others little. The bits of the sum depend on the pieces.

    Raises:
        ConfigError: A number is out of range, there are no batches, or the store has clocks or no name.
    """

    def __init__(
        self,
        store: ParameterStore,
        function: LossAndGradient,
        batches: Sequence[Any],
        *,
        history: int = 10,
        tolerance: float = 1e-6,
        workers: int = 1,
        backups: bool = True,
        pieces: int = 64,
    ) -> None:
        if store.consistency != "asp":
            raise ConfigError(
                f"L-BFGS needs a store with consistency 'asp', and this one has {store.consistency!r}"
            )
        if store.link.arguments.name is None:
            raise ConfigError("L-BFGS needs a store with a name, to find it again: open it with name=")
        if not batches:
            raise ConfigError("L-BFGS needs at least one batch")
        if workers < 0 or pieces < 1:
            raise ConfigError(f"LBFGS takes workers from 0 and pieces from 1, not {workers} and {pieces}")
        self._store = store
        self._function = function
        self._batches = batches
        try:
            self._new = msgspec.convert({"history": history, "tolerance": tolerance}, Minimiser)
        except msgspec.ValidationError as error:
            raise ConfigError(f"LBFGS(history={history!r}, tolerance={tolerance!r}): {error}") from None
        self._workers = workers
        link = store.link
        self._dealer = Dealer(
            link.store.id,
            len(batches),
            pieces,
            backups=backups,
            join_s=link.arguments.waits.prepare_s,
            turn_s=link.arguments.waits.clock_s,
        )
        self._record: CoordinatorState | None = None
        self._records: ParameterStore | None = None
        self._is_minimising = False

    @property
    def computations(self) -> int:
        """Number of pieces whose gradients workers have computed, including backups."""
        return self._dealer.computations

    async def minimise(
        self,
        iterations: int = 100,
        on_iteration: Callable[[Iteration], Any] | None = None,
        *,
        anew: bool = False,
    ) -> Iteration:
        """Minimise, beginning with the store's values; a later call on the same object continues.

        A call also goes on where a lost coordinator of this store was. The minimisation begins anew if
        another object has minimised on the store since the last call.

        Args:
            iterations: Maximum number of further iterations.
            on_iteration: Called after each accepted step, perhaps a coroutine function; the store then has
                the values of the step. False ends the minimisation.
            anew: Whether to begin with the values of the store in any case.

        Raises:
            StoreError: A gradient does not fit the store; another client deleted a vector, or named groups in
                a push; an earlier call has not ended; or another coordinator of the store is live after
                `patience_s`.
            DeadlineExceeded: No worker came within `prepare_s`, or the only worker held its turn for
                `clock_s`.
            ShardUnavailable: A server did not answer within `patience_s`.
            Exception: An error of `function` in a worker of this process.
        """
        if self._is_minimising:
            raise StoreError(f"this LBFGS of store {self._store.name!r} minimises already: await that call")
        self._is_minimising = True
        try:
            async with AsyncExitStack() as stack:
                self._records = await stack.enter_async_context(_open_records(self._store))
                await stack.enter_async_context(self._leading(self._records))
                was_lost = await self._find_record(anew=anew)
                await self._start_workers(stack)
                if not self._now.minimiser.is_done:
                    await self._make_vectors()
                    # A move without an evaluation needs the gradient unchanged, and no piece is missing.
                    if was_lost and self._now.minimiser.move.evaluates:
                        await self._end_earlier_evaluations()
                result = await self._iterate(iterations, on_iteration)
                self._now.address = ""
                await self._save()
                # Behind the record of the end: another coordinator would take zeros for lost vectors.
                if self._now.minimiser.is_done:
                    await self._delete_vectors()
                return result
        except BaseExceptionGroup as errors:
            cause = first_cause(errors)
            raise cause from cause.__cause__
        finally:
            self._is_minimising = False

    @property
    def _now(self) -> CoordinatorState:
        assert self._record is not None, "the record is open"
        return self._record

    async def _iterate(self, iterations: int, on_iteration: Callable[[Iteration], Any] | None) -> Iteration:
        minimiser = self._now.minimiser
        last = minimiser.iteration + iterations
        while not minimiser.is_done and (minimiser.iteration < last or minimiser.phase != "turn"):
            before = minimiser.iteration
            await self._advance(minimiser)
            if minimiser.iteration > before and on_iteration is not None:
                answer = on_iteration(self._iteration())
                if (await answer if inspect.isawaitable(answer) else answer) is False:
                    break
        return self._iteration()

    async def _advance(self, minimiser: Minimiser) -> None:
        """Make the move that is due, and give its answer to the minimiser."""
        try:
            answer = await self._make(minimiser.move)
        except StepRefused:
            if not minimiser.refused():
                raise
        else:
            minimiser.take(*answer)

    def _iteration(self) -> Iteration:
        found = self._now.minimiser
        return Iteration(
            number=found.iteration,
            value=found.value,
            norm=found.norm,
            evaluations=found.evaluations,
            reason=found.reason,
        )

    async def _make(self, move: Move) -> tuple[float, list[float]]:
        """Make a move; return the value of its evaluation, or 0, and the inner products."""
        sums = [
            Combine(stored_name(into), [(a, stored_name(x)) for a, x in terms])
            for into, terms in move.combine
        ]
        dots = [(stored_name(a), stored_name(b)) for a, b in move.dots]
        if not move.evaluates:
            await self._save()
            return 0.0, await self._store.step(sums, dots=dots)
        await self._begin_evaluation(sums)
        value = await self._dealer.evaluate(self._now.evaluation)
        products = await self._store.step([], dots=dots)
        known = self._store.link.calls.groups_epoch
        if known != self._now.evaluation:
            raise StoreError(
                f"the shards of store {self._store.name!r} have groups of epoch {known} after evaluation "
                f"{self._now.evaluation} of L-BFGS: no other program may name groups in pushes meanwhile"
            )
        return value, products

    async def _begin_evaluation(self, sums: Sequence[Combine] = ()) -> None:
        """Empty the gradient, and give the evaluation a number that no shard knows; see the head."""
        await self._number_above(self._now.evaluation)
        await self._store.step([*sums, Combine(stored_name(GRADIENT), ())])
        known = self._store.link.calls.groups_epoch
        if known >= self._now.evaluation:
            await self._number_above(known)

    async def _number_above(self, known: int) -> None:
        """Give the evaluation the next number, and save it. Raises StoreError: there is none."""
        if known >= MOST_EVALUATION:
            raise StoreError(
                f"store {self._store.name!r} has groups of epoch {known}, and no evaluation of L-BFGS may "
                "have a higher number: begin a new store with its values"
            )
        self._now.evaluation = known + 1
        await self._save()

    async def _end_earlier_evaluations(self) -> None:
        """Make late pushes of an earlier coordinator count as repetitions; see the head of this file."""
        # Without a record the first one may have the number of theirs.
        for _ in range(KEPT_EPOCHS):
            await self._begin_evaluation()
            await self._dealer.evaluate(self._now.evaluation, pieces=1)

    async def _make_vectors(self) -> None:
        for name in self._now.minimiser.vectors:
            if stored_name(name) not in self._store.vectors:
                await self._store.add_vector(stored_name(name), temporary=True)

    async def _delete_vectors(self) -> None:
        """Free the memory of the vectors, which have the values of two dozen models."""
        for name in self._now.minimiser.vectors:
            if stored_name(name) in self._store.vectors:
                await self._store.delete_vector(stored_name(name))

    async def was_left(self) -> bool:
        """Return whether a coordinator of this store has not ended: it is lost, or minimises now.

        For errors see `ParameterStore.open`.
        """
        async with _open_records(self._store) as records:
            return self._is_left(await _read(records))

    def _is_left(self, record: CoordinatorState | None) -> bool:
        # Disks may have the record and the vectors of different moments, unless each change was durable.
        store = self._store.link.store
        return record is not None and bool(record.address) and (record.store == store.id or store.durable)

    async def forget(self) -> None:
        """Delete the store of the record. Workers of other programs read it, and have left before.

        For errors see `ParameterStore.open` and `ParameterStore.delete`.
        """
        async with _open_records(self._store) as records:
            await records.delete()

    # --- workers ---------------------------------------------------------------------------------

    async def _start_workers(self, stack: AsyncExitStack) -> None:
        """Start the workers of this process, and listen for those of others."""
        store, link, dealer = self._store, self._store.link, self._dealer
        # First, because the pools close once all workers have ended.
        pools = [
            await stack.enter_async_context(ComputePool(threads=1, name=f"lbfgs-{number}"))
            for number in range(self._workers)
        ]
        group = await stack.enter_async_context(StackedTaskGroup())
        network = link.endpoint.network
        is_local = isinstance(network, LocalNetwork)
        address = "local://" if is_local else await address_towards(link.arguments.where)
        listening = network.listen(address, link.endpoint.identity, dealer.serve_link)
        self._now.address = (await stack.enter_async_context(listening)).address
        for number, pool in enumerate(pools):
            ask = partial(dealer.answer, number)
            worker = GradientWorker(store, self._function, self._batches, ask, pool)
            stack.callback(group.create_task(worker.run(), name=f"lbfgs-worker-{number}").cancel)
            stack.callback(dealer.lost, number)

    # --- other processes ---------------------------------------------------------------------------

    @staticmethod
    async def assist(store: ParameterStore, function: LossAndGradient, batches: Sequence[Any]) -> None:
        """Compute gradients for another program's `LBFGS` on the same store, until it has ended.

        Args:
            store: The store, opened by this program.
            function: The function of the coordinator.
            batches: The batches of the coordinator, the same in each program.

        Raises:
            StoreError: A gradient does not fit the store, or this store has no L-BFGS.
            DeadlineExceeded: No coordinator was there for `prepare_s`.
            Exception: An error of `function`.
        """
        link = store.link
        channel = Channel(
            link.endpoint,
            peer="the coordinator",
            address="",
            peer_role="client",
            patience_s=link.arguments.waits.prepare_s,
        )
        async with _open_records(store) as records, ComputePool(threads=1, name="lbfgs") as pool:
            channel.renew()
            while True:
                record = await _read(records)
                if record is not None and record.store == link.store.id:
                    if not record.address:
                        return
                    channel.address = record.address
                    await _assist_once(store, function, batches, channel, pool)
                if channel.left_s <= 0:
                    raise StoreError(f"no coordinator of store {store.name!r} answers at {channel.address!r}")
                await channel.pause()

    # --- the record ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _leading(self, records: ParameterStore) -> AsyncIterator[None]:
        """Be the only coordinator of the store within the context; see the head of this file."""
        store, link, membership = self._store, self._store.link, records.link.membership
        mine = link.endpoint.identity.node
        name = f"{mine} {records.link.endpoint.identity.node}"

        def live(cluster: ClusterMap) -> list[str]:
            """Return the nodes of live coordinators that came earlier; this store's own do not count."""
            nodes = cluster.nodes
            return [
                each.split()[0]
                for each in _before(name, records)
                if any(node in nodes and nodes[node].live for node in {*each.split()} - {mine})
            ]

        try:
            await records.add_vector(name, temporary=True)
            what, wait_s = f"another L-BFGS on store {store.name!r} to end", link.arguments.waits.patience_s
            if first := live(membership.map):
                logger.warning("waiting %g s for %s (%s)", wait_s, what, first[0])
            try:
                await membership.wait_for(lambda now: not live(now), what, wait_s)
            except DeadlineExceeded:
                there = ", ".join(live(membership.map)[:1])
                raise StoreError(
                    f"another L-BFGS minimises on store {store.name!r} ({there}), and a store has one at a "
                    "time: end it, or help it as a worker by LBFGS.assist"
                ) from None
            for lost in _before(name, records):
                await records.delete_vector(lost)
            yield
        finally:
            with suppress(AdamError, TransportError):  # it has no force once its nodes have left
                # A step on its way must not come between those of the next coordinator.
                await store.settled()
                await records.delete_vector(name)

    async def _find_record(self, *, anew: bool) -> bool:
        """Read the record; return whether pushes of a lost coordinator may be on their way."""
        assert self._records is not None, "the record is open"
        there = self._store.vectors
        try:
            found = await _read(self._records)
        except StoreError:
            if not anew:
                raise
            found = None
        was_lost, newest = self._is_left(found), found.evaluation if found is not None else 0
        if found is not None and was_lost and not anew:
            self._record = found
            found.minimiser.tolerance = self._new.tolerance
        elif self._record is None or anew or newest > self._record.evaluation:  # another one came between
            self._record = CoordinatorState(minimiser=msgspec.structs.replace(self._new))
        minimiser = self._now.minimiser
        gone = [each for each in map(stored_name, minimiser.vectors) if each not in there]
        if gone and minimiser.phase not in ("first", "done"):  # new ones would have zeros
            raise StoreError(
                f"L-BFGS cannot go on on store {self._store.name!r} without vector {gone[0]!r}, which was "
                "deleted: begin anew, with anew=True or --replace"
            )
        self._now.store = self._store.link.store.id
        self._now.evaluation = max(self._now.evaluation, newest)
        return was_lost if found is not None else stored_name(GRADIENT) in there

    async def _save(self) -> None:
        assert self._records is not None, "the record is open"
        await self._records.assign({"record": written(self._now)})


async def _assist_once(
    store: ParameterStore,
    function: LossAndGradient,
    batches: Sequence[Any],
    channel: Channel,
    pool: ComputePool,
) -> None:
    """Work for the coordinator at the channel's address, until its link ends."""
    try:
        link = await channel.dial(min(store.link.arguments.waits.call_s, max(channel.left_s, 0.1)))

        async def ask(asked: AskPieces) -> Pieces:
            found = unpack(await link.call(pack(asked), timeout_s=ANSWER_S), Pieces)
            channel.progressed()
            return found

        await GradientWorker(store, function, batches, ask, pool).run()
    except Exception as error:
        cause = first_cause(error)
        # The link's end means that the coordinator has ended or is lost; its record says which.
        if isinstance(cause, RemoteError) or not isinstance(cause, TransportError):
            raise cause from cause.__cause__
        if channel.link is not None:
            channel.renew()  # the coordinator lived, however long it had no piece for this worker
    finally:
        channel.drop()
        # No push of this link may arrive in an evaluation of the next coordinator.
        await store.settled()


# --- names and forms -----------------------------------------------------------------------------


@asynccontextmanager
async def _open_records(store: ParameterStore) -> AsyncIterator[ParameterStore]:
    """Open the store of the record, or create it."""
    of = store.link.arguments
    async with ParameterStore.open(
        of.where,
        {"record": np.zeros(RECORD_VALUES, np.float32)},
        name=f"{store.name}.lbfgs",
        copies=None if of.where == LOCAL else store.link.store.copies,
        durable=store.link.store.durable,
        link=of.link,
        dir=of.dir,
        token=of.token,
        waits=of.waits,
    ) as records:
        yield records


def _before(vector: str, store: ParameterStore) -> list[str]:
    """Return the names of the vectors that a store had before one of them. Raises StoreError: it is gone."""
    vectors = store.vectors
    if vector not in vectors:
        raise StoreError("another L-BFGS took the place of this one, which did not answer: begin again")
    return [each for each, record in vectors.items() if record.number < vectors[vector].number]


def written(record: CoordinatorState) -> NDArray[np.float32]:
    """Return a record as numbers, two bytes in each, behind its length in bytes."""
    packed = msgspec.msgpack.encode(record)
    halves = np.frombuffer(packed + bytes(len(packed) % 2), np.uint16)
    values = np.zeros(RECORD_VALUES, np.float32)
    values[0], values[1 : len(halves) + 1] = len(packed), halves
    return values


async def _read(records: ParameterStore) -> CoordinatorState | None:
    """Read the record; None if none has been written yet. Raises StoreError: impossible numbers."""
    try:
        return unwritten((await records.pull())["record"])
    except ValueError as error:
        raise StoreError(
            f"the record of L-BFGS in store {records.name!r} is damaged: it has {error}. Begin with the "
            "values of the parameters, by anew=True or --replace"
        ) from None


def unwritten(values: NDArray[Any]) -> CoordinatorState | None:
    """Return an array's record; None if it is empty. Raises ValueError: the array has no record, or the
    record contradicts itself."""
    if not values[0]:
        return None
    try:
        length = int(values[0])  # of a damaged record, perhaps no number
        with np.errstate(invalid="ignore"):
            packed = values[1:].astype(np.uint16).tobytes()[:length]
        record = _DECODER.decode(packed)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise ValueError(f"no fields: {error}") from None
    if contradiction := record.minimiser.contradiction:
        raise ValueError(contradiction)
    return record
