"""Patches that remove safeguards by replacing one named function of the product.

Each patch here removes one safeguard, for the rest of the process; with the `setattr` of pytest's
`monkeypatch` as argument, for a test. `tests.ablations.plugin` calls one.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import msgspec

from adam_async.controller import consensus_node, contents, permissions
from adam_async.controller import state as controller_state
from adam_async.controller.consensus import core
from adam_async.controller.consensus.core import Core
from adam_async.controller.consensus.leading import Leading
from adam_async.controller.consensus.log import Log
from adam_async.controller.consensus.membership import Members
from adam_async.controller.consensus.messages import Append, AskVote
from adam_async.controller.consensus.outbox import Outbox
from adam_async.controller.consensus.records import Ballot, Writer
from adam_async.controller.consensus.roles import Cause
from adam_async.controller.consensus.violations import Guard
from adam_async.controller.failure_detector import FailureDetector
from adam_async.controller.log_file import LogFile
from adam_async.controller.peer_controllers import PeerControllers
from adam_async.controller.replicated_state import Lost, MapSize, ReplicatedState, command_bytes
from adam_async.controller.service import Controller
from adam_async.controller.state import Conflict, ControllerState
from adam_async.data_server.state import DataState
from adam_async.errors import ConfigError
from adam_async.messages import GetMap, of_place, tensors
from adam_async.parameter_server import question_checks, sender_checks, waiting_requests
from adam_async.parameter_server.events import SendValues
from adam_async.parameter_server.question_checks import QuestionChecks
from adam_async.parameter_server.sender_checks import SenderChecks
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.waiting_requests import EpochGate
from adam_async.persistence import frames
from adam_async.run.ids import ShardId
from adam_async.store.opening import StoreLink
from transport import keys
from transport.budget import Account
from transport.decoder import FrameDecoder
from transport.entrance import Entrance
from transport.link import Link

Change = Callable[[Any, str, Any], None]
"""Function that sets an attribute: `setattr`, or one that also sets it back later."""

Patch = Callable[..., None]
"""Removes one safeguard; its only argument is a `Change`, by default `setattr`."""


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], Patch]:
    """Make a patch of an attribute from its replacement, which gets the original as first argument."""

    def make(replacement: Callable[..., Any]) -> Patch:
        @wraps(replacement)
        def apply(change: Change = setattr) -> None:
            original = getattr(owner, name)
            change(owner, name, lambda *args, **options: replacement(original, *args, **options))

        return apply

    return make


def replaces_handler(kind: type) -> Callable[[Callable[..., Any]], Patch]:
    """Make a patch of the handlers of a message of consensus, as `replaces` does."""

    def make(replacement: Callable[..., Any]) -> Patch:
        @wraps(replacement)
        def apply(change: Change = setattr) -> None:
            handlers = {role: partial(replacement, each) for role, each in core.HANDLERS[kind].items()}
            change(core, "HANDLERS", {**core.HANDLERS, kind: handlers})

        return apply

    return make


def replaces_property(owner: type, name: str) -> Callable[[Callable[[Any], Any]], Patch]:
    """Make a patch of a property from the function of another one."""

    def make(getter: Callable[[Any], Any]) -> Patch:
        @wraps(getter)
        def apply(change: Change = setattr) -> None:
            assert isinstance(getattr(owner, name), property), f"{owner.__name__} has no property {name}"
            change(owner, name, property(getter))

        return apply

    return make


def nothing(change: Change = setattr) -> None:
    """Remove no safeguard."""


# --- consensus -----------------------------------------------------------------------------------


@replaces(Outbox, "record")
def forget_ballots(record: Any, self: Outbox, item: Any) -> None:
    """Leave terms and votes out of the log file."""
    if not isinstance(item, Ballot):
        record(self, item)


@replaces_handler(AskVote)
def vote_again(consider: Any, self: Core, ask: AskVote) -> None:
    """Forget the own vote before each request for one."""
    if not ask.pre:
        self.vote = None
    consider(self, ask)


@replaces_handler(AskVote)
def vote_for_any_log(consider: Any, self: Core, ask: AskVote) -> None:
    """Regard the log of each candidate as up to date."""
    term, index = max((ask.last_term, ask.last_index), (self.log.last_term, self.log.last_index))
    consider(self, msgspec.structs.replace(ask, last_term=term, last_index=index))


@replaces(Outbox, "persist")
def send_before_sync(persist: Any, self: Outbox) -> Any:
    """Count records as durable as soon as they are given out to be written."""
    effect = persist(self)
    if effect is not None:
        self.persisted(effect.number)
    return effect


@replaces(Core, "_receive")
def handle_old_terms(receive: Any, self: Core, message: Any) -> None:
    """Handle messages of old terms as those of the present one."""
    if message.to == self.me and message.term < self.term:
        core.HANDLERS[type(message)][self.role](self, message)
    else:
        receive(self, message)


@replaces(Core, "_receive")
def take_messages_for_earlier_identities(receive: Any, self: Core, message: Any) -> None:
    """Handle messages for any identity as if they were for the own one."""
    receive(self, msgspec.structs.replace(message, to=self.me))


@replaces(Log, "snapshot_at")
def snapshot_without_term(snapshot_at: Any, self: Log, index: int, state: bytes) -> Any:
    """Take snapshots of term 0."""
    snapshot = snapshot_at(self, index, state)
    return snapshot and msgspec.structs.replace(snapshot, term=0)


@replaces_handler(Append)
def take_entries_after_other_entries(follow: Any, self: Core, append: Append) -> None:
    """Take entries after any entry of their previous index."""
    term = self.log.term_at(append.prev_index)
    follow(self, append if term is None else msgspec.structs.replace(append, prev_term=term))


@replaces(Core, "_put")
def keep_conflicting_entries(put: Any, self: Core, entries: Any) -> None:
    """Put only entries beyond the end of the log."""
    new = tuple(entry for entry in entries if entry.index > self.log.last_index)
    if new:
        put(self, new)


@replaces_handler(Append)
def commit_unknown_entries(follow: Any, self: Core, append: Append) -> None:
    """Commit as far as the leader did, also entries that may differ from the leader's."""
    follow(self, append)
    previous = append.prev_index
    if previous <= self.commit or self.log.term_at(previous) == append.prev_term:
        self._commit_to(min(append.commit, self.log.last_index))


