"""Copies of a bundle for tests: a primary with random clients, and members that apply what arrives."""

import random

import numpy as np

from adam_async.messages import Part, of_place
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import (
    Applied,
    ApplySum,
    EpochBegan,
    Propose,
    PushArrived,
    ReplicasChanged,
    SumApplied,
    TickArrived,
)
from adam_async.parameter_server.gradients import DeltaPart, read_gradients
from adam_async.parameter_server.log_entries import decode_entry, encode_entry, without_shards
from adam_async.parameter_server.replay_log import NOT_APPLIED, OrderLog, read_order_log
from adam_async.parameter_server.shard_pieces import copy_piece, load_piece, read_piece
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.storage import own_shards
from adam_async.parameter_server.store_work import begin_work
from adam_async.parameter_server.user_applier import applier_of
from adam_async.run.group_ranges import name_groups
from adam_async.run.ids import BucketId, Replica, ShardId
from adam_async.run.shard_table import ShardSpec
from adam_async.run.user_rules import RuleSource
from tests.adam_async.parameter_server.timelines import check_losses, push_on, tick_on
from tests.adam_async.rules import Picky

OURS = BucketId(0)
WEIGHT = 4
USERS = (Picky,)
"""Rules of users that every copy may apply."""


def spec_of(number, tensor, start, stop, row_size=1, bucket=OURS):
    return ShardSpec(
        id=ShardId(number),
        tensor=tensor,
        start=start,
        stop=stop,
        row_size=row_size,
        bucket=bucket,
        dtype="float64",
    )


TABLE = (
    spec_of(0, "matrix", 0, 8, 4),
    spec_of(1, "matrix", 8, 20, 4),
    spec_of(2, "vector", 0, 5),
    spec_of(3, "scale", 0, 1),
    spec_of(4, "elsewhere", 0, 3, bucket=BucketId(1)),
    spec_of(5, "offset", 0, 1),
)
"""The shards of a store; number 4 is another server's."""

HERE = tuple(spec for spec in TABLE if spec.bucket == OURS)
PIECES = ((), HERE[:2], HERE[2:3], HERE[3:])
MATRIX, VECTORS = (0, 1), (2, 3, 5)


class Copy:
    """One server's copy, which applies work on request."""

    def __init__(self, rule, *, clocked=False, summed_weight=0, scales=False):
        self.state = ServerState(
            store="run",
            generation=1,
            shards=own_shards(HERE, [rule]),
            clocked=clocked,
            summed_weight=summed_weight,
            scale_by_staleness=scales,
            log=OrderLog([spec.id for spec in HERE]),
        )
        self.state.alone = False
        self.refusals = []
        """Sentences on the pushes that a rule of the user refused."""
        self.applier = applier_of(rule, HERE, "float64", RuleSource(USERS), refused=self.refusals.append)
        self.state.joins = not self.applier.may_refuse

    @property
    def bundle(self) -> Bundle:
        return self.state.bundle

    @property
    def position(self):
        return self.bundle.entries_applied

    def work(self):
        """Do the next batch or sum, and form the next batch. Returns the effects."""
        batch, effects = self.state.take_batch()
        if batch is not None:
            begun = begin_work(batch, lambda _: self.applier, 0.0)
            if self.bundle.pinning is not None:
                self.bundle.pinning.keep(begun.shards)
            work = begun.work
            work.run(1 << 30)
            is_sum = isinstance(batch, ApplySum)
            done = Applied(batch, begun.outcomes)
            if is_sum:
                done = SumApplied(batch, [finite for (finite,) in work.finite])
            effects += self.state.handle(done)
        self.state.check_invariants()
        return effects

    def take(self, parts, absent=frozenset()):
        """Apply an entry that arrived."""
        entry = decode_entry(parts, self.bundle, TABLE)
        self.bundle.absent = absent
        self.state.committed(without_shards(entry, absent) if absent else entry)
        while not self.bundle.idle:
            self.work()
        self.state.check_invariants()

    def digest(self):
        """Everything that is a function of the log."""
        replicas = self.bundle.replicas.state()
        shards = {spec.id: self.digest_of(spec.id) for spec in HERE}
        return self.bundle.epoch, replicas, shards, self.digest_of_log()

    def digest_of_log(self):
        log = read_order_log(self.bundle.log.packed())
        steps = [(log.clients[step.client], step.clock, step.reads) for step in log.steps]
        entries = {
            shard: [(log.clients[each["client"]], int(each["clock"]), int(each["flags"])) for each in found]
            for shard, found in log.entries.items()
        }
        # In bsp a refusal may be noted before or after the sums in progress, which it does not touch.
        refused = {shard: sorted(e for e in found if e[2] & NOT_APPLIED) for shard, found in entries.items()}
        applied = {shard: [e for e in found if not e[2] & NOT_APPLIED] for shard, found in entries.items()}
        return steps, refused, applied

    def digest_of(self, number):
        shard = self.bundle.shards[number]
        tables, pending = shard.tables, shard.pending
        return (
            shard.values.tobytes(),
            {name: array.tobytes() for name, array in shard.rule_state.items()},
            (tables.version, tables.loaded, tables.refused),
            tables.refusals.whole(),
            tables.last_number.whole(),
            sorted(tables.groups.items()),
            dict(tables.clocks),
            {replica: dict(counts) for replica, counts in tables.staleness_of.items() if counts},
            list(tables.early.items()),
            None if pending is None else (pending.reached, _contributions(pending)),
        )


