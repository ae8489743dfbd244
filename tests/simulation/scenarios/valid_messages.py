"""Pure: makes valid examples of every message from the facts of a running cluster.

    facts = Facts(run=state.store, generation=state.generation, shards=(3, 4), sizes=(640, 128), session=7)
    examples = valid_messages(facts)

Unknown facts keep their defaults: the message is then well formed, and its receiver refuses its meaning.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import inspect
from numpy.typing import NDArray

from adam_async import messages as m
from adam_async.controller.consensus import messages as consensus
from adam_async.controller.consensus.membership import Members
from adam_async.controller.learned_map import StoresReport
from adam_async.data_server.staging.plan import File
from adam_async.model.rules import Sgd
from adam_async.run.cluster_map import ClusterMap, EpochRecord, NodeRecord
from adam_async.run.counts import EpochCounts
from adam_async.run.map_changes import Change
from adam_async.run.store_record import ArrayRecord, StoreRecord, cut_arrays
from adam_async.run.training_program import ProgramRecord
from adam_async.runtime.trace_events import Part as ProfilePart
from transport import Message


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ride:
    """A record attached to a message, as text or packed."""

    kind: Any
    """Type of the record, in the form that a decoder needs."""
    record: Any
    """Valid value of the record."""
    is_text: bool = True
    """Whether the record is JSON text; else it is MessagePack."""
    field: str = ""
    """Name of the bytes field with the record; empty if the only tensor contains it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """A valid message."""

    body: m.Body
    tensors: tuple[NDArray[Any], ...] = ()
    ride: Ride | None = None
    of: str = ""
    """Name of this example among those of its message; empty for a single one."""

    def meta(self) -> dict[str, Any]:
        """Return the fields as builtins, in the form that a receiver decodes."""
        return fields_of(m.pack(self.body))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the cluster, the receiver and the sender. Sizes count numbers, not bytes."""

    run: str = "run"
    store: str = "store"
    """Id of a store that the sender creates."""
    generation: int = 1
    shards: tuple[int, ...] = (0, 1)
    """Shards of the receiving server."""
    sizes: tuple[int, ...] = (4, 4)
    """Number of values in each of these shards."""
    dtype: str = "float32"
    session: int = 1
    """Push session of the sender."""
    incarnation: int = 1
    """Incarnation of the sender."""
    others_session: int = 2
    """Push session of another worker."""
    replica: int = 0
    others_replica: int = 1
    replica_generation: int = 1
    partition: int = 0
    epoch: int = 1
    clock: int = 1
    rule_arrays: tuple[str, ...] = ()
    group: str = "group"
    """Name of the group of controllers."""
    core_term: int = 1
    """Term of the controllers' consensus."""
    core_index: int = 1
    """Index of the last entry in the controllers' log."""
    sender_identity: str = "controller-2/2"
    receiver_identity: str = "controller-1/1"
    version: int = 1
    """Version of the cluster map."""
    node: str = "worker-0"
    """Name of the sender."""
    role: str = "worker"
    """Role that the sender has proven."""
    address: str = "tcp://worker-0:1"
    others_node: str = "ps-0"
    map_session: int = 1
    """Session of numbered questions to the controllers."""
    map_number: int = 1
    digest: str = "0" * 32
    cluster: ClusterMap = field(default_factory=ClusterMap)

    def meant(self) -> dict[str, dict[str, Any]]:
        """Return values of the right type that are wrong under these facts, by field name."""
        return {
            "run": {"wrong-run": "another run"},
            "store": {"wrong-run": "another run"},
            "generation": {"older": self.generation - 1, "newer": self.generation + 1},
            "session": {"anothers": self.others_session},
            "incarnation": {"anothers": self.incarnation + 1},
            "replica": {"anothers": self.others_replica},
            "replica_generation": {"older": self.replica_generation ^ 1},
            "partition": {"unknown": self.partition + 9},
            "epoch": {
                "one-ahead": self.epoch + 1,
                "two-ahead": self.epoch + 2,
                "far": self.epoch + (1 << 20),
            },
            "clock": {"ahead": self.clock + (1 << 20)},
            "count": {"many": 1 << 20},
            "position": {"ahead": 1 << 20},
            "received": {"ahead": 1 << 20},
            "begun": {"ahead": 1 << 20},
            "first": {"ahead": 1 << 20},
            "stop": {"before-start": 0, "far": (1 << 31)},
            "number": {"ahead": 1 << 20},
            "shards": {"unknown": [1 << 20], "unsorted": list(self.shards[::-1])},
            "groups": {
                "no-range": [self.epoch],
                "half-a-range": [self.epoch, 0],
                "reversed": [self.epoch, 3, 1],
                "overlapping": [self.epoch, 0, 4, 2, 6],
                "no-epoch": [0, 0, 1],
                "two-ahead": [self.epoch + 2, 0, 1],
                "many": [self.epoch, 0, (1 << 32) - 1],
                "scattered": [self.epoch, *range(1024)],
            },
            "map_version": {"ahead": self.version + (1 << 20)},
            "key": {"another-nodes": f"nodes/{self.others_node}", "unknown-key": "secrets"},
            "role": {"anothers": "controller"},
            "address": {"no-address": "file:///etc/passwd"},
            "controller": {"no-address": "file:///etc/passwd"},
        }


