"""The pins on the disk of one parameter server: a folder for each bundle of a pin, written once.

A folder has the files of a checkpoint (`persistence/written_once.py`). The rounds and repairs of the store do
not touch it. An unfinished folder has the prefix of removed folders, so the next start after a crash removes
it. The folder gets its final name once all its files are synced. A damaged folder costs the pin on this
server alone.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray

from adam_async.errors import ConfigError, DataError, DeadlineExceeded
from adam_async.messages import MOST_PINS, PinFacts, PinState, SavedPiece, SavedStore, ShardStates
from adam_async.messages.saved_shards import MOST_LISTED_PINS, MOST_PIN_FAULT, SAVED_PIECE_BYTES
from adam_async.messages.tensors import UNREADABLE
from adam_async.parameter_server.bundle_saver import DiskPorts
from adam_async.parameter_server.kept_shards import PinCopies
from adam_async.parameter_server.piece_states import (
    CATALOGUE,
    CONTENTS,
    PIN,
    Catalogue,
    catalogue_state,
    kept_state,
    load_tensors,
    new_bundle,
    pieces_by_name,
    read_catalogue,
    tensors_of,
)
from adam_async.parameter_server.shard_transfer import read_states
from adam_async.persistence import written_once
from adam_async.persistence.records import LEADING, Identity, Order, State, StateKey, StateName
from adam_async.persistence.written_once import FoundState, Head, read_head, write_once
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec, shard_table
from adam_async.run.store_record import StoreRecord
from adam_async.runtime.clock import Within
from transport import RemoteProtocolError

PINNED, REMOVED = "pin-", "removed-"
"""Prefixes of the names of pin folders, and of folders that are being written or removed."""

NO_MEMORY = "no memory is left"
"""Reason why a server that lacked memory has not saved a pin."""

PIECE_S = 60.0
"""Maximum time for a piece of a pin, in seconds. After this time the pin is given up, because pushes may wait
for the disk."""

Key = tuple[int, str]
"""Id of a pin, and name of a bundle."""


def store_of(pin: int) -> str:
    """Return the store id under which a pin's states are read."""
    return f"pin-{pin:014x}"


class _Saved(NamedTuple):
    """A bundle of a pin on the disk."""

    store: str
    """Name of the store."""
    facts: PinFacts
    listed_bytes: int
    """Memory of the pin's entry in the answer to `ListSaved`, in bytes."""


class _Opened(NamedTuple):
    """A bundle of a pin that is being read."""

    key: Key
    head: Head
    record: StoreRecord
    table: Sequence[ShardSpec]
    pieces: Mapping[StateName, Sequence[ShardSpec]]
    places: Mapping[StateName, tuple[str, FoundState]]
    """File and place of each piece."""


class _Writing(NamedTuple):
    """A bundle of a pin that is being written."""

    store: str
    """Name of the store."""
    facts: PinFacts
    copies: PinCopies
    taken: Callable[[], None]


