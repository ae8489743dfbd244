"""kill -9 of the roles of a training, again and again: does each image count exactly once in every shard?

    python -m benchmarks.training_kills --kills 5 --seed 1 --json FILE [--kind driver] [--mode bsp]

Every role is a process that is started by hand. A seed draws the moments of the kills (SIGKILL), and the
killed processes start again with the same commands. The kinds of kills are

    worker           one of two workers, within a step
    data servers     all of them, half of the time only one
    driver           it comes back with `train --attach`
    one server       one of three servers, each shard with three copies
    everything       all processes; the servers come back with their folders, as with `train --store`

Half of the kills are in asp, a quarter in ssp:2 and a quarter in bsp: 200 with `--kills 5`, 40 of each kind.

The values of the model count its images: a step adds 1 to the count of each of its images. An audit reads all
shards with their sets of groups, while training goes on: after each kill, and when an epoch has ended. Each
shard must have all groups of each ended epoch except the skipped ones, and exactly the counts of the groups
in its sets; in `bsp`, where a sum is a mean, a count is at most the number of the image's groups.

With `--bits SEEDS` a training of digits in `bsp` must end with the bits of an undisturbed one, whichever
processes are killed: data servers, dealers and drivers, in a run from its begin and in one that goes on with
`--resume` after all processes were killed; these or all processes, in a run on disks; and all processes of
`train --processes --store`, at any time. `--kills` is then the number of each run.

Rows, one per kind and mode: kills; audits, epochs, and faults, of which there must be none; the longest time
from a kill to the next trained group, in seconds.
"""

import asyncio
import hashlib
import os
import random
import signal
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adam_async.checkpoint.checkpoint import StoredPieces
from adam_async.checkpoint.files import load_checkpoint
from adam_async.checkpoint.shard_transfer import ShardCopies
from adam_async.cluster.networks import network_for
from adam_async.controller.client import Membership
from adam_async.data_server.epoch import EpochOrder, EpochOrders
from adam_async.errors import AdamError
from adam_async.messages import ShardState
from adam_async.model.keyed_random import Dice
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.piece_states import catalogue_of
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import state_of
from adam_async.persistence.records import StateName
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.config import Config, Waits
from adam_async.run.counts import SkippedGroups, skipped_groups
from adam_async.run.training_program import read_training
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.traffic import Traffic
from benchmarks._tally import IMAGES, write_files
from benchmarks.controller_gaps import children_of
from benchmarks.harness import ROOT, Option, Row, run
from transport import BufferPool, Identity, TransportError

KINDS = ("worker", "data servers", "driver", "one server", "everything")
GROUP_IMAGES, SHARD_BYTES, SEED = 4, 2048, 5
LAYER = ("--layer", "tally=benchmarks._tally:Tally")
RETURN_S = 120.0
"""Deadline of the first group after a kill, and of the last epochs, in seconds."""
READ_S = 20.0
"""Deadline of a reading of all shards, in seconds."""
PAUSE_S = 0.05
PASSING = (AdamError, TransportError, TimeoutError, ExceptionGroup)
"""Errors of an observer while roles are dead or start again."""
LATEST_S = 1.5
"""Latest moment of a kill after the first trained group, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Options of a training."""

    name: str
    options: tuple[str, ...]
    workers: int = 2
    times: int = 1
    """Number of kills in multiples of `--kills`."""
    may_skip: bool = True
    """Whether an epoch may skip groups."""
    exact: bool = True
    """Whether a count is the number of times that its image was trained."""


MODES = (
    Mode(name="asp, 1 group", options=("--consistency", "asp")),
    Mode(name="asp, 4 groups", options=("--consistency", "asp", "--push-every", "4")),
    Mode(name="ssp:2", options=("--consistency", "ssp:2"), times=2, may_skip=False),
    Mode(name="bsp", options=("--consistency", "bsp"), times=2, may_skip=False, exact=False),
    Mode(name="2 partitions", options=("--partitions", "2"), workers=4),
    Mode(name="pool", options=("--epoch-rule", "images")),
)


