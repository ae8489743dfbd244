"""Pure: all messages in one table: who may say what to whom, and which class a name is."""

from adam_async.messages import (
    cluster_map,
    controllers,
    data_service,
    leases,
    ledger,
    notes,
    parameters,
    partitions,
    shard_states,
    staging,
)
from adam_async.messages.body import Body, Rows, unpack
from transport import Message, RemoteProtocolError, RoleTable

TABLE: Rows = {
    **cluster_map.ROWS,
    **controllers.ROWS,
    **leases.ROWS,
    **data_service.ROWS,
    **staging.ROWS,
    **ledger.ROWS,
    **partitions.ROWS,
    **parameters.ROWS,
    **shard_states.ROWS,
    **notes.ROWS,
}
"""(from, to) pairs that each message may travel between. A class without a row fails a test."""

BY_NAME = {cls.__name__: cls for cls in TABLE}


def role_table() -> RoleTable:
    """The table in the transport's terms."""
    return RoleTable({cls.__name__: pairs for cls, pairs in TABLE.items()})


def unpack_any(message: Message) -> Body:
    """Validate a received message as whatever it says it is."""
    cls = BY_NAME.get(message.type)
    if cls is None:
        raise RemoteProtocolError("message", f"unknown message {message.type!r}")
    return unpack(message, cls)
