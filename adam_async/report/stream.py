"""The event stream of a run or store, with any number of readers; slow readers lose the oldest events.

A publisher never waits: `publish` puts an event into the bounded memory of each reader. An event with a
role's counts, or with a status, replaces an earlier unread one. Every event that a reader loses adds to its
next `Dropped`.

A `Callback` gets the events in a separate thread, so it may write files or ask servers. `EventFile` is the
callback for `--events`: it writes one JSON object a line; older lines are in FILE.1, FILE.2 and FILE.3.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from adam_async.errors import AdamError, ConfigError, DataError, failing_as
from adam_async.run.events import AnyEvent, Dropped, replaces, text_of
from adam_async.runtime.blocking_thread import BlockingThread
from adam_async.runtime.clock import Clock, wall_clock

logger = logging.getLogger(__name__)

MOST_UNREAD = 1024
"""Maximum number of unread events of one reader."""

END_S = 5.0
"""Time in seconds in which a callback takes its last events and closes when a run ends."""


class Callback:
    """Watches runs, or a store: a program fills in `on_event`. The callback runs in a separate thread."""

    def on_event(self, event: AnyEvent) -> None:
        """Take one event. If the method raises, a warning has the error, and no further event follows."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files and connections, after the last event."""


class EventReader:
    """One reader of a stream, made by `EventStream.reader`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._unread: dict[str | int, AnyEvent] = {}
        self._put = 0
        self._dropped = 0
        self.news = asyncio.Event()
        """Set while there are unread events."""

    def put(self, event: AnyEvent) -> None:
        """Add an event; drop the one that it replaces, or if there are too many, the oldest."""
        self._put += 1
        key = replaces(event) or self._put
        if self._unread.pop(key, None) is not None:
            self._dropped += 1
        elif len(self._unread) >= self._most:
            self._dropped += 1
            del self._unread[next(iter(self._unread))]
        self._unread[key] = event
        self.news.set()

    def take(self) -> list[AnyEvent]:
        """Return the unread events in order; if some were dropped, `Dropped` comes first."""
        found: list[AnyEvent] = [*self._unread.values()]
        if self._dropped:
            found.insert(0, Dropped(at=found[0].at, events=self._dropped))
        self._unread.clear()
        self._dropped = 0
        self.news.clear()
        return found

    async def batches(self) -> AsyncIterator[list[AnyEvent]]:
        """Yield the unread events as soon as there are any, until cancelled."""
        while True:
            await self.news.wait()
            yield self.take()


class EventStream:
    """Publishes events to its readers.

    Args:
        wall: Returns the seconds since 1970.
    """

    def __init__(self, wall: Clock = wall_clock) -> None:
        self._wall = wall
        self.shows_images = False
        """Whether a reader shows sample images, which cost the driver time (`Predicted`)."""
        self._readers: list[EventReader] = []
        self._listeners: list[Callable[[AnyEvent], object]] = []

    @property
    def is_read(self) -> bool:
        """Whether the stream has a reader or a listener."""
        return bool(self._readers or self._listeners)

    def now(self) -> float:
        """Return the time of events, in seconds since 1970."""
        return self._wall()

    def publish(self, event: AnyEvent) -> None:
        """Give an event to all readers and listeners, with the present time if the event has none."""
        if not self.is_read:
            return
        if not event.at:
            event = msgspec.structs.replace(event, at=self._wall())
        for listener in self._listeners:
            listener(event)
        for reader in self._readers:
            reader.put(event)

    def listen(self, on_event: Callable[[AnyEvent], object]) -> None:
        """Call a function with each event as it is published. The function must neither wait nor raise."""
        self._listeners.append(on_event)

    @contextmanager
    def reader(self, most: int = MOST_UNREAD) -> Iterator[EventReader]:
        """Read the events that are published within the block.

        Args:
            most: Maximum number of unread events.
        """
        reader = EventReader(most)
        self._readers.append(reader)
        try:
            yield reader
        finally:
            self._readers.remove(reader)


def texts(on_text: Callable[[str], object]) -> Callable[[AnyEvent], None]:
    """Return a listener that calls a function with each event's sentence, if it has one."""

    def on_event(event: AnyEvent) -> None:
        if text := text_of(event):
            on_text(text)

    return on_event


