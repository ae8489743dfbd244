"""Leases as timelines, and as a machine that kills replicas at random."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adam_async.data_server.state import (
    DataState,
    EpochBegan,
    EpochEnded,
    Grant,
    GroupsReported,
    LeaseAsked,
    ReplicasChanged,
)
from adam_async.ids import Replica
from adam_async.messages import Finished

ZERO, ONE, TWO = Replica(0), Replica(1), Replica(2)
WAIT_S = 5.0


def began(groups=6, shares=None, number=1):
    return EpochBegan(number, groups, shares or {ZERO: (0, groups)})


def asked(replica=ZERO, count=2, *, life=7, holding=None, now=0.0):
    return LeaseAsked(
        request=object(),
        replica=replica,
        incarnation=life,
        count=count,
        deadline=now + WAIT_S,
        holding=holding,
    )


def finished(number, *, attempt=1, epoch=1, images=4, loss=1.0):
    return Finished(epoch, number, attempt, images, loss)


def started(*events):
    state = DataState()
    for event in events:
        state.handle(event, now=0.0)
        state.check_invariants()
    return state


def grant(state, question, *, now=0.0):
    """Ask, and return the groups of the answer, or None while the question is parked."""
    effects = state.handle(question, now=now)
    state.check_invariants()
    for effect in effects:
        if isinstance(effect, Grant) and effect.request is question.request:
            return effect.groups
    return None


def test_groups_are_leased_in_the_order_of_the_share():
    state = started(ReplicasChanged((ZERO,)), began())
    assert grant(state, asked(count=4)) == ((0, 1), (1, 1), (2, 1), (3, 1))
    assert grant(state, asked(count=4)) == ((4, 1), (5, 1))


def test_an_answer_says_when_nothing_more_waits():
    state = started(ReplicasChanged((ZERO,)), began(groups=3))
    (first,) = state.handle(asked(count=2), now=0.0)
    (second,) = state.handle(asked(count=2), now=0.0)
    assert (first.last, second.last) == (False, True)


def test_a_question_without_work_is_parked_until_its_time_is_up():
    state = started(ReplicasChanged((ZERO,)))
    question = asked(now=10.0)
    assert grant(state, question, now=10.0) is None
    assert state.next_deadline() == 15.0
    assert state.tick(now=14.9) == []
    (answer,) = state.tick(now=15.0)
    assert (answer.request, answer.groups) == (question.request, ())
    assert state.next_deadline() is None


def test_a_parked_question_is_answered_when_the_epoch_begins():
    state = started(ReplicasChanged((ZERO,)))
    question = asked()
    assert grant(state, question) is None
    (answer,) = state.handle(began(), now=1.0)
    assert (answer.request, answer.epoch, answer.groups) == (question.request, 1, ((0, 1), (1, 1)))


def test_an_epoch_ends_once_with_its_totals_when_the_last_group_is_reported():
    state = started(ReplicasChanged((ZERO,)), began(groups=2))
    grant(state, asked(), now=3.0)
    assert state.handle(GroupsReported(ZERO, (finished(0, loss=1.0, images=3),)), now=4.0) == []
    (ended,) = state.handle(GroupsReported(ZERO, (finished(1, loss=5.0, images=1),)), now=9.0)
    assert ended == EpochEnded(1, 4, 2.0, 3.0, 9.0, 0)
    assert state.handle(GroupsReported(ZERO, (finished(1),)), now=9.0) == []
    assert state.late_reports == 1


def test_what_a_lost_replica_held_and_what_waited_for_it_goes_to_its_successor():
    state = started(ReplicasChanged((ZERO, ONE, TWO)), began(6, {ZERO: (0, 2), ONE: (2, 4), TWO: (4, 6)}))
    assert grant(state, asked(ONE, 1)) == ((2, 1),)
    assert grant(state, asked(TWO, 9)) == ((4, 1), (5, 1))
    state.handle(ReplicasChanged((ZERO, TWO)), now=0.0)
    state.check_invariants()
    assert grant(state, asked(TWO, 9)) == ((2, 2), (3, 1))
    assert state.trained_again == 1


def test_the_successor_of_the_highest_replica_is_the_lowest():
    state = started(ReplicasChanged((ZERO, TWO)), began(2, {ZERO: (0, 1), TWO: (1, 2)}))
    state.handle(ReplicasChanged((ZERO,)), now=0.0)
    assert grant(state, asked(ZERO, 9)) == ((0, 1), (1, 1))


def test_a_parked_successor_gets_the_lost_groups_at_once():
    state = started(ReplicasChanged((ZERO, ONE)), began(2, {ZERO: (0, 1), ONE: (1, 2)}))
    assert grant(state, asked(ZERO)) == ((0, 1),)
    assert grant(state, asked(ONE)) == ((1, 1),)
    waiting = asked(ONE)
    assert grant(state, waiting) is None
    (answer,) = state.handle(ReplicasChanged((ONE,)), now=1.0)
    assert (answer.request, answer.groups) == (waiting.request, ((0, 2),))


def test_a_share_of_a_replica_that_was_lost_before_the_epoch_is_passed_on():
    state = started(ReplicasChanged((ONE,)), began(2, {ZERO: (0, 1), ONE: (1, 2)}))
    assert grant(state, asked(ONE, 9)) == ((1, 1), (0, 1))


def test_a_lost_replica_whose_question_is_parked_gets_nothing_back():
    state = started(ReplicasChanged((ZERO,)), began(2))
    assert grant(state, asked()) == ((0, 1), (1, 1))
    assert grant(state, asked()) is None
    assert state.handle(ReplicasChanged(()), now=0.0) == []
    state.handle(ReplicasChanged((ONE,)), now=0.0)
    assert grant(state, asked(ONE)) == ((0, 2), (1, 2))


def test_without_any_live_replica_groups_wait_for_the_next_worker_of_that_number():
    state = started(ReplicasChanged((ZERO,)), began(2))
    grant(state, asked())
    state.handle(ReplicasChanged(()), now=0.0)
    state.check_invariants()
    state.handle(ReplicasChanged((ZERO,)), now=0.0)
    assert grant(state, asked(life=8)) == ((0, 2), (1, 2))


def test_a_new_life_gets_what_the_old_one_held_whatever_the_numbers_of_the_two():
    for old, new in ((7, 8), (8, 7)):
        state = started(ReplicasChanged((ZERO,)), began(2))
        assert grant(state, asked(life=old)) == ((0, 1), (1, 1))
        assert grant(state, asked(life=new)) == ((0, 2), (1, 2))


def test_an_outlived_worker_gets_nothing_and_is_not_answered_before_its_time():
    state = started(ReplicasChanged((ZERO,)), began(4))
    grant(state, asked(life=7))
    grant(state, asked(life=8, count=1))
    question = asked(life=7)
    assert grant(state, question) is None
    (answer,) = state.tick(now=WAIT_S)
    assert (answer.request, answer.groups) == (question.request, ())
    assert grant(state, asked(life=8, count=9)) == ((1, 2), (2, 1), (3, 1))


def test_after_a_broken_link_only_what_the_worker_does_not_hold_is_leased_again():
    state = started(ReplicasChanged((ZERO,)), began(4))
    grant(state, asked(count=3))
    assert grant(state, asked(count=3, holding=(1,))) == ((0, 2), (2, 2), (3, 1))
    assert state.trained_again == 2


def test_a_question_on_a_new_link_replaces_the_one_of_the_old_link():
    state = started(ReplicasChanged((ZERO,)))
    lost = asked()
    assert grant(state, lost) is None
    again = asked(holding=())
    (empty,) = state.handle(again, now=0.0)
    assert (empty.request, empty.groups) == (lost.request, ())
    (answer,) = state.handle(began(), now=0.0)
    assert answer.request is again.request


def test_late_reports_are_counted_and_change_nothing():
    state = started(ReplicasChanged((ZERO, ONE)), began(2, {ZERO: (0, 1), ONE: (1, 2)}))
    grant(state, asked(ZERO))
    state.handle(ReplicasChanged((ONE,)), now=0.0)
    grant(state, asked(ONE, 9))
    for report in (
        GroupsReported(ZERO, (finished(0),)),  # leased to another meanwhile
        GroupsReported(ONE, (finished(0, attempt=1),)),  # an attempt that is over
        GroupsReported(ONE, (finished(1, epoch=2),)),  # of another epoch
        GroupsReported(ONE, (finished(99),)),  # never leased
    ):
        assert state.handle(report, now=0.0) == []
        state.check_invariants()
    assert state.late_reports == 4
    assert state.statistics()["finished"] == 0


def test_read_ahead_sees_the_next_groups_without_taking_them():
    state = started(ReplicasChanged((ZERO,)), began(4))
    assert state.upcoming(ZERO, 2) == [0, 1]
    assert grant(state, asked(count=1)) == ((0, 1),)
    assert state.upcoming(ZERO, 9) == [1, 2, 3]
    assert state.upcoming(ONE, 9) == []


def test_the_ranges_that_are_trained_leave_out_what_waits_and_what_is_leased():
    state = started(ReplicasChanged((ZERO, ONE)), began(10, {ZERO: (0, 5), ONE: (5, 10)}))
    assert state.trained_ranges() == ()
    assert grant(state, asked(count=3)) == ((0, 1), (1, 1), (2, 1))
    assert grant(state, asked(ONE, count=1)) == ((5, 1),)
    state.handle(GroupsReported(ZERO, (finished(0), finished(2))), now=1.0)
    assert state.trained_ranges() == ((0, 1), (2, 3))
    assert state.statistics()["trained_ranges"] == ()  # not while groups are leased: it would not last
    state.handle(GroupsReported(ZERO, (finished(1),)), now=1.0)
    state.handle(GroupsReported(ONE, (finished(5),)), now=1.0)
    assert state.statistics()["trained_ranges"] == ((0, 3), (5, 6))
    grant(state, asked(count=9))
    grant(state, asked(ONE, count=9))
    state.handle(GroupsReported(ZERO, (finished(3), finished(4))), now=1.0)
    state.handle(GroupsReported(ONE, tuple(map(finished, range(6, 10)))), now=1.0)
    assert state.trained_ranges() == ((0, 10),)


class Leases(RuleBasedStateMachine):
    """Workers ask, report, lose links and die at random; every group is finished exactly once."""

    REPLICAS = 3
    GROUPS = 8

    def __init__(self):
        super().__init__()
        self.state = DataState()
        self.now = 0.0
        self.epoch = 0
        self.lives = dict.fromkeys(range(self.REPLICAS), 1)
        self.live = set(range(self.REPLICAS))
        self.held: dict[int, dict[int, int]] = {replica: {} for replica in range(self.REPLICAS)}
        self.questions: dict[object, int] = {}
        self.done: list[int] = []
        self.ends: list[EpochEnded] = []
        self.tell(ReplicasChanged(tuple(map(Replica, sorted(self.live)))))
        self.begin()

    def begin(self):
        self.epoch += 1
        self.done = []
        live = sorted(self.live) or list(range(self.REPLICAS))
        shares = {
            Replica(replica): (self.GROUPS * at // len(live), self.GROUPS * (at + 1) // len(live))
            for at, replica in enumerate(live)
        }
        self.tell(EpochBegan(self.epoch, self.GROUPS, shares))

    def tell(self, event):
        self.take(self.state.handle(event, now=self.now))

    def take(self, effects):
        for effect in effects:
            if isinstance(effect, EpochEnded):
                self.ends.append(effect)
                continue
            replica = self.questions.pop(effect.request)
            if replica is not None:
                self.held[replica].update(dict(effect.groups))

    def ask(self, replica, *, lost=False, holding=None):
        """Ask; of a `lost` question the answer never arrives."""
        request = object()
        self.questions[request] = None if lost else replica
        question = LeaseAsked(
            request=request,
            replica=Replica(replica),
            incarnation=self.lives[replica],
            count=2,
            deadline=self.now + WAIT_S,
            holding=holding,
        )
        self.tell(question)

    replicas = st.integers(0, REPLICAS - 1)

    @rule(replica=replicas, lost=st.booleans())
    def asks(self, replica, lost):
        if replica in self.live:
            self.ask(replica, lost=lost)

    @rule(replica=replicas)
    def link_breaks(self, replica):
        if replica in self.live:
            for request, asker in self.questions.items():
                if asker == replica:
                    self.questions[request] = None
            self.ask(replica, holding=tuple(self.held[replica]))

    @rule(replica=replicas, twice=st.booleans())
    def reports(self, replica, twice):
        if self.held[replica] and replica in self.live:
            number, attempt = self.held[replica].popitem()
            for _ in range(1 + twice):
                before = self.state.statistics()["finished"]
                self.tell(GroupsReported(Replica(replica), (Finished(self.epoch, number, attempt, 1, 0.0),)))
                if self.state.statistics()["finished"] > before:
                    self.done.append(number)

    @rule(replica=replicas)
    def dies(self, replica):
        self.live.discard(replica)
        for request, asker in self.questions.items():
            if asker == replica:
                self.questions[request] = None
        self.held[replica] = {}
        self.tell(ReplicasChanged(tuple(map(Replica, sorted(self.live)))))

    @rule(replica=replicas)
    def comes_back(self, replica):
        if replica not in self.live:
            self.live.add(replica)
            self.lives[replica] = (self.lives[replica] * 5 + 3) % 17  # lives have no order
            self.tell(ReplicasChanged(tuple(map(Replica, sorted(self.live)))))

    @rule(seconds=st.floats(0.1, 6.0))
    def time_passes(self, seconds):
        self.now += seconds
        self.take(self.state.tick(now=self.now))

    @precondition(lambda self: self.ends and self.ends[-1].number == self.epoch)
    @rule()
    def next_epoch(self):
        self.held = {replica: {} for replica in range(self.REPLICAS)}
        self.begin()

    @invariant()
    def every_group_is_somewhere_and_finished_once(self):
        self.state.check_invariants()
        assert len(self.done) == len(set(self.done))
        ended = bool(self.ends) and self.ends[-1].number == self.epoch
        assert ended == (len(self.done) == self.GROUPS)

    def teardown(self):
        """Whatever happened, the replicas that are left can finish the epoch."""
        if not self.live:
            self.comes_back_for_good()
        for _ in range(4 * self.GROUPS):
            if len(self.done) == self.GROUPS:
                break
            for replica in sorted(self.live):
                self.link_breaks(replica)
                while self.held[replica]:
                    self.reports(replica, twice=False)
        assert sorted(self.done) == list(range(self.GROUPS))
        self.state.check_invariants()

    def comes_back_for_good(self):
        self.live.add(0)
        self.lives[0] += 20
        self.tell(ReplicasChanged((ZERO,)))


Leases.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLeases = Leases.TestCase
