"""A data server's state with workers around it that ask and hear as real ones do."""

from dataclasses import dataclass, field
from itertools import count, product

from adam_async.data_server.epoch import EpochBegan, SetsRead
from adam_async.data_server.state import (
    DataState,
    Grant,
    GroupsReported,
    LeaseAsked,
    ReplicasChanged,
    TimePassed,
    joined,
)
from adam_async.messages import Finished, HeldLease
from adam_async.run.ids import Replica

WAIT_S = 5.0
_QUESTIONS = count()


def began(groups=6, shares=None, number=1, **more):
    """An epoch in ranges, by default of one replica."""
    more = {"images_per_group": 4, **more}
    return EpochBegan(number, groups, shares or {Replica(0): (0, groups)}, **more)


PAIR = (Replica(0), Replica(1))


def turns(groups=12, *, replicas=PAIR, round_groups=2, clock=0, **more):
    """An epoch in turns."""
    shares = {replica: (place, len(replicas)) for place, replica in enumerate(replicas)}
    more = {"images_per_group": 4, **more}
    return EpochBegan(1, groups, shares, round_groups=round_groups, first_clock=clock, **more)


@dataclass(eq=False)
class Asker:
    """One worker: what it has received and heard."""

    replica: Replica
    replica_generation: int
    part: int
    epoch: int = 0
    position: int = 0
    heard: int = -1
    request: int | None = None
    """Its question that is open."""
    answer: Grant | None = None
    """Last answer to it; None while its request waits."""
    attempts: dict[int, int] = field(default_factory=dict)
    held: list[HeldLease] = field(default_factory=list)
    """Its leases of the epoch that are not settled."""

    def question(self, count, *, now=0.0):
        """Ask for groups; with count 0 tell what it holds."""
        self.request, self.answer = next(_QUESTIONS), None
        return LeaseAsked(
            request=self.request,
            replica=self.replica,
            replica_generation=self.replica_generation,
            partition=self.part,
            epoch=self.epoch,
            position=self.position,
            heard=self.heard,
            count=count,
            wait_s=WAIT_S,
            held=() if count else tuple(self.held),
        )

    def receive(self, grant):
        self.answer, self.request = grant, None
        if grant.groups or grant.last:
            if grant.groups and grant.epoch != self.epoch:
                self.epoch, self.position, self.held = grant.epoch, 0, []
            for at, (number, attempt) in enumerate(grant.groups):
                self.held.append(HeldLease(number, attempt, grant.clock, -1 if at else self.heard))
            self.position += len(grant.groups)
            while len(self.held) > 1 and self.position - len(self.held) < grant.settled:
                del self.held[0]
            self.heard = grant.end if grant.last else -1
            self.attempts.update(grant.groups)


class Scene:
    """Enters events into a state, and hands each answer to its asker.

    After the last group the dealer reads the losses. Unless `reads` is false, it reads at once after the loss
    of a replica that no shard has a group of it.
    """

    def __init__(self, *events, partitions=1, reads=True):
        self.reads = reads
        self.losses = 0, 0.0
        """Images whose losses the shards have, and the sum of the losses."""
        self.version = 0
        self.partitions = partitions
        self.state = DataState(partitions=partitions)
        self.replica_generations: dict[Replica, int] = {}
        self.askers: dict[tuple[Replica, int, int], Asker] = {}
        self.void: list[Grant] = []
        """Answers to repeated questions."""
        self._births = count(7)
        for event in events:
            self.enter(event)

    @property
    def trained(self):
        """Ranges of the finished groups, which neither wait nor are leased or skipped."""
        epoch = self.state._epoch
        others = {*epoch.waiting(), *epoch.leases, *epoch.unsettled, *epoch.skipped}
        return joined(set(range(epoch.groups)) - others)

    def enter(self, event, *, now=0.0):
        """Enter an event; return the effects that are no answers."""
        others = self.take(self.state.handle(event, now=now))
        if (self.reads and self.state.lost_at) or self.state.awaits_losses:
            others += self.read(now=now)
        return others

    def read(self, every=(), some=(), *, version=None, clock=0, now=0.0):
        """All bundles answer which groups their shards have."""
        sets = SetsRead(
            epoch=self.state.epoch,
            version=self.version if version is None else version,
            every=frozenset(every),
            some=frozenset(some),
            clock=clock,
            images=self.losses[0],
            loss_sum=self.losses[1],
        )
        others = self.take(self.state.handle(sets, now=now))
        return others + self.read(now=now) if self.state.awaits_losses else others

    def tick(self, now):
        return self.take(self.state.handle(TimePassed(), now=now))

    def take(self, effects):
        self.state.check_invariants()
        others = []
        open_ones = {asker.request: asker for asker in self.askers.values() if asker.request is not None}
        for effect in effects:
            if not isinstance(effect, Grant):
                others.append(effect)
            elif effect.request in open_ones:
                open_ones[effect.request].receive(effect)
            else:
                self.void.append(effect)
        return others

    def follow(self, epoch, *, now=0.0):
        """Lose the dealer: another one is told what the workers hold, and begins the epoch."""
        self.state = DataState(partitions=self.partitions, follows=True)
        self.enter(self.change(), now=now)
        for replica, part in product(self.replica_generations, range(self.partitions)):
            assert self.state.lacks_held
            self.enter(self.worker(replica, part).question(0, now=now), now=now)
        assert not self.state.lacks_held
        return self.enter(epoch, now=now)

    def live(self, *replicas, anew=()):
        """Change the live replicas; new ones, and those of `anew`, begin a generation."""
        self.replica_generations = self.next_replica_generations(replicas, anew)
        return self.enter(self.change())

    def change(self):
        """The live replicas, in the next version of the map."""
        self.version += 1
        return ReplicasChanged(self.replica_generations, self.version)

    def next_replica_generations(self, replicas, anew=()):
        return {
            replica: self.replica_generations[replica]
            if replica in self.replica_generations and replica not in anew
            else next(self._births)
            for replica in replicas
        }

    def worker(self, replica, part=0, replica_generation=None):
        key = (
            replica,
            self.replica_generations[replica] if replica_generation is None else replica_generation,
            part,
        )
        return self.askers.setdefault(key, Asker(*key))

    def ask(self, replica, count=2, *, part=0, now=0.0):
        """Ask; returns the answer, or None while the question is parked."""
        asker = self.worker(replica, part)
        self.enter(asker.question(count, now=now), now=now)
        return asker.answer

    def leased(self, replica, count=2, *, part=0):
        """Ask; returns the groups (number, attempt) of the answer, or None while the question is parked."""
        answer = self.ask(replica, count, part=part)
        return None if answer is None else answer.groups

    def granted(self, replica, count=2, *, part=0):
        """Ask; returns numbers of groups, last, clock and end, or None while the question is parked."""
        return contents(self.ask(replica, count, part=part))

    def report(self, replica, *numbers, part=0, now=1.0, **about):
        """Report groups as finished, under the attempts that the worker knows."""
        asker = self.worker(replica, part)
        reports = tuple(finished(n, **{"attempt": asker.attempts.get(n, 1), **about}) for n in numbers)
        return self.enter(GroupsReported(replica, asker.replica_generation, part, reports), now=now)


def contents(grant):
    """Numbers of the groups, last, clock and end of an answer."""
    if grant is None:
        return None
    return [number for number, _ in grant.groups], grant.last, grant.clock, grant.end


def finished(number, *, attempt=1, epoch=1, images=4, loss=1.0, clock=0):
    return Finished(epoch, number, attempt, images, loss, clock)