class Roles:
    """The processes of one cluster, each with the command that starts it again."""

    def __init__(
        self,
        folder: Path,
        driver: Sequence[str],
        *,
        data: str,
        servers: int = 2,
        workers: int = 2,
        disks: bool = False,
        by_hand: bool = True,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        join = ("--controller", self.where)
        self._log = (folder / "log").open("ab")
        self._commands: dict[str, tuple[str, ...]] = {"controller": ("controller", "--bind", self.where)}
        for number in range(servers):
            disk = ("--dir", str(folder / f"ps-{number}"), "--flush-s", "0.2") if disks else ()
            self._commands[f"ps-{number}"] = ("ps", "--id", f"ps-{number}", *disk, *join)
        for number in range(2):
            self._commands[f"data-{number}"] = ("data", "--id", f"data-{number}", "--data", data, *join)
        for number in range(workers):
            words = ("worker", "--id", f"worker-{number}", "--threads", "1", *LAYER, "--join", self.where)
            self._commands[f"worker-{number}"] = words
        fixed = ("--replicas", "2", "--servers", str(servers), "--kernels", "numpy", "--seed", str(SEED))
        self._commands["driver"] = ("train", "--attach", *join, *fixed, *driver)
        if not by_hand:
            one = ("--processes", "--data", data, "--data-servers", "2", "--threads", "1", "--flush-s", "0.2")
            self._commands = {"driver": ("train", "--store", str(folder / "store"), *one, *fixed, *driver)}
        self.over = asyncio.Event()
        """Whether the driver has ended without an error."""
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, role: str) -> list[str]:
        """Return the names of the processes of a role."""
        return [name for name in self._commands if name.partition("-")[0] == role]

    def start(self) -> None:
        """Start all processes; each is started again whenever it ends."""
        self._tasks = {asyncio.create_task(self._keep(name), name=name) for name in self._commands}

    async def _keep(self, name: str) -> None:
        while True:
            process = self._running[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "adam_async", *self._commands[name]),
                cwd=ROOT,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
            await process.wait()
            if name == "driver" and process.returncode == 0:
                self.over.set()
                return
            await asyncio.sleep(PAUSE_S)

    def kill(self, names: Sequence[str]) -> None:
        """Kill processes, with the roles that they have started."""
        for name in names:
            process = self._running.get(name)
            if process is not None and process.returncode is None:
                for pid in (process.pid, *children_of(process.pid, b"--id")):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def everything(self) -> list[str]:
        """Return the names of all processes."""
        return list(self._commands)

    async def end(self) -> None:
        """Kill all processes, and start none again."""
        for task in self._tasks:
            task.cancel()
        self.kill(self.everything())
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(each.wait() for each in self._running.values()))
        self._log.close()


def counting_roles(folder: Path, kind: str, mode: Mode) -> Roles:
    """Make the roles of a training whose values count its images."""
    data, model = write_files(folder)
    servers = 3 if kind == "one server" else 2
    words: tuple[str, ...] = (
        *LAYER, "--model", str(model), "--epochs", "100000", "--copies", str(servers if servers == 3 else 1),
        "--images-per-group", str(GROUP_IMAGES), "--shard-bytes", str(SHARD_BYTES), "--rule", "sgd",
        "--rate", "1", "--schedule", "constant", *mode.options,
    )  # fmt: skip
    disks = kind == "everything"
    if disks and mode.may_skip:
        words += ("--epoch-fraction", "1")  # a run that goes on has not the results of all earlier epochs
    return Roles(folder, words, data=str(data), servers=servers, workers=mode.workers, disks=disks)


