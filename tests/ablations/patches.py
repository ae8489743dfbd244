"""Patches that remove safeguards by replacing one named function of the product.

Each function here removes one safeguard, for the rest of the process. `tests.ablations.plugin` calls one.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from adam_async.controller import consensus_node
from adam_async.controller.consensus.core import HANDLERS, Core
from adam_async.controller.consensus.leading import Leading
from adam_async.controller.consensus.membership import Members
from adam_async.controller.consensus.messages import AskVote
from adam_async.controller.consensus.outbox import Outbox
from adam_async.controller.consensus.records import Ballot
from adam_async.controller.consensus.roles import Cause
from adam_async.controller.consensus.violations import Guard
from adam_async.controller.failure_detector import Suspicion
from adam_async.controller.log_file import LogFile
from adam_async.controller.map_size import MapSize
from adam_async.controller.peer_controllers import Peers
from adam_async.controller.replicated_state import Lost, Machine, command_bytes
from adam_async.controller.service import Controller
from adam_async.controller.state import ControllerState
from adam_async.errors import ConfigError
from adam_async.messages import GetMap, body, tensors
from adam_async.parameter_server import question_checks
from adam_async.parameter_server.question_checks import QuestionChecks
from adam_async.parameter_server.sender_checks import Speakers
from transport.budget import Account
from transport.endpoint import Endpoint
from transport.frames import FrameDecoder

Patch = Callable[[], None]


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by what `make` makes of it. Raises AttributeError if the owner has none."""
    setattr(owner, name, make(getattr(owner, name)))


def wrap_handler(kind: type, make: Callable[[Any], Any]) -> None:
    """Replace the handlers of a message type of consensus."""
    HANDLERS[kind] = {role: make(handler) for role, handler in HANDLERS[kind].items()}


def returns(value: Any) -> Callable[[Any], Any]:
    """Return a replacement for a function: one that returns a constant."""
    return lambda original: lambda *args, **options: value


def nothing() -> None:
    """Remove no safeguard."""


# --- consensus -----------------------------------------------------------------------------------


def forget_ballots() -> None:
    """Leave terms and votes out of the log file."""

    def make(record: Any) -> Any:
        return lambda self, item: None if isinstance(item, Ballot) else record(self, item)

    wrap(Outbox, "record", make)


def vote_again() -> None:
    """Forget the own vote before each request for one."""

    def make(consider: Any) -> Any:
        def patched(self: Core, ask: AskVote) -> None:
            if not ask.pre:
                self.vote = None
            consider(self, ask)

        return patched

    wrap_handler(AskVote, make)


def vote_for_any_log() -> None:
    """Regard the log of each candidate as up to date."""

    def make(consider: Any) -> Any:
        def patched(self: Core, ask: AskVote) -> None:
            last = max((ask.last_term, ask.last_index), (self.log.last_term, self.log.last_index))
            consider(self, msgspec.structs.replace(ask, last_term=last[0], last_index=last[1]))

        return patched

    wrap_handler(AskVote, make)


def send_before_sync() -> None:
    """Count records as durable as soon as they are given out to be written."""

    def make(persist: Any) -> Any:
        def patched(self: Outbox) -> Any:
            effect = persist(self)
            if effect is not None:
                self.persisted(effect.number)
            return effect

        return patched

    wrap(Outbox, "persist", make)


def handle_old_terms() -> None:
    """Handle messages of old terms as those of the present one."""

    def make(receive: Any) -> Any:
        def patched(self: Core, message: Any) -> None:
            if message.to == self.me and message.term < self.term:
                HANDLERS[type(message)][self.role](self, message)
            else:
                receive(self, message)

        return patched

    wrap(Core, "_receive", make)


def take_messages_for_earlier_identities() -> None:
    """Handle messages for any identity as if they were for the own one."""

    def make(receive: Any) -> Any:
        return lambda self, message: receive(self, msgspec.structs.replace(message, to=self.me))

    wrap(Core, "_receive", make)


