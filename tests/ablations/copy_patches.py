"""Patches that remove safeguards of shards with several copies, as `patches` does for the others."""

from typing import Any

import msgspec

from adam_async.messages.replication import PieceCopy
from adam_async.parameter_server import log_entries, shard_pieces, state
from adam_async.parameter_server.joining_members import JoiningMembers
from adam_async.parameter_server.service import ParameterServer
from adam_async.parameter_server.session import Session
from adam_async.parameter_server.state import ServerState
from adam_async.replication.log import Log
from adam_async.replication.member import BundleMember
from adam_async.replication.primary import Primary
from adam_async.replication.secondary import Secondary
from tests.ablations.patches import replaces
from transport import Message

FAR = 1 << 50
"""Position beyond every log."""


@replaces(Primary, "_counted")
def commit_without_members(*_: Any) -> set[Any]:
    """Commit an entry without waiting for another member."""
    return set()


@replaces(Secondary, "received")
def apply_uncommitted_entries(received: Any, self: Secondary, message: Any, content: Any) -> None:
    """Apply an entry on arrival."""
    if not isinstance(message, PieceCopy):
        message = msgspec.structs.replace(message, committed=FAR)
    received(self, message, content)


@replaces(Secondary, "begin")
def drop_tail_at_begin(begin: Any, self: Secondary, message: Any) -> None:
    """Drop the uncommitted entries when a new primary begins."""
    if message.session > self._session:
        self._copy.log._drop_from(self._copy.log.committed + 1)
        self._equal = self._copy.log.committed
    begin(self, message)


@replaces(Log, "put")
def keep_conflicting_copies(put: Any, self: Log, entry: Any) -> None:
    """Keep an uncommitted entry in place of the new primary's."""
    if entry.position > self.last:
        put(self, entry)


@replaces(shard_pieces, "_tables_state")
def copy_without_numbers(tables_state: Any, tables: Any) -> Any:
    """Leave the numbers of applied pushes out of pieces."""
    state = tables_state(tables)
    return msgspec.structs.replace(state, last_number=[])


@replaces(shard_pieces, "_tables_state")
def copy_without_clocks(tables_state: Any, tables: Any) -> Any:
    """Leave the clocks of replicas out of pieces."""
    return msgspec.structs.replace(tables_state(tables), clocks={})


@replaces(BundleMember, "applies_to")
def apply_entries_of_pieces_again(_: Any, self: BundleMember, piece: int, position: int) -> bool:
    """Apply entries to a piece that has them already."""
    return piece < len(self._copy.pieces)


@replaces(log_entries, "push_part")
def ship_no_verdict(push_part: Any, queued: Any, *, sums: bool) -> Any:
    """Leave out which gradients are not finite."""
    part = push_part(queued, sums=sums)
    details = part.details
    places = tuple(sorted((*details.accepted, *details.refused)))
    return part._replace(details=msgspec.structs.replace(details, accepted=places, refused=()))


@replaces(Session, "to_send_again")
def send_again_in_reverse(to_send_again: Any, self: Session) -> Any:
    """Send open requests again, the last one first."""
    return to_send_again(self)[::-1]


@replaces(Session, "to_send_again")
def send_again_under_new_numbers(to_send_again: Any, self: Session) -> Any:
    """Give pushes that are sent again the next numbers."""
    exchanges = to_send_again(self)
    for exchange in exchanges:
        message = exchange.message
        if message.type == "Push" and exchange.sent:
            numbers = self.next_numbers(message.meta["shards"])
            meta = {**message.meta, "numbers": numbers}
            exchange.message = Message(type=message.type, meta=meta, tensors=message.tensors)
    return exchanges


@replaces(ServerState, "lead")
def lead_without_numbers(_: Any, self: ServerState) -> None:
    """Lead without the numbers of applied pushes."""
    for tables in self.bundle.tables():
        tables.ordered = {}


@replaces(ParameterServer, "_on_entries_link")
def forget_links_of_later_members(_: Any, self: ParameterServer, member: Any, is_up: bool) -> None:
    """Tell a copy of a link only if the server is a member of its bundle at that time."""
    for served in tuple(self.served.values()):
        if served.copy is not None and member in served.copy.peers:
            served.copy.link(member, is_up=is_up)


@replaces(state, "problems_of")
def answer_refused_pushes_as_duplicates(_: Any, queued: Any) -> Any:
    """Answer a repetition of a refused push as one of an applied push."""
    return tuple(queued.problems)


@replaces(ServerState, "_enter_tick")
def enter_each_tick(_: Any, self: ServerState, queued: Any) -> Any:
    """Put a repeated tick into the log again."""
    return self._enter(queued)


@replaces(JoiningMembers, "stalled")
def let_members_join_for_ever(*_: Any) -> list[Any]:
    """Keep a joining member without progress."""
    return []