@asynccontextmanager
async def observed(where: str) -> AsyncIterator[tuple[Membership, Endpoint]]:
    """Join a cluster as an observer, which must see an epoch within `READ_S`."""
    config = Config(waits=Waits(patience_s=READ_S))
    network = network_for(config, None, entropy=system_entropy, buffers=BufferPool())
    incarnation = int.from_bytes(system_entropy(7), "little")
    identity = Identity(role="driver", node=f"auditor-{incarnation}", incarnation=incarnation)
    member = Membership(
        network=network,
        controller=where,
        identity=identity,
        record=NodeRecord(role="driver", address="", incarnation=incarnation),
        waits=config.waits,
        traffic=Traffic(identity.node),
    )
    running = asyncio.create_task(member.run(), name="auditor")
    try:
        async with asyncio.timeout(READ_S):
            await member.wait_for(lambda found: found.epoch is not None, "an epoch", READ_S)
            yield member, Endpoint(network, identity, Traffic(identity.node))
    finally:
        with suppress(*PASSING):
            async with asyncio.timeout(1):
                await member.leave()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Missed(Exception):
    """Results of epochs have left the map before an audit noted them."""


class Audit:
    """Reads the shards of the run in the map, and compares their counts with their sets."""

    def __init__(self, where: str, *, exact: bool, may_skip: bool = True) -> None:
        self._exact, self._may_skip = exact, may_skip
        self._where = where
        self._orders = EpochOrders(Dice(SEED), num_images=IMAGES, images_per_group=GROUP_IMAGES)
        self._made: dict[int, EpochOrder] = {}
        self._skipped: dict[int, SkippedGroups] = {}
        """Skipped groups of each ended epoch."""
        self._whole = [np.zeros(IMAGES)]
        """How often each image was trained before epoch 1, 2, ..."""
        self.audits = 0
        self.faults: list[str] = []
        self.groups = 0
        """Number of groups of the shard that has the fewest, in the last reading."""

    @property
    def ended(self) -> int:
        """Number of ended epochs."""
        return max(self._skipped, default=0)

    async def read(self) -> bool:
        """Read all shards, and check them. Returns False if the cluster does not train now."""
        try:
            async with observed(self._where) as (member, endpoint):
                waits = Waits(patience_s=READ_S)
                copies = ShardCopies(endpoint, changes=member.changes, waits=waits)
                await self._read(member, member.map, copies)
                return True
        except PASSING:
            return False  # roles are dead or start again

    async def _read(self, member: Membership, cluster: ClusterMap, copies: ShardCopies) -> None:
        if not cluster.in_progress or cluster.run is None:
            raise TimeoutError
        name, store = next(item for item in cluster.stores.items() if item[1].id == cluster.run.id)
        counted: list[Shard] = []

        async def put(_: StateName, bundle: Bundle) -> None:
            counted.extend(each for each in bundle.shards.values() if each.spec.tensor == "tally.count")

        pieces = StoredPieces(catalogue_of(cluster, name, store, began=0.0))
        await copies.read(cluster, pieces, put, within_s=READ_S)
        self._note_results(member.map)
        self.audits += 1
        for shard in counted:
            self._check(shard.spec.start, shard.values, state_of(shard), cluster.ended)
        self.groups = min(_groups_of(state_of(shard)) for shard in counted)

    def _note_results(self, cluster: ClusterMap) -> None:
        results = list(cluster.results)
        resumed = read_training(cluster.run).resumed if cluster.run is not None else None
        if resumed is not None:
            results = [*resumed.results, *results]
        first = cluster.ended - len(results) + 1
        if not self._may_skip:
            self._skipped |= dict.fromkeys(range(self.ended + 1, first), ())
        elif first > self.ended + 1:
            # The order of an epoch depends on the groups that the epochs before have skipped.
            raise Missed(f"the map has the results from epoch {first} on, the audit those to {self.ended}")
        for epoch, ranges in enumerate(skipped_groups(results), start=first):
            if self._skipped.setdefault(epoch, ranges) != ranges:
                self.faults.append(f"epoch {epoch} skipped {self._skipped[epoch]}, and then {ranges}")

    def _check(self, start: int, counts: np.ndarray, state: ShardState, ended: int) -> None:
        """Compare the counts of a shard with its sets, and its sets with the ended epochs."""
        kept = {epoch: {*_numbers(ranges)} for epoch, ranges in state.groups.items()}
        if max(kept, default=0) > self.ended + 1:
            return  # the result of the epoch before is on its way
        first = min(kept, default=1)
        images = self._before(first).copy()
        for epoch in range(first, max([*kept, ended]) + 1):
            found = kept.get(epoch, set())
            if epoch <= ended and found != (trained := self._trained(epoch)):
                lacks, more = sorted(trained - found), sorted(found - trained)
                self.faults.append(
                    f"shard at {start}, epoch {epoch}: lacks {lacks[:9]}, has skipped {more[:9]}"
                )
            images += self._images(epoch, found)
        expected = images[start : start + len(counts)]
        is_wrong = (counts != expected) if self._exact else (counts > expected) | (counts < expected / 8)
        if is_wrong.any():
            at = int(np.flatnonzero(is_wrong)[0])
            self.faults.append(
                f"shard at {start}, epoch {ended + 1}: {int(is_wrong.sum())} counts are wrong, such as "
                f"{counts[at]:g} for {expected[at]:g} of image {start + at}"
            )

    def _before(self, epoch: int) -> np.ndarray:
        """Return how often the epochs before this one have trained each image."""
        while len(self._whole) < epoch:
            last = len(self._whole)
            self._whole.append(self._whole[-1] + self._images(last, self._trained(last)))
        return self._whole[epoch - 1]

    def _trained(self, epoch: int) -> set[int]:
        """Return the groups of an ended epoch that it has not skipped."""
        skipped = {number for each in self._skipped[epoch] for number in range(*each)}
        return set(range(self._orders.num_groups)) - skipped

    def _images(self, epoch: int, groups: set[int]) -> np.ndarray:
        """Return 1 for each image in these groups of an epoch, and 0 for the others."""
        counts = np.zeros(IMAGES)
        rows = self._order(epoch).indices.reshape(-1, GROUP_IMAGES)
        counts[rows[sorted(groups)]] = 1
        return counts

    def _order(self, epoch: int) -> EpochOrder:
        # With skipped groups an order needs those of the epochs before.
        if epoch not in self._made:
            skipped = [self._skipped[before] for before in range(1, epoch)]
            self._made[epoch] = self._orders.order(epoch, skipped)
        return self._made[epoch]


