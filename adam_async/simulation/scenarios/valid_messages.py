"""Pure: makes valid examples of every message from the facts of a running cluster.

    facts = Facts(run=state.store, generation=state.generation, shards=(3, 4), sizes=(640, 128), session=7)
    examples = valid_messages(facts)

Unknown facts keep their defaults: the message is then well formed, and its receiver refuses its meaning.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async import messages as m
from adam_async.controller.consensus import messages as consensus
from adam_async.controller.consensus.membership import Members
from adam_async.controller.learned_map import StoresReport
from adam_async.data_server.epoch import EpochBegan
from adam_async.data_server.ledger import Entry as LedgerEntry
from adam_async.data_server.ledger_replication import Part as LedgerPart
from adam_async.data_server.staging.plan import File
from adam_async.data_server.state import GroupsReported, LeaseAsked, Opening
from adam_async.run.cluster_map import ClusterMap, EpochRecord, LedgerRecord, NodeRecord
from adam_async.run.ids import Replica
from adam_async.run.map_changes import Change
from adam_async.run.program_record import ProgramRecord
from adam_async.run.store_record import ArrayRecord, ArraysPiece, RuleRecord, StoreRecord, cut_arrays
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
    """Term of the consensus of the controllers."""
    core_index: int = 1
    """Index of the last entry of the controllers' log."""
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
    ledger_term: int = 1
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
            "term": {"older": 0, "next": self.ledger_term + 1, "ahead": 1 << 20},
            "key": {"another-nodes": f"nodes/{self.others_node}", "unknown-key": "secrets"},
            "role": {"anothers": "controller"},
            "address": {"no-address": "file:///etc/passwd"},
            "controller": {"no-address": "file:///etc/passwd"},
        }


def valid_messages(facts: Facts) -> list[Example]:
    """Make at least one valid example of every message of the table, in a fixed order."""
    return [
        *_with_a_controller(facts),
        *_among_controllers(facts),
        *_with_a_data_server(facts),
        *_among_data_servers(facts),
        *_among_workers(facts),
        *_with_a_parameter_server(facts),
        *_shard_states(facts),
        *_replication(facts),
        *_notes(facts),
    ]


def fields_of(message: Message) -> dict[str, Any]:
    """Return the fields of a message as builtins."""
    fields: dict[str, Any] = msgspec.msgpack.decode(message.meta)
    return fields


def _text(body: m.Body, kind: Any, record: Any, of: str = "") -> Example:
    return Example(body=body, tensors=(m.text_tensor(record),), ride=Ride(kind=kind, record=record), of=of)


def _packed(body: m.Body, kind: Any, record: Any, of: str = "") -> Example:
    ride = Ride(kind=kind, record=record, is_text=False)
    return Example(body=body, tensors=(m.packed_tensor(record),), ride=ride, of=of)


def _with_a_controller(facts: Facts) -> list[Example]:
    ask = m.CompareAndSet(
        key=f"nodes/{facts.node}",
        expected=0,
        session=facts.map_session,
        number=facts.map_number,
        after=facts.version,
        group=facts.group,
    )
    node = NodeRecord(role=facts.role, address=facts.address, incarnation=facts.incarnation)
    run = ProgramRecord(
        id=facts.run, driver=facts.node, incarnation=facts.incarnation, blob=b"\x80", terms={"epochs": 1}
    )
    epoch = EpochRecord(
        run=facts.run, number=facts.epoch, groups=8, shares={"0": (0, 8)}, result={"loss": 1.0}
    )
    ledger_record = LedgerRecord(run=facts.run, term=facts.ledger_term, ledger_replicas=((facts.node, 1),))
    store = StoreRecord(
        id=facts.store,
        creator=facts.node,
        rules=(RuleRecord(rule="sgd", rate=0.1),),
        arrays=1,
        nbytes=16,
        state_arrays=0,
        pieces=1,
        shard_bytes=16,
    )
    (piece,) = cut_arrays(facts.store, [ArrayRecord("w", (4,))])
    change = Change(version=facts.version, nodes={facts.node: node}, placements=facts.generation)
    keyed = msgspec.structs.replace
    return [
        Example(body=m.GetMap()),
        Example(body=m.OpenSession()),
        Example(body=m.SessionOpened(session=facts.map_session)),
        _text(ask, NodeRecord, node, "node"),
        _text(keyed(ask, key="run"), ProgramRecord, run, "run"),
        _text(keyed(ask, key="epoch"), EpochRecord, epoch, "epoch"),
        _text(keyed(ask, key="lending"), LedgerRecord, ledger_record, "lending"),
        _text(keyed(ask, key="stores/hostile/0"), ArraysPiece, piece, "piece"),
        _text(keyed(ask, key="stores/hostile"), StoreRecord, store, "store"),
        _text(m.ReportStores(), StoresReport, StoresReport(map=ClusterMap(version=facts.version))),
        Example(body=m.WatchMap(after=facts.version, group=facts.group, wait_s=0.1)),
        _text(
            m.MapState(version=facts.version, group=facts.group, controllers=("tcp://controller-1:7000",)),
            ClusterMap,
            facts.cluster,
        ),
        _text(m.MapChanges(version=facts.version, group=facts.group), list[Change], [change]),
    ]


