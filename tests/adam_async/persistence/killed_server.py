"""A server on a real folder that a test kills: `python killed_server.py FOLDER`.

It prints the position that its folder has, and then each position that it acknowledges.
"""

import asyncio
import sys
from pathlib import Path

from adam_async.persistence.records import StateName
from adam_async.runtime.disk import Disk
from tests.adam_async.persistence.disks import Running
from tests.adam_async.persistence.owners import SMALL, Owner, check_states, contents_in, store_of

HOME = "a"
MOST = 20_000


def history() -> list[tuple[int, ...]]:
    """Return the entries, which are the same in each process."""
    return [tuple({position % 6, position * 7 % 6, position // 10 % 6}) for position in range(1, MOST)]


def position_in(folder: Path, owner: Owner) -> int:
    """Return the position up to which states and entries are in a folder, after a check of their bytes."""
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.segment"))}
    contents = contents_in(files)
    assert not contents.damages, contents.damages
    check_states(files, contents, owner)
    entries = {key.position for key in contents.entries}
    states = {name.shard: key.position for name, (key, _) in contents.states.items()}
    for position, shards in enumerate(owner.bundles[HOME].history, 1):
        if position not in entries and any(states.get(shard, 0) < position for shard in shards):
            return position - 1
    raise AssertionError("the history is too short")


def report(position: int) -> None:
    """Print a position at once."""
    sys.stdout.write(f"{position}\n")
    sys.stdout.flush()


async def serve(folder: Path) -> None:
    """Append, apply and flush until killed."""
    owner = Owner(HOME)
    bundle = owner.bundles[HOME]
    bundle.history = history()
    async with Disk() as disk, Disk() as entries_disk:
        async with Running(
            store_of(disk, owner, entries_disk=entries_disk, path=folder, settings=SMALL)
        ) as store:
            begin = bundle.applied = position_in(folder, owner)
            report(begin)
            for shard in range(6):
                known = store.recovery.states.get(StateName(HOME, shard))
                if known is None or known.version < bundle.version(shard, begin):
                    store.mark(StateName(HOME, shard), 1000)
            for position in range(begin + 1, MOST):
                await store.append_durably(*bundle.entry(position))
                report(position)
                owner.apply(store, HOME, position)
                if position % 7 == 0:
                    await store.flush()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