def valid_messages(facts: Facts) -> list[Example]:
    """Make at least one valid example of every message in the table, in a fixed order."""
    known, given, tensors = _known(facts), _given(facts), _tensors(facts)
    examples = [*_with_a_record(facts), *_among_controllers(facts)]
    done = {type(example.body) for example in examples}
    for kind in m.TABLE:
        if kind not in done:
            body = valid(kind, known, **given.get(kind, {}))
            examples.append(Example(body=body, tensors=tensors.get(kind, ())))
        if kind is m.Push:
            body = msgspec.structs.replace(body, groups=_groups(facts))
            examples.append(Example(body=body, tensors=tensors[kind], of="groups"))
            body = msgspec.structs.replace(body, groups=(), numbers=(1,), versions=(0,), own_applied=(0,))
            examples.append(Example(body=body, tensors=tensors[kind], of="lists"))
    return examples


def fields_of(message: Message) -> dict[str, Any]:
    """Return the fields of a message as builtins."""
    decoded: dict[str, Any] = msgspec.msgpack.decode(message.meta)
    return decoded


type_of = functools.cache(inspect.type_info)
"""Function that returns a type's description, cached because msgspec builds one at each call."""

_S = TypeVar("_S", bound=msgspec.Struct)


def valid(kind: type[_S], known: Mapping[str, Any], **given: Any) -> _S:
    """Make a valid message or record.

    Args:
        kind: Its type.
        known: Values of required fields, by name; other required fields get a small value of their type.
        given: Values of any fields.
    """
    info = type_of(kind)
    assert isinstance(info, inspect.StructType)
    required = {field.name: field.type for field in info.fields if field.required and field.name not in given}
    made = {name: known[name] if name in known else _small(type_, known) for name, type_ in required.items()}
    return kind(**made, **given)


def _small(kind: inspect.Type, known: Mapping[str, Any]) -> Any:
    """Return a small valid value of a type; None if the type allows it."""
    match kind:
        case inspect.IntType(ge=least):
            return max(least or 0, 0)
        case inspect.FloatType():
            return 0.1
        case inspect.BoolType():
            return False
        case inspect.BytesType():
            return b"\x80"
        case inspect.StrType():
            return "0" * 32
        case inspect.DictType():
            return {}
        case inspect.VarTupleType(item_type=item):
            return (_small(item, known),)
        case inspect.UnionType(types=(inspect.IntType() as one, inspect.VarTupleType())):
            return _small(one, known)
        case inspect.StructType(cls=cls):
            return valid(cls, known)
        case inspect.Metadata(type=inner):
            return _small(inner, known)
    return None


