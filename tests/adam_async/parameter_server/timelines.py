"""Messages and shards of tests with a value for each field, and a state that a test leads through events."""

import numpy as np

from adam_async.messages import Part, Push, Tick, joined
from adam_async.parameter_server.shard import Shard
from adam_async.run.ids import BucketId, ShardId
from adam_async.run.shard_table import ShardSpec

SENDER = {"store": "run", "generation": 1, "session": 1, "incarnation": 1, "replica": 0}
"""Fields that a push, a tick and a report of steps have in common."""


def shard_of(number):
    spec = ShardSpec(id=ShardId(number), tensor=f"t{number}", start=0, stop=2, row_size=1, bucket=BucketId(0))
    return Shard(spec=spec, values=np.zeros(2), rule_state={})


def push_on(shards, **fields):
    """The first push of a session on some shards, dense and without a read, unless `fields` say otherwise.

    The loss of a group is its number.
    """
    plain = {"clock": 1, "weight": 1, "rate": 0.1, "parts": (Part(False, len(shards)),)}
    if fields.get("groups"):
        plain["loss_sum"] = float(sum(numbers_in(fields["groups"][1:])))
    of_shards = {"numbers": 1, "versions": 0, "own_applied": 0}
    return Push(shards=tuple(shards), **SENDER | plain | as_sent(shards, of_shards | fields))


def numbers_in(ranges):
    """The numbers of the groups in ranges."""
    return [n for start, stop in zip(ranges[::2], ranges[1::2], strict=False) for n in range(start, stop)]


def check_losses(state, without=()):
    """Each shard has counted the loss of each of its groups once, except shards without losses."""
    for number, shard in state.shards.items():
        for epoch, ranges in shard.tables.groups.items() if number not in without else ():
            assert shard.tables.losses[epoch].total == sum(numbers_in(ranges))


def tick_on(shards, **fields):
    return Tick(shards=tuple(shards), **SENDER | {"clock": 1} | as_sent(shards, fields))


def as_sent(shards, fields):
    """Fields as clients send them: numbers that are the same for all shards are one number."""
    names = ("numbers", "versions", "own_applied")
    lists = {name: fields[name] for name in names if np.size(fields.get(name, ())) == len(shards)}
    return fields | {name: joined(np.atleast_1d(each).tolist()) for name, each in lists.items()}


class Timeline:
    """A server's `state`, which handles events of the test; `apply` of the subclass applies one batch."""

    without_losses = ()
    """Shards whose pushes have no loss."""

    def tell(self, event):
        effects = self.state.handle(event)
        self.state.check_invariants()
        check_losses(self.state, self.without_losses)
        return effects

    def drain(self):
        effects = []
        while not self.state.idle:
            effects += self.apply()
        return effects

    def shard(self, number=0):
        return self.state.shards[ShardId(number)]
