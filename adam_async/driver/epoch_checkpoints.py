"""The checkpoints of a run within its epochs, taken while training goes on.

In bsp a checkpoint is *exact*. The driver names a clock that no shard has reached, and reads every shard at
this clock. A run that continues from such a checkpoint has the same values, bit for bit, as a run that never
stopped.

In asp and ssp no moment exists at which all shards have the updates of the same groups. Each shard has the
set of groups whose updates are in its values. So a run that continues from the checkpoint trains, for each
shard, exactly the groups that the shard lacks.

When an epoch ends or a run stops, no group is in training, so every checkpoint is exact.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf

from adam_async.checkpoint.shard_transfer import ClockPassed
from adam_async.checkpoint.writer import Checkpointer, Reading
from adam_async.controller.client import Membership
from adam_async.driver.readiness import POLL_S
from adam_async.driver.role_counts import RoleCounts
from adam_async.run.config import Config
from adam_async.run.counts import DataCounts
from adam_async.run.progress import Progress
from adam_async.run.run_record import RunRecord
from adam_async.run.training_program import ResumeRecord
from transport import TransportError

LEAST_POLL_S = 0.01
"""Minimum time between two questions for the finished groups, in seconds."""


class EpochCheckpoints:
    """Takes the checkpoints within the epochs of one run.

    Args:
        record: Returns the newest record of the run.
        phase: Records the time of a reading under a name.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        config: Config,
        membership: Membership,
        counts: RoleCounts,
        record: Callable[[], RunRecord],
        progress: Progress,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._checkpointer = checkpointer
        self._config = config
        self._membership = membership
        self._counts = counts
        self._record = record
        self._progress = progress
        self._phase = phase

    async def take(self) -> None:
        """Take the checkpoints of the epoch until cancelled at its end, which drops a checkpoint in progress.

        Raises:
            RunFailed: See `Checkpointer.miss`.
        """
        if self._config.synchronous:
            await self._take_at_clocks()
        else:
            await self._take_beside()

    # --- bsp -----------------------------------------------------------------------------------

    async def _take_at_clocks(self) -> None:
        record = self._membership.map.epoch
        assert record is not None, "an epoch has begun"
        step_groups = max(record.round_groups, 1) * max(len(record.shares), 1)
        steps = -(-self._config.checkpoint_every // step_groups)
        last = record.first_clock
        clock, ahead, within_s = last + steps, 1, inf
        while True:
            try:
                data = await self._known()
                with self._phase(f"checkpoint at clock {clock}"):
                    reading = await self._checkpointer.read(self._membership.map, clock, within_s=within_s)
            except ClockPassed as passed:
                # Steps may take less time than the request: name a clock farther ahead each time. A server
                # with wrong clocks may lead to a clock that the epoch never reaches: set a deadline.
                clock, ahead, within_s = passed.clock + ahead, 2 * ahead, self._config.waits.clock_s
                continue
            if reading is not None:
                self._write(data, reading)
                last = clock
            else:
                await self._wait_after_miss()
                last += steps  # not from `clock`, which a server with wrong clocks may have chosen
            clock, ahead, within_s = last + steps, 1, inf

    async def _known(self) -> DataCounts:
        """Return the dealer's counts; without an answer, wait for the next dealer."""
        while True:
            try:
                return await self._counts.dealer()
            except (TransportError, TimeoutError):
                await asyncio.sleep(POLL_S)

    async def _wait_after_miss(self) -> None:
        """Wait until as many further groups are finished as lie between two checkpoints.

        A server may refuse each reading at once. Without a pause, the misses that follow would soon end the
        run.
        """
        groups = (await self._known()).finished + self._config.checkpoint_every
        while True:
            try:
                await self._wait_for(groups)
                return
            except (TransportError, TimeoutError):
                await asyncio.sleep(POLL_S)

    # --- asp and ssp ---------------------------------------------------------------------------

    async def _take_beside(self) -> None:
        taken = -1
        while True:
            try:
                if taken < 0:
                    taken = (await self._counts.dealer()).finished
                data = await self._wait_for(taken + self._config.checkpoint_every)
                taken = data.finished
                with self._phase(f"checkpoint at group {taken}"):
                    reading = await self._checkpointer.read(self._membership.map)
                if reading is not None:
                    self._write(data, reading)
            except (TransportError, TimeoutError) as error:
                what = f"no checkpoint was taken, the data server could not be asked: {error!r}"
                self._checkpointer.miss(what)
                await asyncio.sleep(POLL_S)

    async def _wait_for(self, groups: int) -> DataCounts:
        """Wait until this many groups of the epoch are finished; poll more often when few are left.

        Returns the counts at that moment.
        """
        loop = asyncio.get_running_loop()
        begin, before = loop.time(), -1
        while True:
            data = await self._counts.dealer()
            if data.finished >= groups:
                return data
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

    def _write(self, data: DataCounts, reading: Reading) -> None:
        """Complete a checkpoint, or drop it.

        Args:
            data: Counts of the dealer before the reading.
        """
        record = self._membership.map.epoch
        if record is None or data.epoch != record.number:
            reading.checkpoint.drop()
            return
        resume = ResumeRecord(
            epoch=data.epoch,
            clock=0,
            results=self._record().until(data.epoch - 1).results,
            train_s=data.train_s,
        )
        self._checkpointer.write_within(reading, resume, self._progress.epochs, groups=record.groups)