@replaces(frames, "is_whole")
def read_torn_records(*_: Any) -> bool:
    """Read records without comparing size and checksum."""
    return True


@replaces_property(Members, "quorum")
def count_half_as_majority(self: Members) -> int:
    """Count half of the voters as a majority."""
    return (len(self.voters) + 1) // 2


@replaces(consensus_node, "identity")
def keep_identity_without_disk(identity: Any, name: str, number: int) -> Any:
    """Give a node with an empty disk the identity that it had."""
    return identity(name, 0)


@replaces(PeerControllers, "next_step")
def keep_lost_identities(next_step: Any, self: PeerControllers, *args: Any, **options: Any) -> Any:
    """Never remove an identity from the group."""
    step = next_step(self, *args, **options)
    return None if step is not None and step.kind == "remove" else step


@replaces(Leading, "confirmed")
def read_without_round(*_: Any) -> float:
    """Regard each round as confirmed by a majority."""
    return math.inf


@replaces(Core, "_ask")
def elect_without_pre_vote(ask: Any, self: Core, *, pre: bool, transfer: bool = False) -> None:
    """Start the election itself in place of a pre-vote."""
    if pre:
        self._campaign(Cause.ENCOURAGED)
    else:
        ask(self, pre=pre, transfer=transfer)


@replaces(Leading, "heard")
def lead_without_majority(*_: Any) -> float:
    """Regard a majority as heard at all times."""
    return math.inf


@replaces(Core, "_leader_is_near")
def answer_candidates(*_: Any) -> bool:
    """Answer candidates while a leader is heard."""
    return False


@replaces(Guard, "check")
def accept_violations(*_: Any) -> None:
    """Accept every message of consensus."""


# --- controllers ---------------------------------------------------------------------------------


@replaces(Controller, "_answer")
def answer_reads_at_once(answer: Any, self: Controller, request: Any, body: Any) -> None:
    """Answer reads from the own map, without consensus."""
    if isinstance(body, GetMap) and self.group.leads:
        request.reply(self._whole())
    else:
        answer(self, request, body)


@replaces(Controller, "_has_changes")
def answer_watches_early(_: Any, self: Controller, watch: Any) -> bool:
    """Answer watches as soon as this controller leads."""
    return self.group.leads and (watch.group != self.replicated_state.group or watch.after < self.map.version)


