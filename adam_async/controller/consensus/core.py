"""Pure: one node of a group that agrees on a log of commands: Multi-Paxos with a stable leader, told as Raft.

Theory of operation
-------------------
Events go in, effects come out. Time is an argument, and dice are a function that was given. Nothing here
waits: what would wait is a field, and is looked at again after each event.

*Terms.* Each term has at most one leader, for a node votes once in a term and a leader has the votes of a
majority. Entries are named by index and term, and a term's leader never puts two at one index; so two logs
that have the same entry are the same up to it, because entries are only taken after an entry that both have.

*Durable first.* What was changed in memory and not yet on disk is in records that `Persist` carries out.
Whatever is said to others is held until all records that were made before it are on disk; even to oneself: a
candidate's own vote and a leader's own entries count when they come back from the disk as any other's would.
So a crash only forgets what nobody was told. Entries are sent by a leader before it has them on disk itself;
its term, which is what makes them its own, was durable before it was elected. That a group of one works, and
that all that came while the disk was busy is synced at once, follows from this one rule.

*Why a leader has all committed entries.* An entry of the leader's own term is committed when a majority has
it. A later leader has votes of a majority, so one of its voters had the entry when it voted, and voted only
for a log that ends as late as its own: by that, and by induction over the terms between, the later leader has
the entry. An entry of an earlier term is never committed by counting, because a log without it may end later;
it is committed with the first one after it that is of the leader's term, and each leader begins its term with
an entry for that.

*Why reads see all writes.* A read notes the highest index known to be committed, but at least that of the
leader's first entry, before which lies all that earlier leaders had committed. It then begins a round, or
joins the next: if a majority answers in this term, then no later leader can have been elected when the round
began, so nothing that was committed by then is missing. The answer waits until the index has been applied.

*Why membership may change by one node.* A membership holds as soon as it is in a log. Majorities of two that
are one step apart overlap, so elections and commits of both exclude each other. A step begins only when the
one before is committed, and after an entry of the leader's own term is: without that, leaders of different
terms could each have a step that the other does not know, which are two steps apart.

*Calm.* Before a term is raised the voters are asked whether they would agree (*pre-vote*); who hears a leader
says nothing at all. So a node that was cut off neither raises terms meanwhile nor deposes anybody when it
comes back. A leader that has not heard a majority for an election time-out gives up (*check-quorum*), so one
that can be heard but hears nobody does not keep the others from finding a better one. None of this is needed
for safety, and no clock is."""

from collections.abc import Callable
from typing import Any

from adam_async.controller.consensus.events import (
    Apply,
    Change,
    Done,
    Effect,
    Event,
    Led,
    Persisted,
    Propose,
    Read,
    ReadReady,
    Received,
    Refused,
    Restore,
    Send,
    Snapshotted,
    Tick,
    Transfer,
    Unknown,
)
from adam_async.controller.consensus.incoming import Incoming
from adam_async.controller.consensus.leading import Handover, Leading, Progress, WaitingRead
from adam_async.controller.consensus.log import Log
from adam_async.controller.consensus.membership import Members, MembershipError
from adam_async.controller.consensus.messages import (
    Append,
    Appended,
    AskVote,
    Chunk,
    Entry,
    Message,
    Snapshot,
    Taken,
    TakeOver,
    Vote,
)
from adam_async.controller.consensus.outbox import Outbox
from adam_async.controller.consensus.records import Ballot, Entries, Saved
from adam_async.controller.consensus.roles import TRANSITIONS, Cause, Role, always, by_role, if_leading
from adam_async.controller.consensus.settings import Settings
from adam_async.controller.consensus.violations import ANY_CONTENTS, Contents, Guard