class Pins:
    """The pins in the folder of one server."""

    def __init__(self, folder: Path, ports: DiskPorts) -> None:
        self._folder = folder
        self._ports = ports
        self._found: dict[Key, _Saved] = {}
        """The bundles on the disk."""
        self._faults: dict[Key, tuple[str, PinState]] = {}
        """The newest bundles that could not be saved."""
        self._writing: dict[Key, _Writing] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened: _Opened | None = None
        """The bundle that was read last."""
        self._opening = asyncio.Lock()
        self._removing = asyncio.Lock()

    def _folder_of(self, key: Key) -> Path:
        digest = blake2b(f"{key[0]}/{key[1]}".encode(), digest_size=12).hexdigest()
        return self._folder / f"{PINNED}{digest}"

    async def reopen(self, folder: Path) -> None:
        """Read a folder of an earlier start; log a damaged folder, which then does not count."""
        try:
            head = await read_head(self._ports.states, folder, contents=CONTENTS)
            facts = _facts_of(head, str(folder))
            catalogue = read_catalogue(head.states[CATALOGUE].parts, str(folder))
            if folder != self._folder_of((facts.pin, facts.home)):
                raise DataError(f"{folder} has another name than its pin {facts.name} gives it")
            await written_once.check_sizes(self._ports.states, folder, head)
        except (ConfigError, DataError, KeyError, OSError) as error:
            self._ports.notice(f"the pin in {folder} cannot be read: {error}; remove the folder")
            return
        listed = _listed_bytes(catalogue, len(head.keys))
        self._found[facts.pin, facts.home] = _Saved(catalogue.name, facts, listed)

    # --- writing -----------------------------------------------------------------------------

    def begin(self, task: "asyncio.Task[None]") -> None:
        """Follow a task that writes a pin."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        """Cancel all writing: the server ends, and must not wait for its disk."""
        for task in tuple(self._tasks):
            task.cancel()

    def fail(self, name: str, facts: PinFacts, why: str) -> None:
        """Record why a bundle of a pin is not saved, unless it is saved."""
        key = facts.pin, facts.home
        if key not in self._found:
            state = PinState(facts=facts, fault=why[:MOST_PIN_FAULT] or "it failed")
            self._faults[key] = name, state
            for old in [*self._faults][: -4 * MOST_PINS]:
                del self._faults[old]

    def refusal(self, name: str, pin: int) -> str:
        """Return why this server saves no further pin of the stores with a name; empty if it does."""
        known = [(id, saved.store) for (id, _), saved in self._found.items()]
        known += [(id, writing.store) for (id, _), writing in self._writing.items()]
        # A client may forge an id: the folder of a pin has no name of a store.
        if any(id == pin and store != name for id, store in known):
            return "another store has a pin of this id: draw a new id"
        others = {id for id, store in known if store == name and id != pin}
        if len(others) < MOST_PINS:
            return ""
        return f"it has {len(others)} pins of store {name!r}, {MOST_PINS} are the most: remove one with unpin"

    async def write(
        self,
        copies: PinCopies,
        catalogue: Catalogue,
        facts: PinFacts,
        pieces: Sequence[Sequence[ShardSpec]],
        order: Order,
        taken: Callable[[], None],
    ) -> None:
        """Write a bundle of a pin; on a failure, record it and remove the written files.

        Args:
            pieces: The shards of the bundle, cut into pieces.
            order: Generation and position of the pin in the log.
            taken: Called when the copies have room again.
        """
        key = facts.pin, facts.home
        if key in self._writing:  # by a store that has left, or one whose client has drawn the same id
            self.fail(catalogue.name, facts, "the server still removes an earlier one of this id")
            copies.end()
            return
        self._writing[key] = _Writing(catalogue.name, facts, copies, taken)
        folder, disk = self._folder_of(key), self._ports.states
        aside = folder.with_name(REMOVED + folder.name)
        record = catalogue.record
        record = msgspec.structs.replace(
            record, id=store_of(facts.pin), vectors=record.lasting_vectors, vector_bytes=()
        )
        catalogue = Catalogue(catalogue.name, record, catalogue.arrays, facts.began_ms / 1000)

        def head() -> list[State]:
            if copies.is_given_up:
                return []
            packed = [msgspec.msgpack.encode(facts)]
            return [catalogue_state(catalogue), State(StateKey(*PIN, *order, 0), packed)]

        try:
            identity = Identity(run=record.id, contents=CONTENTS)
            async with (
                Within(PIECE_S, "the disk to take a piece") as limit,
                aclosing(self._states(copies, record, facts.home, pieces, order, taken, limit)) as states,
            ):
                await disk.remove_folder(aside)
                await disk.make_folder(aside)
                is_whole = await write_once(disk, aside, identity, states, head)
            if is_whole:
                await disk.rename(aside, folder)
                listed = _listed_bytes(catalogue, len(pieces))
                self._found[key] = _Saved(catalogue.name, facts, listed)
                self._faults.pop(key, None)
            if copies.is_given_up:  # perhaps during the last writes
                await self.remove(facts.pin)
                await disk.remove_folder(aside)
        except (OSError, MemoryError, DeadlineExceeded) as error:
            why = getattr(error, "strerror", None) or str(error) or NO_MEMORY
            if copies.lacks_memory or not copies.is_given_up:
                self.fail(catalogue.name, facts, f"{self._folder} cannot take it: {why}")
            copies.end()
            taken()
            with suppress(OSError):  # the next start removes it
                await disk.remove_folder(aside)
        finally:
            del self._writing[key]
            copies.end()

    async def _states(
        self,
        copies: PinCopies,
        record: StoreRecord,
        home: str,
        pieces: Sequence[Sequence[ShardSpec]],
        order: Order,
        taken: Callable[[], None],
        limit: asyncio.Timeout,
    ) -> AsyncGenerator[State, None]:
        """Yield the pieces of a pin until it is given up. `limit` gives each piece `PIECE_S`."""
        left = {number: specs for number, specs in enumerate(pieces) if specs}
        while left:
            number = copies.next_of(left)
            state = kept_state(copies, record, home, number, left.pop(number), order=order)
            if copies.lacks_memory:
                raise MemoryError
            if state is None:
                return
            taken()
            # Without copies no push waits for the disk.
            limit.reschedule(asyncio.get_running_loop().time() + PIECE_S if left else None)
            if self._ports.observe is not None:
                self._ports.observe(state, record.id)
            yield state

    async def remove(self, pin: int, store: str = "") -> None:
        """Remove a pin, or all pins of the stores with a name, from the disk; stop writing them, too."""
        for key, writing in self._writing.items():
            if writing.store == store or key[0] == pin:
                writing.copies.end()
                writing.taken()
        async with self._removing:  # a second call returns after the removals of the first
            named = {key: saved.store for key, saved in self._found.items()}
            named |= {key: of for key, (of, _) in self._faults.items()}
            for key in [key for key, of in named.items() if of == store or key[0] == pin]:
                self._faults.pop(key, None)
                if self._found.pop(key, None) is not None:
                    await self._remove_folder(self._folder_of(key))

    async def _remove_folder(self, folder: Path) -> None:
        aside, disk = folder.with_name(REMOVED + folder.name), self._ports.states
        try:
            await disk.remove_folder(aside)
            await disk.rename(folder, aside)
            await disk.remove_folder(aside)
        except OSError as error:
            self._ports.notice_left(folder, error)

    # --- reading -----------------------------------------------------------------------------

    def states(self, name: str) -> list[PinState]:
        """Return the bundles of all pins of the stores with a name.

        The result includes failed bundles and bundles that are being written.
        """
        found = [PinState(facts=saved.facts) for saved in self._found.values() if saved.store == name]
        found += [state for store, state in self._faults.values() if store == name]
        for key, writing in self._writing.items():
            if writing.store == name and key not in self._found:
                if writing.copies.lacks_memory:  # the disk may stand still, so `write` says it later
                    found.append(PinState(facts=writing.facts, fault=NO_MEMORY))
                elif not writing.copies.is_given_up:
                    found.append(PinState(facts=writing.facts, writes=True))
        return found[:MOST_LISTED_PINS]

    def _named(self, name: str, pin: str) -> list[tuple[Key, _Saved]]:
        return [each for each in self._found.items() if (each[1].store, each[1].facts.name) == (name, pin)]

    def listed_bytes(self, name: str, pin: str) -> int:
        """Return the memory of `saved`, in bytes."""
        return sum([saved.listed_bytes for _, saved in self._named(name, pin)])

    async def saved(self, name: str, pin: str) -> list[SavedStore]:
        """Return the pins with a name, each as a saved store with the pieces on this disk."""
        found: dict[int, SavedStore] = {}
        for key, (_, facts, _) in self._named(name, pin):
            try:
                head, catalogue = await self._read_head(key)
            except (ConfigError, DataError, KeyError, OSError) as error:
                self._ports.notice(f"pin {pin} of store {name!r} cannot be read: {error}")
                continue
            of_bundle = [each for each in head.keys if each.home != LEADING]
            pieces = [SavedPiece(each.home, each.shard, *each.order) for each in of_bundle]
            before = found.get(facts.pin)
            found[facts.pin] = SavedStore(
                name=name,
                id=catalogue.record.id,
                record=msgspec.json.encode(catalogue.record),
                arrays=msgspec.json.encode(catalogue.arrays),
                pieces=(*(before.pieces if before is not None else ()), *pieces),
                began_ms=facts.began_ms,
            )
        return list(found.values())

    def has(self, store: str, home: str) -> bool:
        """Return whether the disk has a bundle of a pin, given the id of its states."""
        return any((store_of(pin), at) == (store, home) for pin, at in self._found)

    async def bytes_of(self, store: str, home: str, piece: int) -> int:
        """Return the memory needed to read a piece of a pin, in bytes; errors as in `read`."""
        opened = await self._open(store, home, piece)
        specs = opened.pieces[StateName(home, piece)]
        return sum([spec.nbytes for spec in specs]) * opened.record.arrays_per_value

    async def read(
        self, store: str, home: str, piece: int, numbers: Sequence[int]
    ) -> tuple[ShardStates, list[NDArray[Any]]]:
        """Read some shards of a piece, which have one rule.

        Raises:
            DataError, ConfigError: The disk has no such shards, or their files are damaged or too large.
        """
        key, head, record, table, pieces, places = await self._open(store, home, piece)
        name, origin = StateName(home, piece), f"piece {piece} of bundle {home} of {store}"
        file, place = places[name]
        try:
            state = await written_once.read_state(self._ports.states, self._folder_of(key), head, file, place)
            bundle = new_bundle(record, pieces[name], record.rules)
            load_tensors(bundle, pieces[name], table, tensors_of(state.parts, origin))
        except (RemoteProtocolError, OSError) as error:
            raise DataError(f"{origin} cannot be read: {error}") from None
        shards = [bundle.shards[id] for number in numbers if (id := ShardId(number)) in bundle.shards]
        if len(shards) < len(numbers) or len({shard.spec.rule for shard in shards}) != 1:
            raise DataError(
                f"{origin} has not all of shards {tuple(numbers[:8])}, or they have several rules"
            )
        return read_states(shards, record.rules[shards[0].spec.rule])

    async def _open(self, store: str, home: str, piece: int) -> _Opened:
        """Return the bundle of a pin with the places of its pieces. Raises DataError, ConfigError."""
        key = next((key for key in self._found if (store_of(key[0]), key[1]) == (store, home)), None)
        if key is None:
            raise DataError(f"bundle {home} of {store} is not on this disk")
        async with self._opening:  # one file at a time is read into memory
            if self._opened is None or self._opened.key != key:
                try:
                    self._opened = await self._open_now(key)
                except (KeyError, OSError) as error:
                    raise DataError(f"{self._folder_of(key)} cannot be read: {error}") from None
            opened = self._opened
        if StateName(home, piece) not in opened.places.keys() & opened.pieces.keys():
            raise DataError(f"bundle {home} of {store} has no piece {piece}")
        return opened

    async def _read_head(self, key: Key) -> tuple[Head, Catalogue]:
        folder = self._folder_of(key)
        head = await read_head(self._ports.states, folder, contents=CONTENTS)
        return head, read_catalogue(head.states[CATALOGUE].parts, str(folder))

    async def _open_now(self, key: Key) -> _Opened:
        folder, (head, catalogue) = self._folder_of(key), await self._read_head(key)
        places: dict[StateName, tuple[str, FoundState]] = {}
        for file in head.files:
            for each in await written_once.read_states(self._ports.states, folder, head, file):
                where = FoundState(each.key, memoryview(b""), each.sizes, each.position, each.end)
                places[each.key.name] = file, where
        record = catalogue.record
        table = shard_table(catalogue.arrays, shard_bytes=record.shard_bytes).shards
        return _Opened(key, head, record, table, pieces_by_name(record, table), places)

    def __repr__(self) -> str:
        return f"<Pins {self._folder} {len(self._found)} bundles>"


def _listed_bytes(catalogue: Catalogue, pieces: int) -> int:
    texts = [msgspec.json.encode(each) for each in (catalogue.record, catalogue.arrays)]
    return sum(map(len, texts)) + SAVED_PIECE_BYTES * pieces


def _facts_of(head: Head, origin: str) -> PinFacts:
    """Return the facts of a folder. Raises DataError: it has none."""
    try:
        return msgspec.msgpack.decode(b"".join(head.states[PIN].parts), type=PinFacts)
    except (*UNREADABLE, KeyError) as error:
        raise DataError(f"{origin} has no readable record of its pin: {error}") from None
