"""Patches that remove safeguards of shards with several copies, as `patches` does for the others."""

from functools import partial
from typing import Any

import msgspec
import numpy as np

from adam_async.client.session import Session
from adam_async.controller import bundle_rules
from adam_async.messages import Push, pack, unpack
from adam_async.parameter_server import bundle_copy, log_entries, shard_pieces, state
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import Apply
from adam_async.parameter_server.joining_members import JoiningMembers
from adam_async.parameter_server.served_store import ServedStore
from adam_async.parameter_server.server_links import ServerLinks
from adam_async.parameter_server.service import ParameterServer
from adam_async.parameter_server.shard import BySession
from adam_async.parameter_server.state import ServerState
from adam_async.run.bundle_record import BundleRecord
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.ids import Replica
from adam_async.run.store_record import StoreRecord
from adam_async.worker import pusher, stepper
from tests.ablations.patches import Change, replaces


@replaces(shard_pieces, "_tables_state")
def copy_without_numbers(tables_state: Any, tables: Any, sets: int) -> Any:
    """Leave the numbers of applied pushes out of pieces."""
    state = tables_state(tables, sets)
    return msgspec.structs.replace(state, last_number=[])


@replaces(shard_pieces, "_tables_state")
def copy_without_clocks(tables_state: Any, tables: Any, sets: int) -> Any:
    """Leave the clocks of replicas out of pieces."""
    return msgspec.structs.replace(tables_state(tables, sets), clocks={})


@replaces(shard_pieces, "_tables_of")
def copy_without_groups(tables_of: Any, state: Any, sets: Any) -> Any:
    """Leave the counted groups out of pieces."""
    return tables_of(state, {})


@replaces(pusher, "name_groups")
def name_the_first_group(_: Any, epoch: int, numbers: list[int]) -> tuple[int, ...]:
    """Name only the first group of a step."""
    return epoch, numbers[0], numbers[0] + 1


def _copy_without_ended_generations(copy_piece: Any, bundle: Bundle, specs: Any, **options: Any) -> Any:
    if specs:
        return copy_piece(bundle, specs, **options)
    clocks = msgspec.structs.replace(bundle.replicas.state(), over=[], newest={})
    state = shard_pieces.ReplicasState(bundle.epoch, clocks)
    return [np.frombuffer(msgspec.msgpack.encode(state), np.uint8)]


def copy_without_ended_generations(change: Change = setattr) -> None:
    """Leave the ended replica generations out of pieces."""
    patch = partial(_copy_without_ended_generations, shard_pieces.copy_piece)
    for module in (shard_pieces, bundle_copy):
        change(module, "copy_piece", patch)


@replaces(ServedStore, "map_changed")
def follow_own_map(map_changed: Any, self: ServedStore, cluster: ClusterMap) -> None:
    """Let each copy follow the replicas of its own map, beside the entries."""
    map_changed(self, cluster)
    store = cluster.store(self.store.id)
    if store is not None and not self.is_primary:
        live = {Replica(replica): pair[0] for replica, pair in cluster.pushers(store).items()}
        self.bundle.replicas.change(live, self.bundle.shards.values())


@replaces(bundle_copy, "decode_entry")
def form_own_batches(decode_entry: Any, parts: Any, bundle: Bundle, specs: Any) -> Any:
    """Let each copy order the pushes of a batch."""
    entry = decode_entry(parts, bundle, specs)
    return Apply(entry.pushes[::-1]) if isinstance(entry, Apply) else entry


@replaces(bundle_rules, "fault_of_change")
def permit_all_primaries(
    fault_of_change: Any, store: StoreRecord, old: BundleRecord, new: BundleRecord
) -> str:
    """Let a server outside `in_sync` become the primary."""
    if new.primary != old.primary and new.primary in old.members:
        return ""
    fault: str = fault_of_change(store, old, new)
    return fault


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
            push = unpack(message, Push)
            numbers = self.numbers.next(push.shards)
            exchange.message = pack(msgspec.structs.replace(push, numbers=numbers), message.tensors)
    return exchanges


@replaces(ServerState, "lead")
def lead_without_numbers(_: Any, self: ServerState) -> None:
    """Lead without the numbers of applied pushes."""
    for tables in self.bundle.tables():
        tables.ordered = BySession(0)


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


@replaces(ServerLinks, "begin_again")
def keep_early_sessions(*_: Any) -> None:
    """Take up a bundle without a look at the sessions that have begun."""


@replaces(state, "order_groups")
def take_known_groups(*_: Any) -> None:
    """Apply a push, whichever groups its shards have."""


@replaces(state, "order_groups")
def compare_with_counted_groups(order_groups: Any, queued: Any, tables: Any) -> None:
    """Forget the groups of the pushes that wait."""
    for shard in queued.shards:
        if shard is not None:
            shard.tables.ordered_groups = shard.tables.groups
    order_groups(queued, tables)


@replaces(state, "knows_a_part")
def take_mixed_groups(*_: Any) -> bool:
    """Take a push of which a shard has some groups."""
    return False


@replaces(stepper, "is_returned")
def join_returned_groups(*_: Any) -> bool:
    """Let a returned group join a step with others."""
    return False
