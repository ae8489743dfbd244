"""Data servers with one ledger, any of which may be lost at any moment: nothing that is settled is lost."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.data_server.ledger import Entry
from adam_async.data_server.ledger_replication import CopyRefused, Keeping, Part
from adam_async.data_server.state import (
    EpochBegan,
    EpochEnded,
    Grant,
    GroupsReported,
    LeaseAsked,
    Opening,
    Paused,
    PauseEnded,
    ReplicasChanged,
    TimePassed,
)
from adam_async.run.ids import Replica
from tests.adam_async.data_server.scene import Asker, began, finished

pytestmark = pytest.mark.thorough

GROUPS = 12
PARTS = 2
REPLICAS = 2
EVERY = 5
"""Groups between two pauses of every other epoch."""


@dataclass(frozen=True)
class Map:
    """What the controller says."""

    version: int
    changed: int
    """Version at which the keepers last changed."""
    term: int
    keepers: tuple
    live: tuple
    epoch: int
    lives: dict


@dataclass(eq=False)
class Talk:
    """A lender's conversation with one that copies."""

    busy: bool = False


@dataclass(eq=False)
class Question:
    worker: "Worker"
    event: LeaseAsked | GroupsReported


class Worker(Asker):
    """One worker of a replica: what it holds and what it has to report."""

    def __init__(self, *key):
        super().__init__(*key)
        self.held: list[tuple[int, int, int]] = []
        self.trained: list = []
        self.reporting: tuple[str, int] | None = None