def _among_controllers(facts: Facts) -> list[Example]:
    head: dict[str, Any] = {
        "sender": facts.sender_identity,
        "to": facts.receiver_identity,
        "term": facts.core_term,
    }
    index, term = facts.core_index, facts.core_term
    members = Members((facts.sender_identity, facts.receiver_identity))
    entry = consensus.Entry(index=index + 1, term=term, command=b"\x80")
    messages: dict[str, consensus.Message] = {
        "AskVote": consensus.AskVote(**head, last_index=index, last_term=term, pre=False),
        "Vote": consensus.Vote(**head, pre=False, granted=True),
        "Append": consensus.Append(
            **head, prev_index=index, prev_term=term, entries=(entry,), commit=index + 1, round=1
        ),
        "members": consensus.Append(
            **head,
            prev_index=index,
            prev_term=term,
            entries=(consensus.Entry(index=index + 1, term=term, members=members),),
            commit=index,
            round=1,
        ),
        "Appended": consensus.Appended(**head, ok=True, match=index, round=1),
        "Chunk": consensus.Chunk(
            **head,
            index=index + 9,
            index_term=term,
            members=members,
            size=4,
            crc=0,
            offset=0,
            data=b"data",
            round=1,
        ),
        "Taken": consensus.Taken(**head, index=index, offset=4, round=1),
        "TakeOver": consensus.TakeOver(**head),
    }
    examples = [
        Example(body=m.Introduce(identity=facts.sender_identity)),
        Example(body=m.Introduced(identity=facts.sender_identity, members=(facts.sender_identity,))),
    ]
    for of, one in messages.items():
        ride = Ride(kind=consensus.Message, record=one, is_text=False, field="packed")
        body = m.Agree(group=facts.group, packed=msgspec.msgpack.encode(one))
        examples.append(Example(body=body, ride=ride, of=of))
    examples.append(_packed(m.Agree(group=facts.group), consensus.Message, messages["Append"], "tensor"))
    return examples


def _with_a_data_server(facts: Facts) -> list[Example]:
    part: dict[str, Any] = {
        "run": facts.run,
        "replica": facts.replica,
        "replica_generation": facts.replica_generation,
        "partition": facts.partition,
    }
    lease = m.Lease(epoch=facts.epoch, number=0, attempt=0, images=2, progress=0.0)
    images, labels = np.zeros((2, 1, 8, 8), np.uint8), np.zeros(2, np.int64)
    done = m.Finished(epoch=facts.epoch, number=0, attempt=0, images=2, loss=0.5, clock=facts.clock)
    return [
        Example(body=m.LeaseGroups(**part, position=0, count=1, wait_s=0.1, rows=(0, 8))),
        Example(body=m.Groups(leases=(lease,), last=True), tensors=(images, labels)),
        Example(body=m.ReportGroups(**part, finished=(done,))),
        Example(body=m.Reported()),
        Example(body=m.ReadTest(start=0, stop=2)),
        Example(body=m.TestImages(total=2), tensors=(images, labels)),
        Example(body=m.Serve(controller="tcp://controller-1:7000")),
        _text(m.Serving(node=facts.node), dict[str, Any], {"images": 2}),
    ]


def _among_data_servers(facts: Facts) -> list[Example]:
    asked = LeaseAsked(
        request=None,
        replica=Replica(facts.replica),
        replica_generation=facts.replica_generation,
        partition=facts.partition,
        position=0,
        heard=-1,
        count=1,
        wait_s=0.1,
    )
    finished = (m.Finished(epoch=facts.epoch, number=0, attempt=0, images=2, loss=0.5),)
    reported = GroupsReported(Replica(facts.replica), facts.replica_generation, facts.partition, finished)
    began = EpochBegan(number=facts.epoch, groups=8, shares={Replica(0): (0, 8)})
    part = LedgerPart(
        first=0, settled=0, entries=(LedgerEntry(0.0, began), LedgerEntry(0.1, asked)), opening=Opening()
    )
    ledger: dict[str, Any] = {"run": facts.run, "term": facts.ledger_term}
    staging: dict[str, Any] = {"server": 1, "servers": 2, "digest": facts.digest}
    return [
        _packed(m.Enter(**ledger), tuple[LeaseAsked | GroupsReported, ...], (asked, reported)),
        Example(body=m.Entered()),
        _packed(m.CopyLedger(**ledger), LedgerPart, part),
        Example(body=m.LedgerCopied()),
        Example(body=m.ReadManifest(**staging, first=0, count=1)),
        _text(m.ManifestPart(**staging), list[File], [File("images/0", 4)]),
        Example(body=m.ReadFile(digest=facts.digest, file=0, offset=0, wait_s=0.1)),
        Example(body=m.FilePart(checksum="0" * 32, progress=4), tensors=(np.zeros(4, np.uint8),)),
    ]