def _contributions(pending):
    return {clock: [_contribution(each) for each in waiting] for clock, waiting in pending.waiting.items()}


def _contribution(each):
    push, (gradient,) = each.push.push, each.push.gradients.only([each.place]).parts
    arrays = [gradient.flat] if isinstance(gradient, DeltaPart) else [gradient.x_IK, gradient.errors_RK]
    fields = (push.session, push.incarnation, push.replica, push.clock, push.weight, push.rate)
    of_shards = (push.shards, push.numbers, push.versions, push.own_applied)
    return (
        each.replica,
        each.session,
        fields,
        tuple(of_place(numbers, each.place) for numbers in of_shards),
        [array.tobytes() for array in arrays],
    )


class Joiner:
    """A copy that gets the state in pieces, and meanwhile the entries."""

    def __init__(self, copy):
        self.copy = copy
        self.positions = []
        """Position of each piece that is there."""
        self.applied = 0

    @property
    def is_whole(self):
        return len(self.positions) == len(PIECES)

    def load(self, primary):
        specs = PIECES[len(self.positions)]
        tensors = [tensor.copy() for tensor in copy_piece(primary.bundle, specs, has_log=True)]
        piece = read_piece(self.copy.bundle, specs, TABLE, tensors)
        load_piece(self.copy.bundle, piece)
        self.positions.append(primary.position)

    def take(self, parts):
        self.applied += 1
        if not self.positions or self.applied <= self.positions[0]:
            return
        absent = {
            spec.id
            for number, specs in enumerate(PIECES)
            if number >= len(self.positions) or self.applied <= self.positions[number]
            for spec in specs
        }
        self.copy.take(parts, absent)


