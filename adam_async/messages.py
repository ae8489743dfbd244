"""Pure: every message of the system, one frozen class each, and who may say it to whom.

A message class describes; tensors ride beside it (`transport.Message.tensors`) and never pass
through msgpack. `pack` turns a message into what a link carries and `unpack` validates what came.
Unknown optional keys are ignored, so a newer peer may say more; a missing or mistyped key is a
`RemoteProtocolError` that names it.

Conversations, with the tensors that ride along in brackets:

    anyone - controller          GetMap, CompareAndSet [value], WatchMap -> MapState [map], MapChanges [same]
    anyone - controller          OpenSession -> SessionOpened
    controller - controller      Introduce -> Introduced, Agree [what the consensus core says]
    worker - data server         LeaseGroups -> Groups [images, labels], ReportGroups -> Reported
    driver - data server         ReadTest -> TestImages [images, labels]
    driver - data host           Serve -> Serving [what it says of its data]
    data server - data server    ReadManifest -> ManifestPart [files], ReadFile -> FilePart [bytes]
    worker - worker              Greet, Blocks [activations, error gradients, partial weight gradients]
    worker - parameter server    Push [deltas or factors] -> Pushed [values], Tick -> Ticked
    worker - same, in place      Record -> Recorded
    worker, driver - same        Pull -> Values [values]
    driver - parameter server    ReadShards -> ShardStates [values, rule state], LoadShards [same] -> Loaded
    driver - server, worker      GetRecord -> RecordPart [bytes]
    driver - any role            GetStatistics -> Statistics [values]
    driver - same, but ctrl.     GetProfile -> Profile [events]

Every run-scoped message carries the run's id, and is refused by a role that is on another run.
"""

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from transport import Message, RemoteProtocolError, RoleTable

ROLES = ("controller", "ps", "data", "worker", "driver")
"""The parties of a cluster. `driver` is the command or program that started the run."""


PROFILED = ("ps", "data", "worker")
"""Those that a group passes: the ones that can note a profile."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages: a frozen record of builtins."""


# --- anyone and the controllers --------------------------------------------------------------

NOT_LEADER = "not-leader"
"""A controller that does not lead answers every question about the map with this; the text is the address
of the one that does, or empty where nobody is known to."""

SESSION_OVER = "session-over"
"""The controllers know nothing of this session any more: open another one. What it asked may be done."""

UNKNOWN = "unknown"
"""Leadership was lost with the question under way: it may be done, or may yet be. Ask again, under the same
number."""


class GetMap(Body, frozen=True, kw_only=True):
    """Ask for the cluster map, with all that was answered to anybody before this was asked."""


class OpenSession(Body, frozen=True, kw_only=True):
    """Ask for a session: numbered questions, each of which is done once however often it is asked."""


class SessionOpened(Body, frozen=True, kw_only=True):
    """The session. Its numbers begin with 1, and one question is asked at a time."""

    session: int


class CompareAndSet(Body, frozen=True, kw_only=True):
    """Set `key` if its record still has version `expected` (0: it must not exist).

    The answer is a `MapChanges` or `MapState` as for `WatchMap`, at once.
    Tensor: the new value as JSON text (it may be larger than a frame's meta may be).
    """

    key: str
    expected: int
    session: int
    number: int
    after: int
    group: str


class WatchMap(Body, frozen=True, kw_only=True):
    """Ask for the changes of the map beyond version `after`; the answer waits for the first of them.

    It waits for `wait_s` at most and is then without any, so that who asks knows that this one still leads.
    """

    after: int
    """-1: for the whole map."""
    group: str
    """Of whose map that is a version; another group's map begins anew."""
    wait_s: float


class MapState(Body, frozen=True, kw_only=True):
    """The whole cluster map. Tensor: the map as JSON text.

    Also where changes were asked for that are no longer kept, or of another group.
    """

    version: int
    group: str
    """Which group of controllers this is; one founded anew is another one, and counts versions anew."""
    done: bool = True
    """For an answer to `CompareAndSet`: whether it took effect."""
    at: int = 0
    """For an answer to `CompareAndSet`: version that the key's record got, or has."""


