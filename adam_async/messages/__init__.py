"""Pure: every message of the system, one frozen class each, and who may say it to whom.

A message class describes; tensors ride beside it (`transport.Message.tensors`) and never pass
through msgpack. `pack` turns a message into what a link carries and `unpack` validates what came.
Unknown optional keys are ignored, so a newer peer may say more; a missing or mistyped key is a
`RemoteProtocolError` that names it.

Conversations, each in a file of its own that ends with who may say what (`ROWS`); the tensors that ride along
are in brackets:

    cluster_map    anyone - controller        GetMap, CompareAndSet [value], WatchMap
                                              -> MapState [map], MapChanges [same]
                                              OpenSession -> SessionOpened
    controllers    controller - controller    Introduce -> Introduced, Agree [what the consensus core says]
    leases         worker - data server       LeaseGroups -> Groups [images, labels], ReportGroups -> Reported
    data_service   driver - data server       ReadTest -> TestImages [images, labels]
                   driver - data host         Serve -> Serving [what it says of its data]
    staging        data server - data server  ReadManifest -> ManifestPart [files]
                                              ReadFile -> FilePart [bytes]
    ledger         data server - data server  Enter [events] -> Entered, CopyLedger [part] -> LedgerCopied
    partitions     worker - worker            Greet
                                              Blocks [activations, error gradients, partial weight gradients]
    parameters     worker - parameter server  Push [deltas or factors] -> Pushed [values], Tick -> Ticked
                   worker - same, in place    Record -> Recorded
                   worker, driver - same      Pull -> Values [values]
    shard_states   driver - parameter server  ReadShards -> ShardStates [tables, values, rule state]
                                              LoadShards [same] -> Loaded
    notes          driver - server, worker    GetRecord -> RecordPart [bytes]
                   driver - any role          GetStatistics -> Statistics [values]
                   driver - same, but ctrl.   GetProfile -> Profile [events]

What all of them share is in `body`, the whole table of who may say what in `table`, and what rides beside a
message in `tensors`. Every run-scoped message carries the run's id, and is refused by a role that is on
another run.
"""

from adam_async.messages.body import (
    ROLES,
    Body,
    pack,
    unpack,
)
from adam_async.messages.cluster_map import (
    NOT_LEADER,
    SESSION_OVER,
    UNKNOWN,
    CompareAndSet,
    GetMap,
    MapChanges,
    MapState,
    OpenSession,
    SessionOpened,
    WatchMap,
)
from adam_async.messages.controllers import Agree, Introduce, Introduced
from adam_async.messages.data_service import (
    ReadTest,
    Serve,
    Serving,
    TestImages,
)
from adam_async.messages.leases import (
    Finished,
    Groups,
    Lease,
    LeaseGroups,
    Reported,
    ReportGroups,
)
from adam_async.messages.ledger import (
    CopyLedger,
    Enter,
    Entered,
    LedgerCopied,
)
from adam_async.messages.notes import (
    PROFILED,
    GetProfile,
    GetRecord,
    GetStatistics,
    Profile,
    RecordPart,
    Statistics,
    part_refusal,
)
from adam_async.messages.parameters import (
    APPLIED,
    DUPLICATE,
    GAP,
    NOT_PRIMARY,
    REFUSED,
    Part,
    Problem,
    Pull,
    Push,
    Pushed,
    Record,
    Recorded,
    StepRecord,
    Tick,
    Ticked,
    Values,
)
from adam_async.messages.partitions import Block, Blocks, Greet
from adam_async.messages.shard_states import (
    Loaded,
    LoadShards,
    ReadShards,
    ShardState,
    ShardStates,
    read_state_tables,
    state_tables,
)
from adam_async.messages.staging import (
    FilePart,
    ManifestPart,
    ReadFile,
    ReadManifest,
)
from adam_async.messages.table import (
    BY_NAME,
    TABLE,
    role_table,
    unpack_any,
)
from adam_async.messages.tensors import (
    check_tensor,
    packed_tensor,
    read_number,
    read_packed,
    read_packed_tensor,
    read_text_tensor,
    text_tensor,
)

__all__ = [
    "APPLIED",
    "BY_NAME",
    "DUPLICATE",
    "GAP",
    "NOT_LEADER",
    "NOT_PRIMARY",
    "PROFILED",
    "REFUSED",
    "ROLES",
    "SESSION_OVER",
    "TABLE",
    "UNKNOWN",
    "Agree",
    "Block",
    "Blocks",
    "Body",
    "CompareAndSet",
    "CopyLedger",
    "Enter",
    "Entered",
    "FilePart",
    "Finished",
    "GetMap",
    "GetProfile",
    "GetRecord",
    "GetStatistics",
    "Greet",
    "Groups",
    "Introduce",
    "Introduced",
    "Lease",
    "LeaseGroups",
    "LedgerCopied",
    "LoadShards",
    "Loaded",
    "ManifestPart",
    "MapChanges",
    "MapState",
    "OpenSession",
    "Part",
    "Problem",
    "Profile",
    "Pull",
    "Push",
    "Pushed",
    "ReadFile",
    "ReadManifest",
    "ReadShards",
    "ReadTest",
    "Record",
    "RecordPart",
    "Recorded",
    "ReportGroups",
    "Reported",
    "Serve",
    "Serving",
    "SessionOpened",
    "ShardState",
    "ShardStates",
    "Statistics",
    "StepRecord",
    "TestImages",
    "Tick",
    "Ticked",
    "Values",
    "WatchMap",
    "check_tensor",
    "pack",
    "packed_tensor",
    "part_refusal",
    "read_number",
    "read_packed",
    "read_packed_tensor",
    "read_state_tables",
    "read_text_tensor",
    "role_table",
    "state_tables",
    "text_tensor",
    "unpack",
    "unpack_any",
]