def check_callbacks(callbacks: object) -> None:
    """Check the type of callbacks. Raises ConfigError: the argument is no sequence of `Callback`."""
    if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
        raise ConfigError(f"callbacks are objects of subclasses of Callback, not {callbacks!r:.80}")


class Caller:
    """In a thread, passes a stream's events to a callback, from construction until `finish`.

    The caller runs `run` as a task of its group, and cancels it before `finish`.
    """

    def __init__(self, stream: EventStream, callback: Callback) -> None:
        self.name = f"events/{type(callback).__name__}"
        self._callback = callback
        self._thread = BlockingThread(self.name)
        self._stack = ExitStack()
        self._reader = self._stack.enter_context(stream.reader())
        self._has_failed = False

    async def run(self) -> None:
        """Pass events until cancelled, or until the callback raises."""
        async for events in self._reader.batches():
            await self._in_thread(self._take, events)
            if self._has_failed:
                return

    async def finish(self) -> None:
        """Pass the unread events, for `END_S` at most, and close the callback."""
        self._stack.close()
        try:
            async with asyncio.timeout(END_S):
                await self._in_thread(self._take, self._reader.take())
                await self._in_thread(self._close)
        except TimeoutError:
            logger.warning("%s took longer than %g s for the last events", self.name, END_S)
        finally:
            self._thread.end()

    def _take(self, events: list[AnyEvent]) -> None:
        for event in events:
            self._unless_failed(self._callback.on_event, event)

    def _close(self) -> None:
        self._has_failed = False
        self._unless_failed(self._callback.close)

    def _unless_failed(self, method: Callable[..., None], *arguments: object) -> None:
        try:
            if not self._has_failed:
                method(*arguments)
        except Exception as error:  # code of the user
            self._has_failed = True
            why = str(error) if isinstance(error, AdamError) else repr(error)
            logger.warning("%s gets no further events: %s", self.name, why)

    async def _in_thread(self, function: Callable[..., None], *arguments: object) -> None:
        # The shield: the cancellation of `run` must not drop events on their way to the thread.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments))


MOST_BYTES = 64 << 20
"""Size of a file in bytes above which the next lines go to a new one."""

KEPT = 3
"""Number of earlier files that one run keeps."""

REPEAT_S = 10.0
"""Least time in seconds between two lines with one role's counts, or with the status: they are long."""


class EventFile(Callback):
    """Writes events; a new run of a command replaces the file.

    Args:
        path: The file, in a folder that exists.
        most_bytes: Size at which the file is full.

    Raises:
        DataError: In `on_event`, so that the run continues without the file if it cannot be written.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._file: BinaryIO | None = None
        self._bytes = 0
        self._written_at: dict[str, float] = {}

    def on_event(self, event: AnyEvent) -> None:
        """Write a line."""
        name = replaces(event)
        if name and event.at < self._written_at.get(name, 0.0) + REPEAT_S:
            return
        self._written_at[name] = event.at
        line = msgspec.json.encode(event) + b"\n"
        with failing_as(DataError, f"{self._path} cannot be written"):
            if self._file is None or self._bytes + len(line) > self._most_bytes:
                self._open_next()
            assert self._file is not None, "the next file is open"
            self._file.write(line)
        self._bytes += len(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _open_next(self) -> None:
        """Open the first file of the run, or the one after a full one."""
        if self._file is not None:
            self._file.close()
            for number in range(KEPT, 0, -1):
                earlier = self._numbered(number - 1)
                if earlier.exists():
                    earlier.replace(self._numbered(number))
        else:
            for number in range(1, KEPT + 1):  # those of an earlier run
                self._numbered(number).unlink(missing_ok=True)
        self._file = open(self._path, "wb", buffering=0)
        self._bytes = 0

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path
