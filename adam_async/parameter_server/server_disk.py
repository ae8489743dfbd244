"""The disk of one parameter server: a folder with the states of all stores that it serves or has served."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from adam_async.errors import ConfigError, failing_as
from adam_async.messages import SavedStore
from adam_async.parameter_server.bundle_saver import DiskPorts
from adam_async.parameter_server.pins import PINNED, Pins
from adam_async.parameter_server.store_disk import PREFIX, REMOVED, StoreDisk, folder_of, read_saved_store
from adam_async.persistence.opening import opening, read_identity
from adam_async.persistence.records import FlushSettings
from adam_async.persistence.scan import segment_name
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.store_record import StoreRecord, served_word
from adam_async.run.user_rules import RuleSource
from adam_async.runtime.clock import wall_clock
from adam_async.runtime.disk import Disk

logger = logging.getLogger(__name__)

_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{24}")
_PIN = re.compile(re.escape(PINNED) + "[0-9a-f]{24}")

SAVED = "saved"
"""Key in `NodeRecord.info` of a server. The value lists, as texts, the placements of the stores that the
server's disk has whole."""


class ServerDisk:
    """The stores in one folder, for one server.

    Args:
        folder: Folder that only this server uses; made if absent.
        ports: Services of the process.
    """

    def __init__(self, folder: Path, ports: DiskPorts) -> None:
        self.folder = folder
        self.ports = ports
        self.pins = Pins(folder, ports)
        self._stores: dict[str, StoreDisk] = {}
        self._leaving: set[StoreDisk] = set()
        """Stores that are being removed."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["ServerDisk"]:
        """Open the folder with all its stores until the block ends.

        Raises:
            ConfigError: Another server uses the folder, the folder is unusable, or a newer release wrote it.
            DataError: A store cannot be read.
        """
        states = self.ports.states
        async with AsyncExitStack() as stack:
            with opening(self.folder):
                await states.make_folder(self.folder)
                names = await states.names(self.folder)
                await stack.enter_async_context(states.hold(self.folder / "lock"))
            try:
                for name in names:
                    if name.startswith(REMOVED):  # a crash came before the end of the removal
                        await self._remove_left(self.folder / name)
                    elif _NAME.fullmatch(name):
                        await self._open(self.folder / name)
                    elif _PIN.fullmatch(name):
                        await self.pins.reopen(self.folder / name)
                yield self
            finally:
                for each in (*self._stores.values(), *self._leaving):
                    await each.aclose()

    async def _open(self, folder: Path) -> None:
        with failing_as(ConfigError, f"{folder} cannot be read", f"; move it out of {self.folder}"):
            identity = await read_identity(self.ports.states, folder)
        if identity is None:  # the folder's server ended before the first write
            if any(segment_name(name) for name in await self.ports.states.names(folder)):
                self.ports.notice(
                    f"{folder} is removed: its files are empty; its server ended before the first write, or "
                    "another program emptied them, and the store of this folder does not exist any more"
                )
            await self._remove_left(folder)
            return
        if folder != folder_of(self.folder, identity.run):
            raise ConfigError(
                f"{folder} has the states of store {identity.run}, whose folder has another name: move it "
                f"out of {self.folder}"
            )
        store = StoreDisk(identity.run, folder, self.ports)
        self._stores[identity.run] = store
        await store.reopen()

    def of(self, id: str) -> StoreDisk:
        """Return the disk of the store with an id; make an empty one if absent."""
        store = self._stores.get(id)
        if store is None:
            store = self._stores[id] = StoreDisk(id, folder_of(self.folder, id), self.ports)
        return store

    def find(self, id: str) -> StoreDisk | None:
        """Return the disk of a store; None if the store has none."""
        return self._stores.get(id)

    def of_name(self, name: str) -> list[StoreDisk]:
        """Return the disks of all stores with a name; with an empty name those of all runs."""
        known = [(each.catalogue, each) for each in self if each.catalogue is not None]
        return [each for found, each in known if (found.name == name if name else found.record.program)]

    def __iter__(self) -> Iterator[StoreDisk]:
        return iter(tuple(self._stores.values()))

    async def forget(self, store: StoreDisk) -> None:
        self._stores.pop(store.id, None)
        # If the server ends during the removal, it still has to close the folder.
        self._leaving.add(store)
        await store.retire(is_over=True)
        try:
            await store.remove()
        except OSError as error:
            self.ports.notice_left(store.folder, error)
        self._leaving.discard(store)

    async def _remove_left(self, folder: Path) -> None:
        try:
            await self.ports.states.remove_folder(folder)
        except OSError as error:
            self.ports.notice_left(folder, error)

    def superseded(self, cluster: ClusterMap) -> list[StoreDisk]:
        """Return the saved stores that a later store, whole on the disks, has replaced."""
        found = []
        for name, record in cluster.stores.items():
            mine = self._stores.get(record.id)
            if mine is None or mine.catalogue is None or not is_saved(cluster, record):
                continue
            for each in self:
                old = each.catalogue
                if each is mine or old is None or not each.is_saved or old.began >= mine.catalogue.began:
                    continue
                if old.name == name or (old.record.program and record.program):
                    found.append(each)
        return found

    async def end(self) -> None:
        """Write the last changes of all stores, and stop following them."""
        async with asyncio.TaskGroup() as group:
            for each in self:
                group.create_task(each.end(for_good=True), name=f"ends-{each.id}")

    def __repr__(self) -> str:
        return f"<ServerDisk {self.folder} {len(self._stores)} stores>"


def is_saved(cluster: ClusterMap, store: StoreRecord) -> bool:
    """Return whether all primaries of a store's bundles have reported the bundles on their disks."""
    word = served_word(store)
    for home in set(store.buckets):
        primary = cluster.primary(store.id, home)
        words = primary.info.get(SAVED) if primary is not None else None
        if not isinstance(words, list) or word not in words:
            return False
    return bool(store.buckets)


async def read_saved_stores(folder: Path, disk: Disk) -> list[SavedStore]:
    """List the stores in the folder of a server, which may be running.

    Raises:
        ConfigError, DataError, OSError: See `read_saved_store`.
    """
    names = [name for name in await disk.folders(folder) if _NAME.fullmatch(name)]
    found = [await read_saved_store(folder / name, disk) for name in names]
    return [each for each in found if each is not None]


@asynccontextmanager
async def opened_disk(
    folder: Path, *, flush_s: float, rules: RuleSource | None = None
) -> AsyncIterator[ServerDisk]:
    """Open the disk of a server for as long as the block lasts.

    Args:
        folder: Folder that only this server uses; made if absent.
        flush_s: Time between two rounds of writing, in seconds.
        rules: User rules that the server may apply; None: none.

    Raises:
        ConfigError, DataError: See `ServerDisk.opened`.
    """
    async with AsyncExitStack() as stack:
        ports = DiskPorts(
            states=await stack.enter_async_context(Disk(name="states", private=True)),
            entries=await stack.enter_async_context(Disk(name="entries", private=True)),
            clock=asyncio.get_running_loop().time,
            wall_clock=wall_clock,
            settings=FlushSettings(flush_s=flush_s),
            rules=rules or RuleSource(),
        )
        yield await stack.enter_async_context(ServerDisk(folder, ports).opened())
