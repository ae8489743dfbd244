"""Messages: the roles that may send them, their way over a link, and the errors of invalid ones."""

import math
from importlib import import_module

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import encode

from adam_async import messages
from adam_async.messages import (
    BY_NAME,
    ROLES,
    TABLE,
    Agree,
    AskPieces,
    Beat,
    Begin,
    Begun,
    Block,
    Blocks,
    Body,
    BundleSets,
    Command,
    Commands,
    Committed,
    CompareAndSet,
    Copy,
    DotProduct,
    FilePart,
    Finished,
    GetMap,
    GetProfile,
    GetRecord,
    GetStatistics,
    Greet,
    Groups,
    Held,
    Introduce,
    Introduced,
    Lease,
    LeaseGroups,
    Leases,
    ListPins,
    ListSaved,
    Loaded,
    LoadShards,
    ManifestPart,
    MapChanges,
    MapState,
    OpenSession,
    Part,
    PieceCopy,
    Pieces,
    PinList,
    PinShards,
    Problem,
    Profile,
    Pull,
    Push,
    Pushed,
    ReadFile,
    ReadGroups,
    ReadGroupSets,
    ReadManifest,
    ReadSaved,
    ReadShards,
    ReadTest,
    RecordPart,
    Reported,
    ReportGroups,
    ReportSteps,
    ReportStores,
    SavedList,
    Serve,
    Serving,
    SessionOpened,
    ShardsPinned,
    ShardStates,
    Statistics,
    StepReport,
    StepsReported,
    Tick,
    Ticked,
    Values,
    WatchMap,
    check_tensor,
    pack,
    read_number,
    read_packed_tensor,
    read_text_tensor,
    role_table,
    text_tensor,
    unpack,
    unpack_any,
)
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.store.layout import MESSAGE_SHARDS as OF_STORE
from adam_async.worker.push_plan import MESSAGE_SHARDS as OF_WORKER
from tests.adam_async.runs import NETWORKS, address_of
from tests.simulation.scenarios.valid_messages import fields_of
from tests.transport.testing import link_pair
from transport import Identity, LinkConfig, LocalProtocolError, Message, RemoteProtocolError
from transport.frames import pack_meta
from transport.tensors import lay_out

DRAWN, CLOCK, SHARD = (1 << 56) - 1, (1 << 48) - 1, (1 << 32) - 1
"""The largest of some kinds of numbers."""

LARGE = (1 << 63) - 1
"""Largest number that leaves a message within its limit of size."""

EVERYBODY = {
    (role, "controller") for role in ("controller", "ps", "data", "worker", "driver", "client", "reader")
}