class Core:
    """One node. The shell has restored `saved.snapshot` into its state machine before it handles any event.

    Args:
        saved: What `records.recover` found, what `records.found` made, or `Saved` with nothing but a new
            identity for a node that joins; in the latter two cases it is on disk already.
        settings: Times and sizes.
        draw: Returns a number from 0 to 1, another one each time: it spreads the election time-outs.
        now: The time, in seconds of the caller's clock.
        contents: Checks that the state machine can read commands and states of other nodes.
    """

    def __init__(
        self,
        saved: Saved,
        settings: Settings,
        *,
        draw: Callable[[], float],
        now: float,
        contents: Contents = ANY_CONTENTS,
    ) -> None:
        self.me = saved.me
        self.term = saved.term
        self.vote = saved.vote
        self.role = Role.FOLLOWER
        self.leader: str | None = None
        self.commit = saved.snapshot.index
        """All entries up to here are committed, and were given out to be applied."""
        self.log = Log(saved.snapshot, saved.entries)
        self._settings = settings
        self._draw = draw
        self._now = now
        self._heard = now
        """When `leader` was last heard."""
        self._votes: set[str] = set()
        self._leading: Leading | None = None
        self._incoming = Incoming()
        self._guard = Guard(self.me, settings, contents, self._incoming)
        self._effects: list[Effect] = []
        self._outbox = Outbox()
        self._told: tuple[int, str | None] = (self.term, None)
        self._wait_for_leader()

    @property
    def members(self) -> Members:
        """The membership in force: the last in the log, committed or not."""
        return self.log.members

    @property
    def saved(self) -> Saved:
        """What a new file may begin with, in place of all records so far."""
        return Saved(
            me=self.me, term=self.term, vote=self.vote, snapshot=self.log.snapshot, entries=self.log.entries
        )

    def silent_s(self, node: str, *, now: float) -> float:
        """For how long one of the group has not answered us; 0 where we do not lead, or it is not known."""
        known = self._leading.progress.get(node) if self._leading is not None else None
        return now - known.heard if known is not None and node != self.me else 0.0

    def __repr__(self) -> str:
        where = f"commit {self.commit} of {self.log.last_index}"
        return f"<Core {self.me} {self.role.value} term {self.term} {where}>"

    def next_deadline(self) -> float:
        """When to send a `Tick`, in seconds of the caller's clock."""
        return self._deadline

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """Take one event. The caller carries out the effects in their order.

        Raises:
            Violation: No correct node sends the received message; nothing has changed.
        """
        if isinstance(event, Received):
            self._guard.check(event.message, self.log, self.commit, self._leading, self.term, self.leader)
        self._now = now
        if isinstance(event, Received):
            self._receive(event.message)
        elif isinstance(event, Persisted):
            self._outbox.persisted(event.number)
        else:
            HANDLERS[type(event)][self.role](self, event)
        self._settle()
        effects, self._effects = self._effects, []
        return effects

    # --- what is said waits for what is written ------------------------------------------------

    def _settle(self) -> None:
        """Give out what is to be written, and what has waited for what is written by now."""
        while True:
            persist = self._outbox.persist()
            if persist is not None:
                self._effects.append(persist)
            message = self._outbox.next()
            if message is None:
                break
            if message.to == self.me:
                self._receive(message)
            else:
                self._effects.append(Send(message))
        if self._told != (self.term, self.leader):
            self._told = (self.term, self.leader)
            self._effects.append(Led(*self._told))

    # --- terms and roles -----------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        if message.to != self.me:
            return  # for an earlier life of this place, which may have promised what we know nothing of
        if isinstance(message, AskVote) and not message.transfer and self._leader_is_near():
            return
        if message.term > self.term:
            self._become(Cause.OUTDATED, term=message.term)
        elif message.term < self.term:
            self._correct(message)
            return
        HANDLERS[type(message)][self.role](self, message)

    def _leader_is_near(self) -> bool:
        if self.role is Role.LEADER:
            return True
        return self.leader is not None and self._now < self._heard + self._settings.election_s

    def _correct(self, message: Message) -> None:
        """Tell one who asks in an old term which one it is. Answers of old terms come too late."""
        sender = message.sender
        if isinstance(message, AskVote):
            self._outbox.hold(Vote(sender=self.me, to=sender, term=self.term, pre=message.pre, granted=False))
        elif isinstance(message, Append | Chunk):
            self._outbox.hold(Appended(sender=self.me, to=sender, term=self.term, ok=False, match=0, round=0))

    def _become(self, cause: Cause, *, term: int | None = None, vote: str | None = None) -> None:
        """Move to the role that follows from `cause`, and into `term`, if it is given, with `vote`."""
        old, self.role = self.role, TRANSITIONS[self.role, cause]
        if term is not None:
            assert term > self.term, (term, self.term)
            self._cast(term, vote)
        if self.role is not Role.LEADER:
            self.leader = None
            self._resign()
        if old is not Role.FOLLOWER or self.role is not Role.FOLLOWER:
            self._wait_for_leader()
        self._votes.clear()

    def _cast(self, term: int, vote: str | None) -> None:
        self.term, self.vote = term, vote
        self._outbox.record(Ballot(term, vote))

    def _wait_for_leader(self) -> None:
        self._deadline = self._now + self._settings.election_s * (1 + self._draw())

    def _resign(self) -> None:
        leading, self._leading = self._leading, None
        if leading is None:
            return
        self._effects.extend(Unknown(tag) for tag in leading.waiting.values())
        self._effects.extend(Refused(read.tag, "leadership was lost", None) for read in leading.reads)
        if leading.handover is not None:
            self._effects.append(Done(leading.handover.tag, 0))

    # --- elections -----------------------------------------------------------------------------

    def _seek(self, _: Tick) -> None:
        if self._now < self._deadline:
            return
        # One whose removal is in its own log alone may be the only one whom the others could elect.
        if not self.log.has_voter_since(self.commit, self.me):
            self._wait_for_leader()
            return
        self._become(Cause.SILENCE)
        self._ask(pre=True)

    def _take_over(self, _: TakeOver) -> None:
        if self.me in self.members.voters:
            self._runner(Cause.ASKED)

    def _runner(self, cause: Cause) -> None:
        self._become(cause, term=self.term + 1, vote=self.me)
        self._ask(pre=False, transfer=cause is Cause.ASKED)

    def _ask(self, *, pre: bool, transfer: bool = False) -> None:
        for voter in self.members.voters:
            if voter == self.me:
                self._outbox.hold(Vote(sender=voter, to=voter, term=self.term, pre=pre, granted=True))
            else:
                ask = AskVote(
                    sender=self.me,
                    to=voter,
                    term=self.term,
                    last_index=self.log.last_index,
                    last_term=self.log.last_term,
                    pre=pre,
                    transfer=transfer,
                )
                self._outbox.hold(ask)

    def _consider(self, ask: AskVote) -> None:
        granted = (ask.last_term, ask.last_index) >= (self.log.last_term, self.log.last_index)
        if not ask.pre:
            granted = granted and self.vote in (None, ask.sender)
            if granted and self.vote is None:
                self._cast(self.term, ask.sender)
                self._wait_for_leader()
        self._outbox.hold(Vote(sender=self.me, to=ask.sender, term=self.term, pre=ask.pre, granted=granted))

    def _count(self, vote: Vote) -> None:
        members = self.members
        if vote.pre != (self.role is Role.PROBER) or not vote.granted or vote.sender not in members.voters:
            return
        self._votes.add(vote.sender)
        if len(self._votes) < members.quorum:
            return
        if vote.pre:
            self._runner(Cause.ENCOURAGED)
        else:
            self._lead()

    def _lead(self) -> None:
        self._become(Cause.ELECTED)
        self.leader = self.me
        self._deadline = self._now + self._settings.heartbeat_s
        self._leading = Leading(self.me, self.term, self._settings, first=self.log.last_index + 1)
        self._leading.regroup(self.members, last_index=self.log.last_index, now=self._now)
        self._add()
        self._speak()

    # --- following -----------------------------------------------------------------------------

    def _hear(self, leader: str) -> None:
        if self.role is not Role.FOLLOWER:
            self._become(Cause.LED)
        self.leader, self._heard = leader, self._now
        self._wait_for_leader()

    def _follow(self, append: Append) -> None:
        self._hear(append.sender)
        previous = append.prev_index
        if previous > self.commit and self.log.term_at(previous) != append.prev_term:
            last = self.log.last_index
            match = last if previous > last else self.log.before_term_of(previous, self.commit)
            self._answer(append, ok=False, match=match)
            return
        for position, entry in enumerate(append.entries):
            if entry.index > self.commit and self.log.term_at(entry.index) != entry.term:
                self._put(append.entries[position:])
                break
        match = previous + len(append.entries)
        self._commit_to(min(append.commit, match))
        self._answer(append, ok=True, match=match)

    def _answer(self, question: Append | Chunk, *, ok: bool, match: int) -> None:
        answer = Appended(
            sender=self.me,
            to=question.sender,
            term=self.term,
            ok=ok,
            match=match,
            prev_index=question.prev_index if isinstance(question, Append) else 0,
            round=question.round,
        )
        self._outbox.hold(answer)

    def _put(self, entries: tuple[Entry, ...]) -> None:
        assert entries[0].index > self.commit, (entries[0], self.commit)
        self.log.put(entries)
        self._outbox.record(Entries(entries))

    def _commit_to(self, index: int) -> None:
        if index <= self.commit:
            return
        entries = self.log.run(self.commit + 1, index)
        self.commit = index
        self._effects.append(Apply(entries))

    def _receive_chunk(self, chunk: Chunk) -> None:
        self._hear(chunk.sender)
        if chunk.index <= self.commit:
            self._answer(chunk, ok=True, match=self.commit)
            return
        state = self._incoming.whole(chunk)
        if state is not None:
            self._incoming.forget()
            self._install(chunk, state)
            return
        self._outbox.hold(
            Taken(
                sender=self.me,
                to=chunk.sender,
                term=self.term,
                index=chunk.index,
                offset=self._incoming.take(chunk),
                round=chunk.round,
            )
        )

    def _install(self, chunk: Chunk, state: bytes) -> None:
        snapshot = Snapshot(chunk.index, chunk.index_term, chunk.members, state)
        self.log.install(snapshot)
        self.commit = snapshot.index
        self._outbox.record(snapshot)
        self._effects.append(Restore(snapshot))
        self._answer(chunk, ok=True, match=snapshot.index)

    def _keep_snapshot(self, taken: Snapshotted) -> None:
        if taken.index > self.commit:
            raise ValueError(
                f"a snapshot at {taken.index} was taken, but only {self.commit} entries are applied"
            )
        term = self.log.term_at(taken.index)
        if term is None or taken.index == self.log.snapshot.index:
            return  # a later one was received meanwhile
        snapshot = Snapshot(taken.index, term, self.log.members_at(taken.index), taken.state)
        self.log.install(snapshot)
        self._outbox.record(snapshot)

    # --- leading -------------------------------------------------------------------------------

    @property
    def _led(self) -> Leading:
        assert self._leading is not None, self
        return self._leading

    def _add(self, command: bytes | None = None, members: Members | None = None) -> int:
        """Put an entry of one's own at the end of the log, and send it."""
        index = self.log.last_index + 1
        self._put((Entry(index, self.term, command, members),))
        self._outbox.hold(Appended(sender=self.me, to=self.me, term=self.term, ok=True, match=index, round=0))
        if members is not None:
            self._led.regroup(members, last_index=index, now=self._now)
        for node in self._others():
            self._feed(node)
        return index

    def _others(self) -> list[str]:
        return [node for node in self._led.progress if node != self.me]

    def _speak(self) -> None:
        """Say something to everybody."""
        for node in self._others():
            self._feed(node, speak=True)

    def _feed(self, node: str, *, speak: bool = False) -> None:
        self._effects.extend(map(Send, self._led.feed(node, self.log, self.commit, speak=speak)))

    def _hear_from(self, answer: Appended | Taken) -> Progress | None:
        known = self._led.progress.get(answer.sender)
        if known is not None:
            known.heard = self._now
            known.round = max(known.round, answer.round)
        return known

    def _count_entries(self, answer: Appended) -> None:
        known = self._hear_from(answer)
        if known is None:
            return
        if answer.ok:
            known.matched(answer.match)
            self._commit_what_is_decided()
        elif known.snapshot is None and (known.sure or answer.prev_index == known.next - 1):
            if answer.prev_index > known.match:
                known.sure = False
                known.next = max(known.match, min(answer.prev_index - 1, answer.match)) + 1
                self._feed(answer.sender, speak=True)
        if self._leading is not None:
            self._serve_reads()
            if answer.ok and answer.sender in self._others():
                self._feed(answer.sender)
                self._hand_over()

    def _continue_snapshot(self, taken: Taken) -> None:
        known = self._hear_from(taken)
        if known is not None and known.snapshot is not None and known.snapshot.index == taken.index:
            if known.offset != taken.offset:
                known.offset = taken.offset
                self._feed(taken.sender, speak=True)
        self._serve_reads()

    def _commit_what_is_decided(self) -> None:
        leading, before = self._led, self.commit
        if before < self.log.last_index:
            decided = leading.matched(self.members)
            if decided > before and self.log.term_at(decided) == self.term:
                self._commit_to(decided)
            for index in range(before + 1, self.commit + 1):
                if index in leading.waiting:
                    self._effects.append(Done(leading.waiting.pop(index), index))
        if self.me not in self.members.voters and self.log.members_index <= self.commit:
            self._speak()  # so that those who stay hear of it from one who knows
            self._become(Cause.REMOVED)

    def _beat(self, _: Tick) -> None:
        if self._now < self._deadline:
            return
        leading, settings = self._led, self._settings
        if self.me in leading.progress:
            leading.progress[self.me].heard = self._now
        if leading.heard(self.members) < self._now - settings.election_s:
            self._become(Cause.DEAF)
            return
        self._deadline = self._now + settings.heartbeat_s
        self._speak()
        handover = leading.handover
        if handover is not None and self._now >= handover.deadline:
            leading.handover = None
            self._effects.append(
                Refused(handover.tag, f"{handover.to} did not take over in {settings.election_s} s", self.me)
            )
        self._hand_over()

    def _hand_over(self) -> None:
        handover = self._led.handover
        if handover is not None and self._led.progress[handover.to].match == self.log.last_index:
            self._effects.append(Send(TakeOver(sender=self.me, to=handover.to, term=self.term)))

    # --- questions -----------------------------------------------------------------------------

    def _propose(self, propose: Propose) -> None:
        size, limit = len(propose.command), self._settings.command_bytes
        if size > limit:
            self._refuse(
                propose, f"a command of {size} bytes is above the limit of {limit}; send less at once"
            )
        elif self._may_add(propose):
            self._led.waiting[self._add(command=propose.command)] = propose.tag

    def _change(self, change: Change) -> None:
        leading, step = self._led, change.step
        if self.commit < leading.first:
            self._refuse(change, "no entry of this term is committed yet; try again")
        elif self.log.members_index > self.commit:
            self._refuse(change, "another change of the membership is not committed yet; try again")
        elif step.kind == "promote" and self._lag(step.node) > self._settings.catch_up:
            self._refuse(change, f"{step.node} lacks {self._lag(step.node)} entries; try again")
        elif self._may_add(change):
            try:
                members = self.members.changed(step)
            except MembershipError as error:
                self._refuse(change, str(error))
            else:
                leading.waiting[self._add(members=members)] = change.tag

    def _lag(self, node: str) -> int:
        known = self._led.progress.get(node)
        return self.log.last_index - known.match if known is not None else 0

    def _may_add(self, question: Propose | Change) -> bool:
        if self._led.handover is not None:
            self._refuse(question, f"leadership is on its way to {self._led.handover.to}")
            return False
        if self.log.last_index - self.commit >= self._settings.backlog:
            self._refuse(question, f"{self._settings.backlog} entries wait to be committed; try again later")
            return False
        return True

    def _read(self, read: Read) -> None:
        leading = self._led
        if len(leading.reads) >= self._settings.backlog:
            self._refuse(read, f"{self._settings.backlog} reads wait for an answer; try again later")
            return
        leading.reads.append(WaitingRead(read.tag, max(self.commit, leading.first), leading.round + 1))
        self._serve_reads()

    def _serve_reads(self) -> None:
        """Answer the reads that may be, and begin a round for the others if none is under way."""
        leading = self._led
        while leading.reads:
            confirmed = leading.confirmed(self.members)
            while (
                leading.reads
                and leading.reads[0].round <= confirmed
                and leading.reads[0].index <= self.commit
            ):
                self._effects.append(ReadReady(leading.reads.popleft().tag))
            if not leading.reads or confirmed < leading.round or leading.reads[-1].round <= leading.round:
                return
            leading.round += 1
            if self.me in leading.progress:
                leading.progress[self.me].round = leading.round
            self._speak()

    def _transfer(self, transfer: Transfer) -> None:
        leading = self._led
        if transfer.to == self.me or transfer.to not in self.members.voters:
            others = ", ".join(voter for voter in self.members.voters if voter != self.me)
            self._refuse(transfer, f"{transfer.to} is not another voter; there are {others or 'none'}")
        elif leading.handover is not None:
            self._refuse(transfer, f"leadership is on its way to {leading.handover.to}")
        else:
            deadline = self._now + self._settings.election_s
            leading.handover = Handover(transfer.tag, transfer.to, deadline)
            self._hand_over()

    def _refuse(self, question: Propose | Change | Read | Transfer, reason: str) -> None:
        self._effects.append(Refused(question.tag, reason, self.leader))

    def _refer(self, question: Propose | Change | Read | Transfer) -> None:
        self._refuse(question, "this node does not lead")

    # --- events that a role has nothing to do with ------------------------------------------------

    def _ignore(self, _: object) -> None:
        """A word that came too late."""

    def _refuse_rival(self, message: Append | Chunk) -> None:
        raise AssertionError(f"{message.sender} leads in term {self.term} as well as {self.me}")

    def check_invariants(self) -> None:
        """Assert what must hold between two events."""
        log, members = self.log, self.members
        assert log.snapshot.index <= self.commit <= log.last_index, self
        assert log.last_term <= self.term, self
        assert self._outbox.is_settled
        assert not self._effects
        assert (self._leading is not None) == (self.role is Role.LEADER) == (self.leader == self.me), self
        assert self.role is not Role.CANDIDATE or self.vote == self.me, self
        if self._leading is not None:
            leading = self._leading
            assert leading.first <= log.last_index, self
            assert log.term_at(leading.first) in (self.term, None), self
            assert leading.progress.keys() == {*members.voters, *members.learners}, self
            assert max([known.match for known in leading.progress.values()]) <= log.last_index, self
            assert not leading.waiting or self.commit < min(leading.waiting), self
            assert not leading.waiting or max(leading.waiting) <= log.last_index, self
            if self.commit < log.last_index:
                uncommitted = log.run(self.commit + 1, log.last_index)
                changes = [entry for entry in uncommitted if entry.members is not None]
                assert len(changes) <= 1 or self.commit < leading.first, self


_Handler = Callable[[Core, Any], None]


HANDLERS: dict[type, dict[Role, _Handler]] = {
    AskVote: always(Core._consider),
    Vote: by_role(Core._ignore, Core._count, Core._count, Core._ignore),
    Append: if_leading(Core._refuse_rival, otherwise=Core._follow),
    Appended: if_leading(Core._count_entries, otherwise=Core._ignore),
    Chunk: if_leading(Core._refuse_rival, otherwise=Core._receive_chunk),
    Taken: if_leading(Core._continue_snapshot, otherwise=Core._ignore),
    TakeOver: by_role(Core._take_over, Core._take_over, Core._ignore, Core._ignore),
    Tick: if_leading(Core._beat, otherwise=Core._seek),
    Propose: if_leading(Core._propose, otherwise=Core._refer),
    Change: if_leading(Core._change, otherwise=Core._refer),
    Read: if_leading(Core._read, otherwise=Core._refer),
    Transfer: if_leading(Core._transfer, otherwise=Core._refer),
    Snapshotted: always(Core._keep_snapshot),
}
"""What a node does with an event, or with a message of its own term, in each role."""