def _numbers(ranges: Sequence[int]) -> list[int]:
    return [number for at in range(0, len(ranges), 2) for number in range(ranges[at], ranges[at + 1])]


def _groups_of(state: ShardState) -> int:
    """Return a number that grows with the groups of a shard."""
    newest = max(state.groups, default=0)
    return newest * IMAGES + len(_numbers(state.groups.get(newest, ())))


async def progressed(audit: Audit, before: int) -> None:
    """Audit until all shards have further groups."""
    async with asyncio.timeout(RETURN_S):
        while True:
            if await audit.read() and audit.groups > before:
                return
            await asyncio.sleep(PAUSE_S)


def victims(roles: Roles, kind: str, dice: random.Random) -> list[str]:
    """Draw the processes of a kill."""
    if kind == "everything":
        return roles.everything()
    if kind == "data servers":
        names = roles.of("data")
        return names if dice.random() < 0.5 else [dice.choice(names)]
    return [dice.choice(roles.of({"worker": "worker", "driver": "driver", "one server": "ps"}[kind]))]


async def killed(kind: str, mode: Mode, arguments: Namespace) -> Row:
    """Measure one row."""
    dice = random.Random(f"{arguments.seed}/{kind}/{mode.name}")
    kills, longest_s, error, wanted_kills = 0, 0.0, "", arguments.kills * mode.times
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        roles = counting_roles(Path(folder), kind, mode)
        audit = Audit(roles.where, exact=mode.exact, may_skip=mode.may_skip and kind != "everything")
        roles.start()
        try:
            await progressed(audit, 0)
            while kills < wanted_kills and not audit.faults:
                await asyncio.sleep(dice.uniform(0, LATEST_S))
                await audit.read()
                before, begin = audit.groups, time.perf_counter()
                roles.kill(victims(roles, kind, dice))
                kills += 1
                await progressed(audit, before if kind != "everything" else 0)
                longest_s = max(longest_s, time.perf_counter() - begin)
            wanted = audit.ended + 2  # the current epoch, and a whole one
            async with asyncio.timeout(RETURN_S):
                while audit.ended < wanted and not audit.faults:
                    await audit.read()
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            error = f"no further group within {RETURN_S:g} s"
        except Missed as missed:
            error = str(missed)
        finally:
            await roles.end()
        if error or audit.faults:
            (arguments.folder / f"{kind}-{mode.name}.log").write_bytes((Path(folder) / "log").read_bytes())
    return {
        "case": f"{kind}, {mode.name}",
        "seed": arguments.seed,
        "kills": kills,
        "audits": audit.audits,
        "epochs": audit.ended,
        "faults": audit.faults[:20],
        "longest_without_progress": round(longest_s, 2),
        "unit": "s",
        "error": error,
        "met": kills == wanted_kills and not audit.faults and not error,
    }


