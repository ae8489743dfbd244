"""Pure: checks of questions to a parameter server, which refuse questions that contradict themselves or the
run.

`messages.body` limits each field for every run. The checks here need the state of this run. A question names
each shard once and an epoch at most one ahead; no version is newer than its shard; and the answer fits into a
message. A refused question changes nothing. The server may learn of an epoch later than workers do, so it
also refuses a correct question that comes too early. The client sends the question again.

`SenderChecks` binds each push session to one peer and one replica. A session belongs to the link identity
(node and incarnation) that used it first. Otherwise push numbers of another peer would turn this peer's
pushes into duplicates. A session also belongs to one replica. If the session has the replica's live
generation, the cluster map must name the peer as a worker of the replica. In a store without a program each
client is a replica. A server may receive the map later than workers do. So the server accepts and remembers
sessions of a generation that it does not know to be live. The server checks the members once it knows the
generation.

In bsp the server acknowledges a push before it applies it, and keeps its gradients until the sum is complete.
So the checks bound the clocks of pending contributions. A replica pushes clock c only after it has received
the values of clock c - 1, which the server sends only after all live replicas have reached it. So a correct
push is at most one clock ahead of each of its shards, even at the end of an epoch and after a join. A replica
that reports a wrong clock within the bound harms mainly itself. If a replica's clock is too high, no other
replica waits for it. In bsp the server refuses its later contributions as late; in ssp it runs ahead with old
values. If a replica's clock is too low, the others wait, as for a replica that trains nothing. The clocks of
other replicas stay correct, because only the workers of a live generation may report their replica's clock
(`SenderChecks`). In asp no replica waits for a clock.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from adam_async.messages import MapShards, Pull, Push, ReadGroupSets, ReadShards, ReportSteps, Tick
from adam_async.messages.body import each_of, fits, of_place
from adam_async.messages.group_sets import MOST_BOUNDS
from adam_async.parameter_server.shard import Session, Shard, ShardTables
from adam_async.parameter_server.shard_group import each_tables
from adam_async.parameter_server.state import ServerState
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.epoch_shares import most_clock
from adam_async.run.group_ranges import KEPT_PER_WORK, LEAST_BOUNDS, MOST_WORK, GroupSets, groups_fault
from adam_async.run.ids import Replica, ShardId
from adam_async.run.shard_table import ShardSpec
from transport import Identity

MOST_WAIT_S = 60.0
"""Maximum wait of a pull for its answer, in seconds, even if the pull asks for a longer one."""

PADDING_BYTES = 64
"""Maximum padding of a tensor in a message, in bytes."""

TABLE_ROW_BYTES = 32
"""Maximum size of a row of the tables that precede the shards in an answer, in bytes."""

LOSSES_ROW_BYTES = 72
"""Size of a row of the table of losses there, in bytes."""

EARLY_STEPS = 4096
"""Maximum number of steps that a replica may report from the start of the run while the server has no epoch.
Also the maximum number of steps by which a client may be ahead of the newest clock of its shards."""

MOST_STEPS = 1 << 40
"""Number of steps that the bounds of clocks allow in a store without a program, whose only epoch has no
end."""

MOST_AHEAD = 4
"""Number of clocks by which a push in bsp may be ahead of the slowest replica. A correct push is 1 ahead."""


Question = Push | Tick | ReportSteps | Pull | ReadShards
"""Questions about shards of a store."""

SESSION_TYPES = (Push, Tick, ReportSteps, MapShards)
"""Types of the questions that belong to a push session."""

QUESTION_TYPES = (Push, Tick, ReportSteps, Pull, ReadShards)
"""Types of all questions."""


class Refusal(NamedTuple):
    """Reason for refusing a question: its code and its text."""

    code: str
    text: str


def answer_bytes(shards: Sequence[Shard]) -> int:
    """Return the size of an answer with the values of shards, as one tensor, in bytes."""
    return sum([shard.values.nbytes for shard in shards]) + PADDING_BYTES


def state_bytes(shards: Sequence[Shard]) -> int:
    """Return the size of an answer with shards and their rule's arrays, a tensor each, in bytes."""
    arrays = [array for shard in shards for array in (shard.values, *shard.rule_state.values())]
    sets = {id(shard.tables.groups): shard.tables.groups for shard in shards}
    sums = {id(shard.tables.losses): len(shard.tables.losses) for shard in shards}
    tables = sum([TABLE_ROW_BYTES * (1 + len(shard.clocks)) for shard in shards])
    tables += LOSSES_ROW_BYTES * sum(sums.values())
    tables += sum([TABLE_ROW_BYTES + 8 * len(kept) for each in sets.values() for kept in each.values()])
    return sum([array.nbytes + PADDING_BYTES for array in arrays]) + tables


