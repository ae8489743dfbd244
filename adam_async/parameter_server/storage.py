"""Pure: the memory of the shards of a store, with the state of their rules.

A server allocates its own shards (`own_shards`), and those of one rule and type one after the other, so that
a request for many small arrays reads and changes one range of memory.

In a run *in place* the servers of a process have views of the same whole tensors (`ShardStorage`), the
workers of the process use that memory as their weights, and their compute threads run the rule on it. Then no
other thread may write it, and a reader copies it first.

A step changes this memory before the servers count it. A reader that needs values and counts of the same
steps keeps the storage *still*: the compute threads stop after their present group, and the servers count all
steps.

In a run in place of several processes the storage is in a region that the server hands over (`Region`): all
processes have views of it, with their own gates. There each thread notes its steps (`StepNotes`), so that the
server can count those of a process that has ended.
"""

import gc
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.model.context import BEGUN, JobNotes
from adam_async.model.rules import Rule, RuleState
from adam_async.parameter_server.shard import FamilyMemory, Shard, ShardTables, Sheet
from adam_async.run.shard_table import ShardSpec
from dataflow import Gate

ALIGNMENT = 64
"""Size of a cache line and of the widest vector register, in bytes."""


PAGE = 4096
"""Size of a page, in bytes, on which vectors of `PAGES` pages or more begin. The kernel of Linux copies sent
bytes by one instruction, which on some processors takes up to seven times as long if the target lies 1 to 15
bytes behind the source within their pages. The bytes follow the head of a frame, which has more than 15."""

PAGES = 16
"""Minimum size of a vector that begins on a page, in pages."""