class Node:
    """A data server as `Lending` and `DataServer` are one, without links."""

    def __init__(self, world, name, incarnation):
        self.world, self.me = world, (name, incarnation)
        self.keeping = Keeping(self.me, Opening(partitions=PARTS))
        self.view = None
        self.talks: dict[tuple[str, int], Talk] = {}
        self.questions: dict[int, Question] = {}
        self.asked = 0
        self.outbox: list = []
        self.forwarding: object = None

    @property
    def alive(self):
        return self.world.nodes.get(self.me[0]) is self

    @property
    def keeps(self):
        return self.view is not None and self.me in self.view.keepers

    @property
    def open_events(self):
        return [question.event for question in self.questions.values()]

    # --- the map -----------------------------------------------------------------------------

    def look(self):
        before, self.view = self.view, self.world.map
        lender = self.view.keepers[0]
        if lender == self.me:
            self.lead()
        elif self.keeping.leads and self.view.term > self.keeping.term:
            self.keeping.follow()
            self.talks.clear()
        if not self.keeps:
            self.drop_questions()
        if lender != self.me and (before is None or before.keepers[0] != lender):
            self.begin_forwarding()

    def lead(self):
        keeping, cluster = self.keeping, self.view
        if not keeping.leads or keeping.term < cluster.term:
            self.talks.clear()
            keeping.lead(cluster.term, cluster.keepers, now=self.world.now)
            self.outbox = []
            self.settle(keeping.enter(self.open_events, now=self.world.now))
            untold = keeping.ledger.state.untold()
            if untold is not None:
                self.perform(untold)
        for keeper in keeping.copies():
            if keeper not in cluster.live:
                self.talks.pop(keeper, None)
                self.settle(keeping.strike_out(keeper))
        for keeper in cluster.live:
            if keeper != self.me and keeper not in self.talks:
                self.begin_talk(keeper)
        state = keeping.ledger.state
        if cluster.lives != state.lives:
            self.enter(ReplicasChanged(cluster.lives))
        if cluster.epoch > keeping.ledger.state.epoch:
            self.enter(self.world.epoch(cluster.epoch))

    # --- events ------------------------------------------------------------------------------

    def ask(self, worker, event):
        self.questions[self.asked] = Question(worker, event)
        self.enter(event)

    def enter(self, *events):
        if self.keeping.leads:
            self.settle(self.keeping.enter(events, now=self.world.now))
        else:
            self.outbox += events

    def begin_forwarding(self):
        self.outbox, self.forwarding = self.open_events, None

    def forward(self):
        """Send what is to be entered to the lender, as this one knows it."""
        if self.keeping.leads or not self.keeps or self.forwarding is not None or not self.outbox:
            return
        events, self.outbox = self.outbox, []
        term, lender = self.view.term, self.view.keepers[0]
        talk = self.forwarding = object()

        def end(lost):
            if self.forwarding is talk:
                self.forwarding = None
                if lost:
                    self.begin_forwarding()

        def arrive(lost):
            there = self.world.node(lender)
            fails = lost or there is None or not there.keeping.leads or there.keeping.term != term
            if not fails and there.keeping.counts(self.me):
                there.enter(*events)
                self.world.send(end)
            else:
                self.world.send(lambda _: end(True))

        self.world.send(arrive)

    def settle(self, settled):
        ledger = self.keeping.ledger
        for number, each in enumerate(settled, ledger.settled - len(settled)):
            self.world.settled(self, number, each.event)
            if isinstance(each.event, GroupsReported):
                self.answer(each.event.request, None)
            for effect in each.effects:
                self.perform(effect)

    def perform(self, effect):
        world = self.world
        match effect:
            case Grant():
                self.answer(effect.request, effect)
            case EpochEnded() if self.keeping.leads:
                world.send_surely(lambda: world.epoch_ended(effect))
            case Paused() if self.keeping.leads:
                world.send_surely(lambda: self.resume(effect))

    def resume(self, paused):
        if self.alive and self.keeping.leads and self.keeping.ledger.state.untold() == paused:
            self.enter(PauseEnded())

    def answer(self, request, grant):
        question = self.questions.pop(request[1], None) if request and request[0] == self.me[0] else None
        if question is not None:
            self.world.answer(question, grant)

    def drop_questions(self):
        for question in self.questions.values():
            self.world.unanswered(question)
        self.questions.clear()

    # --- copies ------------------------------------------------------------------------------

    def begin_talk(self, keeper):
        self.talks[keeper] = Talk()
        self.keeping.welcome(keeper)
        self.keeping.begin_anew(keeper)

    def copy(self, keeper, count):
        """Send the next part to somebody, if there is news."""
        talk, keeping = self.talks.get(keeper), self.keeping
        if talk is None or talk.busy or (part := keeping.part_for(keeper, count)) is None:
            return
        talk.busy, term, wire = True, keeping.term, msgspec.msgpack.encode(part)

        def arrive(lost):
            there = self.world.node(keeper)
            taken = there is not None and not lost and there.take(term, wire)
            self.world.send(lambda lost: self.copied(keeper, talk, part) if taken and not lost else broken())

        def broken():
            self.broken(keeper, talk)

        self.world.send(arrive)

    def take(self, term, wire):
        led = self.keeping.leads
        try:
            settled = self.keeping.take(term, msgspec.msgpack.decode(wire, type=Part))
        except CopyRefused:
            return False
        if led and not self.keeping.leads:
            self.talks.clear()
        self.settle(settled)
        return True

    def copied(self, keeper, talk, part):
        if not self.alive or self.talks.get(keeper) is not talk:
            return
        talk.busy = False
        self.settle(self.keeping.copied(keeper, part))
        if self.keeping.counts(keeper) and keeper not in self.view.keepers:
            talk.busy = True
            self.change(
                talk,
                lambda keepers: (*keepers, keeper) if keeper not in keepers else None,
                lambda: setattr(talk, "busy", False),
            )

    def broken(self, keeper, talk):
        """A conversation is over: who counts is struck out of the map, and then what it lacks is settled."""
        if not self.alive or self.talks.get(keeper) is not talk:
            return
        talk = self.talks[keeper] = Talk(busy=True)

        def again():
            self.settle(self.keeping.strike_out(keeper))
            if self.talks.get(keeper) is talk:
                self.begin_talk(keeper)

        if self.keeping.counts(keeper):
            self.change(talk, lambda keepers: tuple(each for each in keepers if each != keeper), again)
        else:
            again()

    def change(self, talk, change, then):
        """Compare and set the keepers in the map; may arrive late, or after our end."""
        term, newest = self.keeping.term, self.world.map

        def is_over():
            gone = not self.alive or talk not in self.talks.values()
            return gone or (self.world.map.term, self.world.map.keepers[0]) != (term, self.me)

        def attempt():
            if is_over():
                return
            newest = self.world.map
            keepers = change(newest.keepers)
            if keepers is None:
                done(False)
            else:
                self.world.send_surely(lambda: set_keepers(newest, keepers))

        def set_keepers(newest, keepers):
            applied = self.world.set_keepers(newest, keepers)
            self.world.send(done if applied else lambda _: attempt())

        def done(lost):
            if lost:
                attempt()
            elif not is_over():
                then()

        if (newest.term, newest.keepers[0]) == (term, self.me):
            attempt()