class QuestionChecks:
    """The checks of one bundle on one server.

    Args:
        specs: All shards of the store, by number.
        most_weight: Maximum weight of one step.
        resumed_epoch: Epoch in progress at the checkpoint that the run resumes; 0 for a new run.
        resumed_clock: Number of steps that the fastest replica had finished at that checkpoint.
    """

    def __init__(
        self,
        state: ServerState,
        specs: Sequence[ShardSpec],
        *,
        most_weight: int,
        resumed_epoch: int = 0,
        resumed_clock: int = 0,
    ) -> None:
        self._state = state
        self._specs = specs
        self._families = {(spec.rule, spec.dtype) for spec in specs}
        self._most_weight = most_weight
        self._resumed_clock = resumed_clock
        self._most_epoch = resumed_epoch + 1
        self._most_groups = 1 << 32
        """Number of groups of an epoch, once it is known."""
        self._shard_bounds = max(LEAST_BOUNDS, 16 * MOST_BOUNDS // max(len(state.shards), 1))
        """Length of the ranges of a set for each shard that has it: sets of split tables share the memory."""
        self._most_clock = resumed_clock + EARLY_STEPS
        self._least_bound = self._most_clock
        """Clock up to which questions pass without a look at the clocks of shards, in a store of clients."""
        self.free_clock = self._most_clock
        """Clock up to which a question of this store passes without a look at the clocks of shards."""

    def epoch_began(self, number: int, *, first_clock: int, groups: int | None) -> None:
        """Move the bounds to an epoch that the controllers began.

        Args:
            first_clock: Clock at the beginning of the epoch, in steps.
            groups: Number of its groups; None for a store without a program, whose only epoch has no end.
        """
        self._most_epoch = number + 1
        self._most_groups = self._most_groups if groups is None else groups
        stands_at = max(first_clock, self._resumed_clock)
        if groups is None:
            self._most_clock = stands_at + MOST_STEPS
        else:
            self._most_clock = most_clock(stands_at=stands_at, epochs=number + 1, groups=groups)
        self._set_free_clock()

    def _set_free_clock(self) -> None:
        is_bounded = self._state.clocked and not self._state.program
        self.free_clock = min(self._most_clock, self._least_bound) if is_bounded else self._most_clock

    def refusal(self, body: Question, *, most_bytes: int) -> Refusal | None:
        """Return the refusal of a question; None if the server can take it.

        The server's state refuses a question for another run or generation, with its own code.

        Args:
            most_bytes: Maximum size of a message on the link of the question, in bytes.
        """
        if body.store != self._state.store:
            return None
        match body:
            case Push():
                text = self._push(body)
            case Tick():
                text = self._repeated(body.shards) or self._epoch(body.epoch)
                text = text or self._clock(body.clock) or self._leap(body)
            case ReportSteps():
                text = self._step_reports(body)
            case Pull():
                text = self._repeated(body.shards) or self._clock(body.clock) or self._mixed(body.shards)
            case ReadShards():
                text = _twice(body.shards) or self._clock(body.clock) or self._mixed(body.shards)
        if text:
            return Refusal("malformed", f"{type(body).__name__}: {text}")
        if self._state.synchronous and isinstance(body, Push) and (text := self._ahead(body)):
            return Refusal("busy", text)
        return self._too_large(body, most_bytes)

    def refusal_of_sets(self, asked: ReadGroupSets, cluster: ClusterMap | None) -> Refusal | None:
        """Return the refusal of a question for groups; None if the server can take it.

        Args:
            cluster: Map that the bundle follows.
        """
        if not self._state.program:
            return Refusal("malformed", "ReadGroupSets: a store without a program has no groups")
        version = cluster.version if cluster is not None else 0
        if version < asked.map_version:
            text = f"this server follows map version {version}, not {asked.map_version} yet"
            return Refusal("busy", text)
        if text := self._epoch(asked.epoch) or ("" if asked.epoch else "no epoch has the number 0"):
            return Refusal("malformed", f"ReadGroupSets: {text}")
        return None

    def _push(self, push: Push) -> str:
        if not fits(len(push.shards), push.numbers, push.versions, push.own_applied):
            return "shards, numbers, versions and own_applied differ in length"
        # One test lets a correct push of one shard pass; the calls name the first of the faults.
        if (
            len(push.shards) > 1
            or push.epoch > self._most_epoch
            or push.clock > self._most_clock
            or push.weight > self._most_weight
        ):
            text = (
                self._repeated(push.shards)
                or self._epoch(push.epoch)
                or self._clock(push.clock)
                or self._weight(push.weight)
                or (self._mixed(push.shards) if push.commands is None else "")
            )
            if text:
                return text
        if push.assign and (text := _assignment(push)):
            return text
        if push.commands is not None and (not push.assign or push.parts or push.pull or push.vector):
            return "commands are an assignment without tensors, values in the answer, and a vector"
        if push.vector and self._state.synchronous and not push.assign:
            return "with bsp a push goes to the values, and the rule is applied to the sum of a step"
        if push.groups:
            text = self.fault_of_groups(push.groups, self._tables(push.shards), push.epoch)
            if text:
                return text
        if text := self._leap(push):
            return text
        if push.generation != self._state.generation:
            return ""
        group = self._state.bundle.group(push.shards)
        tables = group.shared() if group is not None else None
        is_one = isinstance(push.versions, int) and push.own_applied == 0
        if tables is not None and is_one and of_place(push.versions, 0) <= tables.version:
            return ""
        shards = self._state.shards
        several = (push.versions, push.own_applied, push.numbers)
        for number, version, own_applied, count in zip(
            push.shards, *[each_of(each, len(push.shards)) for each in several], strict=True
        ):
            shard = shards.get(ShardId(number))
            if shard is not None and version > shard.version:
                return f"version {version} of shard {number} was read, and it has {shard.version}"
            if own_applied >= count and own_applied:
                return f"{own_applied} pushes on shard {number} came before push {count}"
        return ""

    def _mixed(self, shards: tuple[int, ...]) -> str:
        """Name a shard whose rule or type differs from those of the first shard; empty if there is none."""
        if len(self._families) < 2 or len(shards) < 2 or self._state.bundle.group(shards) is not None:
            return ""
        specs = self._specs
        known = [specs[number] for number in shards if number < len(specs)]
        for spec in known:
            if (spec.rule, spec.dtype) != (known[0].rule, known[0].dtype):
                return f"shards {known[0].id} and {spec.id} differ in rule or type: send a message for each"
        return ""

    def _repeated(self, shards: tuple[int, ...]) -> str:
        return "" if self._state.bundle.group(shards) is not None else _twice(shards)

    def _step_reports(self, report: ReportSteps) -> str:
        text, tables = _twice(report.shards), self._tables(report.shards)
        named = [len(step.groups) for step in report.steps if step.groups]
        for step in report.steps:
            text = text or self._clock(step.clock) or self._weight(step.weight) or _twice(step.refused)
            if step.groups and not text:
                text = self.fault_of_groups(step.groups, tables, named=sum(named), steps=len(named))
            if step.refused and max(step.refused) >= len(report.shards):
                return f"it names {len(report.shards)} shards, and no place {max(step.refused)}"
        return text

    def _tables(self, shards: tuple[int, ...]) -> Collection[ShardTables]:
        """Return the tables of the shards that are here, each once."""
        found = [self._state.shards.get(ShardId(number)) for number in shards]
        return each_tables([shard for shard in found if shard is not None])

    def fault_of_groups(
        self,
        groups: tuple[int, ...],
        several: Collection[ShardTables],
        epoch: int = 0,
        *,
        named: int = 0,
        steps: int = 1,
    ) -> str:
        """Return why a push or a step may not name these groups; empty if it may.

        Args:
            several: Tables of its shards.
            epoch: Epoch of the push; 0 for none.
            named: Length of the groups of all steps of a report; 0 for one step.
            steps: Number of steps of a report that name groups.
        """
        is_of_run = self._state.program
        if not is_of_run and self._state.clocked:
            return "it names groups, and a store with clocks has those of runs only"
        # One test lets a correct step of one range pass; the calls name the first of the faults.
        if len(groups) != 3 or not 0 < groups[0] <= self._most_epoch or groups[1] >= groups[2]:
            # Clients number their epochs, such as the evaluations of L-BFGS, as they like.
            if text := groups_fault(groups) or (self._epoch(groups[0]) if is_of_run else ""):
                return text
        if epoch and groups[0] != epoch:
            return f"it is of epoch {epoch}, and its groups of epoch {groups[0]}"
        if groups[-1] > self._most_groups:
            return f"group {groups[-1] - 1}, and an epoch has {self._most_groups}"
        sets: GroupSets | None = None
        named, work = named or len(groups), 0
        for tables in several:
            # Not the counted groups: those of pushes that wait are counted after this one passes.
            if tables.ordered_groups == sets:
                continue
            sets = tables.ordered_groups
            kept = sets.get(groups[0], ())
            most = min(MOST_BOUNDS, tables.shards * self._shard_bounds)
            if len(kept) + named > most:
                return f"its groups are too scattered: a shard keeps {most // 2} ranges of an epoch"
            work += steps * len(kept) // KEPT_PER_WORK + named
        if work > MOST_WORK:
            return "its groups are too scattered over shards with different sets: name fewer shards at a time"
        return ""

    def _epoch(self, epoch: int) -> str:
        most = self._most_epoch
        return "" if epoch <= most else f"epoch {epoch}, and {most} is the next one"

    def _clock(self, clock: int) -> str:
        most = self._most_clock
        return "" if clock <= most else f"clock {clock}, and no replica can be beyond {most}"

    def _leap(self, body: Push | Tick) -> str:
        """Name the fault of an epoch or a clock in a store of clients; empty if it has none."""
        state = self._state
        if state.program:
            return ""
        if not state.clocked:
            return f"epoch {body.epoch} of a store without clocks" if body.epoch else ""
        if body.clock <= self._least_bound:
            return ""
        named = [state.shards.get(ShardId(number)) for number in body.shards]
        newest = max((clock for shard in named if shard for clock in shard.clocks.values()), default=0)
        self._least_bound = max(self._least_bound, newest + EARLY_STEPS)
        self._set_free_clock()
        if body.clock <= self._least_bound:
            return ""
        return f"clock {body.clock}, and the newest of these shards is {newest}"

    def _ahead(self, push: Push) -> str:
        """Name the first shard whose clock a push is too far ahead of; empty if there is none."""
        for number in push.shards:
            shard = self._state.shards.get(ShardId(number))
            if shard is None or shard.pending is None:
                continue
            reached = shard.pending.reached
            if push.clock > reached + MOST_AHEAD:
                return f"clock {push.clock} of shard {number}, and all replicas have reached {reached}: wait"
        return ""

    def _weight(self, weight: int) -> str:
        most = self._most_weight
        return "" if weight <= most else f"weight {weight}, and a step has at most {most}"

    def _too_large(self, body: Question, most_bytes: int) -> Refusal | None:
        """Refuse an answer that would not fit into a message, before copying its values."""
        if isinstance(body, (Tick, ReportSteps)) or (isinstance(body, Push) and not body.pull):
            return None
        known = self._state.shards
        group = self._state.bundle.group(body.shards)
        if group is not None and not isinstance(body, ReadShards):
            return _refuse_size(group.nbytes + PADDING_BYTES, most_bytes)
        shards = [known[ShardId(number)] for number in body.shards if ShardId(number) in known]
        size = state_bytes(shards) if isinstance(body, ReadShards) else answer_bytes(shards)
        return _refuse_size(size, most_bytes)


def _refuse_size(size: int, most_bytes: int) -> Refusal | None:
    if size <= most_bytes:
        return None
    text = f"the answer would have {size} bytes, and a message {most_bytes}: ask for fewer shards"
    return Refusal("too-large", text)


def _assignment(push: Push) -> str:
    """Return the fault of a push of values; empty if it has none."""
    if any(part.factors for part in push.parts):
        return "an assignment has values, not factors"
    if push.groups:
        return "an assignment sums no groups"
    return "an assignment has no clock" if push.clock or push.epoch else ""


def _twice(numbers: Sequence[int]) -> str:
    """Name the first repeated number; empty without a repetition."""
    if len(numbers) < 2 or len(set(numbers)) == len(numbers):
        return ""
    again = next(one for one, other in pairwise(sorted(numbers)) if one == other)
    return f"{again} is named twice"


Peer = tuple[str, int]
"""Identity of a peer: the node and its incarnation."""

MOST_SESSIONS = 8
"""Maximum number of sessions of one peer that the map does not name, and of one generation that it names."""

MOST_UNNAMED = 32
"""Maximum number of sessions of all peers that the map does not name. Correct ones wait for a newer map."""

MOST_SENDERS = 4096
"""Number of sessions of all peers above which the server forgets the oldest of ended generations."""

TABLES_BYTES = 64 << 20
"""Memory of the numbers of ended sessions in the tables of a bundle, in bytes, above which the server forgets
the oldest of them."""

ENTRY_BYTES = 512
"""Memory of the numbers of a session in the tables of a shard, in bytes."""


class SenderChecks:
    """The sessions of one bundle on one server.

    Args:
        program: Whether the store belongs to a program: its workers push, and its driver loads the values.
            Clients push to other stores.
        creator: Node of the client that loads the values of a store without a program.
    """

    def __init__(self, *, program: bool = True, creator: str = "") -> None:
        self._program = program
        self._creator = creator
        self._of: dict[Session, tuple[Peer, Replica]] = {}
        self._unnamed: dict[Session, Peer] = {}
        """Sessions of generations that the map has not named."""
        self._has_new = False
        """Whether a session was bound since the last call of `surplus`."""
        self._members: Mapping[tuple[Replica, int], frozenset[Peer]] = {}

    def replica_generations_changed(self, members: Mapping[tuple[Replica, int], frozenset[Peer]]) -> None:
        """Set the workers of each live replica generation; forget sessions of replaced generations."""
        self._members = members
        live = dict(members.keys())
        for session, (_, replica) in list(self._of.items()):
            if live.get(replica, session[1]) != session[1]:
                self._forget(session)
            elif (replica, session[1]) in members:
                self._unnamed.pop(session, None)

    def refusal(self, peer: Identity, message: Push | Tick | ReportSteps | MapShards) -> str:
        """Return why a peer may not send this message; empty if it may. Binds the session to the peer."""
        if (peer.role == "client") == self._program:
            return self._not_a_user(peer)
        if self._program and isinstance(message, Push) and message.assign:
            return f"{peer.node} assigns values, and the store of a run takes none"
        session: Session = (message.session, message.incarnation)
        replica, sender = Replica(message.replica), (peer.node, peer.incarnation)
        bound = self._of.get(session)
        if bound == (sender, replica):
            members = self._members.get((replica, message.incarnation))
            if members is None or sender in members:
                return ""
        elif bound is not None:
            return f"this session is {bound[0][0]}'s, for replica {bound[1]}"
        members = self._members.get((replica, message.incarnation))
        if members is not None and sender not in members:
            return f"{peer.node} is no worker of replica {replica} in generation {message.incarnation}"
        if members is None:
            mine = sum([each == sender for each in self._unnamed.values()])
        else:
            mine = sum([owner == (sender, replica) and of[1] == session[1] for of, owner in self._of.items()])
        if mine >= MOST_SESSIONS:
            return f"{peer.node} has {MOST_SESSIONS} sessions, and no more at a time"
        if members is None:
            if len(self._unnamed) >= MOST_UNNAMED:
                return f"{MOST_UNNAMED} sessions wait for a map that names them, and no more may"
            self._unnamed[session] = sender
        self._of[session] = (sender, replica)
        self._has_new = True
        return ""

    def load_refusal(self, peer: Identity) -> str:
        """Return why a peer may not load values; empty if it may."""
        if (peer.role == "client") == self._program:
            return self._not_a_user(peer)
        if not self._program and peer.node != self._creator:
            return f"{peer.node} loads values, and {self._creator} created the store"
        return ""

    def read_refusal(self, peer: Identity) -> str:
        """Return why a peer may not read the state of rules; empty if it may."""
        return self._not_a_user(peer) if self._program and peer.role == "client" else ""

    def _not_a_user(self, peer: Identity) -> str:
        of = "a run" if self._program else "clients"
        return f"{peer.role} {peer.node} has no part in a store of {of}"

    def surplus(self, tables: Callable[[], int]) -> list[Session]:
        """Forget and return the oldest sessions of ended generations beyond the bounds of their number.

        Args:
            tables: Returns the number of different tables of the bundle's shards.
        """
        if not self._has_new:
            return []
        self._has_new = False
        # A session that the map has not named stays: without its numbers a repeated push would count twice.
        idle = [
            session
            for session, (_, replica) in self._of.items()
            if (replica, session[1]) not in self._members and session not in self._unnamed
        ]
        most = TABLES_BYTES // (ENTRY_BYTES * tables())
        surplus = idle[: max(len(self._of) - MOST_SENDERS, len(idle) - most, 0)]
        for session in surplus:
            self._forget(session)
        return surplus

    def _forget(self, session: Session) -> None:
        del self._of[session]
        self._unnamed.pop(session, None)

    def __repr__(self) -> str:
        return f"<SenderChecks {len(self._of)} sessions, {len(self._unnamed)} not in the map>"
