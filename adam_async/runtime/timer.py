"""One timer for a pure state machine: sleeps until its next deadline, then lets it look."""

import asyncio
from collections.abc import Callable


class Timer:
    """Calls `due` whenever `next_deadline` has come.

    Args:
        next_deadline: The state machine's own answer, in seconds of the loop's clock.
        due: Called when that time has come; it may move the deadline.
    """

    def __init__(self, next_deadline: Callable[[], float | None], due: Callable[[], None]) -> None:
        self._next_deadline = next_deadline
        self._due = due
        self._rearm = asyncio.Event()
        self._armed: float | None = None
        """When `run` will look by itself; None for never."""

    def rearm(self) -> None:
        """Look at the deadline again; call this after any event that may have moved it.

        One that was moved away is looked at when it would have come: most are moved away again before that.
        """
        deadline = self._next_deadline()
        if deadline is not None and (self._armed is None or deadline < self._armed):
            self._rearm.set()

    async def run(self) -> None:
        """Run until cancelled. Cancelling it loses nothing."""
        loop = asyncio.get_running_loop()
        while True:
            self._rearm.clear()
            self._armed = deadline = self._next_deadline()
            alarm = None if deadline is None else loop.call_at(deadline, self._rearm.set)
            try:
                await self._rearm.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()
            deadline = self._next_deadline()  # it may have been moved away meanwhile
            if deadline is not None and deadline <= loop.time():
                self._due()