# --- bits in bsp -------------------------------------------------------------------------------

LEARNING = (
    "--consistency", "bsp", "--images-per-group", "4", "--epochs", "24", "--rate", "0.05",
)  # fmt: skip
"""Options of a training of digits whose values must have the bits of an undisturbed one."""

OF_ROLES = ("dealer", "data servers", "driver")

SETUPS = {
    "by hand": OF_ROLES,
    "resumed": OF_ROLES,
    "on disks": (*OF_ROLES, "everything"),
    "one command": ("everything",),
}
"""Trainings of `--bits`, and the kinds of their kills. Before a resumed one all processes are killed."""

WENT_ON = b"goes on from the disks of its servers"

EPOCH, LOG_BYTES = b": loss ", 1 << 20
"""Text in the line of each epoch that `train` has trained, and maximum size of its log, in bytes."""


async def in_progress(roles: Roles, after: int) -> tuple[int, str]:
    """Wait until a later epoch is in progress on all replicas; return its number and the dealer."""
    async with asyncio.timeout(RETURN_S):
        while not roles.over.is_set():
            with suppress(*PASSING):
                async with observed(roles.where) as (member, _):
                    found = await member.wait_for(lambda it: trains(it, after), "training", READ_S)
                    assert found.epoch is not None
                    return found.epoch.number, found.dealing
            await asyncio.sleep(PAUSE_S)
    return 0, ""


async def printed(log: Path, before: int) -> int:
    """Wait until the log has a further epoch; return the number of trained epochs, some trained again."""
    async with asyncio.timeout(RETURN_S), Disk() as disk:
        while True:
            found = (await disk.read_bytes(log, LOG_BYTES)).count(EPOCH)
            if found > before:
                return found
            await asyncio.sleep(PAUSE_S)


def trains(cluster: ClusterMap, after: int) -> bool:
    """Return whether an epoch after this one is in progress on all replicas."""
    epoch = cluster.epoch
    ready = epoch is not None and epoch.number > after and not epoch.ended and cluster.in_progress
    return ready and bool(cluster.dealing) and len(cluster.replica_generations()) == 2


async def checkpointed(folder: Path) -> None:
    """Wait until a folder has a whole checkpoint."""
    async with asyncio.timeout(RETURN_S), Disk() as disk:
        while True:
            with suppress(AdamError):
                await load_checkpoint(folder, disk)
                return
            await asyncio.sleep(PAUSE_S)


def learning_roles(folder: Path, setup: str, *, again: bool = False) -> Roles:
    """Make the roles of a training of digits."""
    checkpoints = str(folder / "checkpoints")
    words: tuple[str, ...] = (*LEARNING, "--out", str(folder / "out"))
    if setup == "resumed":
        saves = ("--checkpoint", checkpoints, "--checkpoint-every", "200")
        words += ("--resume", checkpoints) if again else saves
    return Roles(folder, words, data="digits", disks=setup == "on disks", by_hand=setup != "one command")