def count_half_as_majority() -> None:
    """Count half of the voters as a majority."""
    wrap(Members, "quorum", lambda _: property(lambda self: (len(self.voters) + 1) // 2))


def keep_identity_without_disk() -> None:
    """Give a node with an empty disk the identity that it had."""
    wrap(consensus_node, "identity", lambda _: lambda name, number: f"{name}/0")


def keep_lost_identities() -> None:
    """Never remove an identity from the group."""

    def make(next_step: Any) -> Any:
        def patched(self: Peers, *args: Any, **options: Any) -> Any:
            step = next_step(self, *args, **options)
            return None if step is not None and step.kind == "remove" else step

        return patched

    wrap(Peers, "next_step", make)


def read_without_round() -> None:
    """Regard each round as confirmed by a majority."""
    wrap(Leading, "confirmed", returns(math.inf))


def elect_without_pre_vote() -> None:
    """Start the election itself in place of a pre-vote."""

    def make(ask: Any) -> Any:
        def patched(self: Core, *, pre: bool, transfer: bool = False) -> None:
            if pre:
                self._runner(Cause.ENCOURAGED)
            else:
                ask(self, pre=pre, transfer=transfer)

        return patched

    wrap(Core, "_ask", make)


def lead_without_majority() -> None:
    """Regard a majority as heard at all times."""
    wrap(Leading, "heard", returns(math.inf))


def answer_candidates() -> None:
    """Answer candidates while a leader is heard."""
    wrap(Core, "_leader_is_near", returns(False))


def accept_violations() -> None:
    """Accept every message of consensus."""
    wrap(Guard, "check", returns(None))


# --- controllers ---------------------------------------------------------------------------------


def answer_reads_at_once() -> None:
    """Answer reads from the own map, without consensus."""

    def make(answer: Any) -> Any:
        def patched(self: Controller, request: Any, question: Any) -> None:
            if isinstance(question, GetMap) and self.group.leads:
                self._tell(request, self._whole())
            else:
                answer(self, request, question)

        return patched

    wrap(Controller, "_answer", make)


def answer_watches_early() -> None:
    """Answer watches as soon as this controller leads."""

    def patched(self: Controller, watch: Any) -> bool:
        return self.group.leads and (watch.group != self.machine.group or watch.after < self.map.version)

    wrap(Controller, "_has_news", lambda _: patched)


def answer_watches_with_older_maps() -> None:
    """Answer a watch also with a map older than the watcher's."""

    def patched(self: Controller, watch: Any) -> bool:
        return self._ready and (watch.group != self.machine.group or watch.after != self.map.version)

    wrap(Controller, "_has_news", lambda _: patched)


def repeat_questions() -> None:
    """Apply a repeated question again."""

    def make(set_: Any) -> Any:
        def patched(self: Machine, question: Any) -> Any:
            session = self._sessions.get(question.session)
            if session is not None and session.number == question.number:
                session.number -= 1
            return set_(self, question)

        return patched

    wrap(Machine, "_set", make)


def snapshot_without_sessions() -> None:
    """Leave the sessions of clients out of snapshots."""

    def make(snapshot: Any) -> Any:
        def patched(self: Machine) -> Any:
            sessions, self._sessions = self._sessions, {}
            try:
                return snapshot(self)
            finally:
                self._sessions = sessions

        return patched

    wrap(Machine, "snapshot", make)


def lose_later_incarnations() -> None:
    """Apply the loss of one incarnation to the present one."""

    def make(node_lost: Any) -> Any:
        def patched(self: ControllerState, command: Any) -> None:
            node = self.map.nodes.get(command.node)
            present = command.incarnation if node is None else node.incarnation
            node_lost(self, replace(command, incarnation=present))

        return patched

    wrap(ControllerState, "_node_lost", make)


def lose_without_agreement() -> None:
    """Apply the loss of a node to the leader's map alone."""

    def make(propose: Any) -> Any:
        def patched(self: consensus_node.Group, tag: Any, command: Any) -> None:
            if isinstance(command, Lost):
                self._machine.apply(0, command_bytes(command))
                self._on_applied()
            else:
                propose(self, tag, command)

        return patched

    wrap(consensus_node.Group, "propose", make)


def suspect_nobody_after_election() -> None:
    """Suspect no member after an election."""
    wrap(Suspicion, "led", returns(None))


def ignore_failed_disk() -> None:
    """Go on after a failed write of the log."""

    def make(append: Any) -> Any:
        async def patched(self: LogFile, batches: Any) -> None:
            with suppress(ConfigError):
                await append(self, batches)

        return patched

    wrap(LogFile, "append", make)


def fill_map_without_bound() -> None:
    """Take every record into the map."""
    wrap(MapSize, "refusal", returns(""))


# --- messages and questions ----------------------------------------------------------------------


def take_infinite_numbers() -> None:
    """Take NaN and infinities in messages."""
    wrap(body, "finder", returns(None))


def take_long_records() -> None:
    """Decode records of any length."""

    def make(only_bytes: Any) -> Any:
        return lambda message, kind, most_bytes: only_bytes(message, kind, 1 << 62)

    wrap(tensors, "_only_bytes", make)


def take_repeated_shards() -> None:
    """Take questions that name a shard twice."""
    wrap(question_checks, "_twice", returns(""))


def take_any_epoch() -> None:
    """Take questions of any epoch."""
    wrap(QuestionChecks, "_epoch", returns(""))


def take_any_clock() -> None:
    """Take questions of any clock."""
    wrap(QuestionChecks, "_clock", returns(""))


def take_large_answers() -> None:
    """Take questions whose answer exceeds a message."""
    wrap(QuestionChecks, "_too_large", returns(None))


def take_sessions_of_others() -> None:
    """Take questions of a push session from any peer."""
    wrap(Speakers, "refusal", returns(""))


# --- links ---------------------------------------------------------------------------------------


def take_messages_while_serving() -> None:
    """Receive messages also on links that only serve requests."""

    def make(serve: Any) -> Any:
        return lambda self, handler, *, receives=True: serve(self, handler)

    wrap(Endpoint, "serve", make)


def admit_every_answer() -> None:
    """Begin every answer at once."""

    def patched(self: Account, nbytes: int, *, alone: bool = False) -> bool:
        self.charge(nbytes)
        return True

    wrap(Account, "admit", lambda _: patched)


def reserve_no_part() -> None:
    """Reserve no part of the budget for a link."""

    def make(init: Any) -> Any:
        def patched(self: Account, budget: Any, limit_bytes: int) -> None:
            init(self, budget, limit_bytes)
            budget.reserved_bytes -= self.part_bytes

        return patched

    wrap(Account, "__init__", make)


def keep_bytes_of_closed_links() -> None:
    """Keep the bytes of a closed link in the budget."""

    def make(close: Any) -> Any:
        def patched(self: Account) -> None:
            budget = self.budget
            kept = budget.held_bytes, budget.beyond_bytes
            close(self)
            budget.held_bytes, budget.beyond_bytes = kept

        return patched

    wrap(Account, "close", make)


def take_damaged_payloads() -> None:
    """Take payloads without comparing checksums."""

    def patched(self: FrameDecoder) -> None:
        self._expected = None

    wrap(FrameDecoder, "_compare", lambda _: patched)
