"""The published values of one bundle on a server: memory on which processes of its host read them."""

import logging
from functools import partial

from adam_async.parameter_server.shard import FamilyMemory, Sheet
from adam_async.parameter_server.shard_group import ShardGroup
from adam_async.parameter_server.store_host import StoreHost
from adam_async.run.store_record import SHEETS
from dataflow import WaitTimedOut
from transport import Link
from transport.regions import region_of

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
"""Time between two attempts to allocate sheets if memory is lacking, in seconds."""


class StoreSheets:
    """Allocates the sheets of the families of one bundle of a store."""

    def __init__(self, store: str, home: str, host: StoreHost) -> None:
        self._store = store
        self._home = home
        self._host = host
        self._is_over = False

    def publish(self, group: ShardGroup, link: Link) -> None:
        """Begin to allocate the sheets on which readers of this host find values; until then they copy."""
        memory = group.memory
        assert memory is not None
        if memory.allocates or self._host.now() < memory.waits_until or not memory.may_publish():
            return
        memory.lacks_sheets, memory.allocates = False, True
        self._host.spawn(f"sheets-{self._store}-{self._home}", self._allocate(memory, link))

    async def _allocate(self, memory: FamilyMemory, link: Link) -> None:
        values = memory.private.values
        nbytes, dtype = values.nbytes, values.dtype
        del values  # pushes may leave it meanwhile
        try:
            async with self._host.make_memory_pool(threads=1, name=f"{self._host.node}-sheets") as pool:
                while len(memory.sheets) < SHEETS and memory.may_publish() and not self._is_over:
                    found = await pool.run(partial(link.publish, nbytes))
                    region = region_of(found.data)
                    assert region is not None
                    memory.sheets.append(Sheet(found.view(dtype), region[0]))
        except (OSError, RuntimeError, WaitTimedOut) as error:
            # Its text: a record of a log could keep the error, with the frames and the memory of this task.
            logger.warning("%s copies the values of store %s: %s", self._host.node, self._store, str(error))
            memory.lacks_sheets, memory.waits_until = True, self._host.now() + AGAIN_S
        finally:
            memory.allocates = False

    def end(self) -> None:
        """Allocate no further sheets: the store leaves the server."""
        self._is_over = True