async def kill_everything(folder: Path, dice: random.Random) -> None:
    """Train until there is a checkpoint, and kill all processes."""
    roles = learning_roles(folder, "resumed")
    roles.start()
    try:
        await checkpointed(folder / "checkpoints")
        await asyncio.sleep(dice.uniform(0, LATEST_S))
    finally:
        await roles.end()


async def learned(
    folder: Path, setup: str, dice: random.Random, *, kills: int
) -> tuple[str, Counter[str], int]:
    """Train digits to the end; return the digest of the model, the kills, and the epoch before the last."""
    roles, number, dealer, done = learning_roles(folder, setup, again=True), 0, "", Counter[str]()
    roles.start()
    try:
        while done.total() < kills:
            if setup == "one command":
                number = await printed(folder / "log", number)
            else:
                number, dealer = await in_progress(roles, number)
            await asyncio.sleep(dice.uniform(0, LATEST_S))
            if roles.over.is_set():
                break
            kind = dice.choice(SETUPS[setup])
            roles.kill([dealer] if kind == "dealer" else victims(roles, kind, dice))
            done[kind] += 1
        async with asyncio.timeout(2 * RETURN_S):
            await roles.over.wait()
    finally:
        await roles.end()
    (file,) = (folder / "out").glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest(), done, number


async def compare(setup: str, seed: int, expected: str, arguments: Namespace) -> Row:
    """Compare the bits of a disturbed training with those of an undisturbed one."""
    dice = random.Random(f"{seed}/{setup}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as parent:
        folder, found, error, done, number = Path(parent), "", "", Counter[str](), 0
        try:
            if setup == "resumed":
                await kill_everything(folder, dice)
            found, done, number = await learned(folder, setup, dice, kills=arguments.kills)
        except (TimeoutError, ValueError) as failed:
            error = repr(failed)
        log = (folder / "log").read_bytes()
        if error or found != expected:
            (arguments.folder / f"bits-{setup}-{seed}.log").write_bytes(log)
    return {
        "case": f"bits, {setup}",
        "seed": seed,
        "kills": dict(done),
        "went_on_from_disks": log.count(WENT_ON),
        "last_killed_after_epoch": number,
        "digest": found[:16],
        "expected": expected[:16],
        "error": error,
        "met": found == expected and not error,
    }


async def bits(arguments: Namespace) -> AsyncIterator[Row]:
    """Measure the rows of `--bits`, one per setup and seed."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        expected, _, _ = await learned(Path(folder), "by hand", random.Random(), kills=0)
    for seed in range(arguments.seed, arguments.seed + arguments.bits):
        for setup in arguments.setup or SETUPS:
            yield await compare(setup, seed, expected, arguments)


async def counts(arguments: Namespace) -> AsyncIterator[Row]:
    """Measure the rows of counted images, one per kind and mode."""
    for kind in arguments.kind or KINDS:
        for mode in MODES:
            if mode.name in (arguments.mode or [mode.name]):
                yield await killed(kind, mode, arguments)


def measure(arguments: Namespace) -> AsyncIterator[Row]:
    """Yield the rows of the wanted kind."""
    return bits(arguments) if arguments.bits else counts(arguments)


if __name__ == "__main__":
    run(
        __doc__,
        measure,
        kills=Option(5, "kills of each kind and mode, twice in ssp:2 and bsp"),
        seed=1,
        kind=Option([], "default: all", choices=KINDS, repeated=True),
        mode=Option([], "default: all", choices=[mode.name for mode in MODES], repeated=True),
        bits=Option(0, "seeds of each setup of bits in bsp"),
        setup=Option([], "setups of bits; default: all", choices=list(SETUPS), repeated=True),
        folder=Option(Path(tempfile.gettempdir()), "for files and logs", type=Path),
    )