class MapChanges(Body, frozen=True, kw_only=True):
    """What became of the map since the version that was named, version by version without a gap.

    Tensor: the changes (`controller.changes.Change`) as JSON text.
    """

    version: int
    """After the last of them."""
    group: str
    done: bool = True
    at: int = 0


# --- controller and controller ---------------------------------------------------------------


class Introduce(Body, frozen=True, kw_only=True):
    """Say to another controller who we are, and ask the same; see `controller.founding`."""

    identity: str
    """Its name, and the number of its disk."""


class Introduced(Body, frozen=True, kw_only=True):
    """Who that is."""

    identity: str
    members: tuple[str, ...]
    """The identities in its group, as far as it knows; empty if it belongs to none."""


class Agree(Body, frozen=True, kw_only=True):
    """Something that a controller's consensus core says to another's; it may be lost.

    Tensor: the message (`consensus.Message`) as MessagePack.
    """

    group: str
    """Of the sender; empty where it knows of none. What one group agrees on means nothing in another."""


# --- worker and data server ------------------------------------------------------------------


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """One group was trained and its push acknowledged."""

    epoch: int
    number: int
    attempt: int
    images: int
    loss: float
    clock: int = 0
    """Step of the replica that it was in."""


class LeaseGroups(Body, frozen=True, kw_only=True):
    """Ask for up to `count` groups. The answer waits for work, but no longer than `wait_s`.

    All workers of a replica are given the same groups in the same order, each at its own pace.
    """

    run: str
    replica: int
    life: int
    """Of the replica; see `ClusterMap.life`."""
    partition: int
    position: int
    """Groups that this worker has received in this life: the answer goes on behind them. A question that is
    asked again after a broken link is answered with the same groups."""
    count: int
    wait_s: float
    heard: int = -1
    """Where all meet, as this worker was told it with `last` behind those groups; -1: it was not told."""
    rows: tuple[int, int] | None = None
    """Rows of the images that are wanted; ``(0, 0)``: no images at all. None: whole ones."""


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """One group handed out: its tag, and the images it holds out of those that ride along."""

    epoch: int
    number: int
    attempt: int
    images: int
    progress: float = 0.0
    """Epochs of the run that lie before it, for its replica: 1.25 is a quarter into the second. Schedules go
    by this, so that a rate depends on the group alone."""


class Groups(Body, frozen=True, kw_only=True):
    """Leased groups. Tensors, unless there are none: images (n, C, H, W) with the rows asked for, or none,
    one group after the other and each within one tensor; and the labels of all of them (n,)."""

    leases: tuple[Lease, ...] = ()
    last: bool = False
    """Nothing more waits for this replica: a step that is being collected ends with these groups."""
    clock: int = 0
    """The first of these groups begins no earlier than this clock: the replica ticks up to it. 0 in asp."""
    end: int = 0
    """With `last`: once these groups are pushed the replica ticks up to this clock, where all meet."""


class ReportGroups(Body, frozen=True, kw_only=True):
    """The part of this worker in these groups is finished. A group is finished when all parts are."""

    run: str
    replica: int
    life: int
    partition: int
    finished: tuple[Finished, ...]


class Reported(Body, frozen=True, kw_only=True):
    """Acknowledgement of a report."""


class ReadTest(Body, frozen=True, kw_only=True):
    """Ask for test images `start` to `stop`."""

    start: int
    stop: int


class TestImages(Body, frozen=True, kw_only=True):
    """Tensors: images (n, C, H, W) uint8 and labels (n,). `total` is the size of the test set."""

    __test__ = False  # not a test class, whatever its name suggests to pytest

    total: int


class Serve(Body, frozen=True, kw_only=True):
    """Ask a data host for a data server in a cluster. It serves until the asker says goodbye or is lost."""

    controller: str
    """Where the host reaches the cluster's controller, ``tcp://host:port``."""


class Serving(Body, frozen=True, kw_only=True):
    """A data server has joined the cluster. Tensor: what the map says of its data, as JSON text."""

    node: str
    """Its id there."""


# --- data servers that stage one source ------------------------------------------------------