def aligned_zeros(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return a zeroed vector of `size` values that begins on a 64-byte boundary, and if large on a page."""
    nbytes = size * np.dtype(dtype).itemsize
    boundary = PAGE if nbytes >= PAGES * PAGE else ALIGNMENT
    raw = np.zeros(nbytes + boundary, np.uint8)
    offset = -raw.ctypes.data % boundary
    return raw[offset : offset + nbytes].view(dtype)


def own_shards(specs: Sequence[ShardSpec], rules: Sequence[Rule]) -> list[Shard]:
    """Allocate shards, zeroed, each with a new state of its rule; in the order of `specs`.

    Args:
        specs: The shards of one bundle, or some of them.
        rules: The rules of the store.
    """
    shards: dict[int, Shard] = {}
    families: dict[tuple[int, str], list[ShardSpec]] = {}
    for spec in specs:
        families.setdefault((spec.rule, spec.dtype), []).append(spec)
    for (rule, dtype), members in families.items():
        # Without gaps: an array of several shards is one range, which readers of this host can have.
        *starts, size = accumulate([spec.size for spec in members], initial=0)
        zeros = partial(aligned_zeros, size, dtype)
        new = rules[rule].new_state((1,), dtype)
        state = {name: aligned_zeros(size, new[name].dtype) for name in rules[rule].state_names}
        for name, array in state.items():
            if new[name].any():
                array[:] = new[name][0]
        counts = {name: np.repeat(new[name], len(members)) for name in rules[rule].scalar_names}
        memory = FamilyMemory(Sheet(zeros(), shards=len(members)), state, counts, zeros)
        tables = ShardTables(shards=len(members))
        for at, (spec, start) in enumerate(zip(members, starts, strict=True)):
            part = slice(start, start + spec.size)
            shards[spec.id] = Shard(
                spec=spec,
                values=memory.private.values[part],
                rule_state={
                    **{name: array[part] for name, array in state.items()},
                    **{name: array[at : at + 1] for name, array in counts.items()},
                },
                tables=tables,
                memory=memory,
                sheet=memory.private,
                offset=start,
                place=at,
            )
    return [shards[spec.id] for spec in specs]


class Tensor(Protocol):
    """A named array of a shape."""

    @property
    def name(self) -> str:
        """Name of the tensor."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        ...


MOST_NOTED = 1 << 21
"""Maximum number of steps in the notes of a worker, which one piece of the loop's work reads."""


class NotedStep(NamedTuple):
    """A step that a thread has begun, as the thread says."""

    epoch: int
    group: int
    images: int
    loss: float | None
    """Mean loss over the images; None for a step that was cut off."""
    staleness: int


class StepNotes:
    """Notes of the newest jobs of one compute thread, in memory that outlives its process.

    Args:
        jobs: Memory of the notes, one element for each job.
    """

    def __init__(self, jobs: NDArray[Any]) -> None:
        self._jobs = jobs
        self._next = 0

    @classmethod
    def of_worker(cls, memory: NDArray[Any], threads: int, jobs: int, groups: int) -> "list[StepNotes]":
        """Return the notes of each thread of a worker, in memory of `nbytes` bytes.

        Raises:
            ValueError: The memory has another size, or room for too many steps.
        """
        if threads * jobs * groups > MOST_NOTED:
            raise ValueError(f"notes of {threads * jobs * groups} steps, {MOST_NOTED} are allowed")
        whole = memory.view(cls._job(groups))
        return [cls(part) for part in whole.reshape(threads, jobs)]

    @classmethod
    def nbytes(cls, threads: int, jobs: int, groups: int) -> int:
        """Return the size of the notes of a worker, in bytes.

        Args:
            jobs: Number of the newest jobs of a thread whose notes stay.
            groups: Maximum number of groups of a job.
        """
        return threads * jobs * cls._job(groups).itemsize

    @staticmethod
    def _job(groups: int) -> np.dtype[Any]:
        each = [("groups", np.int64, (groups, 3)), ("done", np.int64, (groups,))]
        return np.dtype([*each, ("losses", np.float64, (groups,))])

    def begin(self, groups: Sequence[tuple[int, int, int]]) -> JobNotes:
        """Name epoch, number and images of the groups of the next job, and return its notes."""
        job = self._jobs[self._next % len(self._jobs)]
        self._next += 1
        job["done"] = 0  # before the names: no step of the job before may pass for one of these groups
        job["groups"][: len(groups)] = groups
        return JobNotes(job["done"][: len(groups)], job["losses"][: len(groups)])

    def steps(self) -> Iterator[NotedStep]:
        """Yield the steps that the thread has begun, in any order."""
        done = self._jobs["done"]
        begun = done.nonzero()
        fields = (self._jobs["groups"][begun], done[begun], self._jobs["losses"][begun])
        for (epoch, number, images), is_done, loss in zip(*[each.tolist() for each in fields], strict=True):
            is_cut = is_done == BEGUN
            yield NotedStep(epoch, number, images, None if is_cut else loss, 0 if is_cut else is_done - 1)


def storage_bytes(parameters: Iterable[Tensor], rule: Rule, dtype: DTypeLike) -> int:
    """Return the size of the memory of a `ShardStorage`, in bytes."""
    new, item = rule.new_state((1,), np.dtype(dtype)), np.dtype(dtype).itemsize
    state = sum([new[name].itemsize for name in rule.state_names])
    arrays = 1 + len(rule.state_names) + len(rule.scalar_names)
    return PAGE + sum([prod(p.shape) * (item + state) + arrays * PAGE for p in parameters])


class _Space:
    """Memory of a storage: of its own, or one array after the other in a region."""

    def __init__(self, region: NDArray[Any] | None) -> None:
        self._region = region
        self._taken = 0

    def vector(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return the next vector; in a region it begins on a page."""
        if self._region is None:
            return aligned_zeros(size, dtype)
        begin, nbytes = self._taken, size * np.dtype(dtype).itemsize
        self._taken += nbytes + -nbytes % PAGE
        return self._region[begin : begin + nbytes].view(dtype)

    def state(self, rule: Rule, shape: tuple[int, ...], dtype: DTypeLike, *, is_new: bool) -> RuleState:
        """Return the state of a rule for a tensor."""
        if self._region is None:
            return rule.new_state(shape, dtype)
        new, found = rule.new_state((1,), dtype), {}
        for name in (*rule.state_names, *rule.scalar_names):
            whole = shape if name in rule.state_names else new[name].shape
            found[name] = self.vector(prod(whole), new[name].dtype).reshape(whole)
            if is_new:
                found[name][...] = new[name]
        return found


class ShardStorage:
    """Values and rule state of every tensor of a run; shards are views into them.

    Args:
        rule: The update rule, which defines its state.
        in_place: Whether the rule is applied to whole tensors; its counts are then per tensor instead of per
            shard. A replay applies it to shards.
        region: Common memory of `storage_bytes`, of zeros; None: memory of this process.
        is_new: Whether the memory has no state of the rule yet.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        rule: Rule,
        dtype: DTypeLike = np.float32,
        *,
        in_place: bool = False,
        region: NDArray[Any] | None = None,
        is_new: bool = True,
    ) -> None:
        self.region = region
        self.dtype = np.dtype(dtype)
        self.in_place = in_place
        self._rule = rule
        parameters = tuple(parameters)
        space = _Space(region)
        self._flat = {p.name: space.vector(prod(p.shape), self.dtype) for p in parameters}
        self.weights: Mapping[str, NDArray[Any]] = {
            p.name: self._flat[p.name].reshape(p.shape) for p in parameters
        }
        """Values of each tensor, in its shape, by name."""
        self.states: Mapping[str, RuleState] = {
            p.name: space.state(rule, p.shape, self.dtype, is_new=is_new) for p in parameters
        }
        """Rule state of each tensor, by name."""
        self.gate = Gate()
        """Gate of the compute threads that apply steps in place, between two groups."""
        self._settling: list[Callable[[], AbstractAsyncContextManager[None]]] = []
        """Functions of the workers; see `counted_by`."""
        self.notes: deque[StepNotes] = deque()
        """Notes for the compute threads of a worker; empty in the process of the servers."""
        self.steps = space.vector(1, np.int64)
        """Number of steps applied in place, for their staleness; two processes that add at once may count one
        step."""

    def values(self, shard: ShardSpec) -> NDArray[Any]:
        """Return the memory of one shard, flat."""
        return self._flat[shard.tensor][shard.start : shard.stop]

    def rule_state(self, shard: ShardSpec) -> RuleState:
        """Return the rule state of one shard: views, flat, and the rule's counts."""
        state = self.states[shard.tensor]
        views = {name: state[name].reshape(-1)[shard.start : shard.stop] for name in self._rule.state_names}
        counts = {
            name: state[name] if self.in_place else state[name].copy() for name in self._rule.scalar_names
        }
        return {**views, **counts}

    @contextmanager
    def counted_by(self, settle: Callable[[], AbstractAsyncContextManager[None]]) -> Iterator[None]:
        """Name the function of a worker for a block.

        Args:
            settle: Waits until the servers have counted the steps of the worker. The worker begins no step
                until the end of its block.
        """
        self._settling.append(settle)
        try:
            yield
        finally:
            self._settling.remove(settle)

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Keep the values for as long as the block lasts. The servers have counted all steps in them.

        A step stays uncounted if its worker ended before it reported the step.
        """
        async with self.gate.turn, self.gate.closed(), AsyncExitStack() as stack:
            for settle in tuple(self._settling):
                if settle in self._settling:  # else its worker has ended meanwhile
                    await stack.enter_async_context(settle())
            yield

    def __repr__(self) -> str:
        total = sum(flat.nbytes for flat in self._flat.values())
        return f"<ShardStorage {len(self._flat)} tensors {total} bytes {self.dtype}>"


class StoragePool:
    """The storages of the runs of a process, for all its roles. A storage lives as long as a role keeps it.

    Servers and workers learn of a new run at different times, so for a while one role may ask for a run that
    another role has left. All roles of a run get the same storage, in any order of their requests.

    Args:
        allocate: Returns common memory of a number of bytes, for workers of other processes; None: all
            workers are in this process.
    """

    def __init__(self, allocate: Callable[[int], NDArray[Any]] | None = None) -> None:
        self._allocate = allocate
        self._storages: WeakValueDictionary[str, ShardStorage] = WeakValueDictionary()
        self.has_servers = False
        """Whether a server of this process has opened a run."""

    def provide(self, run: str, parameters: Sequence[Tensor], rule: Rule, dtype: DTypeLike) -> ShardStorage:
        """Return the storage of a run for a server, made at the first call. The server must keep it.

        Raises:
            MemoryError: There is no memory.
        """
        storage = self._storages.get(run)
        if storage is None:
            region = None
            if self._allocate is not None:
                gc.collect()  # the regions of earlier runs stay as long as cycles of objects have them
                try:
                    region = self._allocate(storage_bytes(parameters, rule, dtype))
                except OSError as error:
                    raise MemoryError(str(error)) from None
            storage = ShardStorage(parameters, rule, dtype, in_place=True, region=region)
            self._storages[run] = storage
        self.has_servers = True
        return storage

    def find(self, run: str) -> ShardStorage | None:
        """Return the storage of a run for a worker; None if no role of this process keeps it."""
        return self._storages.get(run)

    @asynccontextmanager
    async def still(self, run: str) -> AsyncIterator[None]:
        """Keep the storage of a run still for as long as the block lasts; does nothing without a storage."""
        storage = self.find(run)
        if storage is None:
            yield
            return
        async with storage.still():
            yield