def _among_workers(facts: Facts) -> list[Example]:
    greet = m.Greet(
        run=facts.run,
        replica=facts.replica,
        replica_generation=facts.replica_generation,
        partition=facts.partition,
        received=0,
        begun=0,
    )
    block = m.Block(crossing=0, epoch=facts.epoch, number=0, attempt=0)
    blocks = m.Blocks(first=1, blocks=(block,), received=0, begun=0)
    return [
        Example(body=greet),
        Example(body=blocks, tensors=(np.zeros((2, 4), np.float32),)),
    ]


def _with_a_parameter_server(facts: Facts) -> list[Example]:
    some = facts.shards[:1]
    here: dict[str, Any] = {"store": facts.run, "generation": facts.generation, "shards": some}
    sender: dict[str, Any] = {
        "session": facts.session,
        "incarnation": facts.incarnation,
        "replica": facts.replica,
    }
    zeros = np.zeros(facts.sizes[0], facts.dtype)
    push = m.Push(
        **here,
        **sender,
        clock=facts.clock,
        weight=2,
        rate=0.1,
        parts=(m.Part(factors=False, count=1),),
        numbers=(1,),
        versions=(0,),
        own_applied=(0,),
        pull=True,
        epoch=facts.epoch,
    )
    problem = m.Problem(index=0, status=m.GAP, expected=1)
    groups = (facts.epoch, 0, 1, 3, 4)
    step = m.StepReport(clock=facts.clock, weight=2, staleness=0, refused=(0,), groups=groups)
    return [
        Example(body=push, tensors=(zeros,)),
        Example(body=msgspec.structs.replace(push, groups=groups), tensors=(zeros,), of="groups"),
        Example(body=m.Pushed(versions=(1,), problems=(problem,), clock=1), tensors=(zeros,)),
        Example(body=m.ReportSteps(**here, **sender, number=1, steps=(step,))),
        Example(body=m.StepsReported()),
        Example(body=m.Tick(**here, **sender, clock=facts.clock, numbers=(0,), epoch=facts.epoch)),
        Example(body=m.Ticked()),
        Example(body=m.Pull(**here, clock=facts.clock, wait_s=0.1)),
        Example(body=m.Values(versions=(1,), clock=1, behind=(0,)), tensors=(zeros,)),
    ]


def _shard_states(facts: Facts) -> list[Example]:
    shard = facts.shards[0]
    zeros = np.zeros(facts.sizes[0], facts.dtype)
    tables = m.state_tables([m.ShardState(shard=shard, version=1, clocks={"0": 1})])
    here: dict[str, Any] = {"store": facts.run, "generation": facts.generation}
    tensors = (*tables, zeros, *(np.zeros_like(zeros) for _ in facts.rule_arrays))
    saved = m.SavedStore(
        name=facts.store,
        id=facts.store,
        record=b"{}",
        arrays=b"[]",
        pieces=(m.SavedPiece(facts.others_node, 1, 1, 1, 1),),
        began_ms=1,
    )
    read = m.ReadSaved(store=facts.store, home=facts.others_node, piece=1, shards=facts.shards[:1])
    return [
        Example(body=m.ListSaved(name=facts.store)),
        _packed(m.SavedList(keeps=True), tuple[m.SavedStore, ...], (saved,)),
        Example(body=read),
        Example(body=m.ReadShards(**here, shards=facts.shards[:1])),
        Example(body=m.ShardStates(arrays=facts.rule_arrays), tensors=tensors),
        Example(body=m.LoadShards(**here, arrays=facts.rule_arrays), tensors=tensors),
        Example(body=m.Loaded(left=0)),
    ]


def _replication(facts: Facts) -> list[Example]:
    session: dict[str, Any] = {
        "store": facts.store,
        "home": facts.node,
        "generation": facts.generation,
        "session": 1,
    }
    positions: dict[str, Any] = {"committed": 1, "applied_by_all": 0}
    content = (np.zeros(4, np.float32),)
    return [
        Example(body=m.Beat()),
        Example(body=m.Begin(**session, version=facts.version, start=0)),
        Example(body=m.Begun(**session, position=0, applied=0)),
        Example(body=m.Copy(**session, **positions, position=1, origin=1, nbytes=16), tensors=content),
        Example(body=m.Committed(**session, **positions)),
        Example(body=m.Held(**session, position=1, applied=0, pieces=1)),
        Example(body=m.PieceCopy(**session, piece=0, position=1, nbytes=16), tensors=content),
        Example(body=m.Superseded(store=facts.store, home=facts.node, generation=facts.generation)),
    ]


def _notes(facts: Facts) -> list[Example]:
    return [
        Example(body=m.GetRecord(run=facts.run, start=0, stop=9)),
        Example(body=m.RecordPart(total=9), tensors=(np.zeros(9, np.uint8),)),
        Example(body=m.GetStatistics(run=facts.run)),
        _text(m.Statistics(node=facts.node, role="worker"), dict[str, Any], {"groups": 3}),
        Example(body=m.GetProfile(start=0, stop=9)),
        _text(m.Profile(total=0), ProfilePart, ProfilePart(process="worker-0", dropped=0, events=[])),
    ]
