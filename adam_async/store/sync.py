"""`adam_async.sync`, the synchronous interface for scripts and notebooks: the same methods without `await`.

    with sync.ParameterStore.open("local", {"w": np.zeros(784)}, rule=Sgd(rate=0.1)) as store:
        values = store.pull()
        store.push({"w": gradient(values["w"])}, read=values)

    with sync.LocalCluster(Config(epochs=3)) as cluster:
        cluster.train(print)

The store and its thread are here, the cluster and its thread in `cluster/sync.py`.

All open stores of a process share one thread with an event loop, so named stores at ``local`` share servers.
The first store starts the thread, and it ends with the last store. Several threads may call methods.

Ctrl-C cancels the interrupted call; a sent push continues, and `settled` waits for it. The thread is a
daemon, so an open store does not keep its process alive. A forked child process has no such thread: there,
calls on stores that were opened before the fork raise StoreError.
"""

import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, Self, TypeVar, cast

from adam_async.cluster.sync import LocalCluster, load_checkpoint
from adam_async.errors import StoreError
from adam_async.run.events import AnyEvent
from adam_async.runtime.loop_thread import Call, LoopThread
from adam_async.store import store as face
from adam_async.store.arguments import OpenArguments, with_arguments
from adam_async.store.opening import NO_COPY, Opening

__all__ = ["LocalCluster", "ParameterStore", "load_checkpoint"]

_T = TypeVar("_T")
_P = ParamSpec("_P")


class StoreThread(LoopThread):
    """A thread with an event loop, from the first open store of the process to the last."""

    def __init__(self) -> None:
        self.users = 0
        self.forked = False
        """Whether this object is a copy in a child process, without the thread."""
        super().__init__("adam-store")

    def run(self, work: Coroutine[Any, Any, _T]) -> "Call[_T]":
        """Begin to run a coroutine on the thread."""
        return self.begin(work, StoreError("the store is closed: open it again"))


class _Shared:
    """The thread that the open stores of this process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: StoreThread | None = None

    def enter(self) -> StoreThread:
        """Return the thread, for one more store."""
        with self.lock:
            if self.thread is None:
                self.thread = StoreThread()
            self.thread.users += 1
            return self.thread

    def leave(self, thread: StoreThread) -> None:
        """End the thread after its last store."""
        with self.lock:
            thread.users -= 1
            if thread.users:
                return
            self.thread = None
        thread.end()

    def forked(self) -> None:
        """Forget the thread, in a child process: a fork copies only the thread of the caller."""
        if self.thread is not None:
            self.thread.forked = True
        self.thread, self.lock = None, threading.Lock()


_SHARED = _Shared()
os.register_at_fork(after_in_child=_SHARED.forked)


def _blocking(
    method: Callable[Concatenate[face.ParameterStore, _P], Coroutine[Any, Any, _T]],
) -> "Callable[Concatenate[ParameterStore, _P], _T]":
    """Return a method that runs an asynchronous one on its store's thread, and waits for it."""

    @wraps(method)
    def call(self: "ParameterStore", /, *args: _P.args, **options: _P.kwargs) -> _T:
        return self._call(method(self._store, *args, **options))

    return call


def _fact(fact: Callable[[face.ParameterStore], _T]) -> _T:
    """Return a property that reads one of the asynchronous store; its type is the value's type."""
    read = cast(property, fact).fget
    assert read is not None
    return cast(_T, property(lambda self: read(self._store), doc=fact.__doc__))