class ReadManifest(Body, frozen=True, kw_only=True):
    """First question of a data server to another one, and where theirs differ for the files of its list."""

    server: int
    """Number of the sender, of so many `servers`."""
    servers: int
    digest: str
    """As in the answer: both sides learn that their lists differ."""
    first: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Files wanted, from `first` on; it may answer with fewer."""


class ManifestPart(Body, frozen=True, kw_only=True):
    """Tensor: these files as JSON text; `data_server.staging.File`."""

    server: int
    """Number of the sender, of so many `servers`."""
    servers: int
    digest: str
    """Of all files: who has the same means the same files by the same numbers."""
    yours: int = 0
    """Files here that belong to the one that asked."""


class ReadFile(Body, frozen=True, kw_only=True):
    """Ask for the piece of a file that begins at `offset`. The answer waits for the file, up to `wait_s`."""

    digest: str
    file: Annotated[int, msgspec.Meta(ge=0)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    wait_s: float = 0.0


class FilePart(Body, frozen=True, kw_only=True):
    """Tensor, unless it has no bytes: the piece."""

    checksum: str
    """Of the whole file; empty, and no tensor: it is not here yet."""
    progress: int = 0
    """Bytes that the sender has staged: one that stays behind but moves is waited for."""


# --- data servers ----------------------------------------------------------------------------


class Enter(Body, frozen=True, kw_only=True):
    """Events for the ledger of a run's leases, for its lender to enter. Tensor: the events, packed."""

    run: str
    term: int
    """Of the lending, as the sender knows it."""


class Entered(Body, frozen=True, kw_only=True):
    """They are in the ledger; which says nothing of who else has it."""


class CopyLedger(Body, frozen=True, kw_only=True):
    """A part of the ledger, from its lender. Tensor: a `keeping.Part`, packed."""

    run: str
    term: int


class LedgerCopied(Body, frozen=True, kw_only=True):
    """The sender has taken it."""


# --- workers of one replica ------------------------------------------------------------------


class Greet(Body, frozen=True, kw_only=True):
    """First message on a link between two workers of a replica, from either side; no others before it."""

    run: str
    replica: int
    life: int
    partition: int
    """Of the sender."""
    received: int
    """Blocks that it has from the other: sending goes on behind them."""
    begun: int
    """As in `Blocks`."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """What one tensor is: activations, error gradients or a partial weight gradient of one group."""

    crossing: int
    """Number of the crossing in the plan."""
    epoch: int
    number: int
    attempt: int


class Blocks(Body, frozen=True, kw_only=True):
    """Blocks of any groups that became ready together. Tensors: one per block, in order."""

    first: int
    """Number of the first block, from 1 without gaps on the way from this worker to that one in this life."""
    blocks: tuple[Block, ...]
    received: int
    """Blocks that the sender has from the receiver: those need not be kept any longer."""
    begun: int
    """Groups that the sender has begun in this life: nobody who sends to it goes far ahead of that."""


# --- worker and parameter server -------------------------------------------------------------


class Part(msgspec.Struct, frozen=True, array_like=True):
    """How the gradient of some shards rides along."""

    factors: bool
    """False: one flat tensor, the shards' deltas one after the other. True: two tensors, activations
    (I, K) and error gradients (R, K) for the R rows of all these shards, which are of one tensor."""
    count: Annotated[int, msgspec.Meta(ge=1)]
    """Shards that this part covers."""


class Push(Body, frozen=True, kw_only=True):
    """One step's gradients for the shards of one server.

    `shards`, `numbers`, `versions`, `own` run in parallel, in the order of `parts`.
    """

    run: str
    session: int
    incarnation: int
    replica: int
    clock: int
    """Step of the replica, from 1, that these gradients end."""
    images: int
    rate: float
    generation: int
    parts: tuple[Part, ...]
    shards: tuple[int, ...]
    numbers: tuple[int, ...]
    """The push's number on each shard, from 1 without gaps per (session, shard)."""
    versions: tuple[int, ...]
    """Oldest version of the shard that the step's groups read."""
    own: tuple[int, ...]
    """Own pushes since that version which a local step had already applied to the copy read."""
    pull: bool = False
    """Whether the answer shall carry the values of these shards, with this push in them."""
    epoch: int = 0
    """In ssp and bsp the epoch of its groups: the server orders it once it has heard of that epoch, and with
    it of all replicas that take part. 0 in asp: at once."""