ALLOWED = {
    "GetMap": EVERYBODY,
    "CompareAndSet": EVERYBODY,
    "WatchMap": EVERYBODY,
    "ReportStores": {("ps", "controller")},
    "OpenSession": EVERYBODY,
    "SessionOpened": {(to, of) for of, to in EVERYBODY},
    "MapState": {(to, of) for of, to in EVERYBODY},
    "MapChanges": {(to, of) for of, to in EVERYBODY},
    "Introduce": {("controller", "controller")},
    "Introduced": {("controller", "controller")},
    "Agree": {("controller", "controller")},
    "LeaseGroups": {("worker", "data")},
    "Leases": {("data", "worker")},
    "ReadGroups": {("worker", "data")},
    "Groups": {("data", "worker")},
    "ReportGroups": {("worker", "data")},
    "ReadManifest": {("data", "data")},
    "ManifestPart": {("data", "data")},
    "ReadFile": {("data", "data")},
    "FilePart": {("data", "data")},
    "Greet": {("worker", "worker")},
    "Blocks": {("worker", "worker")},
    "Reported": {("data", "worker")},
    "ReadTest": {("driver", "data")},
    "TestImages": {("data", "driver")},
    "Serve": {("driver", "data")},
    "Serving": {("data", "driver")},
    "Push": {("worker", "ps"), ("client", "ps")},
    "Pushed": {("ps", "worker"), ("ps", "client")},
    "ReportSteps": {("worker", "ps")},
    "StepsReported": {("ps", "worker")},
    "MapShards": {("worker", "ps")},
    "ShardsMapped": {("ps", "worker")},
    "UnmapShards": {("worker", "ps")},
    "KeepStill": {("ps", "worker"), ("driver", "ps")},
    "Settled": {("worker", "ps"), ("ps", "worker"), ("ps", "driver")},
    "Tick": {("worker", "ps"), ("client", "ps")},
    "Ticked": {("ps", "worker"), ("ps", "client")},
    "Pull": {(role, "ps") for role in ("worker", "driver", "client", "reader")},
    "Values": {("ps", role) for role in ("worker", "driver", "client", "reader")},
    "ReadShards": {("driver", "ps"), ("client", "ps")},
    "ShardStates": {("ps", "driver"), ("ps", "client")},
    "LoadShards": {("driver", "ps"), ("client", "ps")},
    "Loaded": {("ps", "driver"), ("ps", "client")},
    "ReadGroupSets": {("data", "ps")},
    "BundleSets": {("ps", "data")},
    "ListSaved": {("driver", "ps"), ("client", "ps")},
    "SavedList": {("ps", "driver"), ("ps", "client")},
    "ReadSaved": {("driver", "ps"), ("client", "ps")},
    "PinShards": {("client", "ps")},
    "ShardsPinned": {("ps", "client")},
    "ListPins": {("client", "ps"), ("reader", "ps")},
    "PinList": {("ps", "client"), ("ps", "reader")},
    "AskPieces": {("client", "client")},
    "Pieces": {("client", "client")},
    "Beat": {("ps", "ps")},
    "Begin": {("ps", "ps")},
    "Begun": {("ps", "ps")},
    "Copy": {("ps", "ps")},
    "Committed": {("ps", "ps")},
    "Held": {("ps", "ps")},
    "PieceCopy": {("ps", "ps")},
    "GetRecord": {("driver", "ps")},
    "RecordPart": {("ps", "driver")},
    "GetStatistics": {
        *(("driver", role) for role in ("controller", "ps", "data", "worker")),
        ("client", "ps"),
        ("reader", "ps"),
    },
    "GetProfile": {("driver", role) for role in ("ps", "data", "worker")},
    "Profile": {(role, "driver") for role in ("ps", "data", "worker")},
    "Statistics": {
        *((role, "driver") for role in ("controller", "ps", "data", "worker")),
        ("ps", "client"),
        ("ps", "reader"),
    },
}
"""Written a second time, so that a row that is changed by accident is noticed."""