def _known(facts: Facts) -> dict[str, Any]:
    """Return values of the fields with a meaning in this cluster, by name."""
    return {field.name: getattr(facts, field.name) for field in fields(facts)} | {
        "store": facts.run,
        "name": facts.store,
        "shards": facts.shards[:1],
        "arrays": facts.rule_arrays,
        "after": facts.version,
        "home": facts.node,
        "driver": facts.node,
        "identity": facts.sender_identity,
        "members": (facts.sender_identity,),
        "controller": "tcp://controller-1:7000",
        **dict.fromkeys(("count", "first", "server", "origin", "committed", "pieces"), 1),
        **dict.fromkeys(("images", "weight", "stop", "servers"), 2),
        **dict.fromkeys(("nbytes", "total"), 16),
    }


def _given(facts: Facts) -> dict[type[m.Body], dict[str, Any]]:
    """Return fields that one message needs, and that the others lack or have with another value."""
    known, store = _known(facts), {"store": facts.store, "session": 1}
    copied = {**store, "position": 1}
    step = valid(m.StepReport, known, refused=(0,), groups=_groups(facts))
    return {
        m.SessionOpened: {"session": facts.map_session},
        m.Leases: {"leases": (valid(m.Lease, known),), "last": True},
        m.ReadGroups: {"numbers": (0, 1), "rows": (0, 8)},
        m.ReadManifest: {"count": 1},
        m.ReadFile: {"wait_s": 0.1},
        m.FilePart: {"progress": 4},
        m.Push: {"numbers": 1, "pull": True, "epoch": facts.epoch},
        m.Pushed: {"problems": (valid(m.Problem, known),), "clock": 1},
        m.ReportSteps: {"number": 1, "steps": (step,)},
        m.Tick: {"numbers": 0, "epoch": facts.epoch},
        m.Pull: {"clock": facts.clock, "wait_s": 0.1},
        m.Values: {"behind": (0,)},
        m.BundleSets: {"trainable": True},
        m.ReadGroupSets: {"home": facts.others_node, "map_version": facts.version},
        m.ReadSaved: {"store": facts.store, "home": facts.others_node, "piece": 1},
        m.PinShards: {"store": facts.store, "home": facts.others_node, "name": "best", "pin": 7},
        **dict.fromkeys((m.Begin, m.Begun, m.Committed), store),
        **dict.fromkeys((m.Copy, m.Held, m.PieceCopy), copied),
    }


def _groups(facts: Facts) -> tuple[int, ...]:
    return (facts.epoch, 0, 1, 3, 4)


def _tensors(facts: Facts) -> dict[type[m.Body], tuple[NDArray[Any], ...]]:
    """Return the tensors of each message that has some."""
    images = (np.zeros((2, 1, 8, 8), np.uint8), np.zeros(2, np.int64))
    zeros, content = np.zeros(facts.sizes[0], facts.dtype), (np.zeros(4, np.float32),)
    groups = {facts.epoch: _groups(facts)[1:]}
    tables = m.state_tables([m.ShardState(facts.shards[0], version=1, clocks={0: 1}, groups=groups)])
    states = (*tables, zeros, *(np.zeros_like(zeros) for _ in facts.rule_arrays))
    return {
        m.FilePart: (np.zeros(4, np.uint8),),
        m.RecordPart: (np.zeros(9, np.uint8),),
        m.Blocks: (np.zeros((2, 4), np.float32),),
        m.BundleSets: (np.array((0, 1), np.int64), np.array((3, 4), np.int64)),
        **dict.fromkeys((m.Groups, m.TestImages), images),
        **dict.fromkeys((m.Push, m.Pushed, m.Values), (zeros,)),
        **dict.fromkeys((m.ShardStates, m.LoadShards), states),
        **dict.fromkeys((m.Copy, m.PieceCopy), content),
    }


