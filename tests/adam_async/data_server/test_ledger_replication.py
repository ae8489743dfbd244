"""Data servers with one ledger, any of which may be lost at any moment: nothing that is settled is lost."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.data_server.epoch import EpochBegan
from adam_async.data_server.ledger import Entry
from adam_async.data_server.ledger_replication import CopyRefused, LedgerReplication, Part
from adam_async.data_server.state import (
    EpochEnded,
    Grant,
    GroupsReported,
    LeaseAsked,
    Opening,
    ReplicasChanged,
    TimePassed,
)
from adam_async.run.ids import Replica
from tests.adam_async.data_server.scene import Asker, began, finished

pytestmark = pytest.mark.thorough

GROUPS = 12
PARTS = 2
REPLICAS = 2


@dataclass(frozen=True)
class Map:
    """The cluster map of the controller."""

    version: int
    changed: int
    """Version at which the keepers last changed."""
    term: int
    ledger_replicas: tuple
    live: tuple
    epoch: int
    replica_generations: dict


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
        self.ledger_replication = LedgerReplication(self.me, Opening(partitions=PARTS))
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
        return self.view is not None and self.me in self.view.ledger_replicas

    @property
    def open_events(self):
        return [question.event for question in self.questions.values()]

    # --- the map -----------------------------------------------------------------------------

    def look(self):
        before, self.view = self.view, self.world.map
        ledger_leader = self.view.ledger_replicas[0]
        if ledger_leader == self.me:
            self.lead()
        elif self.ledger_replication.leads and self.view.term > self.ledger_replication.term:
            self.ledger_replication.follow()
            self.talks.clear()
        if not self.keeps:
            self.drop_questions()
        if ledger_leader != self.me and (before is None or before.ledger_replicas[0] != ledger_leader):
            self.begin_forwarding()

    def lead(self):
        ledger_replication, cluster = self.ledger_replication, self.view
        if not ledger_replication.leads or ledger_replication.term < cluster.term:
            self.talks.clear()
            ledger_replication.lead(cluster.term, cluster.ledger_replicas, now=self.world.now)
            self.outbox = []
            self.settle(ledger_replication.enter(self.open_events, now=self.world.now))
            unreported = ledger_replication.ledger.state.unreported()
            if unreported is not None:
                self.perform(unreported)
        for ledger_replica in ledger_replication.copies():
            if ledger_replica not in cluster.live:
                self.talks.pop(ledger_replica, None)
                self.settle(ledger_replication.strike_out(ledger_replica))
        for ledger_replica in cluster.live:
            if ledger_replica != self.me and ledger_replica not in self.talks:
                self.begin_talk(ledger_replica)
        state = ledger_replication.ledger.state
        if cluster.replica_generations != state.replica_generations:
            self.enter(ReplicasChanged(cluster.replica_generations))
        if cluster.epoch > ledger_replication.ledger.state.epoch:
            self.enter(self.world.epoch(cluster.epoch))

    # --- events ------------------------------------------------------------------------------

    def ask(self, worker, event):
        self.questions[self.asked] = Question(worker, event)
        self.enter(event)

    def enter(self, *events):
        if self.ledger_replication.leads:
            self.settle(self.ledger_replication.enter(events, now=self.world.now))
        else:
            self.outbox += events

    def begin_forwarding(self):
        self.outbox, self.forwarding = self.open_events, None

    def forward(self):
        """Send what is to be entered to the lender, as this one knows it."""
        if self.ledger_replication.leads or not self.keeps or self.forwarding is not None or not self.outbox:
            return
        events, self.outbox = self.outbox, []
        term, ledger_leader = self.view.term, self.view.ledger_replicas[0]
        talk = self.forwarding = object()

        def end(lost):
            if self.forwarding is talk:
                self.forwarding = None
                if lost:
                    self.begin_forwarding()

        def arrive(lost):
            there = self.world.node(ledger_leader)
            fails = (
                lost
                or there is None
                or not there.ledger_replication.leads
                or there.ledger_replication.term != term
            )
            if not fails and there.ledger_replication.counts(self.me):
                there.enter(*events)
                self.world.send(end)
            else:
                self.world.send(lambda _: end(True))

        self.world.send(arrive)

    def settle(self, settled):
        ledger = self.ledger_replication.ledger
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
            case EpochEnded() if self.ledger_replication.leads:
                world.send_surely(lambda: world.epoch_ended(effect))

    def answer(self, request, grant):
        question = self.questions.pop(request[1], None) if request and request[0] == self.me[0] else None
        if question is not None:
            self.world.answer(question, grant)

    def drop_questions(self):
        for question in self.questions.values():
            self.world.unanswered(question)
        self.questions.clear()

    # --- copies ------------------------------------------------------------------------------

    def begin_talk(self, ledger_replica):
        self.talks[ledger_replica] = Talk()
        self.ledger_replication.welcome(ledger_replica)
        self.ledger_replication.begin_anew(ledger_replica)

    def copy(self, ledger_replica, count):
        """Send the next part to somebody, if there is news."""
        talk, ledger_replication = self.talks.get(ledger_replica), self.ledger_replication
        if talk is None or talk.busy or (part := ledger_replication.part_for(ledger_replica, count)) is None:
            return
        talk.busy, term, wire = True, ledger_replication.term, msgspec.msgpack.encode(part)

        def arrive(lost):
            there = self.world.node(ledger_replica)
            taken = there is not None and not lost and there.take(term, wire)
            self.world.send(
                lambda lost: self.copied(ledger_replica, talk, part) if taken and not lost else broken()
            )

        def broken():
            self.broken(ledger_replica, talk)

        self.world.send(arrive)

    def take(self, term, wire):
        led = self.ledger_replication.leads
        try:
            settled = self.ledger_replication.take(term, msgspec.msgpack.decode(wire, type=Part))
        except CopyRefused:
            return False
        if led and not self.ledger_replication.leads:
            self.talks.clear()
        self.settle(settled)
        return True

    def copied(self, ledger_replica, talk, part):
        if not self.alive or self.talks.get(ledger_replica) is not talk:
            return
        talk.busy = False
        self.settle(self.ledger_replication.copied(ledger_replica, part))
        if self.ledger_replication.counts(ledger_replica) and ledger_replica not in self.view.ledger_replicas:
            talk.busy = True
            self.change(
                talk,
                lambda ledger_replicas: (
                    (*ledger_replicas, ledger_replica) if ledger_replica not in ledger_replicas else None
                ),
                lambda: setattr(talk, "busy", False),
            )

    def broken(self, ledger_replica, talk):
        """A conversation is over: who counts is struck out of the map, and then what it lacks is settled."""
        if not self.alive or self.talks.get(ledger_replica) is not talk:
            return
        talk = self.talks[ledger_replica] = Talk(busy=True)

        def again():
            self.settle(self.ledger_replication.strike_out(ledger_replica))
            if self.talks.get(ledger_replica) is talk:
                self.begin_talk(ledger_replica)

        if self.ledger_replication.counts(ledger_replica):
            self.change(
                talk,
                lambda ledger_replicas: tuple(each for each in ledger_replicas if each != ledger_replica),
                again,
            )
        else:
            again()

    def change(self, talk, change, then):
        """Compare and set the keepers in the map; may arrive late, or after our end."""
        term, newest = self.ledger_replication.term, self.world.map

        def is_over():
            gone = not self.alive or talk not in self.talks.values()
            return gone or (self.world.map.term, self.world.map.ledger_replicas[0]) != (term, self.me)

        def attempt():
            if is_over():
                return
            newest = self.world.map
            ledger_replicas = change(newest.ledger_replicas)
            if ledger_replicas is None:
                done(False)
            else:
                self.world.send_surely(lambda: set_ledger_replicas(newest, ledger_replicas))

        def set_ledger_replicas(newest, ledger_replicas):
            applied = self.world.set_ledger_replicas(newest, ledger_replicas)
            self.world.send(done if applied else lambda _: attempt())

        def done(lost):
            if lost:
                attempt()
            elif not is_over():
                then()

        if (newest.term, newest.ledger_replicas[0]) == (term, self.me):
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
        """Ledger leader that settled in each term."""
        self.course: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        """Group at each position of each replica generation."""
        self.given: dict[tuple[int, int, int], tuple[int, int]] = {}
        """Replica generation that got each attempt at a group."""
        self.ended: list[EpochEnded] = []
        self.workers: list[Worker] = []
        ledger_replicas = (self.nodes["data-0"].me,)
        live = tuple(node.me for node in self.nodes.values())
        self.map = Map(1, 1, 1, ledger_replicas, live, 1, {})
        for replica in range(REPLICAS):
            self.new_replica_generation(Replica(replica))

    def node(self, ledger_replica):
        found = self.nodes.get(ledger_replica[0])
        return found if found is not None and found.me == ledger_replica else None

    def epoch(self, number):
        shares = {Replica(n): (n * GROUPS // REPLICAS, (n + 1) * GROUPS // REPLICAS) for n in range(REPLICAS)}
        return began(GROUPS, shares, number)

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

    def set_ledger_replicas(self, read, ledger_replicas):
        if self.map.changed != read.changed or not any(map(self.node, ledger_replicas)):
            return False  # what would leave nobody is lost on its way
        self.change_map(changed=self.map.version + 1)
        self.put_ledger_replicas(ledger_replicas)
        return True

    def put_ledger_replicas(self, ledger_replicas):
        left = tuple(each for each in ledger_replicas if each in self.map.live)
        if left != self.map.ledger_replicas:
            replaced = left[0] != self.map.ledger_replicas[0]
            self.terms += replaced
            self.change_map(ledger_replicas=left, term=self.map.term + replaced, changed=self.map.version + 1)

    def notice(self):
        """See who is gone and who is back."""
        live = tuple(node.me for node in self.nodes.values())
        if live != self.map.live:
            self.change_map(live=live)
            self.put_ledger_replicas(self.map.ledger_replicas)

    def suspect(self):
        """Take a lender that lives, and does not know it, for lost; it is back at once."""
        if len(self.map.ledger_replicas) > 1 and all(
            self.node(ledger_replica) for ledger_replica in self.map.ledger_replicas[1:]
        ):
            live = self.map.live
            self.change_map(live=tuple(each for each in live if each != self.map.ledger_replicas[0]))
            self.put_ledger_replicas(self.map.ledger_replicas)
            self.change_map(live=live)

    def new_replica_generation(self, replica):
        replica_generation = self.births = self.births + 1
        self.workers = [worker for worker in self.workers if worker.replica != replica]
        self.workers += [Worker(replica, replica_generation, part) for part in range(PARTS)]
        self.change_map(replica_generations={**self.map.replica_generations, replica: replica_generation})

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
        if node is None or not any(self.node(k) for k in self.map.ledger_replicas if k != node.me):
            return
        del self.nodes[name]
        node.drop_questions()
        self.kills += 1

    def come(self, name):
        if name not in self.nodes:
            self.births += 1
            self.nodes[name] = Node(self, name, self.births)

    def break_a_talk(self):
        """End one wait for an answer as too long; the answer may still come."""
        busy = [(n, k, talk) for n in self.nodes.values() for k, talk in n.talks.items() if talk.busy]
        if busy:
            node, ledger_replica, talk = self.dice.choice(busy)
            node.broken(ledger_replica, talk)

    # --- workers -----------------------------------------------------------------------------

    def work(self, worker):
        """Ask for groups, or report some, through any data server that thinks that it may be asked."""
        node = self.nodes.get(self.dice.choice(self.map.ledger_replicas)[0])
        if node is None or not node.keeps:
            return
        if worker.reporting is None and worker.trained and self.dice.random() < 0.7:
            node.asked += 1
            request = worker.reporting = (node.me[0], node.asked)
            event = GroupsReported(
                worker.replica, worker.replica_generation, worker.part, tuple(worker.trained), request
            )
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
                assert self.course.setdefault((worker.replica, worker.replica_generation, at), told) == told
                assert self.given.setdefault(told, (worker.replica, worker.replica_generation)) == (
                    worker.replica,
                    worker.replica_generation,
                )
                worker.held.append(told)
            worker.receive(grant)

    def unanswered(self, question):
        if isinstance(question.event, GroupsReported):
            question.worker.reporting = None
        else:
            question.worker.request = None

    # --- what always holds -------------------------------------------------------------------

    def settled(self, node, number, event):
        if node.ledger_replication.leads:
            assert self.settled_in.setdefault(node.ledger_replication.term, node.me) == node.me
        entry = msgspec.msgpack.encode(event)
        if number == len(self.truth):
            self.truth.append(entry)
            self.events.append(event)
        assert self.truth[number] == entry, "what was settled is something else now"

    def check(self, *, wholly):
        """Every keeper that is left has whatever was settled."""
        for ledger_replica in self.map.ledger_replicas:
            node = self.node(ledger_replica)
            if node is None:
                continue
            ledger = node.ledger_replication.ledger
            assert ledger.stop >= len(self.truth), f"{ledger_replica}: {ledger!r} of {len(self.truth)}"
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
            victims = (
                self.map.ledger_replicas[0][0],
                dice.choice(self.map.ledger_replicas)[0],
                dice.choice(self.names),
            )
            self.kill(dice.choice(victims))
        elif faults and chance < 0.013:
            self.suspect()
        elif faults and chance < 0.025:
            self.break_a_talk()
        elif faults and chance < 0.028:
            self.new_replica_generation(Replica(dice.randrange(REPLICAS)))
        elif chance < 0.05:
            self.come(dice.choice(self.names))
        elif chance < 0.08:
            self.notice()
        elif chance < 0.09:
            self.now += 1.0
            ledger_leaders = [node for node in self.nodes.values() if node.ledger_replication.leads]
            for node in ledger_leaders:
                node.enter(TimePassed())
        elif chance < 0.2:
            self.nodes[dice.choice(list(self.nodes))].look()
        elif chance < 0.4:
            node = self.nodes[dice.choice(list(self.nodes))]
            node.forward()
            for ledger_replica in list(node.talks):
                node.copy(ledger_replica, dice.randint(1, 4))
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


def ledger_replication_of(me):
    return LedgerReplication(me, Opening())


def leading(*ledger_replicas, me=A, term=1):
    ledger_leader = ledger_replication_of(me)
    ledger_leader.lead(term, (me, *ledger_replicas), now=0.0)
    return ledger_leader


def copy(ledger_leader, ledger_replica, to, *, count=ALL):
    """One part, taken and acknowledged; returns what that settles at the lender."""
    part = ledger_leader.part_for(ledger_replica, count)
    to.take(ledger_leader.term, part)
    return ledger_leader.copied(ledger_replica, part)


def copy_all(ledger_leader, ledger_replica, to):
    while (part := ledger_leader.part_for(ledger_replica, ALL)) is not None:
        to.take(ledger_leader.term, part)
        ledger_leader.copied(ledger_replica, part)


def ticks(count):
    return [TimePassed()] * count


def test_a_single_replica_settles_at_once():
    ledger_leader = leading()
    assert len(ledger_leader.enter(ticks(3), now=1.0)) == 3


def test_an_entry_is_settled_when_all_replicas_have_it_and_they_learn_of_it():
    ledger_leader, b, c = leading(B, C), ledger_replication_of(B), ledger_replication_of(C)
    assert ledger_leader.enter(ticks(2), now=1.0) == []
    assert copy(ledger_leader, B, b) == []
    assert len(copy(ledger_leader, C, c)) == 2
    assert (b.ledger.stop, b.ledger.settled) == (2, 0)
    copy(ledger_leader, B, b)
    assert (b.ledger.stop, b.ledger.settled) == (2, 2)
    assert ledger_leader.part_for(B, ALL) is None


def test_a_new_replica_counts_once_it_has_all_entries():
    ledger_leader, b = leading(), ledger_replication_of(B)
    ledger_leader.enter(ticks(3), now=1.0)
    ledger_leader.welcome(B)
    copy(ledger_leader, B, b, count=2)
    assert not ledger_leader.counts(B)
    assert len(ledger_leader.enter(ticks(1), now=1.0)) == 1
    copy(ledger_leader, B, b)
    assert ledger_leader.counts(B)
    assert ledger_leader.enter(ticks(1), now=1.0) == []
    assert len(ledger_leader.strike_out(B)) == 1


def test_a_replica_that_reads_anew_settles_nothing_before_it_has_all():
    old, b, c = leading(B, C), ledger_replication_of(B), ledger_replication_of(C)
    for ledger_replica, node in ((B, b), (C, c)):
        copy_all(old, ledger_replica, node)
    old.enter(ticks(5), now=1.0)
    copy(old, B, b)  # C has none of these
    b.lead(2, (B, C), now=1.0)
    assert copy(b, C, c, count=3) == []
    assert c.ledger.stop == 0
    assert len(copy(b, C, c)) == 5
    assert c.ledger.stop == 5


def test_a_replica_keeps_its_ledger_until_it_has_read_all_anew():
    old, b, c = leading(B, C), ledger_replication_of(B), ledger_replication_of(C)
    old.enter(ticks(4), now=1.0)
    for ledger_replica, node in ((B, b), (C, c)):
        copy_all(old, ledger_replica, node)
    b.lead(2, (B, C), now=1.0)
    c.take(2, b.part_for(C, 2))
    assert c.ledger.stop == 4
    c.lead(3, (C,), now=2.0)
    assert c.ledger.stop == 4


def test_a_former_leader_settles_nothing_more():
    old, b = leading(B), ledger_replication_of(B)
    copy_all(old, B, b)
    b.lead(2, (B,), now=1.0)
    assert old.enter(ticks(1), now=1.0) == []
    with pytest.raises(CopyRefused, match="this is term 2, not 1") as refused:
        b.take(1, old.part_for(B, ALL))
    assert refused.value.code == "old-term"


def test_in_a_new_term_a_former_leader_reads_the_ledger_anew_too():
    old, b = leading(B), ledger_replication_of(B)
    copy_all(old, B, b)
    old.enter(ticks(2), now=1.0)
    b.lead(2, (B,), now=1.0)
    b.enter(ticks(1), now=1.0)
    with pytest.raises(CopyRefused, match="a replica reads the ledger anew"):
        old.take(2, Part(first=2, settled=0))
    b.welcome(A)
    copy_all(b, A, old)
    assert (old.leads, old.term, old.ledger.stop) == (False, 2, 1)


def test_a_part_that_does_not_follow_is_refused():
    ledger_leader, b = leading(B), ledger_replication_of(B)
    ledger_leader.enter(ticks(2), now=1.0)
    part = ledger_leader.part_for(B, ALL)
    b.take(1, part)
    with pytest.raises(CopyRefused, match="entry 5 does not follow 2"):
        b.take(1, Part(first=5, settled=0))


def test_a_late_part_of_an_earlier_reading_takes_nothing_away():
    ledger_leader, b = leading(B), ledger_replication_of(B)
    ledger_leader.enter(ticks(2), now=1.0)
    late = ledger_leader.part_for(B, ALL)
    ledger_leader.enter(ticks(2), now=1.0)
    ledger_leader.begin_anew(B)
    copy_all(ledger_leader, B, b)
    with pytest.raises(CopyRefused, match="2 entries came late: here are 4"):
        b.take(1, late)
    assert b.ledger.stop == 4


@given(
    heard=st.floats(0.0, 1e6),
    begun=st.floats(0.0, 1e6),
    waits=st.floats(0.001, 100.0),
    later=st.floats(0.0, 9.0),
)
def test_an_event_of_a_new_leader_at_a_deadline_is_not_too_early_for_it(heard, begun, waits, later):
    old, b = leading(B), ledger_replication_of(B)
    old.enter(ticks(1), now=heard)
    copy_all(old, B, b)
    b.lead(2, (B,), now=begun)
    b.enter(ticks(1), now=begun + later)
    deadline = b.ledger.last_now + waits
    due = b.time_of(deadline)
    assert due == pytest.approx(begun + later + waits, abs=1e-6)
    b.enter(ticks(1), now=due)
    assert b.ledger.last_now >= deadline


def test_a_new_leader_goes_on_at_the_ledgers_time():
    old, b = leading(B), ledger_replication_of(B)
    old.enter(ticks(1), now=500.0)
    copy_all(old, B, b)
    b.lead(2, (B,), now=20.0)
    b.enter(ticks(1), now=21.0)
    assert b.ledger.last_now == 501.0
    assert b.time_of(503.0) == 23.0


@pytest.mark.parametrize("anew", [False, True])
def test_a_part_that_no_state_takes_changes_nothing(anew):
    ledger_leader, b = leading(B), ledger_replication_of(B)
    ledger_leader.enter(ticks(3), now=1.0)
    copy_all(ledger_leader, B, b)
    impossible = Entry(2.0, EpochBegan(1, 0, {Replica(0): (0, 0)}))
    entries = (Entry(2.0, ReplicasChanged({Replica(0): 7})), impossible)
    opening = Opening() if anew else None
    with pytest.raises(CopyRefused) as refused:
        b.take(1 + anew, Part(first=0 if anew else 3, settled=3, entries=entries, opening=opening))
    assert refused.value.code == "impossible"
    assert (b.term, b.ledger.stop, b.ledger.settled, b.ledger.state.replica_generations) == (1, 3, 3, {})
    ledger_leader.enter(ticks(1), now=3.0)
    copy_all(ledger_leader, B, b)
    assert (b.ledger.stop, b.ledger.settled) == (4, 4)


@pytest.mark.parametrize("far", [1e7 + 0.1, 1e15, -1e15])
def test_a_deadline_on_a_far_clock_is_found_at_once(far):
    old, b = leading(B), ledger_replication_of(B)
    old.enter(ticks(1), now=far)
    copy_all(old, B, b)
    b.lead(2, (B,), now=3.3)
    ours = b.time_of(far + 5.7)
    assert ours + b._lag_s >= far + 5.7
    assert ours == pytest.approx(9.0, abs=1e-6 + abs(far) * 1e-15)