EXAMPLES = [
    GetMap(),
    CompareAndSet(key="run", expected=3, session=1 << 55, number=9, after=12, group="a1"),
    WatchMap(after=-1, group="", wait_s=1.5),
    MapState(version=7, group="a1", done=False, at=3, controllers=("tcp://a:1", "tcp://b:1")),
    MapChanges(version=9, group="a1", done=True, at=9),
    ReportStores(),
    OpenSession(),
    SessionOpened(session=1 << 55),
    Introduce(identity="controller-1/5"),
    Introduced(identity="controller-1/5", members=("controller-1/5", "controller-2/7")),
    Agree(group="8f3c"),
    LeaseGroups(
        run="r",
        replica=0,
        replica_generation=1 << 55,
        partition=1,
        epoch=2,
        position=7,
        count=4,
        wait_s=1.5,
        heard=9,
    ),
    Leases(leases=(Lease(1, 2, 3, 16),), last=True),
    ReadGroups(run="r", epoch=1, numbers=(2, 7), least=1, rows=(0, 14)),
    Groups(count=2),
    ReportGroups(
        run="r", replica=1, replica_generation=5, partition=0, finished=(Finished(1, 2, 1, 16, 0.25),)
    ),
    Reported(),
    ReadTest(start=0, stop=10),
    messages.TestImages(total=10),
    Push(
        store="r",
        session=1 << 55,
        incarnation=2,
        replica=0,
        clock=9,
        weight=16,
        rate=0.1,
        generation=1,
        parts=(Part(True, 2), Part(False, 1)),
        shards=(0, 1, 2),
        numbers=9,
        versions=(1, 2, 3),
        own_applied=(0, 0, 1),
        pull=True,
        groups=(1, 0, 1),
        loss_sum=2.5,
        vector=3,
        commands=Commands((Command(1, ((0.5, 2), (-1.0, 0)), "w"),), (DotProduct(1, 2),)),
    ),
    Pushed(versions=(1, 2), problems=(Problem(1, messages.GAP, 4),), dots=((0.5, 1e-30), ()), epoch=7),
    ReportSteps(
        store="r",
        session=1,
        incarnation=2,
        replica=0,
        generation=1,
        shards=(5, 6),
        number=7,
        steps=(StepReport(3, 16, 1), StepReport(4, 16, 0, (1,), (1, 0, 1), 2.5)),
    ),
    StepsReported(),
    messages.MapShards(
        store="r", generation=1, session=1, incarnation=2, replica=0, notes=3, threads=2, jobs=144, groups=8
    ),
    messages.ShardsMapped(region=4),
    messages.UnmapShards(store="r"),
    messages.KeepStill(store="r"),
    messages.Settled(),
    Tick(store="r", session=1, incarnation=2, replica=0, clock=3, generation=1, shards=(5,)),
    Ticked(),
    Pull(store="r", generation=1, shards=(1, 2)),
    Values(versions=(4, 5), clock=2),
    ReadShards(store="r", generation=1, shards=(1, 2)),
    ShardStates(arrays=("momentum",)),
    LoadShards(store="r", generation=1, arrays=()),
    Loaded(left=2),
    ReadGroupSets(store="r", generation=1, home="ps-0", epoch=2, map_version=70),
    BundleSets(trainable=True, clock=9),
    ListSaved(name="mine"),
    SavedList(keeps=True),
    ReadSaved(store="r", home="ps-0", piece=1, shards=(1, 2)),
    PinShards(store="r", home="ps-0", name="best", pin=7),
    ShardsPinned(),
    ListPins(name="mine"),
    PinList(),
    AskPieces(store="r", pushes=True, evaluation=3, batch=7),
    Pieces(evaluation=3, first=7, stop=9),
    Beat(),
    Begin(store="r", home="ps-0", generation=2, session=3, version=9, start=4, anew=True),
    Begun(store="r", home="ps-0", generation=2, session=3, position=7, applied=5),
    Copy(
        store="r",
        home="ps-0",
        generation=2,
        session=3,
        position=8,
        origin=1,
        nbytes=24,
        committed=7,
        applied_by_all=5,
        part=1,
        parts=2,
    ),
    Committed(store="r", home="ps-0", generation=2, session=3, committed=8, applied_by_all=7),
    Held(store="r", home="ps-0", generation=2, session=3, position=8, applied=7, pieces=2, offered=5),
    PieceCopy(store="r", home="ps-0", generation=2, session=3, piece=1, position=8, nbytes=24),
    GetRecord(run="r", home="ps-0", start=0, stop=10),
    RecordPart(total=7),
    GetStatistics(run="r"),
    Statistics(node="ps-0", role="ps"),
    GetProfile(start=5, stop=10),
    Profile(total=7),
    ReadManifest(server=1, servers=4, digest="a1", first=7, count=9),
    ManifestPart(server=1, servers=4, digest="a1", yours=3),
    ReadFile(digest="a1", file=7, offset=1 << 40, wait_s=1.5),
    FilePart(checksum="b2", progress=1 << 40),
    Greet(run="r", replica=1, replica_generation=5, partition=2, received=7, begun=3),
    Blocks(first=8, blocks=(Block(3, 1, 2, 1), Block(4, 1, 2, 1)), received=9, begun=4),
    Serve(controller="tcp://127.0.0.1:7070"),
    Serving(node="data-host-1"),
]


PUSH = next(example for example in EXAMPLES if isinstance(example, Push))
TICK = next(example for example in EXAMPLES if isinstance(example, Tick))


def changed(message, **fields):
    """Return a message with other or further fields."""
    return Message(type=message.type, meta=encode({**fields_of(message), **fields}))


def classes():
    """Return all messages; a class with a private name is a base of some."""
    found, waiting = [], [Body]
    while waiting:
        children = waiting.pop().__subclasses__()
        found += children
        waiting += children
    ours = (cls for cls in found if cls.__module__.startswith(f"{messages.__name__}."))
    return {cls for cls in ours if not cls.__name__.startswith("_")}


def test_every_message_has_a_row_and_an_example_here():
    assert classes() == set(TABLE) == {type(example) for example in EXAMPLES}
    assert set(ALLOWED) == set(BY_NAME)


