"""The checkpoints of a run within its epochs, taken while training goes on.

In bsp a checkpoint is *exact*. The driver names a clock that no shard has reached, reads every shard at this
clock, and then the groups of the steps up to it. A run that continues from such a checkpoint has the same
values, bit for bit, as a run that never stopped.

In asp and ssp no moment exists at which the shards have the updates of the same groups. The driver reads the
list of finished groups first, and then the shards. The checkpoint is *complete*, because the values have the
updates of all groups in the list. The values also have updates of groups that are finished during the
reading. A run that continues from the checkpoint trains these groups again; `CheckpointResult` has their
number.

At the end of an epoch, and of a run that stops, no group is in training, and every checkpoint is exact.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf

from msgspec import UNSET

from adam_async.checkpoint.shard_transfer import ClockPassed
from adam_async.checkpoint.writer import Checkpointer, Reading
from adam_async.controller.client import Membership
from adam_async.driver.count_types import DataCounts
from adam_async.driver.epoch_results import EpochResults
from adam_async.driver.readiness import POLL_S
from adam_async.driver.role_counts import RoleCounts
from adam_async.errors import DeadlineExceeded
from adam_async.messages import read_number
from adam_async.run.config import Config
from adam_async.run.progress import Progress
from adam_async.run.training_program import ResumeRecord
from transport import TransportError

LEAST_POLL_S = 0.01
"""Minimum time between two questions for the finished groups, in seconds."""


class EpochCheckpoints:
    """Takes the checkpoints within the epochs of one run.

    Args:
        phase: Records the time of a reading under a name.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        config: Config,
        membership: Membership,
        counts: RoleCounts,
        results: EpochResults,
        progress: Progress,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._checkpointer = checkpointer
        self._config = config
        self._membership = membership
        self._counts = counts
        self._results = results
        self._progress = progress
        self._phase = phase

    async def take(self, epoch: int) -> None:
        """Take the checkpoints of an epoch until cancelled at its end, which drops a checkpoint in progress.

        Raises:
            RunFailed: See `Checkpointer.miss`.
        """
        if self._config.synchronous:
            await self._take_at_clocks(epoch)
        else:
            await self._take_beside(epoch)

    # --- bsp -----------------------------------------------------------------------------------

    async def _take_at_clocks(self, epoch: int) -> None:
        record = self._membership.map.epoch
        assert record is not None, "an epoch has begun"
        step_groups = max(record.round_groups, 1) * max(len(record.shares), 1)
        steps = -(-self._config.checkpoint_every // step_groups)
        last = record.first_clock
        clock, ahead, within_s = last + steps, 1, inf
        while True:
            try:
                with self._phase(f"checkpoint at clock {clock}"):
                    reading = await self._checkpointer.read(self._membership.map, clock, within_s=within_s)
            except ClockPassed as passed:
                # Steps may take less time than the request: name a clock farther ahead each time. A server
                # with wrong clocks may lead to a clock that the epoch never reaches: set a deadline.
                clock, ahead, within_s = passed.clock + ahead, 2 * ahead, self._config.waits.clock_s
                continue
            if reading is not None:
                await self._write_at(clock, reading)
                last = clock
            else:
                await self._wait_after_miss()
                last += steps  # not from `clock`, which a server with wrong clocks may have chosen
            clock, ahead, within_s = last + steps, 1, inf

    async def _wait_after_miss(self) -> None:
        """Wait until as many further groups are finished as lie between two checkpoints.

        A server may refuse each reading at once. Without this wait, the misses that follow would soon end the
        run.
        """
        groups = 0
        while True:
            try:
                if not groups:
                    groups = (await self._counts.ledger_leader()).finished + self._config.checkpoint_every
                await self._wait_for(groups)
                return
            except (TransportError, TimeoutError):
                await asyncio.sleep(POLL_S)

    async def _write_at(self, clock: int, reading: Reading) -> None:
        try:
            data = await self._trained_at(clock)
        except (TransportError, TimeoutError, DeadlineExceeded) as error:
            self._checkpointer.miss(f"no checkpoint was taken, its groups are not known: {error!r}")
            return
        self._write(data, reading)

    async def _trained_at(self, clock: int) -> DataCounts:
        """Return the counts of the groups up to a clock, which replicas report just after their pushes.

        Raises:
            DeadlineExceeded: Not all groups were reported within `clock_s`.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._config.waits.clock_s
        while True:
            data = await self._counts.ledger_leader(ranges=True, clock=clock)
            if data.finished_ranges is not UNSET:
                return data
            if loop.time() > ends_at:
                raise DeadlineExceeded(f"the groups up to clock {clock}", self._config.waits.clock_s)
            await asyncio.sleep(LEAST_POLL_S)

    # --- asp and ssp ---------------------------------------------------------------------------

    async def _take_beside(self, epoch: int) -> None:
        record = self._membership.map.epoch
        taken = sum(stop - start for start, stop in record.finished) if record is not None else 0
        while True:
            try:
                await self._wait_for(taken + self._config.checkpoint_every)
                await self._checkpointer.settle()
                data = await self._counts.ledger_leader(ranges=True)
                taken = data.finished
                with self._phase(f"checkpoint at group {taken}"):
                    reading = await self._checkpointer.read(self._membership.map)
                if reading is None or data.epoch != epoch:
                    continue
                after = await self._counts.ledger_leader()
                if after.epoch == epoch:
                    self._write(data, reading, finished=after.finished, beyond=after.finished - data.finished)
            except (TransportError, TimeoutError) as error:
                what = f"no checkpoint was taken, the data server could not be asked: {error!r}"
                self._checkpointer.miss(what)
                await asyncio.sleep(POLL_S)

    async def _wait_for(self, groups: int) -> None:
        """Wait until this many groups of the epoch are finished; poll more often when few are left."""
        loop = asyncio.get_running_loop()
        begin, before = loop.time(), -1
        while True:
            data = await self._counts.ledger_leader()
            if data.finished >= groups:
                return
            before = data.finished if before < 0 else before
            rate = (data.finished - before) / max(loop.time() - begin, LEAST_POLL_S)
            wait_s = (groups - data.finished) / rate / 2 if rate else 2 * (loop.time() - begin)
            await asyncio.sleep(min(max(wait_s, LEAST_POLL_S), POLL_S))

    # --- all modes -----------------------------------------------------------------------------

    async def take_last(self, data: DataCounts) -> None:
        """Take the checkpoint of a run that stops, after its last leased group is finished.

        Raises:
            RunFailed: See `Checkpointer.miss`.
        """
        clock = data.clock if self._config.slack is not None else 0
        reading = await self._checkpointer.read(self._membership.map, clock)
        if reading is not None:
            self._write(data, reading)

    def _write(self, data: DataCounts, reading: Reading, *, finished: int = 0, beyond: int = 0) -> None:
        """Begin to write a checkpoint, unless the epoch is finished, because its end has a checkpoint of its
        own."""
        record = self._membership.map.epoch
        if record is None or _ranges_of(data) == ((0, record.groups),):
            return
        resume = ResumeRecord(
            epoch=data.epoch,
            finished=_ranges_of(data),
            clock=0,
            results=self._results.before(data.epoch),
            images=data.images,
            loss=read_number(data.loss),
            train_s=data.train_s,
        )
        self._checkpointer.note_progress(data.epoch, max(finished, data.finished))
        self._checkpointer.write_within(reading, resume, self._progress.epochs, beyond=beyond)


def _ranges_of(data: DataCounts) -> tuple[tuple[int, int], ...]:
    return data.finished_ranges if data.finished_ranges is not UNSET else ()
