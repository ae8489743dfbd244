"""Pure: shards with their whole state as one message, read from one server and loaded into another.

The message has tables of versions, clocks, group sets and their losses. Then come, for each shard, its flat
values and the rule's arrays: first the elementwise arrays, as long as the values, then the arrays with one
number per shard. Last come the store's vectors, which are empty for a shard without them. A reader gets
copies.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import LoadShards, ShardState, ShardStates, read_state_tables, state_tables
from adam_async.messages.group_sets import MOST_SETS_BOUNDS
from adam_async.model.rules import Rule
from adam_async.parameter_server.gradients import is_finite
from adam_async.parameter_server.shard import Shard, check_array
from adam_async.run.ids import Replica, ShardId, Version
from adam_async.run.store_record import is_vector_key
from transport import RemoteProtocolError


@dataclass(frozen=True, slots=True, eq=False)
class ShardCopy:
    """A copy of a shard at one moment, with its rule's arrays."""

    state: ShardState
    values: NDArray[Any]
    rule_state: Mapping[str, NDArray[Any]]


def copy_shard(
    shard: Shard,
    *,
    clock: int | None = None,
    state: ShardState | None = None,
    without: Set[str] = frozenset(),
) -> ShardCopy:
    """Copy a shard.

    Args:
        clock: In bsp, the clock of the values: higher clocks of replicas are lowered to it. None to copy the
            replicas' clocks unchanged.
        state: Tables that the caller has already copied; None to copy them now.
        without: Names of the state's arrays to leave out.
    """
    return ShardCopy(
        state=state or state_of(shard, clock=clock),
        values=shard.values.copy(),
        rule_state={name: a.copy() for name, a in shard.rule_state.items() if name not in without},
    )


def state_of(shard: Shard, *, clock: int | None = None) -> ShardState:
    """Return the tables of a shard; for the argument see `copy_shard`."""
    clocks = {int(r): at if clock is None else min(at, clock) for r, at in shard.clocks.items()}
    return ShardState(int(shard.spec.id), shard.version, clocks, *shard.applied_groups())


def read_states(shards: Sequence[Shard], rule: Rule) -> tuple[ShardStates, list[NDArray[Any]]]:
    """Copy shards with their rules' arrays; return the body and the tensors of a message."""
    return states_message([copy_shard(shard) for shard in shards], rule)


def states_message(copies: Sequence[ShardCopy], rule: Rule) -> tuple[ShardStates, list[NDArray[Any]]]:
    """Return the body and the tensors of a message with shards."""
    vectors = sorted({name for copy in copies for name in copy.rule_state if is_vector_key(name)})
    names = (*rule.state_names, *rule.scalar_names, *vectors)
    tensors = [
        array
        for copy in copies
        for array in (copy.values, *(copy.rule_state.get(name, _absent(copy.values)) for name in names))
    ]
    return ShardStates(arrays=names), [*state_tables([copy.state for copy in copies]), *tensors]


def load_states(
    shards: Mapping[ShardId, Shard],
    body: LoadShards | ShardStates,
    tensors: Sequence[NDArray[Any]],
    *,
    is_new: bool = False,
) -> set[ShardId]:
    """Load all shards of a message, or none if one does not fit.

    Args:
        shards: The shards of this process. The message must have the arrays of the shards' rule.
        body: Message with the names of the arrays.
        tensors: Tables and arrays, see `ShardStates`.
        is_new: Whether the store is new: its shards have version 0, finite values, and neither clocks nor
            groups.

    Returns the numbers of the loaded shards.

    Raises:
        RemoteProtocolError: A shard belongs to another server; a table is malformed; an array is missing, or
            has the wrong shape or type; or a shard of a new store is not new.
    """
    states, tensors = read_state_tables(tensors, most_shards=len(shards), is_new=is_new)
    arrays = len(body.arrays) + 1
    if len(tensors) != arrays * len(states):
        raise RemoteProtocolError(
            "tensors",
            f"{len(states)} shards of {arrays} arrays each need {arrays * len(states)} tensors, "
            f"not {len(tensors)}",
        )
    copies: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for at, state in enumerate(states):
        shard = shards.get(ShardId(state.shard))
        if shard is None:
            raise RemoteProtocolError("shards", f"shard {state.shard} is not held here")
        # Values alone leave the state of the rule as new. Vectors may have come or gone since.
        known = {name for name in shard.rule_state if not is_vector_key(name)}
        of_rule = {name for name in body.arrays if not is_vector_key(name)}
        if of_rule and of_rule != known:
            raise RemoteProtocolError(
                "arrays", f"this run's rule keeps {sorted(known)}, not {sorted(of_rule)}"
            )
        mine = [shard.values, *(shard.rule_state.get(name, _absent(shard.values)) for name in body.arrays)]
        for name, target, source in zip(
            ("values", *body.arrays), mine, tensors[at * arrays : (at + 1) * arrays], strict=True
        ):
            if is_vector_key(name) and not (len(target) and len(source)):
                continue
            check_array(source, f"{name} of shard {state.shard}", target)
            if is_new and (state.version or (source.dtype.kind == "f" and not is_finite(source))):
                raise RemoteProtocolError(
                    "values",
                    f"{name} of shard {state.shard}: a new store needs finite values of version 0, "
                    f"not of version {state.version}",
                )
            copies.append((target, source))
    _check_room(shards, states)
    for target, source in copies:
        np.copyto(target, source)
    for state in states:
        set_state(shards[ShardId(state.shard)], state)
    return {ShardId(state.shard) for state in states}


def _absent(values: NDArray[Any]) -> NDArray[Any]:
    """Return an empty array, which represents a vector that a shard lacks."""
    return values[:0]


def _check_room(shards: Mapping[ShardId, Shard], states: Sequence[ShardState]) -> None:
    """Raise RemoteProtocolError if all shards together would have more ranges than one answer may have."""
    loaded = {state.shard for state in states}
    kept = [shard.tables.groups for number, shard in shards.items() if int(number) not in loaded]
    several = {id(sets): sets for sets in (*kept, *(state.groups for state in states))}
    length = sum([len(ranges) for sets in several.values() for ranges in sets.values()])
    if length > MOST_SETS_BOUNDS:
        raise RemoteProtocolError("sets", f"{length} bounds of groups, {MOST_SETS_BOUNDS} are the most")


def set_state(shard: Shard, state: ShardState) -> None:
    """Set the tables of a shard before its first push."""
    loaded = {Replica(replica): clock for replica, clock in state.clocks.items()}
    slowest = min(loaded.values(), default=0)
    # The live replicas of this run replace the checkpoint's replicas.
    clocks = {r: loaded.get(r, slowest) for r in shard.clocks} if shard.clocks else loaded
    version = Version(state.version)
    # The shards of a new store keep the tables that they share.
    before = (shard.version, shard.tables.loaded, shard.clocks, shard.tables.groups, shard.tables.losses)
    if before != (version, version, clocks, state.groups, state.losses):
        tables = shard.separate()
        tables.version = tables.loaded = version
        tables.clocks = clocks
        tables.groups = tables.ordered_groups = state.groups
        tables.losses = state.losses
    if shard.pending is not None:
        shard.pending.reached = slowest