@pytest.mark.parametrize("conversation", sorted({cls.__module__ for cls in classes()}))
def test_the_rows_of_a_conversation_are_those_of_its_own_messages(conversation):
    own = {cls for cls in classes() if cls.__module__ == conversation}
    assert import_module(conversation).ROWS == {cls: TABLE[cls] for cls in own}


def test_all_messages_are_exported_by_name():
    assert {cls.__name__ for cls in TABLE} <= set(dir(messages))


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("speaker", ROLES)
def test_a_role_may_send_exactly_the_messages_of_the_table(name, speaker):
    rules = role_table()
    for listener in ROLES:
        assert rules.allows(name, speaker, listener) == ((speaker, listener) in ALLOWED[name])
    assert not rules.allows(name, speaker, "unknown")


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
async def test_a_message_survives_a_link(network, body):
    links = NETWORKS[network]()
    speaker, listener = sorted(TABLE[type(body)])[0]
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    near = Identity(role=speaker, node="near", incarnation=1)
    far = Identity(role=listener, node="far", incarnation=2)
    async with link_pair(links, address=address_of(links), near=near, far=far) as (one, other):
        await one.send(pack(body, [tensor]))
        received = await other.receive()
    assert unpack(received, type(body)) == body
    assert unpack_any(received) == body
    np.testing.assert_array_equal(received.tensors[0], tensor)


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_message_without_a_row_is_not_sent(network):
    links = NETWORKS[network]()
    near = Identity(role="driver", node="near", incarnation=1)
    far = Identity(role="ps", node="far", incarnation=2)
    async with link_pair(links, address=address_of(links), near=near, far=far) as (one, _):
        with pytest.raises(LocalProtocolError, match="Push"):
            await one.send(pack(PUSH))


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_keys_of_a_newer_peer_are_ignored(body):
    sent = pack(body)
    for value in ("red", [[[[1]]]], math.nan):
        assert unpack(changed(sent, colour=value), type(body)) == body


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_a_missing_key_is_named(body):
    fields = msgspec.structs.fields(type(body))
    for field in fields:
        rest = {key: value for key, value in fields_of(pack(body)).items() if key != field.encode_name}
        short = Message(type=type(body).__name__, meta=encode(rest))
        if not field.required:
            unpack(short, type(body))
            continue
        with pytest.raises(RemoteProtocolError, match=rf"malformed {type(body).__name__}: .*`{field.name}`"):
            unpack(short, type(body))


@pytest.mark.parametrize("body", EXAMPLES, ids=lambda body: type(body).__name__)
def test_a_mistyped_key_is_named(body):
    for key, value in fields_of(pack(body)).items():
        wrong = changed(pack(body), **{key: {"not": "this"}})
        with pytest.raises(RemoteProtocolError, match=rf"malformed {type(body).__name__}: .*\$\.{key}"):
            unpack(wrong, type(body))
        assert value is not None


@pytest.mark.parametrize("count", [0, -1])
def test_a_part_of_no_shards_is_malformed(count):
    with pytest.raises(RemoteProtocolError, match=r"malformed Push: .*parts"):
        unpack(changed(pack(PUSH), parts=[[True, count]]), Push)


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\xc1",
        encode(7),
        encode([]),
        encode("Ticked"),
        encode({}) + encode(9),
        encode({1: 2}),
        encode({b"shards": 2}),
        b"\x81\xa6shards",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 16_000 + b"\x90",
        b"\xc7\x00\x04",
        b"\xd6\xff\0\0\0\0",
    ],
    ids=lambda meta: f"{meta[:12]!r}",
)
@pytest.mark.parametrize("kind", [Ticked, Tick, Agree])
def test_a_meta_that_is_no_map_of_fields_is_malformed(kind, meta):
    with pytest.raises(RemoteProtocolError, match=f"malformed {kind.__name__}: "):
        unpack(Message(type=kind.__name__, meta=meta), kind)


