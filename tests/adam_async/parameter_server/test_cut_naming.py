"""The clocks of cuts, as the primary of the first bundle names them."""

import pytest

from adam_async.parameter_server.store_cuts import LATE_S, NO_CLOCK, CutNaming, NamedCut

PERIOD_S = 1.0
TICK_S = 0.25


class Store:
    """A store whose clock moves by so many steps in a second.

    Args:
        rate: Steps in a second.
        takes_s: Time from a naming to the moment at which the servers learn it, in seconds.
    """

    def __init__(self, rate, *, takes_s=0.0):
        self.now, self.clock, self.rate, self.takes_s = 0.0, 0, rate, takes_s
        self.naming = CutNaming(0.0)
        self.named, self.complete, self.handled, self.passed = [], NO_CLOCK, 0, 0
        self.newest = None

    def look(self, **changes):
        facts = {
            "period_s": PERIOD_S,
            "newest": self.newest,
            "handled": self.handled,
            "passed": self.passed,
            "complete": self.complete,
        }
        found = self.naming.next(self.now, self.clock, **{**facts, **changes})
        if found is not None:
            self.named.append(found)
            self.newest = found
        return found

    def tick(self):
        """Let a tick pass: the servers learn the last naming, and take it or report that they passed it."""
        self.now += TICK_S
        self.clock = int(self.now * self.rate)
        newest = self.newest
        if newest is not None and newest.number > self.handled:
            learnt_at = self.at + self.takes_s
            if learnt_at <= self.now and int(learnt_at * self.rate) > newest.clock:
                self.handled, self.passed = newest.number, int(learnt_at * self.rate)
            elif self.clock >= newest.clock:
                self.handled, self.passed, self.complete = newest.number, 0, newest.clock
        if self.look() is not None:
            self.at = self.now

    def run(self, ticks):
        for _ in range(ticks):
            self.tick()


@pytest.mark.parametrize("rate", [0.3, 3, 50, 2_000])
def test_a_cut_is_taken_about_once_in_a_period_at_any_pace_of_the_steps(rate):
    store = Store(rate)
    store.run(200)
    taken = [each for each in store.named if each.clock <= store.complete]
    least = min(25, int(0.8 * rate * store.now))
    assert least <= len(taken) <= store.now / PERIOD_S + 1
    assert [each.number for each in store.named] == list(range(1, len(store.named) + 1))
    complete = [each.complete for each in store.named]
    assert complete == sorted(complete), "a later naming never has an earlier complete cut"


def test_cuts_are_named_farther_ahead_until_the_servers_learn_them_in_time():
    store = Store(1_000, takes_s=0.2)
    store.run(80)
    assert store.complete != NO_CLOCK
    assert sum([each.clock > store.complete for each in store.named]) <= 1
    assert len({each.complete for each in store.named}) > 10


def test_a_clock_that_stands_still_is_named_once_it_is_not_on_the_disks():
    store = Store(8)
    store.run(20)
    store.rate, store.clock = 0, store.clock
    clock, seen = store.clock, len(store.named)
    for _ in range(40):
        store.now += TICK_S
        if store.look() is not None:
            assert store.newest.clock == clock
            store.handled, store.complete = store.newest.number, clock
    assert store.complete == clock
    assert len(store.named) <= seen + 2


def test_a_cut_that_training_does_not_reach_is_named_anew_at_the_present_clock():
    store = Store(0)
    store.clock, store.newest = 12, NamedCut(7, 20, 10)
    store.look()
    while store.now <= PERIOD_S:
        store.now += TICK_S
        store.look()
    assert store.named == [NamedCut(8, 12, 10)]


def test_another_cut_waits_until_all_servers_have_handled_the_last_one_but_not_for_ever():
    store = Store(0)
    store.clock, store.newest, store.handled = 12, NamedCut(7, 12, 10), 6
    while store.now < LATE_S:
        assert store.look() is None
        store.now += 5.0
    assert store.look() == NamedCut(8, 12, 10)


def test_a_new_primary_goes_on_from_the_naming_in_the_map_and_keeps_its_complete_cut():
    """The new one may know no complete cut: a bundle has lost the server whose disk had it."""
    store = Store(0)
    store.clock, store.newest, store.handled = 30, NamedCut(7, 20, 20), 7
    store.now = 2 * PERIOD_S
    assert store.look(complete=NO_CLOCK) == NamedCut(8, 30, 20)


def test_a_passed_clock_is_named_anew_at_once_beyond_the_clock_that_was_passed():
    store = Store(0)
    store.clock, store.newest, store.handled = 30, NamedCut(7, 29, 20), 7
    store.look(passed=0)
    assert store.look(passed=33).clock == 33