@replaces(Controller, "_has_changes")
def answer_watches_with_older_maps(_: Any, self: Controller, watch: Any) -> bool:
    """Answer a watch also with a map older than the watcher's."""
    return self._ready and (watch.group != self.replicated_state.group or watch.after != self.map.version)


@replaces(ReplicatedState, "_set")
def repeat_requests(set_: Any, self: ReplicatedState, request: Any) -> Any:
    """Apply a repeated request again."""
    session = self._sessions.get(request.session)
    if session is not None and session.number == request.number:
        session.number -= 1
    return set_(self, request)


@replaces(ReplicatedState, "snapshot")
def snapshot_without_sessions(snapshot: Any, self: ReplicatedState) -> Any:
    """Leave the sessions of clients out of snapshots."""
    sessions, self._sessions = self._sessions, {}
    try:
        return snapshot(self)
    finally:
        self._sessions = sessions


@replaces(ControllerState, "_compare_and_set")
def set_newer_records(compare_and_set: Any, self: ControllerState, command: Any) -> Any:
    """Set a record also if it is newer than expected."""
    problem = compare_and_set(self, command)
    if isinstance(problem, Conflict) and problem.version > command.expected:
        return compare_and_set(self, replace(command, expected=problem.version))
    return problem


@replaces(ControllerState, "_set_node")
def join_after_later_incarnations(set_node: Any, self: ControllerState, name: str, new: Any) -> Any:
    """Forget the earlier incarnations of a node before each change of its record."""
    old = self.map.nodes.get(name)
    if old is not None:
        nodes = {**self.map.nodes, name: msgspec.structs.replace(old, before=())}
        self.map = msgspec.structs.replace(self.map, nodes=nodes)
    return set_node(self, name, new)


@replaces(controller_state, "_without_node")
def lose_later_incarnations(without_node: Any, cluster: Any, lost: Any) -> Any:
    """Apply the loss of one incarnation to the present one."""
    node = cluster.nodes.get(lost.node)
    return without_node(cluster, lost if node is None else replace(lost, incarnation=node.incarnation))


@replaces(consensus_node.ConsensusNode, "propose")
def lose_without_agreement(propose: Any, self: consensus_node.ConsensusNode, tag: Any, command: Any) -> None:
    """Apply the loss of a node to the leader's map alone."""
    if isinstance(command, Lost):
        self._state.apply(0, command_bytes(command))
        self._on_applied()
    else:
        propose(self, tag, command)


@replaces(FailureDetector, "led")
def suspect_nobody_after_election(*_: Any, **__: Any) -> None:
    """Suspect no member after an election."""


@replaces(LogFile, "append")
async def ignore_failed_disk(append: Any, self: LogFile, batches: Any) -> None:
    """Go on after a failed write of the log."""
    with suppress(ConfigError):
        await append(self, batches)


@replaces(LogFile, "_cut_off")
async def use_unsynced_log(*_: Any) -> None:
    """Use a recovered log without a sync, and with its torn tail."""


@replaces(LogFile, "begin_anew")
async def write_log_in_place(_: Any, self: LogFile, batch: Any) -> None:
    """Write a new log over the old one."""
    writer = Writer()
    await self._disk.append_durably(self._path, 0, writer.frame(batch))
    writer.durable(writer.position)
    self._writer = writer


@replaces(permissions.PermissionTable, "_found")
def set_keys_of_other_roles(found: Any, *args: Any) -> Any:
    """Take what the table forbids."""
    verdict = found(*args)
    return permissions.RIGHT if verdict is permissions.WRONG else verdict


@replaces(permissions, "_is_record_of")
def take_records_of_other_incarnations(*_: Any) -> bool:
    """Take a member's record with any role and incarnation."""
    return True


@replaces(contents, "_record_problem")
def take_unreadable_records(*_: Any) -> str:
    """Take records in commands unread."""
    return ""


@replaces(MapSize, "refusal")
def fill_map_without_bound(*_: Any) -> str:
    """Take every record into the map."""
    return ""


# --- messages and questions ----------------------------------------------------------------------


@replaces(tensors, "_only_bytes")
def take_long_records(only_bytes: Any, message: Any, kind: str, most_bytes: int) -> Any:
    """Decode records of any length."""
    return only_bytes(message, kind, 1 << 62)