APPLIED, DUPLICATE, REFUSED, GAP, NOT_PRIMARY = range(5)
"""What became of a push on one shard. REFUSED: not finite, or in bsp too late for the sum of its clock; it
consumed its number and ticked."""


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """A shard of a push that was not simply applied."""

    index: int
    """Position of the shard in the push."""
    status: int
    expected: int = 0
    """For GAP: the number that the server wants next."""


class Pushed(Body, frozen=True, kw_only=True):
    """Acknowledgement: the version of each shard after the push, and what was out of order.

    Tensor, if the push asked for it and every shard of it is settled: the values, as in `Values`.
    """

    versions: tuple[int, ...]
    problems: tuple[Problem, ...] = ()
    clock: int = 0
    """With values: all pushes of live replicas up to this clock are in them."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step that a compute thread has already applied to the shards' own memory."""

    clock: int
    """Step of the replica, from 1."""
    images: int
    staleness: int
    """Steps that others applied to that memory while this one was computed."""
    refused: tuple[int, ...] = ()
    """Positions, among the record's shards, whose gradient was not finite and was not applied."""


class Record(Body, frozen=True, kw_only=True):
    """Steps of a run that trains in place: numbered like pushes, counted and clocked, without payload."""

    run: str
    session: int
    incarnation: int
    replica: int
    generation: int
    shards: tuple[int, ...]
    number: int
    """Number of the first step, on each of these shards; the others follow it."""
    steps: Annotated[tuple[StepRecord, ...], msgspec.Meta(min_length=1)]


class Recorded(Body, frozen=True, kw_only=True):
    """Acknowledgement of a record."""


class Tick(Body, frozen=True, kw_only=True):
    """The replica's step `clock` ended without a push for these shards."""

    run: str
    session: int
    incarnation: int
    replica: int
    clock: int
    generation: int
    shards: tuple[int, ...]
    numbers: tuple[int, ...] = ()
    """The replica's last push on each of these shards: a server that has not seen it refuses the tick with
    code ``gap``, for it would say that the push had been applied."""
    epoch: int = 0
    """As in `Push`."""


class Ticked(Body, frozen=True, kw_only=True):
    """Acknowledgement of a tick."""


class Pull(Body, frozen=True, kw_only=True):
    """Ask for the values of shards; what came before on the same link is in them."""

    run: str
    generation: int
    shards: tuple[int, ...]
    clock: int = 0
    """Answer when all pushes of live replicas up to this clock are in the values; 0: at once."""
    wait_s: float = 0.0
    """But answer after this long at the latest, then perhaps without values."""


class Values(Body, frozen=True, kw_only=True):
    """Tensor: the values of the shards asked for, one after the other, flat, copied by the server."""

    versions: tuple[int, ...]
    """Empty, and no tensor, if the clock that was asked for had not come within the time."""
    clock: int
    """Slowest clock of these shards: all pushes of live replicas up to it are in the values, and a joining
    replica starts there."""
    behind: tuple[int, ...] = ()
    """Without values: the replicas that are waited for."""


# --- driver and parameter server -------------------------------------------------------------


class ShardState(msgspec.Struct, frozen=True, array_like=True):
    """Everything that travels with a shard, beside its values and its rule state."""

    shard: int
    version: int
    clocks: dict[str, int]
    """Replica (as text) to the step that it has finished."""
    numbers: tuple[tuple[int, int, int], ...]
    """Dedup table: session, incarnation, number of the last push ordered."""


class ReadShards(Body, frozen=True, kw_only=True):
    """Ask for shards with all that travels with them. What came before on the same link is in them."""

    run: str
    generation: int
    shards: tuple[int, ...]


class ShardStates(Body, frozen=True, kw_only=True):
    """Tensors: for each shard its values (flat), then its rule's arrays in the order of `arrays`."""

    states: tuple[ShardState, ...]
    arrays: tuple[str, ...]
    """Names of the rule's arrays: elementwise ones, then those of one number per shard."""