class ParameterStore:
    """One client of a store, for programs without a loop; `open` makes it. See `store.ParameterStore`.

    A call raises the errors of its asynchronous twin, with their causes, and StoreError after `close` or in a
    forked child process. An interrupt ends an attempt to open a store, and raises KeyboardInterrupt.
    """

    def __init__(
        self, thread: StoreThread, opening: Opening[face.ParameterStore], store: face.ParameterStore
    ) -> None:
        self._thread = thread
        self._opening = opening
        self._store = store
        self._closed = False
        self._unclosed = weakref.finalize(self, _abandon, thread, opening)
        self.name = store.name

    @classmethod
    @with_arguments(OpenArguments)
    def open(cls, arguments: OpenArguments) -> "ParameterStore":
        """Open a store, and wait until it is open; `with` closes it. See `store.ParameterStore.open`."""
        opening = Opening(face.ParameterStore, arguments)
        thread = _SHARED.enter()
        try:
            return cls(thread, opening, thread.run(_opened(opening)).wait())
        except BaseException:
            _SHARED.leave(thread)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- facts ---------------------------------------------------------------------------------

    arrays: Final = _fact(face.ParameterStore.arrays)
    clock: Final = _fact(face.ParameterStore.clock)
    rules: Final = _fact(face.ParameterStore.rules)
    consistency: Final = _fact(face.ParameterStore.consistency)
    vectors: Final = _fact(face.ParameterStore.vectors)
    clients: Final = _fact(face.ParameterStore.clients)

    @property
    def closed(self) -> bool:
        """Whether this client has ended: it was closed, or has failed."""
        return self._closed or self._store.closed

    # --- work ----------------------------------------------------------------------------------

    pull = _blocking(face.ParameterStore.pull)
    buffers = _blocking(face.ParameterStore.buffers)
    push = _blocking(face.ParameterStore.push)
    push_pull = _blocking(face.ParameterStore.push_pull)
    assign = _blocking(face.ParameterStore.assign)
    add_vector = _blocking(face.ParameterStore.add_vector)
    delete_vector = _blocking(face.ParameterStore.delete_vector)
    step = _blocking(face.ParameterStore.step)
    combine = _blocking(face.ParameterStore.combine)
    dot = _blocking(face.ParameterStore.dot)
    norm = _blocking(face.ParameterStore.norm)
    ema = _blocking(face.ParameterStore.ema)
    tick = _blocking(face.ParameterStore.tick)
    settled = _blocking(face.ParameterStore.settled)
    save = _blocking(face.ParameterStore.save)
    pin = _blocking(face.ParameterStore.pin)
    unpin = _blocking(face.ParameterStore.unpin)
    pins = _blocking(face.ParameterStore.pins)
    read_pin = _blocking(face.ParameterStore.read_pin)

    def publish(self, event: AnyEvent) -> None:
        """Give an event of the caller to the `callbacks` of this client, without a wait."""
        self._thread.call(self._store.publish, event)

    def begin(self, work: Callable[[face.ParameterStore], Coroutine[Any, Any, _T]]) -> "Call[_T]":
        """Begin work with the asynchronous store, on its thread, and return a future of the result.

        `store.begin(lambda inner: inner.push(gradients)).wait()` does the same as `store.push(gradients)`.
        Several calls begin their work in the order of the calls.

        Args:
            work: Function that takes the asynchronous store and returns a coroutine. The function runs on the
                caller's thread, the coroutine on the thread of the store.
        """
        return self._begin(work(self._store))

    # --- the end -------------------------------------------------------------------------------

    def delete(self) -> None:
        """Delete the store for all its clients, and close this client. See `store.ParameterStore.delete`."""
        self._call(self._store.delete())
        self.close()

    def close(self) -> None:
        """Leave the store, which stays for other clients. Closing the store again has no effect.

        Raises:
            DeadlineExceeded: The thread of the last open store did not end.
        """
        if self._unclosed.detach() is None or self._thread.forked:
            return
        self._closed = True
        try:
            self._thread.run(self._opening.close()).wait()
        finally:
            _SHARED.leave(self._thread)

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._begin(work).wait()

    def _begin(self, work: Coroutine[Any, Any, _T]) -> "Call[_T]":
        refusal = ""
        if self._thread.forked:
            refusal = "was opened before this process was forked, and its thread is in the parent"
        elif self._closed:
            refusal = "is closed"
        if refusal:
            work.close()
            raise StoreError(f"store {self.name!r} {refusal}: open it again")
        return self._thread.run(work)

    def __getstate__(self) -> NoReturn:
        raise TypeError(NO_COPY.format(name=self.name))

    def __repr__(self) -> str:
        return f"<sync {self._store!r}>"


async def _opened(opening: Opening[face.ParameterStore]) -> face.ParameterStore:
    return await opening


def _abandon(thread: StoreThread, opening: Opening[face.ParameterStore]) -> None:
    """Close a store that was not closed, when it is garbage-collected or the program ends.

    A garbage collection may begin within any call, so this function neither takes the lock of `_SHARED` nor
    waits.
    """
    if thread.forked:
        return

    async def close() -> None:
        """Close the store, then leave the thread from another thread, because leaving waits."""
        try:
            await opening.close()
        finally:
            reaper = threading.Thread(
                target=_SHARED.leave, args=(thread,), name="adam-store-end", daemon=True
            )
            reaper.start()

    thread.run(close())
