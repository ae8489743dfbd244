"""Pure: all messages of the system, one frozen class each, and the roles that may send each.

The fields of a message travel as msgpack, in the meta of the link's message. The tensors of a message
(`transport.Message.tensors`) are separate. `pack` makes the link's message from an object. `unpack` decodes a
received message straight into its class, whose types have the bounds. Decoders ignore unknown keys, so a
newer peer may send more. A mistyped key, or a missing key without a default, is a `RemoteProtocolError` that
names the key. Most messages of a run or store have its id; a role without this run or store refuses them.

    body.py                  start here: the base of the messages, the roles, `pack` and `unpack`; types of
                             all fields, with their bounds, which refuse NaN and infinities too
    tensors.py               tensors of a message: text, packed records, numbers; validated before use
    table.py                 the table of all conversations, and the class of each name

Conversations, each in a file that ends with the table of which role may send which message (`ROWS`); tensors
are in brackets:

    controllers.py   any role - controller      GetMap, CompareAndSet [value], WatchMap
                                                -> MapState [map], MapChanges [same]
                                                OpenSession -> SessionOpened
                     p. server - controller     ReportStores [report]
                     controller - controller    Introduce -> Introduced, Agree [consensus message]
    data_service.py  worker - data server       LeaseGroups -> Leases
                                                ReadGroups -> Groups [images, labels]
                                                ReportGroups -> Reported
                     driver - data server       ReadTest -> TestImages [images, labels]
                     driver - data host         Serve -> Serving [description of its data]
                     data server - data server  ReadManifest -> ManifestPart [files]
                                                ReadFile -> FilePart [bytes]
    peers.py         worker - worker            Greet, Blocks [activations, error gradients,
                                                partial weight gradients]
                     client - client            AskPieces -> Pieces
    parameters.py    worker, client - p. server Push [deltas or factors] -> Pushed [values], Tick -> Ticked
                     worker - same, in place    ReportSteps -> StepsReported
                     those, driver, reader      Pull -> Values [values]
    mapped_shards.py worker - p. server         MapShards -> ShardsMapped, UnmapShards -> Settled
                     p. server - worker         KeepStill -> Settled
                     driver - p. server         same
    shard_states.py  driver - parameter server  ReadShards -> ShardStates [tables, values, rule state]
                     driver, client - same      LoadShards [same] -> Loaded
    group_sets.py    data server - p. server    ReadGroupSets -> BundleSets [ranges of groups]
    saved_shards.py  driver, client - p. server ListSaved -> SavedList [saved stores]
                                                ReadSaved -> ShardStates [tables, values, rule state]
                     client - parameter server  PinShards -> ShardsPinned
                     client, reader - p. server ListPins -> PinList [pins]
    replication.py   p. server - p. server      Begin -> Begun, Copy [entry] -> Held, Committed -> Held
                                                PieceCopy [state] -> Held
                                                Beat (heartbeat)
    notes.py         driver - parameter server  GetRecord -> RecordPart [bytes]
                     driver - server, worker    GetProfile -> Profile [events]
                     driver - same, controller  GetStatistics -> Statistics [values]
                     client, reader - p. server same, of one store
"""

from adam_async.messages.body import ROLES, Body, OfEach, each_of, fits, joined, of_place, pack, unpack
from adam_async.messages.controllers import (
    LEARNING,
    NOT_LEADER,
    SESSION_OVER,
    UNKNOWN,
    Agree,
    CompareAndSet,
    GetMap,
    Introduce,
    Introduced,
    MapChanges,
    MapState,
    OpenSession,
    ReportStores,
    SessionOpened,
    Standing,
    WatchMap,
)
from adam_async.messages.data_service import (
    MOST_GROUPS,
    MOST_HELD,
    MOST_LEASES,
    MOST_REPORTED,
    FilePart,
    Finished,
    Groups,
    HeldLease,
    Lease,
    LeaseGroups,
    Leases,
    ManifestPart,
    ReadFile,
    ReadGroups,
    ReadManifest,
    ReadTest,
    Reported,
    ReportGroups,
    Serve,
    Serving,
    TestImages,
)
from adam_async.messages.group_sets import BundleSets, ReadGroupSets, read_group_sets
from adam_async.messages.mapped_shards import KeepStill, MapShards, Settled, ShardsMapped, UnmapShards
from adam_async.messages.notes import (
    PROFILED,
    USERS,
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
    MOST_TERMS,
    NOT_PRIMARY,
    REFUSED,
    Command,
    Commands,
    DotProduct,
    Part,
    Problem,
    Pull,
    Push,
    Pushed,
    ReportSteps,
    StepReport,
    StepsReported,
    Tick,
    Ticked,
    Values,
)
from adam_async.messages.peers import AskPieces, Block, Blocks, Greet, Pieces
from adam_async.messages.replication import Beat, Begin, Begun, Committed, Copy, Held, PieceCopy
from adam_async.messages.saved_shards import (
    MOST_PINS,
    ListPins,
    ListSaved,
    PinFacts,
    PinList,
    PinShards,
    PinState,
    ReadSaved,
    SavedList,
    SavedPiece,
    SavedStore,
    ShardsPinned,
    pin_state_bytes,
    read_pin_list,
)
from adam_async.messages.shard_states import (
    Loaded,
    LoadShards,
    ReadShards,
    ShardState,
    ShardStates,
    read_state_tables,
    state_tables,
)
from adam_async.messages.table import BY_NAME, TABLE, role_table, table_among, unpack_any
from adam_async.messages.tensors import (
    check_tensor,
    packed_tensor,
    read_number,
    read_packed,
    read_packed_tensor,
    read_text_tensor,
    text_tensor,
)