class LoadShards(Body, frozen=True, kw_only=True):
    """Set shards of a run that is preparing. Tensors as in `ShardStates`."""

    run: str
    generation: int
    states: tuple[ShardState, ...]
    arrays: tuple[str, ...]


class Loaded(Body, frozen=True, kw_only=True):
    """Acknowledgement of `LoadShards`. `left` counts shards of this server that wait for theirs."""

    left: int


class GetRecord(Body, frozen=True, kw_only=True):
    """Ask a server or worker that records for bytes `start` to `stop` of what it noted."""

    run: str
    start: Annotated[int, msgspec.Meta(ge=0)]
    stop: int


class RecordPart(Body, frozen=True, kw_only=True):
    """Tensor: these bytes. `total` is how many there are."""

    total: int


# --- driver and any role ---------------------------------------------------------------------


class GetStatistics(Body, frozen=True, kw_only=True):
    """Ask a role how it is doing; the driver builds the live table and the report from it."""

    run: str


class Statistics(Body, frozen=True, kw_only=True):
    """What the role counted. Tensor: the values as JSON text; docs/report.md names the fields."""

    node: str
    role: str


class GetProfile(Body, frozen=True, kw_only=True):
    """Ask a role that notes a profile for its events from `start` to `stop`."""

    start: Annotated[int, msgspec.Meta(ge=0)]
    stop: int


class Profile(Body, frozen=True, kw_only=True):
    """What a role noted. Tensor: the events as JSON text; `trace_events.Part`."""

    total: int
    """All events that it has."""


TABLE: dict[type[Body], frozenset[tuple[str, str]]] = {
    GetMap: frozenset((role, "controller") for role in ROLES),
    CompareAndSet: frozenset((role, "controller") for role in ROLES),
    WatchMap: frozenset((role, "controller") for role in ROLES),
    OpenSession: frozenset((role, "controller") for role in ROLES),
    SessionOpened: frozenset(("controller", role) for role in ROLES),
    MapState: frozenset(("controller", role) for role in ROLES),
    MapChanges: frozenset(("controller", role) for role in ROLES),
    Introduce: frozenset({("controller", "controller")}),
    Introduced: frozenset({("controller", "controller")}),
    Agree: frozenset({("controller", "controller")}),
    LeaseGroups: frozenset({("worker", "data")}),
    Groups: frozenset({("data", "worker")}),
    ReportGroups: frozenset({("worker", "data")}),
    ReadManifest: frozenset({("data", "data")}),
    ManifestPart: frozenset({("data", "data")}),
    ReadFile: frozenset({("data", "data")}),
    FilePart: frozenset({("data", "data")}),
    Enter: frozenset({("data", "data")}),
    Entered: frozenset({("data", "data")}),
    CopyLedger: frozenset({("data", "data")}),
    LedgerCopied: frozenset({("data", "data")}),
    Greet: frozenset({("worker", "worker")}),
    Blocks: frozenset({("worker", "worker")}),
    Reported: frozenset({("data", "worker")}),
    ReadTest: frozenset({("driver", "data")}),
    TestImages: frozenset({("data", "driver")}),
    Serve: frozenset({("driver", "data")}),
    Serving: frozenset({("data", "driver")}),
    Push: frozenset({("worker", "ps")}),
    Pushed: frozenset({("ps", "worker")}),
    Record: frozenset({("worker", "ps")}),
    Recorded: frozenset({("ps", "worker")}),
    Tick: frozenset({("worker", "ps")}),
    Ticked: frozenset({("ps", "worker")}),
    Pull: frozenset({("worker", "ps"), ("driver", "ps")}),
    Values: frozenset({("ps", "worker"), ("ps", "driver")}),
    ReadShards: frozenset({("driver", "ps")}),
    ShardStates: frozenset({("ps", "driver")}),
    LoadShards: frozenset({("driver", "ps")}),
    Loaded: frozenset({("ps", "driver")}),
    GetRecord: frozenset({("driver", "ps"), ("driver", "worker")}),
    RecordPart: frozenset({("ps", "driver"), ("worker", "driver")}),
    GetStatistics: frozenset(("driver", role) for role in ROLES if role != "driver"),
    Statistics: frozenset((role, "driver") for role in ROLES if role != "driver"),
    GetProfile: frozenset(("driver", role) for role in PROFILED),
    Profile: frozenset((role, "driver") for role in PROFILED),
}
"""(from, to) pairs that each message may travel between. A class without a row fails a test."""