class RandomPrimary:
    """A primary and its clients. Entries commit and apply later than they are formed."""

    def __init__(self, copy, seed):
        self.copy = copy
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.groups = random.Random(seed)
        self.proposed = []
        """Entries on their way to the other members."""
        self.log = []
        """Parts of the committed entries."""
        self.generations = {0: 1, 1: 1, 2: 1}
        self.epoch = 0
        self.clocks = {}

    def note(self, effects):
        self.proposed += [effect.entry for effect in effects if isinstance(effect, Propose)]

    def step(self):
        """Let one thing happen."""
        dice = self.random
        act = dice.choices(
            (self.push, self.commit, self.work, self.tick, self.live, self.begin_epoch, self.forget),
            (8, 6, 6, 2, 1, 1, 0.5),
        )[0]
        act()

    def push(self):
        dice, state = self.random, self.copy.state
        replica = dice.randrange(4)
        generation = self.generations.get(replica, 1)
        kind = dice.choices(("matrix", "vectors", "all", "one", "assign"), (4, 4, 2, 2, 0.5))[0]
        parts = [Part(True, 2)] if kind in ("matrix", "all") and dice.random() < 0.6 else [Part(False, 2)]
        shards = {
            "matrix": MATRIX,
            "vectors": VECTORS,
            "one": (dice.choice((2, 3, 4)),),
            "assign": VECTORS,
        }.get(kind, (*MATRIX, *VECTORS, 4))
        if kind in ("vectors", "assign", "one"):
            parts = [Part(False, len(shards))]
        elif kind == "all":
            parts.append(Part(False, 4))
        session = (replica, generation)
        nexts = []
        skew = dice.choices((1, 0, 2), (85, 10, 5))[0]
        for number in shards:
            shard = state.shards.get(number)
            nexts.append((shard.tables.ordered[session] if shard is not None else 0) + skew)
        clock = self.clocks[session] = self.clocks.get(session, 0) + dice.randrange(2)
        push = push_on(
            shards,
            session=replica,
            incarnation=generation,
            replica=replica,
            clock=0 if kind == "assign" else clock,
            weight=dice.randrange(1, 4),
            rate=dice.choice((0.5, 0.1)),
            parts=tuple(parts),
            numbers=tuple(max(number, 1) for number in nexts),
            versions=tuple(
                max(state.shards[number].version - dice.randrange(3), 0) if number in state.shards else 0
                for number in shards
            ),
            epoch=self.epoch if state.clocked and kind != "assign" else 0,
            assign=kind == "assign",
            groups=() if kind == "assign" else self.some_groups(),
            recorded=True,
        )
        reads = np.frombuffer(b"%d, %d" % (replica, clock), np.uint8)
        tensors = [*self.tensors(parts, shards), reads]
        group = state.bundle.group(push.shards)
        gradients = read_gradients(push, tensors, TABLE, np.dtype("float64"), group)
        finite = None
        if not gradients.is_sure:
            finite = self.copy.applier.check_finite([TABLE[number] for number in shards], gradients)
            gradients = gradients.trusted()
        self.note(state.handle(PushArrived("push", push, gradients, finite)))

    def tensors(self, parts, shards):
        tensors, at = [], 0
        for part in parts:
            sizes = [TABLE[number].size for number in shards[at : at + part.count]]
            at += part.count
            if part.factors:
                images = self.random.randrange(1, 4)
                tensors += [self.normal(4, images), self.normal(sum(sizes) // 4, images)]
            else:
                tensors.append(self.normal(sum(sizes)))
        if self.random.random() < 0.1:
            tensors[-1][0] = self.random.choice((np.nan, np.inf, 1e308))
        return tensors

    def some_groups(self):
        dice = self.groups
        numbers = [dice.randrange(40) for _ in range(dice.randrange(4))]
        return name_groups(self.epoch + 1, numbers) if numbers else ()

    def normal(self, *shape):
        return np.ascontiguousarray(self.numbers.standard_normal(shape))

    def tick(self):
        dice, state = self.random, self.copy.state
        replica = dice.randrange(4)
        session = (replica, self.generations.get(replica, 1))
        clock = self.clocks[session] = self.clocks.get(session, 0) + 1
        shards = dice.choice((MATRIX, VECTORS, (3,)))
        epoch = self.epoch if state.clocked else 0
        tick = tick_on(
            shards, session=replica, incarnation=session[1], replica=replica, clock=clock, epoch=epoch
        )
        self.note(state.handle(TickArrived("tick", tick)))

    def live(self):
        dice = self.random
        replica = dice.randrange(4)
        if dice.random() < 0.4:
            self.generations[replica] = self.generations.get(replica, 0) + 1
        elif dice.random() < 0.3:
            self.generations.pop(replica, None)
        names = [replica for replica in self.generations if replica < 3 or dice.random() < 0.5]
        live = {Replica(replica): self.generations[replica] for replica in names}
        self.note(self.copy.state.handle(ReplicasChanged(live)))

    def begin_epoch(self):
        self.epoch += 1
        self.note(self.copy.state.handle(EpochBegan(self.epoch, self.random.randrange(4))))

    def forget(self):
        self.note(self.copy.state.forget([(3, self.generations.get(3, 1))]))

    def commit(self):
        """Let the other members hold the next entry."""
        if self.proposed:
            entry = self.proposed.pop(0)
            self.log.append([[tensor.copy() for tensor in part] for part in encode_entry(entry)])
            self.note(self.copy.state.committed(entry))
            check_losses(self.copy.state)

    def work(self):
        self.note(self.copy.work())

    def settle(self):
        while self.proposed or not self.copy.state.idle:
            self.commit()
            self.work()