def _with_a_record(facts: Facts) -> list[Example]:
    known = _known(facts)

    def text(body: type[m.Body], kind: Any, record: Any, of: str = "", **given: Any) -> Example:
        ride = Ride(kind=kind, record=record)
        return Example(body=valid(body, known, **given), tensors=(m.text_tensor(record),), ride=ride, of=of)

    def packed(body: type[m.Body], kind: Any, record: Any) -> Example:
        ride = Ride(kind=kind, record=record, is_text=False)
        return Example(body=valid(body, known), tensors=(m.packed_tensor(record),), ride=ride)

    numbered = {"session": facts.map_session, "number": facts.map_number}
    node = valid(NodeRecord, known)
    run = valid(ProgramRecord, known, id=facts.run, blob=b"\x80", terms={"epochs": 1})
    shares, result = {"0": (0, 8)}, EpochCounts(loss=1.0)
    epoch = valid(EpochRecord, known, number=facts.epoch, groups=8, shares=shares, result=result)
    (piece,) = cut_arrays(facts.store, [ArrayRecord("w", (4,))])
    made = {"id": facts.store, "creator": facts.node, "rules": (Sgd(rate=0.1),)}
    store = valid(StoreRecord, known, **made, arrays=1, shard_bytes=16)
    keyed: dict[str, tuple[str, Any]] = {
        "node": (f"nodes/{facts.node}", node),
        "run": ("run", run),
        "epoch": ("epoch", epoch),
        "piece": ("stores/hostile/0", piece),
        "store": ("stores/hostile", store),
    }
    change = Change(version=facts.version, nodes={facts.node: node}, placements=facts.generation)
    saved_piece = m.SavedPiece(facts.others_node, 1, 1, 1)
    saved = valid(m.SavedStore, known, id=facts.store, record=b"{}", arrays=b"[]", pieces=(saved_piece,))
    homes = (facts.others_node,)
    pin = valid(m.PinFacts, known, name="best", pin=7, home=facts.others_node, homes=homes, servers=homes)
    profile = ProfilePart(process="worker-0", dropped=0, events=[])
    address = "tcp://controller-1:7000"
    return [
        *(
            text(m.CompareAndSet, type(record), record, of, key=key, **numbered)
            for of, (key, record) in keyed.items()
        ),
        text(m.ReportStores, StoresReport, StoresReport(map=ClusterMap(version=facts.version))),
        text(m.MapState, ClusterMap, facts.cluster, controllers=(address,)),
        text(m.MapChanges, list[Change], [change]),
        text(m.Serving, dict[str, Any], {"images": 2}),
        text(m.ManifestPart, list[File], [File("images/0", 4)]),
        packed(m.SavedList, tuple[m.SavedStore, ...], (saved,)),
        packed(m.PinList, tuple[m.PinState, ...], (m.PinState(facts=pin),)),
        text(m.Statistics, dict[str, Any], {"groups": 3}),
        text(m.Profile, ProfilePart, profile),
    ]


def _among_controllers(facts: Facts) -> list[Example]:
    """Make an example of each consensus message, and some more."""
    index, term = facts.core_index, facts.core_term
    members = Members((facts.sender_identity, facts.receiver_identity))
    entry = consensus.Entry(index=index + 1, term=term, command=b"\x80")
    known = {
        "sender": facts.sender_identity,
        "to": facts.receiver_identity,
        "entries": (entry,),
        "members": members,
        "commit": index + 1,
        "index": index + 9,
        "size": 4,
        "data": b"data",
        **dict.fromkeys(("term", "last_term", "prev_term", "index_term"), term),
        **dict.fromkeys(("last_index", "prev_index", "match"), index),
        **dict.fromkeys(("granted", "ok"), True),
        "round": 1,
    }
    messages = {kind.__name__: valid(kind, known) for kind in get_args(consensus.Message)}
    changed = (consensus.Entry(index=index + 1, term=term, members=members),)
    messages["members"] = valid(consensus.Append, known, entries=changed, commit=index)

    def agree(record: consensus.Message, of: str, *, in_tensor: bool = False) -> Example:
        ride = Ride(kind=consensus.Message, record=record, is_text=False, field="" if in_tensor else "packed")
        packed = b"" if in_tensor else msgspec.msgpack.encode(record)
        tensors = (m.packed_tensor(record),) if in_tensor else ()
        return Example(body=m.Agree(group=facts.group, packed=packed), tensors=tensors, ride=ride, of=of)

    examples = [agree(record, of) for of, record in messages.items()]
    return [*examples, agree(messages["Append"], "tensor", in_tensor=True)]