BY_NAME = {cls.__name__: cls for cls in TABLE}

_B = TypeVar("_B", bound=Body)


def role_table() -> RoleTable:
    """The table in the transport's terms."""
    return RoleTable({cls.__name__: pairs for cls, pairs in TABLE.items()})


def pack(body: Body, tensors: Sequence[NDArray[Any]] = ()) -> Message:
    """Turn a message and its tensors into what a link carries."""
    return Message(type=type(body).__name__, meta=msgspec.to_builtins(body), tensors=tuple(tensors))


def unpack(message: Message, expected: type[_B]) -> _B:
    """Validate a received message as `expected`.

    Raises:
        RemoteProtocolError: It is another message, or a field is missing or mistyped.
    """
    if message.type != expected.__name__:
        raise RemoteProtocolError("message", f"expected {expected.__name__}, got {message.type}")
    try:
        return msgspec.convert(message.meta, expected)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError("message", f"malformed {message.type}: {error}") from None


def unpack_any(message: Message) -> Body:
    """Validate a received message as whatever it says it is."""
    cls = BY_NAME.get(message.type)
    if cls is None:
        raise RemoteProtocolError("message", f"unknown message {message.type!r}")
    return unpack(message, cls)


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What the bytes of a peer may raise: the decoder has words of its own for most of it, but not for all."""


@cache
def _text_decoder(expected: Any) -> msgspec.json.Decoder[Any]:
    """One for each type: to make one takes longer than to decode a small message."""
    return msgspec.json.Decoder(expected)


@cache
def _packed_decoder(expected: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(expected)


def text_tensor(value: Any) -> NDArray[np.uint8]:
    """Write any builtin or record as JSON text that rides as a tensor."""
    return np.frombuffer(msgspec.json.encode(value), np.uint8)


def read_text_tensor(message: Message, expected: Any) -> Any:
    """Validate the JSON text that rides beside a message.

    Raises:
        RemoteProtocolError: There is no such tensor, or the text is not what is expected.
    """
    if len(message.tensors) != 1 or message.tensors[0].dtype != np.uint8:
        raise RemoteProtocolError("tensors", f"{message.type} must carry one text tensor")
    try:
        return _text_decoder(expected).decode(message.tensors[0].tobytes())
    except UNREADABLE as error:
        raise RemoteProtocolError("message", f"malformed text beside {message.type}: {error}") from None


def read_number(value: float | None) -> float:
    """A number out of JSON text, which writes null for what is not finite, such as a diverged loss."""
    return float("nan") if value is None else float(value)


def packed_tensor(value: Any) -> NDArray[np.uint8]:
    """Write any builtin or record as bytes that ride as a tensor; unlike text it holds every float."""
    return np.frombuffer(msgspec.msgpack.encode(value), np.uint8)


def read_packed_tensor(message: Message, expected: Any) -> Any:
    """Validate what rides beside a message, as `packed_tensor` writes it.

    Raises:
        RemoteProtocolError: There is no such tensor, or it is not what is expected.
    """
    if len(message.tensors) != 1 or message.tensors[0].dtype != np.uint8:
        raise RemoteProtocolError("tensors", f"{message.type} must carry one packed tensor")
    try:
        return _packed_decoder(expected).decode(message.tensors[0].tobytes())
    except UNREADABLE as error:
        raise RemoteProtocolError("message", f"malformed bytes beside {message.type}: {error}") from None


def check_tensor(tensor: NDArray[Any], what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuse a tensor that is not what its message promises.

    Raises:
        RemoteProtocolError: Naming what was expected and what came.
    """
    if tensor.shape != shape or tensor.dtype != dtype:
        raise RemoteProtocolError(
            "tensors", f"{what}: expected {dtype}{shape}, got {tensor.dtype}{tensor.shape}"
        )
