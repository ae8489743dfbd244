"""Turns of pieces beside entries, with a clock of their own."""

import heapq
import random

import pytest

from adam_async.parameter_server.piece_link import GO_S, YIELD_S, PieceTurns


class Bench:
    """Turns, and the time for which pieces were held."""

    def __init__(self):
        self.now = self.held_s = 0.0
        self.waits = False
        self.changed_at = 0.0
        self.entries_wait = False
        self._timers = []
        self.turns = PieceTurns(lambda: self.entries_wait, self._hold, self._later)

    def _hold(self, waits):
        assert waits is not self.waits, "a change that is none"
        self.held_s += (self.now - self.changed_at) if self.waits else 0.0
        self.waits, self.changed_at = waits, self.now

    def _later(self, seconds, call):
        timer = _Timer(self.now + seconds, call)
        heapq.heappush(self._timers, timer)
        return timer

    @property
    def timers(self):
        return [timer for timer in self._timers if not timer.is_cancelled]

    def look(self, entries_wait):
        self.entries_wait = entries_wait
        self.turns.update()

    def until(self, now):
        while self._timers and self._timers[0].at <= now:
            timer = heapq.heappop(self._timers)
            self.now = timer.at
            if not timer.is_cancelled:
                timer.call()
        self.now = now


class _Timer:
    def __init__(self, at, call):
        self.at, self.call, self.is_cancelled = at, call, False

    def __lt__(self, other):
        return self.at < other.at

    def cancel(self):
        self.is_cancelled = True


@pytest.fixture
def bench():
    return Bench()


def test_pieces_wait_from_an_entry_until_all_are_held(bench):
    bench.look(True)
    assert bench.waits
    bench.until(0.9 * YIELD_S)
    bench.look(False)
    assert not bench.waits
    assert not bench.timers
    bench.look(True)
    assert bench.waits


def test_beside_entries_without_end_a_fifth_of_the_time_belongs_to_pieces(bench):
    bench.look(True)
    rounds = 40
    for step in range(1, 1000 * rounds + 1):
        bench.until(step * (YIELD_S + GO_S) / 1000)
        bench.look(True)
    share = bench.held_s / bench.now
    assert share == pytest.approx(YIELD_S / (YIELD_S + GO_S), rel=0.05)
    assert GO_S / (YIELD_S + GO_S) == pytest.approx(0.2)


def test_a_turn_of_pieces_ends_without_another_look(bench):
    bench.look(True)
    bench.until(YIELD_S)
    assert not bench.waits
    bench.until(YIELD_S + GO_S)
    assert bench.waits


def test_after_the_end_no_timer_is_left_and_no_piece_is_held(bench):
    bench.look(True)
    bench.turns.end()
    assert not bench.timers
    assert not bench.waits
    bench.turns.end()


def test_pieces_are_held_only_while_entries_wait_and_never_for_long(bench):
    dice = random.Random(20261127)
    for _ in range(5000):
        bench.until(bench.now + dice.uniform(0, YIELD_S / 3))
        bench.look(dice.random() < 0.6)
        assert bench.entries_wait or not bench.waits
        assert not bench.waits or bench.now - bench.changed_at <= YIELD_S
