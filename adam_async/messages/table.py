"""Pure: all messages in one table, with the roles that may send them, and the class of each name."""

from collections.abc import Callable
from functools import partial

from adam_async.messages import (
    controllers,
    data_service,
    group_sets,
    mapped_shards,
    notes,
    parameters,
    peers,
    replication,
    saved_shards,
    shard_states,
)
from adam_async.messages.body import Body, Rows, unpack_as
from transport import Message, RoleTable

TABLE: Rows = {
    **controllers.ROWS,
    **data_service.ROWS,
    **peers.ROWS,
    **parameters.ROWS,
    **mapped_shards.ROWS,
    **shard_states.ROWS,
    **group_sets.ROWS,
    **saved_shards.ROWS,
    **replication.ROWS,
    **notes.ROWS,
}
"""The (from, to) pairs of roles that may send each message. A class without a row fails a test."""

BY_NAME = {cls.__name__: cls for cls in TABLE}


def role_table() -> RoleTable:
    """Return the table as a `RoleTable` of the transport."""
    return RoleTable({cls.__name__: pairs for cls, pairs in TABLE.items()})


def table_among(role: str) -> RoleTable:
    """Return the rows of one role with itself, for a listener that accepts no other role."""
    pair = (role, role)
    return RoleTable({cls.__name__: {pair} for cls, pairs in TABLE.items() if pair in pairs})


unpack_any: Callable[[Message], Body] = partial(unpack_as, BY_NAME)
"""Validates a received message as the class that its type names; see `unpack_as`."""