@pytest.mark.parametrize("levels", [100, 5_000, 16_000])
@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
def test_an_unknown_field_of_any_depth_is_ignored_or_malformed(level, levels):
    nested = b"\x81\xa7unknown" + level * (levels // len(level)) + b"\x90"
    try:  # the depth at which the decoder stops differs between versions of Python
        found = unpack(Message(type="Ticked", meta=nested), Ticked)
    except RemoteProtocolError as error:
        found = error
    assert found == Ticked() or "malformed Ticked" in str(found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clock", b"\xc7\x00\x04"),
        ("clock", b"\xd6\xff\0\0\0\0"),
        ("clock", b"\xcf" + b"\xff" * 8),
        ("clock", b"\xd3" + b"\x80" + bytes(7)),
        ("clock", encode(1.5)),
        ("rate", encode(math.nan)),
        ("rate", encode(math.inf)),
        ("rate", b"\xca\xff\xc0\x00\x00"),
        ("store", b"\xa1\xff"),
        ("store", b"\xa3\xed\xb2\x80"),
        ("store", encode(b"bytes")),
        ("shards", b"\xdd\xff\xff\xff\xff"),
        ("parts", encode([[True, 1, 2, []]] * 9)[:-1]),
        ("pull", encode(1)),
    ],
)
def test_a_field_of_another_form_is_malformed(field, value):
    fields = {**fields_of(pack(PUSH)), field: msgspec.Raw(value)}
    with pytest.raises(RemoteProtocolError, match="malformed Push: "):
        unpack(Message(type="Push", meta=encode(fields)), Push)


def test_the_last_of_two_fields_of_one_name_counts_within_its_bounds():
    twice = b"\x82\xa7version\x01\xa7version"
    with pytest.raises(RemoteProtocolError, match=r"version"):
        unpack(Message(type="MapState", meta=twice + encode(-1)), MapState)


@pytest.mark.parametrize("value", [1 << 64, -(1 << 70)])
def test_a_number_beyond_64_bits_is_not_sent(value):
    with pytest.raises(LocalProtocolError, match="a field of Tick cannot be encoded"):
        pack(msgspec.structs.replace(TICK, clock=value))


def test_a_lone_surrogate_is_not_sent():
    with pytest.raises(LocalProtocolError, match="a field of Tick cannot be encoded"):
        pack(msgspec.structs.replace(TICK, store="\udc80"))


def test_another_message_than_expected_is_refused_with_both_names():
    with pytest.raises(RemoteProtocolError, match="expected Pushed, got Ticked"):
        unpack(pack(Ticked()), Pushed)
    with pytest.raises(RemoteProtocolError, match="unknown message 'Hello'"):
        unpack_any(Message(type="Hello"))


def test_text_beside_a_message_survives_and_is_checked():
    map_ = ClusterMap(version=3, nodes={"ps-0": NodeRecord(role="ps", address="", incarnation=1)})
    message = pack(MapState(version=3, group="a1"), [text_tensor(map_)])
    assert read_text_tensor(message, ClusterMap, 1 << 20) == map_
    for tensors in ([], [np.zeros(3, np.float32)], [text_tensor(1), text_tensor(2)]):
        with pytest.raises(RemoteProtocolError, match="MapState must carry one text tensor"):
            read_text_tensor(pack(MapState(version=3, group="a1"), tensors), ClusterMap, 1 << 20)
    for text in (b"{", b'{"version": "x"}', b"\xff", b'{"run": {"id": "\xff"}}'):
        with pytest.raises(RemoteProtocolError, match="malformed text beside MapState"):
            read_text_tensor(
                pack(MapState(version=3, group="a1"), [np.frombuffer(text, np.uint8)]), ClusterMap, 1 << 20
            )


def test_text_nested_too_deep_or_undecodable_is_malformed():
    deep = np.frombuffer(b"[" * 5000 + b"]" * 5000, np.uint8)
    with pytest.raises(RemoteProtocolError, match="malformed text beside MapState"):
        read_text_tensor(pack(MapState(version=3, group="a1"), [deep]), list, 1 << 20)
    for packed in (b"\x91" * 5000 + b"\x90", b"\x91\xa1\xff"):
        with pytest.raises(RemoteProtocolError, match="malformed bytes beside Agree"):
            read_packed_tensor(pack(Agree(group=""), [np.frombuffer(packed, np.uint8)]), list, 1 << 20)