class World:
    """Data servers, workers and a controller; everything between them is on its way for a while."""

    def __init__(self, seed, *, servers):
        self.dice = random.Random(seed)
        self.now = 0.0
        self.kills = self.terms = self.pauses = 0
        self.flying: list[Callable[[bool], None]] = []
        self.nodes = {f"data-{number}": Node(self, f"data-{number}", 1) for number in range(servers)}
        self.names = tuple(self.nodes)
        self.births = 1
        self.truth: list[bytes] = []
        """Everything that was settled anywhere."""
        self.events: list = []
        self.settled_in: dict[int, tuple[str, int]] = {}
        """Who settled as the lender in each term."""
        self.course: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        """What was told at each position of each life of a replica."""
        self.given: dict[tuple[int, int, int], tuple[int, int]] = {}
        """To which life each attempt at a group was given."""
        self.ended: list[EpochEnded] = []
        self.workers: list[Worker] = []
        keepers = (self.nodes["data-0"].me,)
        live = tuple(node.me for node in self.nodes.values())
        self.map = Map(1, 1, 1, keepers, live, 1, {})
        for replica in range(REPLICAS):
            self.new_life(Replica(replica))

    def node(self, keeper):
        found = self.nodes.get(keeper[0])
        return found if found is not None and found.me == keeper else None

    def epoch(self, number):
        every = EVERY if number % 2 else 0
        shares = {Replica(n): (n * GROUPS // REPLICAS, (n + 1) * GROUPS // REPLICAS) for n in range(REPLICAS)}
        return began(GROUPS, shares, number, every=every)

    # --- what is on its way ------------------------------------------------------------------

    def send(self, work):
        """Something arrives later, or is lost."""
        self.flying.append(work)

    def send_surely(self, work):
        """Something arrives later, whatever becomes of who sent it."""
        self.flying.append(lambda lost: self.send_surely(work) if lost else work())

    # --- the controller ----------------------------------------------------------------------

    def change_map(self, **fields):
        self.map = replace(self.map, version=self.map.version + 1, **fields)

    def set_keepers(self, read, keepers):
        if self.map.changed != read.changed or not any(map(self.node, keepers)):
            return False  # what would leave nobody is lost on its way
        self.change_map(changed=self.map.version + 1)
        self.put_keepers(keepers)
        return True

    def put_keepers(self, keepers):
        left = tuple(each for each in keepers if each in self.map.live)
        if left != self.map.keepers:
            replaced = left[0] != self.map.keepers[0]
            self.terms += replaced
            self.change_map(keepers=left, term=self.map.term + replaced, changed=self.map.version + 1)

    def notice(self):
        """See who is gone and who is back."""
        live = tuple(node.me for node in self.nodes.values())
        if live != self.map.live:
            self.change_map(live=live)
            self.put_keepers(self.map.keepers)

    def suspect(self):
        """Take a lender that lives, and does not know it, for lost; it is back at once."""
        if len(self.map.keepers) > 1 and all(self.node(keeper) for keeper in self.map.keepers[1:]):
            live = self.map.live
            self.change_map(live=tuple(each for each in live if each != self.map.keepers[0]))
            self.put_keepers(self.map.keepers)
            self.change_map(live=live)

    def new_life(self, replica):
        life = self.births = self.births + 1
        self.workers = [worker for worker in self.workers if worker.replica != replica]
        self.workers += [Worker(replica, life, part) for part in range(PARTS)]
        self.change_map(lives={**self.map.lives, replica: life})

    def epoch_ended(self, ended):
        if ended.number != self.map.epoch:
            return
        # Each group's loss is another power of two: the sum says which were counted, and how often.
        assert ended.images == GROUPS
        assert ended.loss * GROUPS == 2**GROUPS - 1
        self.ended.append(ended)
        self.change_map(epoch=ended.number + 1)

    # --- faults ------------------------------------------------------------------------------

    def kill(self, name):
        """Kill a data server, unless nobody would be left who has what was settled."""
        node = self.nodes.get(name)
        if node is None or not any(self.node(k) for k in self.map.keepers if k != node.me):
            return
        del self.nodes[name]
        node.drop_questions()
        self.kills += 1

    def come(self, name):
        if name not in self.nodes:
            self.births += 1
            self.nodes[name] = Node(self, name, self.births)

    def break_a_talk(self):
        """Somebody has waited too long for an answer, which may come all the same."""
        busy = [(n, k, talk) for n in self.nodes.values() for k, talk in n.talks.items() if talk.busy]
        if busy:
            node, keeper, talk = self.dice.choice(busy)
            node.broken(keeper, talk)

    # --- workers -----------------------------------------------------------------------------

    def work(self, worker):
        """Ask for groups, or report some, through any data server that thinks that it may be asked."""
        node = self.nodes.get(self.dice.choice(self.map.keepers)[0])
        if node is None or not node.keeps:
            return
        if worker.reporting is None and worker.trained and self.dice.random() < 0.7:
            node.asked += 1
            request = worker.reporting = (node.me[0], node.asked)
            event = GroupsReported(worker.replica, worker.life, worker.part, tuple(worker.trained), request)
        elif worker.request is None:
            node.asked += 1
            event = worker.question(self.dice.randint(1, 3))
            event = msgspec.structs.replace(event, request=(node.me[0], node.asked))
            worker.request = event.request
        else:
            return
        node.ask(worker, event)

    def train(self, worker):
        if worker.held:
            epoch, number, attempt = worker.held.pop(0)
            loss = float(2**number) if worker.part == 0 else 0.0
            worker.trained.append(finished(number, epoch=epoch, attempt=attempt, images=1, loss=loss))

    def answer(self, question, grant):
        worker, event = question.worker, question.event
        if self.dice.random() < self.loss:
            self.unanswered(question)
        elif isinstance(event, GroupsReported):
            worker.reporting = None
            del worker.trained[: len(event.finished)]
        else:
            for at, (number, attempt) in enumerate(grant.groups, event.position):
                told = (grant.epoch, number, attempt)
                assert self.course.setdefault((worker.replica, worker.life, at), told) == told
                assert self.given.setdefault(told, (worker.replica, worker.life)) == (
                    worker.replica,
                    worker.life,
                )
                worker.held.append(told)
            worker.hear(grant)

    def unanswered(self, question):
        if isinstance(question.event, GroupsReported):
            question.worker.reporting = None
        else:
            question.worker.request = None

    # --- what always holds -------------------------------------------------------------------

    def settled(self, node, number, event):
        if node.keeping.leads:
            assert self.settled_in.setdefault(node.keeping.term, node.me) == node.me
        entry = msgspec.msgpack.encode(event)
        if number == len(self.truth):
            self.truth.append(entry)
            self.events.append(event)
        assert self.truth[number] == entry, "what was settled is something else now"

    def check(self, *, wholly):
        """Every keeper that is left has whatever was settled."""
        for keeper in self.map.keepers:
            node = self.node(keeper)
            if node is None:
                continue
            ledger = node.keeping.ledger
            assert ledger.stop >= len(self.truth), f"{keeper}: {ledger!r} of {len(self.truth)}"
            if not wholly:
                continue
            first, _ = ledger.begin()
            entries = ledger.read(first, len(self.truth) - first)
            assert [msgspec.msgpack.encode(entry.event) for entry in entries] == self.truth[first:]
            ledger.state.check_invariants()

    # --- time --------------------------------------------------------------------------------

    def step(self, faults):
        dice, chance = self.dice, self.dice.random()
        self.loss = 0.1 if faults else 0.0
        self.now += 0.01
        if faults and chance < 0.01:
            victims = (self.map.keepers[0][0], dice.choice(self.map.keepers)[0], dice.choice(self.names))
            self.kill(dice.choice(victims))
        elif faults and chance < 0.013:
            self.suspect()
        elif faults and chance < 0.025:
            self.break_a_talk()
        elif faults and chance < 0.028:
            self.new_life(Replica(dice.randrange(REPLICAS)))
        elif chance < 0.05:
            self.come(dice.choice(self.names))
        elif chance < 0.08:
            self.notice()
        elif chance < 0.09:
            self.now += 1.0
            lenders = [node for node in self.nodes.values() if node.keeping.leads]
            for node in lenders:
                node.enter(TimePassed())
        elif chance < 0.2:
            self.nodes[dice.choice(list(self.nodes))].look()
        elif chance < 0.4:
            node = self.nodes[dice.choice(list(self.nodes))]
            node.forward()
            for keeper in list(node.talks):
                node.copy(keeper, dice.randint(1, 4))
        elif chance < 0.55:
            worker = dice.choice(self.workers)
            self.train(worker)
            self.work(worker)
        for _ in range(min(2, len(self.flying))):
            # Mostly in order, for most of it travels on links.
            at = 0 if dice.random() < 0.8 else dice.randrange(len(self.flying))
            self.flying.pop(at)(faults and dice.random() < 0.02)


def run(seed, *, servers, steps=4000):
    """Faults for a while, and then none: two more epochs end."""
    world = World(seed, servers=servers)
    for number in range(steps):
        kills = world.kills
        world.step(True)
        world.check(wholly=number % 20 == 0 or world.kills > kills)
    wanted = len(world.ended) + 2
    for _ in range(20_000):
        world.step(False)
        if len(world.ended) >= wanted:
            break
    world.check(wholly=True)
    assert len(world.ended) >= wanted, f"seed {seed}: an epoch does not end: {world.map}"
    return world


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_whichever_data_servers_are_killed_every_group_is_trained_once(servers):
    worlds = [run(seed, servers=servers) for seed in range(16)]
    assert sum(world.kills for world in worlds) >= 150
    assert sum(world.terms for world in worlds) >= 80
    assert sum(len(world.ended) for world in worlds) >= 100


# --- one thing at a time ------------------------------------------------------------------------

A, B, C = ("data-0", 1), ("data-1", 2), ("data-2", 3)
ALL = 100


def keeping_of(me):
    return Keeping(me, Opening())


def leading(*keepers, me=A, term=1):
    lender = keeping_of(me)
    lender.lead(term, (me, *keepers), now=0.0)
    return lender


def copy(lender, keeper, to, *, count=ALL):
    """One part, taken and acknowledged; returns what that settles at the lender."""
    part = lender.part_for(keeper, count)
    to.take(lender.term, part)
    return lender.copied(keeper, part)


def copy_all(lender, keeper, to):
    while (part := lender.part_for(keeper, ALL)) is not None:
        to.take(lender.term, part)
        lender.copied(keeper, part)


def ticks(count):
    return [TimePassed()] * count


def test_who_is_alone_settles_at_once():
    lender = leading()
    assert len(lender.enter(ticks(3), now=1.0)) == 3


def test_an_entry_is_settled_when_all_keepers_have_it_and_they_hear_of_that():
    lender, b, c = leading(B, C), keeping_of(B), keeping_of(C)
    assert lender.enter(ticks(2), now=1.0) == []
    assert copy(lender, B, b) == []
    assert len(copy(lender, C, c)) == 2
    assert (b.ledger.stop, b.ledger.settled) == (2, 0)
    copy(lender, B, b)
    assert (b.ledger.stop, b.ledger.settled) == (2, 2)
    assert lender.part_for(B, ALL) is None


def test_somebody_new_counts_from_when_it_has_all():
    lender, b = leading(), keeping_of(B)
    lender.enter(ticks(3), now=1.0)
    lender.welcome(B)
    copy(lender, B, b, count=2)
    assert not lender.counts(B)
    assert len(lender.enter(ticks(1), now=1.0)) == 1
    copy(lender, B, b)
    assert lender.counts(B)
    assert lender.enter(ticks(1), now=1.0) == []
    assert len(lender.strike_out(B)) == 1


def test_a_part_of_what_a_keeper_reads_anew_settles_nothing_before_it_has_all():
    old, b, c = leading(B, C), keeping_of(B), keeping_of(C)
    for keeper, node in ((B, b), (C, c)):
        copy_all(old, keeper, node)
    old.enter(ticks(5), now=1.0)
    copy(old, B, b)  # C has none of these
    b.lead(2, (B, C), now=1.0)
    assert copy(b, C, c, count=3) == []
    assert c.ledger.stop == 0
    assert len(copy(b, C, c)) == 5
    assert c.ledger.stop == 5


def test_what_a_keeper_had_is_kept_until_it_has_read_all_anew():
    old, b, c = leading(B, C), keeping_of(B), keeping_of(C)
    old.enter(ticks(4), now=1.0)
    for keeper, node in ((B, b), (C, c)):
        copy_all(old, keeper, node)
    b.lead(2, (B, C), now=1.0)
    c.take(2, b.part_for(C, 2))
    assert c.ledger.stop == 4
    c.lead(3, (C,), now=2.0)
    assert c.ledger.stop == 4


def test_who_was_the_lender_settles_nothing_more_once_another_is():
    old, b = leading(B), keeping_of(B)
    copy_all(old, B, b)
    b.lead(2, (B,), now=1.0)
    assert old.enter(ticks(1), now=1.0) == []
    with pytest.raises(CopyRefused, match="this is term 2, not 1") as refused:
        b.take(1, old.part_for(B, ALL))
    assert refused.value.code == "old-term"


def test_in_a_new_term_the_ledger_is_read_anew_by_a_former_lender_too():
    old, b = leading(B), keeping_of(B)
    copy_all(old, B, b)
    old.enter(ticks(2), now=1.0)
    b.lead(2, (B,), now=1.0)
    b.enter(ticks(1), now=1.0)
    with pytest.raises(CopyRefused, match="is to be read anew"):
        old.take(2, Part(first=2, settled=0))
    b.welcome(A)
    copy_all(b, A, old)
    assert (old.leads, old.term, old.ledger.stop) == (False, 2, 1)


def test_a_part_that_does_not_follow_is_refused():
    lender, b = leading(B), keeping_of(B)
    lender.enter(ticks(2), now=1.0)
    part = lender.part_for(B, ALL)
    b.take(1, part)
    with pytest.raises(CopyRefused, match="entry 5 does not follow 2"):
        b.take(1, Part(first=5, settled=0))


def test_what_was_read_before_and_comes_late_takes_nothing_away():
    lender, b = leading(B), keeping_of(B)
    lender.enter(ticks(2), now=1.0)
    late = lender.part_for(B, ALL)
    lender.enter(ticks(2), now=1.0)
    lender.begin_anew(B)
    copy_all(lender, B, b)
    with pytest.raises(CopyRefused, match="2 entries came late: here are 4"):
        b.take(1, late)
    assert b.ledger.stop == 4


@given(
    heard=st.floats(0.0, 1e6),
    begun=st.floats(0.0, 1e6),
    waits=st.floats(0.001, 100.0),
    later=st.floats(0.0, 9.0),
)
def test_what_a_new_lender_enters_at_the_time_of_a_deadline_is_not_too_early_for_it(
    heard, begun, waits, later
):
    old, b = leading(B), keeping_of(B)
    old.enter(ticks(1), now=heard)
    copy_all(old, B, b)
    b.lead(2, (B,), now=begun)
    b.enter(ticks(1), now=begun + later)
    deadline = b.ledger.last_now + waits
    due = b.time_of(deadline)
    assert due == pytest.approx(begun + later + waits, abs=1e-6)
    b.enter(ticks(1), now=due)
    assert b.ledger.last_now >= deadline


def test_a_new_lender_goes_on_where_the_ledgers_time_was():
    old, b = leading(B), keeping_of(B)
    old.enter(ticks(1), now=500.0)
    copy_all(old, B, b)
    b.lead(2, (B,), now=20.0)
    b.enter(ticks(1), now=21.0)
    assert b.ledger.last_now == 501.0
    assert b.time_of(503.0) == 23.0


@pytest.mark.parametrize("anew", [False, True])
def test_a_part_that_no_state_takes_changes_nothing(anew):
    lender, b = leading(B), keeping_of(B)
    lender.enter(ticks(3), now=1.0)
    copy_all(lender, B, b)
    impossible = Entry(2.0, EpochBegan(1, 0, {Replica(0): (0, 0)}))
    entries = (Entry(2.0, ReplicasChanged({Replica(0): 7})), impossible)
    opening = Opening() if anew else None
    with pytest.raises(CopyRefused) as refused:
        b.take(1 + anew, Part(first=0 if anew else 3, settled=3, entries=entries, opening=opening))
    assert refused.value.code == "impossible"
    assert (b.term, b.ledger.stop, b.ledger.settled, b.ledger.state.lives) == (1, 3, 3, {})
    lender.enter(ticks(1), now=3.0)
    copy_all(lender, B, b)
    assert (b.ledger.stop, b.ledger.settled) == (4, 4)


@pytest.mark.parametrize("far", [1e7 + 0.1, 1e15, -1e15])
def test_a_deadline_on_a_far_clock_is_found_at_once(far):
    old, b = leading(B), keeping_of(B)
    old.enter(ticks(1), now=far)
    copy_all(old, B, b)
    b.lead(2, (B,), now=3.3)
    ours = b.time_of(far + 5.7)
    assert ours + b._lag_s >= far + 5.7
    assert ours == pytest.approx(9.0, abs=1e-6 + abs(far) * 1e-15)