@replaces(question_checks, "_twice")
def take_repeated_shards(*_: Any) -> str:
    """Take questions that name a shard twice."""
    return ""


@replaces(QuestionChecks, "_epoch")
def take_any_epoch(*_: Any) -> str:
    """Take questions of any epoch."""
    return ""


@replaces(EpochGate, "__contains__")
def delay_every_session(_: Any, self: EpochGate, session: Any) -> bool:
    """Delay the pushes and ticks of all sessions while those of one wait for an epoch."""
    return bool(self._sessions)


@replaces(QuestionChecks, "_clock")
def take_any_clock(*_: Any) -> str:
    """Take questions of any clock."""
    return ""


@replaces(QuestionChecks, "_too_large")
def take_large_answers(*_: Any) -> None:
    """Take questions whose answer exceeds a message."""


@replaces(SenderChecks, "refusal")
def take_sessions_of_others(*_: Any) -> str:
    """Take questions of a push session from any peer."""
    return ""


@replaces(ServerState, "_is_unnamed")
def split_tables_for_anyone(*_: Any) -> bool:
    """Let sessions that the map does not name split the tables of shards."""
    return False


def take_any_number_of_sessions(change: Change = setattr) -> None:
    """Take any number of sessions of a peer that the map does not name."""
    change(sender_checks, "MOST_SESSIONS", 1 << 20)


# --- training ------------------------------------------------------------------------------------


@replaces(ServerState, "_order")
def apply_pushes_again(order: Any, self: ServerState, event: Any) -> Any:
    """Forget the last push of a session before it arrives again."""
    push = event.push
    session = push.session, push.incarnation
    for place, shard_id in enumerate(push.shards):
        number = of_place(push.numbers, place)
        shard = self.shards.get(ShardId(shard_id))
        if shard is not None and shard.tables.ordered[session] == number:
            shard.separate().ordered[session] = number - 1
    return order(self, event)


@replaces(waiting_requests, "_answer")
def answer_pulls_at_once(answer: Any, queued: Any) -> Any:
    """Answer a pull whatever the clock of the values is."""
    if not queued.is_reading:
        return SendValues(queued.request, queued.shards)
    return answer(queued)


@replaces(StoreLink, "_follow")
async def use_stores_after_loss(*_: Any) -> None:
    """Go on with a store after its deletion, and without a place in its clocks."""


@replaces(DataState, "_replicas_changed")
def keep_groups_of_lost_replicas(replicas_changed: Any, self: DataState, event: Any) -> None:
    """Leave the groups of a lost replica to it."""
    epoch, self._epoch = self._epoch, None
    try:
        replicas_changed(self, event)
    finally:
        self._epoch = epoch


# --- links ---------------------------------------------------------------------------------------


@replaces(keys, "_pair_info")
def use_one_key_for_all_pairs(*_: Any) -> bytes:
    """Derive the same key for every pair of roles."""
    return keys._LABEL


@replaces(Entrance, "connected")
def close_newest_connection(connected: Any, self: Entrance, greeter: Any, host: str) -> None:
    """Close a new connection above the limit in place of an old one."""
    if len(self._admission) >= self._admission._limit:
        greeter.crowd_out()
    else:
        connected(self, greeter, host)


@replaces(Link, "serve")
def take_messages_while_serving(serve: Any, self: Link, handler: Any, *, receives: bool = True) -> None:
    """Receive messages also on links that only serve requests."""
    serve(self, handler)


@replaces(Account, "admit")
def admit_every_answer(_: Any, self: Account, nbytes: int, *, alone: bool = False) -> bool:
    """Begin every answer at once."""
    self.charge(nbytes)
    return True


@replaces(Account, "__init__")
def reserve_no_part(init: Any, self: Account, budget: Any, limit_bytes: int) -> None:
    """Reserve no part of the budget for a link."""
    init(self, budget, limit_bytes)
    budget.reserved_bytes -= self.part_bytes


@replaces(Account, "close")
def keep_bytes_of_closed_links(close: Any, self: Account) -> None:
    """Keep the bytes of a closed link in the budget."""
    budget = self.budget
    kept = budget.held_bytes, budget.beyond_bytes
    close(self)
    budget.held_bytes, budget.beyond_bytes = kept


@replaces(FrameDecoder, "_compare")
def take_damaged_payloads(_: Any, self: FrameDecoder) -> None:
    """Take payloads without comparing checksums."""
    self._expected = None