def test_too_long_text_is_refused_undecoded():
    no_json = np.frombuffer(b"{" * 65, np.uint8)
    state, agree = pack(MapState(version=3, group=""), [no_json]), pack(Agree(group=""), [no_json])
    with pytest.raises(RemoteProtocolError, match="65 bytes beside MapState are above the limit of 64"):
        read_text_tensor(state, dict, 64)
    with pytest.raises(RemoteProtocolError, match="65 bytes beside Agree are above the limit of 64"):
        read_packed_tensor(agree, dict, 64)
    with pytest.raises(RemoteProtocolError, match="malformed text"):
        read_text_tensor(state, dict, 65)


def test_an_absent_number_survives_as_nan():
    message = pack(Statistics(node="d", role="data"), [text_tensor({"loss": float("inf"), "images": 3})])
    values = read_text_tensor(message, dict, 1 << 20)
    assert np.isnan(read_number(values["loss"]))
    assert read_number(values["images"]) == 3.0


def test_the_error_of_an_unexpected_tensor_describes_it():
    with pytest.raises(RemoteProtocolError, match=r"delta of fc1: expected float32\(3,\), got float64\(2,\)"):
        check_tensor(np.zeros(2), "delta of fc1", (3,), np.dtype(np.float32))


def meta_bytes(message):
    """Bytes of a frame's meta, measured with the link's own encoder."""
    layout = lay_out(message.tensors, LinkConfig().max_message_bytes)
    return len(pack_meta(message, layout.packed, 1 << 20))


@pytest.mark.parametrize(
    ("shards", "parts", "tensors"),
    [(OF_WORKER, (Part(True, 1),) * OF_WORKER, 2 * OF_WORKER), (OF_STORE, (Part(False, OF_STORE),), 1)],
    ids=["worker", "client of a store"],
)
def test_the_largest_push_fits_into_the_meta_of_a_frame(shards, parts, tensors):
    numbers = (LARGE,) * shards
    push = Push(
        store="driver-of-a-long-name-0123456789abcdef-12345",
        session=LARGE,
        incarnation=LARGE,
        replica=LARGE,
        clock=LARGE,
        weight=LARGE,
        rate=0.1,
        generation=LARGE,
        parts=parts,
        shards=(1 << 31,) * shards,
        numbers=numbers,
        versions=numbers,
        own_applied=numbers,
        pull=True,
    )
    message = pack(push, [np.zeros((4096, 1), np.float32)] * tensors)
    assert meta_bytes(message) <= LinkConfig().max_meta_bytes


def test_the_largest_answers_fit_into_the_meta_of_a_frame():
    shards = max(OF_WORKER, OF_STORE)
    numbers = (LARGE,) * shards
    problems = tuple(Problem(n, messages.GAP, LARGE) for n in range(shards))
    leases = tuple(Lease(1 << 31, 1 << 31, 1 << 31, 1 << 31) for _ in range(64))
    images = [np.zeros((19_200, 3, 9, 9), np.uint8), np.zeros(19_200, np.int64)]
    for message in (
        pack(Pushed(versions=numbers, problems=problems), [np.zeros(9, np.float32)]),
        pack(Values(versions=numbers, clock=LARGE), [np.zeros(9, np.float32)]),
        pack(Leases(leases=leases)),
        pack(Groups(count=64), images),
    ):
        assert meta_bytes(message) <= LinkConfig().max_meta_bytes, message.type


OF_EACH = st.integers(0, CLOCK) | st.lists(st.integers(0, CLOCK), max_size=5).map(tuple)
"""One number for all shards, or one for each."""


@given(
    st.builds(
        Push,
        store=st.text(max_size=20),
        session=st.integers(0, DRAWN),
        incarnation=st.integers(0, DRAWN),
        replica=st.integers(0, 9),
        clock=st.integers(0, CLOCK),
        weight=st.integers(1, 9999),
        rate=st.floats(0, 1e12),
        generation=st.integers(0, 9),
        parts=st.lists(st.builds(Part, st.booleans(), st.integers(1, 9)), max_size=4).map(tuple),
        shards=st.lists(st.integers(0, SHARD), max_size=5).map(tuple),
        numbers=OF_EACH,
        versions=OF_EACH,
        own_applied=OF_EACH,
        pull=st.booleans(),
    )
)
def test_any_push_is_unpacked_as_it_was_packed(push):
    assert unpack_any(pack(push)) == push
