"""Pure: one node of a consensus group with a replicated log; `consensus` has the theory of operation."""

from collections.abc import Callable
from typing import Any

from adam_async.controller.consensus.events import (
    Apply,
    Change,
    Done,
    Effect,
    Event,
    Led,
    Outbox,
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
from adam_async.controller.consensus.leading import Handover, Leading, WaitingRead
from adam_async.controller.consensus.log import IncomingSnapshot, Log
from adam_async.controller.consensus.membership import Members, MembershipError, Settings
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
from adam_async.controller.consensus.records import Ballot, Entries, Saved
from adam_async.controller.consensus.roles import TRANSITIONS, Cause, Role, always, by_role, if_leading
from adam_async.controller.consensus.violations import ANY_CONTENTS, Contents, Guard


class Core:
    """One node of a group. The shell restores `saved.snapshot` into its state machine before the first event.

    Args:
        saved: The durable state: the result of `records.recover` or, already written to disk, of
            `records.bootstrapped`; for a joining node, `Saved` with only a new identity.
        draw: Returns a new random number from 0 to 1 at each call, which spreads the election time-outs.
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
        """Index of the last committed entry that an emitted `Apply`, or the snapshot, covers."""
        self.log = Log(saved.snapshot, saved.entries)
        self._settings = settings
        self._draw = draw
        self._now = now
        self._heard = now
        """Time of the last message from `leader`, in seconds of the caller's clock."""
        self._votes: set[str] = set()
        self._leading: Leading | None = None
        self._incoming = IncomingSnapshot()
        self._guard = Guard(self.me, settings, contents, self._incoming)
        self._effects: list[Effect] = []
        self._outbox = Outbox()
        self._reported: tuple[int, str | None] = (self.term, None)
        """Term and leader of the last `Led`."""
        self._wait_for_leader()

    @property
    def members(self) -> Members:
        """The membership in force: the last in the log, committed or not."""
        return self.log.members

    @property
    def saved(self) -> Saved:
        """The durable state; a new file may begin with it instead of all earlier records."""
        return Saved(
            me=self.me, term=self.term, vote=self.vote, snapshot=self.log.snapshot, entries=self.log.entries
        )

    def silent_s(self, node: str, *, now: float) -> float:
        """Return the seconds since another member's last answer to this leader; otherwise 0."""
        known = self._leading.progress.get(node) if self._leading is not None else None
        return now - known.heard if known is not None and node != self.me else 0.0

    def __repr__(self) -> str:
        where = f"commit {self.commit} of {self.log.last_index}"
        return f"<Core {self.me} {self.role.value} term {self.term} {where}>"

    def next_deadline(self) -> float:
        """Return the time of the next `Tick`, in seconds of the caller's clock."""
        return self._deadline

    def handle(self, event: Event, *, now: float) -> list[Effect]:
        """Take one event. The caller carries out the effects in their order.

        Raises:
            Violation: No correct node sends the received message. The state is unchanged.
        """
        # The check comes before any change: a violation must not change this node.
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

    # --- messages wait for durable records -----------------------------------------------------

    def _settle(self) -> None:
        """Emit the new records, and the messages whose records are durable."""
        # A loop, because a message to this node itself may make records and messages again.
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
        if self._reported != (self.term, self.leader):
            self._reported = (self.term, self.leader)
            self._effects.append(Led(*self._reported))

    # --- terms and roles -----------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        if message.to != self.me:
            return  # for an earlier identity on this address, whose promises this node does not know
        # A node that returns may have a higher term; its request must not depose a leader that is well.
        # With `transfer` the leader itself wants the election.
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
        """Answer a request of an old term with the present term; ignore an answer of an old term."""
        sender = message.sender
        if isinstance(message, AskVote):
            self._outbox.hold(Vote(sender=self.me, to=sender, term=self.term, pre=message.pre, granted=False))
        elif isinstance(message, Append | Chunk):
            self._outbox.hold(Appended(sender=self.me, to=sender, term=self.term, ok=False, match=0, round=0))

    def _become(self, cause: Cause, *, term: int | None = None, vote: str | None = None) -> None:
        """Take the role that follows from `cause` and, if `term` is given, enter it with `vote`."""
        old, self.role = self.role, TRANSITIONS[self.role, cause]
        if term is not None:
            assert term > self.term, (term, self.term)
            self._cast(term, vote)
        if self.role is not Role.LEADER:
            self.leader = None
            self._resign()
        # A follower that only enters a new term keeps its time-out: otherwise a candidate that cannot win
        # would delay one that can.
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
        # A later leader may have these entries and commit them, so their outcome is unknown, not refused.
        self._effects.extend(Unknown(tag) for tag in leading.waiting.values())
        self._effects.extend(Refused(read.tag, "leadership was lost", None) for read in leading.reads)
        if leading.handover is not None:
            self._effects.append(Done(leading.handover.tag, 0))

    # --- elections -----------------------------------------------------------------------------

    def _seek(self, _: Tick) -> None:
        if self._now < self._deadline:
            return
        # The test covers every membership from the commit index on: if only a node's own log has its removal,
        # that node may be the only electable one.
        if not self.log.has_voter_since(self.commit, self.me):
            self._wait_for_leader()
            return
        self._become(Cause.SILENCE)
        self._ask(pre=True)

    def _take_over(self, _: TakeOver) -> None:
        if self.me in self.members.voters:
            self._campaign(Cause.ASKED)

    def _campaign(self, cause: Cause) -> None:
        self._become(cause, term=self.term + 1, vote=self.me)
        self._ask(pre=False, transfer=cause is Cause.ASKED)

    def _ask(self, *, pre: bool, transfer: bool = False) -> None:
        for voter in self.members.voters:
            if voter == self.me:
                # A node's own vote goes through the outbox as well: it counts once the ballot is durable.
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
        # A pre-vote promises nothing: a node does not record it, and may give several.
        if not ask.pre:
            granted = granted and self.vote in (None, ask.sender)
            if granted and self.vote is None:
                self._cast(self.term, ask.sender)
                self._wait_for_leader()
        self._outbox.hold(Vote(sender=self.me, to=ask.sender, term=self.term, pre=ask.pre, granted=granted))

    def _count(self, vote: Vote) -> None:
        members = self.members
        # A late pre-vote must not count as a vote of the same term's election.
        if vote.pre != (self.role is Role.PROBER) or not vote.granted or vote.sender not in members.voters:
            return
        self._votes.add(vote.sender)
        if len(self._votes) < members.quorum:
            return
        if vote.pre:
            self._campaign(Cause.ENCOURAGED)
        else:
            self._lead()

    def _lead(self) -> None:
        self._become(Cause.ELECTED)
        self.leader = self.me
        self._deadline = self._now + self._settings.heartbeat_s
        self._leading = Leading(self.me, self.term, self._settings, first=self.log.last_index + 1)
        self._leading.regroup(self.members, last_index=self.log.last_index, now=self._now)
        # The empty entry of the new term: earlier entries can be committed only together with the empty
        # entry.
        self._add()
        self._broadcast()

    # --- following -----------------------------------------------------------------------------

    def _heed(self, leader: str) -> None:
        if self.role is not Role.FOLLOWER:
            self._become(Cause.LED)
        self.leader, self._heard = leader, self._now
        self._wait_for_leader()

    def _follow(self, append: Append) -> None:
        self._heed(append.sender)
        previous = append.prev_index
        # Committed entries are the same in all logs, so only a later previous entry can differ.
        if previous > self.commit and self.log.term_at(previous) != append.prev_term:
            last = self.log.last_index
            # The hint skips the whole term in conflict; a search entry by entry takes a round trip for each.
            match = last if previous > last else self.log.before_term_of(previous, self.commit)
            self._answer(append, ok=False, match=match)
            return
        # Cut the log only at a real conflict: a late, shorter `Append` must not remove acknowledged entries.
        for position, entry in enumerate(append.entries):
            if entry.index > self.commit and self.log.term_at(entry.index) != entry.term:
                self._put(append.entries[position:])
                break
        match = previous + len(append.entries)
        # Entries beyond `match` may differ from the leader's, whatever the leader has committed.
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
        self._heed(chunk.sender)
        if chunk.index <= self.commit:
            # The snapshot covers nothing new: the leader can send entries at once.
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
        snapshot = self.log.snapshot_at(taken.index, taken.state)
        if snapshot is None or taken.index == self.log.snapshot.index:
            return  # meanwhile the log got a snapshot at this index or a later one
        self.log.install(snapshot)
        self._outbox.record(snapshot)

    # --- leading -------------------------------------------------------------------------------

    @property
    def _led(self) -> Leading:
        assert self._leading is not None, self
        return self._leading

    def _add(self, command: bytes | None = None, members: Members | None = None) -> int:
        """Append an entry of this leader to the log, and send it. Returns its index."""
        index = self.log.last_index + 1
        self._put((Entry(index, self.term, command, members),))
        # The leader acknowledges its own entry through the outbox: the entry counts once durable here.
        self._outbox.hold(Appended(sender=self.me, to=self.me, term=self.term, ok=True, match=index, round=0))
        if members is not None:
            # A membership is in force once it is in the log, so an added node gets this very entry.
            self._led.regroup(members, last_index=index, now=self._now)
        for node in self._others():
            self._feed(node)
        return index

    def _others(self) -> list[str]:
        return [node for node in self._led.progress if node != self.me]

    def _broadcast(self) -> None:
        """Send each other node at least one message."""
        for node in self._others():
            self._feed(node, force=True)

    def _feed(self, node: str, *, force: bool = False) -> None:
        # Sent past the outbox: these entries need not be durable here first (see *Durable first*).
        self._effects.extend(map(Send, self._led.feed(node, self.log, self.commit, force=force)))

    def _count_entries(self, answer: Appended) -> None:
        known = self._led.note_answer(answer, now=self._now)
        if known is None:
            return
        if answer.ok:
            known.matched(answer.match)
            self._advance_commit()
        elif known.refused(answer):
            self._feed(answer.sender, force=True)
        # The commit above may have removed this leader from the group.
        if self._leading is not None:
            self._serve_reads()
            if answer.ok and answer.sender in self._others():
                self._feed(answer.sender)
                self._hand_over()

    def _continue_snapshot(self, taken: Taken) -> None:
        known = self._led.note_answer(taken, now=self._now)
        if known is not None and known.snapshot is not None and known.snapshot.index == taken.index:
            # An answer with the same offset is a copy: a chunk for each copy would multiply the messages.
            if known.offset != taken.offset:
                known.offset = taken.offset
                self._feed(taken.sender, force=True)
        self._serve_reads()

    def _advance_commit(self) -> None:
        leading, before = self._led, self.commit
        if before < self.log.last_index:
            decided = leading.matched(self.members)
            # Counting copies commits only entries of this term: a node without an earlier entry may still be
            # elected.
            if decided > before and self.log.term_at(decided) == self.term:
                self._commit_to(decided)
            for index in range(before + 1, self.commit + 1):
                if index in leading.waiting:
                    self._effects.append(Done(leading.waiting.pop(index), index))
        if self.me not in self.members.voters and self.log.members_index <= self.commit:
            # The remaining nodes learn of the commit now: this leader sends no later message.
            self._broadcast()
            self._become(Cause.REMOVED)

    def _beat(self, _: Tick) -> None:
        if self._now < self._deadline:
            return
        leading, settings = self._led, self._settings
        # A leader that is a member counts itself: its own vote counts for check-quorum.
        if self.me in leading.progress:
            leading.progress[self.me].heard = self._now
        if leading.heard(self.members) < self._now - settings.election_s:
            self._become(Cause.DEAF)
            return
        self._deadline = self._now + settings.heartbeat_s
        self._broadcast()
        handover = leading.handover
        if handover is not None and self._now >= handover.deadline:
            # A lost `TakeOver` must not block proposals for ever: the leader works on after the deadline.
            leading.handover = None
            self._effects.append(
                Refused(handover.tag, f"{handover.to} did not take over in {settings.election_s} s", self.me)
            )
        self._hand_over()

    def _hand_over(self) -> None:
        handover = self._led.handover
        # The successor must have the whole log, or the voters would refuse it.
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
        # See *Why membership may change by one node* for the first two refusals.
        if self.commit < leading.first:
            self._refuse(change, "no entry of this term is committed yet; try again")
        elif self._is_changing:
            self._refuse(change, "another change of the membership is not committed yet; try again")
        # A voter that lacks many entries would delay commits if its vote were needed for a majority.
        elif step.kind == "promote" and (lag := leading.lag(step.node, self.log)) > self._settings.catch_up:
            self._refuse(change, f"{step.node} lacks {lag} entries; try again")
        elif self._may_add(change):
            try:
                members = self.members.changed(step)
            except MembershipError as error:
                self._refuse(change, str(error))
            else:
                leading.waiting[self._add(members=members)] = change.tag

    @property
    def _is_changing(self) -> bool:
        """Whether the last change of the membership is not committed yet."""
        return self.log.members_index > self.commit

    def _may_add(self, question: Propose | Change) -> bool:
        # With new entries during a handover the successor might never have the whole log.
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
        # Take the next round: the present one may have begun before a write that this read must see.
        leading.reads.append(WaitingRead(read.tag, max(self.commit, leading.first), leading.round + 1))
        self._serve_reads()

    def _serve_reads(self) -> None:
        """Answer reads whose round and index are confirmed; begin a round for others if none is running."""
        leading = self._led
        # A loop: in a group of one a new round is confirmed at once.
        while leading.reads:
            self._effects.extend(map(ReadReady, leading.take_ready_reads(self.members, self.commit)))
            if not leading.begin_round(self.members):
                return
            self._broadcast()

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

    # --- events without effect in a role -----------------------------------------------------------

    def _ignore(self, _: object) -> None:
        """Ignore a message that is too late for this role."""

    def _refuse_rival(self, message: Append | Chunk) -> None:
        raise AssertionError(f"{message.sender} leads in term {self.term} as well as {self.me}")

    def check_invariants(self) -> None:
        """Assert the invariants between two events."""
        log, members = self.log, self.members
        assert log.snapshot.index <= self.commit <= log.last_index, self
        assert log.last_term <= self.term, self
        assert self._outbox.is_settled
        assert not self._effects
        assert (self._leading is not None) == (self.role is Role.LEADER) == (self.leader == self.me), self
        assert self.role is not Role.CANDIDATE or self.vote == self.me, self
        if self._leading is not None:
            self._leading.check_invariants(log, members, self.term, self.commit)


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
"""Handlers of events, and of messages in the node's own term, by type and role."""
