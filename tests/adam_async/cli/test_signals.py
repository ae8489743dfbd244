"""A signal that cancels a command ends it without an error; after a stop in good order errors are raised."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from adam_async.cli.signals import Signals


def run(signals: Signals, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    return signals.run(main)


async def stopped(signals: Signals) -> None:
    """Receive a SIGTERM in a block that stops in good order, and wait for the call."""
    stop = asyncio.Event()
    with signals.calling_at_sigterm(stop.set):
        signals._on_signal(signal.SIGTERM, None)
        await stop.wait()


def test_an_error_after_a_stop_in_good_order_is_raised() -> None:
    signals = Signals()

    async def main() -> int:
        await stopped(signals)
        raise LookupError("the report cannot be written")

    with pytest.raises(LookupError, match="the report cannot be written"):
        run(signals, main)
    assert not signals.interrupted


def test_a_command_that_stops_in_good_order_has_the_exit_code_of_sigterm() -> None:
    signals = Signals()

    async def main() -> int:
        await stopped(signals)
        return 0

    assert run(signals, main) == 143


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_error_of_the_cleanup_after_a_signal_is_not_raised(number: int, code: int) -> None:
    signals = Signals()

    async def main() -> int:
        try:
            signals._on_signal(number, None)
            return await asyncio.get_running_loop().create_future()
        finally:
            raise LookupError("of the cleanup")

    assert run(signals, main) == code
    assert signals.interrupted


def test_the_signal_after_a_stop_in_good_order_cancels_the_command() -> None:
    signals = Signals()

    async def main() -> int:
        await stopped(signals)
        signals._on_signal(signal.SIGINT, None)
        return await asyncio.get_running_loop().create_future()

    assert run(signals, main) == 143
    assert signals.interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(number: int) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signals = Signals()
    try:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        signal.signal(number, signal.SIG_IGN)
        signals.install()
        found = {each: signal.getsignal(each) for each in before}
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert found.pop(number) == signal.SIG_IGN
    assert list(found.values()) == [signals._on_signal]
