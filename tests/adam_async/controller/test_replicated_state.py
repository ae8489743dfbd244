"""The replicated state machine: the same commands give the same bytes, and each question is done once."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.controller import replicated_state as machine_module
from adam_async.controller.records import nests_too_deep
from adam_async.controller.replicated_state import (
    GROWTH_BYTES,
    MAX_SESSIONS,
    NODES_BYTES,
    STORES,
    STORES_BYTES,
    Lost,
    Open,
    Outcome,
    ReplicatedState,
    Set,
    command_bytes,
    first_state,
)
from adam_async.controller.state import DEPARTED_KEPT
from adam_async.controller.store_rules import CLIENT_STORES, CREATOR_STORES, MOST_STORES, UNFINISHED_PIECES
from adam_async.messages import SESSION_OVER
from adam_async.messages.body import (
    MOST_INFO_BYTES,
    MOST_MAP_BYTES,
    MOST_MAP_TEXT_BYTES,
    MOST_VALUE_BYTES,
    SMALL_INFO_BYTES,
)
from adam_async.model.network import Network
from adam_async.model.partition.planner import vertical_plan
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.cluster_map import NodeRecord
from adam_async.run.config import Config
from adam_async.run.map_changes import changed
from adam_async.run.store_record import MOST_STORE_ID, STORE_PIECE_BYTES, STORE_PIECES, ArraysPiece
from adam_async.run.training_program import ProgramRecord, TrainingProgram, cut_blob
from tests.adam_async.cluster_maps import run_record
from transport.sockets import MOST_HOST

GROUP = "a-group"


def node(incarnation=1, role="worker", **fields):
    """A node's record as it comes over a link."""
    return msgspec.json.encode(NodeRecord(role=role, address="local://a", incarnation=incarnation, **fields))


class Log:
    """A machine and the log that it applies, command by command."""

    def __init__(self, **options):
        self.replicated_state = ReplicatedState(**options)
        self.replicated_state.restore(first_state(GROUP))
        self.commands = []

    def apply(self, command):
        self.commands.append(command_bytes(command))
        return self.replicated_state.apply(len(self.commands), self.commands[-1])

    def open(self):
        return self.apply(Open()).at

    def set(self, session, number, key="nodes/a", expected=0, value=None):
        value = node() if value is None else value
        return self.apply(Set(session=session, number=number, key=key, expected=expected, value=value))


def deep_run():
    """The record of a run whose model of 300 layers is cut over 16 workers."""
    layers = []
    for number in range(148):
        layers += [
            LayerSpec.of(
                f"stage_{number}_of_the_network_convolution", "conv2d", filters=4, kernel=3, padding=1
            ),
            LayerSpec.of(f"stage_{number}_rectifier", "relu"),
        ]
    layers += [LayerSpec.of("flat", "flatten"), LayerSpec.of("hidden", "dense", outputs=64)]
    layers += [LayerSpec.of("out", "dense", outputs=10), LayerSpec.of("loss", "softmax_cross_entropy")]
    spec = ModelSpec(name="deep", input_shape=(3, 32, 32), layers=tuple(layers))
    plan = vertical_plan(Network(spec, dtype="float32"), 16, halo="exchange")
    program = TrainingProgram(config=Config(partitions=16), spec=spec.to_dict(), plan=plan.to_dict())
    return program.record("run-1", ("driver", 1))


sessions = st.integers(1, 12)  # those that are open, others' places in the log, and none
sets = st.builds(
    Set,
    session=sessions,
    number=st.integers(0, 4),
    key=st.sampled_from(["nodes/a", "nodes/b", "run", "epoch", "no/key"]),
    expected=st.integers(0, 3),
    value=st.sampled_from(
        [node(), node(2, ready="x"), msgspec.json.encode(run_record(epochs=1)), b"{}", b"{", b"[]"]
    ),
)
commands = st.lists(
    st.one_of(st.just(Open()), sets, sets, sets, st.builds(Lost, st.sampled_from("ab"), st.integers(1, 2))),
    max_size=40,
)


@settings(max_examples=150)
@given(commands, st.integers(0, 40))
def test_the_same_commands_or_a_snapshot_and_the_rest_give_the_same_bytes_and_answers(commands, cut):
    one, other, late = Log().replicated_state, Log().replicated_state, ReplicatedState()
    late.restore(one.snapshot())
    for index, command in enumerate(commands, 1):
        answer = one.apply(index, command_bytes(command))
        assert other.apply(index, command_bytes(command)) == answer
        if index == cut:
            late.restore(one.snapshot())
        elif index > cut:
            late.apply(index, command_bytes(command))
    if cut <= len(commands):
        assert late.snapshot() == one.snapshot()
        assert late.map == one.map
        assert late.size.total == one.size.total
    assert other.snapshot() == one.snapshot()
    one.state.check_invariants()


@settings(max_examples=100)
@given(commands)
def test_the_changes_since_any_version_make_the_newest_map(commands):
    replicated_state = Log().replicated_state
    maps = [replicated_state.map]
    for index, command in enumerate(commands, 1):
        replicated_state.apply(index, command_bytes(command))
        if replicated_state.map is not maps[-1]:
            maps.append(replicated_state.map)
    for known in maps:
        newest = known
        for change in replicated_state.since(known.version, GROUP):
            newest = changed(newest, change)
        assert newest == replicated_state.map


def test_a_repeated_request_is_not_applied_again_and_gets_the_same_answer():
    log = Log()
    session = log.open()
    first = log.set(session, 1)
    assert first == Outcome(done=True, at=1)
    before = log.replicated_state.map
    log.set(log.open(), 1, "nodes/b")
    assert log.set(session, 1) == first
    assert log.replicated_state.map.nodes["a"] == before.nodes["a"]
    assert log.replicated_state.map.version == 2


@pytest.mark.parametrize(
    ("again", "outcome"),
    [({"expected": 7}, Outcome(done=False, at=0)), ({"key": "colour"}, "no key 'colour'")],
)
def test_a_refusal_is_an_answer_that_stays_too(again, outcome):
    log = Log()
    session = log.open()
    first = log.set(session, 1, **again)
    log.set(log.open(), 1)  # what was refused would now be done, or refused in another way
    assert log.set(session, 1, **again) == first
    assert first == outcome or (first.problem == "invalid" and outcome in first.text)


def test_a_conflict_has_the_version_of_the_record():
    log = Log()
    session = log.open()
    log.set(session, 1)
    log.set(session, 2, "nodes/b")
    assert log.set(session, 3, expected=0) == Outcome(done=False, at=1)
    assert log.set(session, 4, expected=1, value=node(ready="x")) == Outcome(done=True, at=3)


def test_a_question_that_comes_late_is_not_done():
    log = Log()
    session = log.open()
    log.set(session, 2)
    late = log.set(session, 1, "nodes/b")
    assert (late.done, late.problem) == (False, "late")
    assert "b" not in log.replicated_state.map.nodes
    assert log.set(session, 2) == Outcome(done=True, at=1)


def test_numbers_of_one_session_mean_nothing_in_another():
    log = Log()
    one, other = log.open(), log.open()
    assert one != other
    log.set(one, 5)
    assert log.set(other, 1, "nodes/b").done
    assert log.set(one, 6, "nodes/c").done


def test_a_session_that_nobody_opened_is_over_and_does_nothing():
    log = Log()
    outcome = log.set(77, 1)
    assert (outcome.done, outcome.problem) == (False, SESSION_OVER)
    assert outcome.text == "there is no session 77"
    assert not log.replicated_state.map.nodes


def test_sessions_that_were_not_used_for_longest_are_forgotten_and_never_come_again():
    log = Log(most_sessions=3)
    first, second, third = log.open(), log.open(), log.open()
    log.set(first, 1)
    log.set(third, 1, "nodes/c")
    fourth = log.open()
    assert fourth not in (first, second, third)
    assert log.set(second, 1, "nodes/b").problem == SESSION_OVER
    assert log.set(first, 2, "nodes/d").done
    assert log.open() not in (first, second, third, fourth)
    assert log.set(third, 1, "nodes/c").problem == SESSION_OVER
    assert log.set(first, 2, "nodes/d").done


def test_a_role_that_opens_many_sessions_forgets_its_own():
    log = Log(most_sessions=4)
    worker = log.apply(Open(role="worker")).at
    first, *_ = [log.apply(Open(role="reader")).at for _ in range(9)]
    assert log.set(worker, 1).done
    assert log.set(first, 1, "nodes/b").problem == SESSION_OVER
    again = ReplicatedState(most_sessions=4)
    again.restore(log.replicated_state.snapshot())
    log.replicated_state = again
    for _ in range(9):
        log.apply(Open(role="reader"))
    assert log.set(worker, 2, "nodes/c").done


def test_asking_the_same_again_keeps_a_session_from_being_forgotten():
    log = Log(most_sessions=2)
    one, other = log.open(), log.open()
    log.set(one, 1)
    log.set(other, 1, "nodes/b")
    log.set(one, 1)
    log.open()
    assert log.set(one, 1).done
    assert log.set(other, 1, "nodes/b").problem == SESSION_OVER


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"{", "nodes/a: Input data was truncated"),
        (b"[]", "nodes/a: Expected `object`, got `array`"),
        (b"\xff", "nodes/a: "),
        (b'{"role":"worker"}', "missing required field `address`"),
        (
            b'{"role":"worker","address":"local://a","incarnation":1,"info":{"x":123456789012345678901234567890}}',
            "can't serialize ints",
        ),
        (
            b'{"role":"worker","address":"local://a","incarnation":18446744073709551616}',
            "can't serialize ints",
        ),
    ],
)
def test_a_value_that_cannot_be_read_or_written_down_is_refused_and_uses_its_number(value, said):
    log = Log()
    session = log.open()
    outcome = log.set(session, 1, value=value)
    assert (outcome.done, outcome.problem) == (False, "invalid")
    assert said in outcome.text
    assert log.replicated_state.map.version == 0
    assert log.set(session, 1) == outcome
    log.replicated_state.snapshot()


def test_the_loss_of_a_node_is_a_change_like_any_other_and_that_of_an_earlier_incarnation_is_none():
    log = Log()
    log.set(log.open(), 1, value=node(incarnation=5))
    assert log.apply(Lost("a", 4)) == Outcome()
    assert log.replicated_state.map.nodes["a"].live
    log.apply(Lost("a", 5))
    assert not log.replicated_state.map.nodes["a"].live
    (change,) = log.replicated_state.since(1, GROUP)
    assert list(change.nodes) == ["a"]


def test_changes_of_another_group_or_from_the_beginning_are_the_whole_map():
    log = Log()
    log.set(log.open(), 1)
    assert log.replicated_state.since(1, GROUP) == []
    assert log.replicated_state.since(1, "another") is None
    assert log.replicated_state.since(-1, GROUP) is None
    assert log.replicated_state.since(2, GROUP) is None


def test_a_restored_state_has_no_earlier_history():
    log = Log()
    session = log.open()
    log.set(session, 1)
    log.set(session, 2, "nodes/b")
    other = ReplicatedState()
    other.restore(log.replicated_state.snapshot())
    assert other.group == GROUP
    assert other.since(2, GROUP) == []
    assert other.since(1, GROUP) is None


def test_a_machine_that_was_given_no_state_belongs_to_no_group():
    assert ReplicatedState().group == ""
    assert ReplicatedState().map.version == 0


def test_a_record_that_the_rules_cannot_work_with_is_refused_and_leaves_the_map_as_it_was(monkeypatch):
    """It is in the log for good: what it raised it would raise again at every restart."""
    log = Log()
    session = log.open()
    log.set(session, 1)
    before, changes_before = log.replicated_state.map, log.replicated_state.since(0, GROUP)

    def fails(self):
        self.map = msgspec.structs.replace(self.map, placements=99)
        raise KeyError("servers")

    monkeypatch.setattr(machine_module.ControllerState, "_run_rules", fails)
    answer = log.set(session, 2, key="nodes/b")
    assert answer == Outcome(
        done=False, problem="invalid", text="the map's rules cannot work with it: KeyError"
    )
    assert log.apply(Lost("a", 1)) == Outcome()
    assert log.replicated_state.map is before
    assert log.replicated_state.since(0, GROUP) == changes_before


LARGE = {"text": "x" * 8000}


def large(log, session, number, *, expected=0, role="ps"):
    """Set a record of some 8 KiB; returns what came of it."""
    return log.set(session, number, f"nodes/w{number}", expected, node(role=role, info=LARGE))


def test_two_and_twenty_large_records_lock_nobody_out_also_after_a_restart():
    log = Log()
    session = log.open()
    far_too_large = log.set(session, 1, value=node(info={"text": "x" * (3 << 20)})).text
    assert far_too_large.endswith("bytes is above the limit of 65536: put less into it")
    assert all(large(log, session, number).done for number in range(2, 24))
    again = ReplicatedState()
    again.restore(log.replicated_state.snapshot())
    assert again.apply(99, command_bytes(Set(session, 24, "nodes/joins", 0, node()))).done
    assert len(msgspec.json.encode(again.map)) < MOST_MAP_TEXT_BYTES / 8


@pytest.mark.parametrize("role", NODES_BYTES)
def test_the_nodes_of_a_role_fill_their_share_of_the_map_and_those_of_other_roles_join(role):
    log = Log()
    session, number, info = log.open(), 0, {"train_images": 1, **LARGE}
    if role in ("worker", "client", "reader"):
        info = {"text": "x" * 900}
    record = node(role=role, info=info)
    while (refused := log.set(session, number + 1, f"nodes/{role}-{number}", 0, record)).done:
        number += 1
        assert number < MOST_MAP_BYTES >> 7, "the map takes records beyond its limit"
    size, share = log.replicated_state.size, NODES_BYTES[role]
    held = size.total
    assert share - len(record) - 200 < held == size.by_group[role] <= share
    assert refused.text == (
        f"the map holds {held} bytes of {role} nodes; a record of {len(record)} more would exceed "
        f"{share / (1 << 20):g} MiB: end a {role} that is not needed"
    )
    restored = ReplicatedState()
    restored.restore(log.replicated_state.snapshot())
    assert restored.size.by_group == size.by_group
    other = "worker" if role != "worker" else "ps"
    assert log.set(session, number + 2, f"nodes/{other}-0", 0, node(role=other)).done
    # Members of the cluster go on in a full share; clients and readers do not grow beyond it.
    more, grown = node(role=role, info={**info, "more": "x" * 50}), set()
    for each in range(number):
        at = log.replicated_state.map.nodes[f"{role}-{each}"].changed
        grown.add(log.set(session, number + 3 + each, f"nodes/{role}-{each}", at, more).done)
    assert (False in grown) == (role in ("client", "reader"))


def test_a_full_map_takes_no_new_record_from_any_controller_and_its_members_go_on(monkeypatch):
    monkeypatch.setattr(machine_module, "NODES_BYTES", {"ps": MOST_MAP_BYTES + GROWTH_BYTES})
    log = Log()
    session, number = log.open(), 1
    while large(log, session, number).done:
        number += 1
        assert number < MOST_MAP_BYTES >> 12, "the map takes records beyond its limit"
    total = log.replicated_state.size.total
    assert MOST_MAP_BYTES - (9 << 10) < total <= MOST_MAP_BYTES
    restored = ReplicatedState()
    restored.restore(log.replicated_state.snapshot())
    assert restored.size.total == total
    record = node(role="ps", info=LARGE)
    refused = log.set(session, number + 1, "nodes/new", 0, record)
    question = Set(session, number + 1, "nodes/new", 0, record)
    restored.apply(98, log.commands[-2])
    assert restored.apply(99, command_bytes(question)) == refused
    said = f"the map holds {total} bytes; a record of {len(record)} more would exceed 8 MiB"
    assert refused.text.startswith(said)
    at = log.replicated_state.map.nodes["w1"].changed
    assert log.set(session, number + 2, "nodes/w1", at, node(role="ps", ready="run", info=LARGE)).done
    for gone in range(2, 100):
        log.apply(Lost(f"w{gone}", 1))
    assert log.set(session, number + 3, "nodes/new", 0, node()).done


def test_stores_fill_half_of_the_map_and_nodes_join_all_the_same():
    log = Log()
    session, number = log.open(), 1
    text = b"x" * (40 << 10)
    while True:
        creator = f"client-{number}"
        assert log.set(session, number, f"nodes/{creator}", 0, node(role="client")).done
        piece = msgspec.json.encode(ArraysPiece(store=f"id-{number}", creator=creator, text=text))
        outcome = log.set(session, number + 1, f"stores/s{number}/0", 0, piece)
        number += 2
        if not outcome.done:
            break
        assert number < 2 * UNFINISHED_PIECES
    held = log.replicated_state.size.by_group[STORES]
    assert STORES_BYTES - len(piece) < held <= STORES_BYTES
    assert outcome.text == (
        f"the map holds {held} bytes of stores; a record of {len(piece)} more would exceed 4 MiB: "
        "delete a store"
    )
    assert large(log, session, number + 1).done
    driver = NodeRecord(role="driver", address="", incarnation=255)
    assert log.set(session, number + 2, "nodes/driver", 0, msgspec.json.encode(driver)).done
    piece = msgspec.json.encode(ArraysPiece(store="driver-ff-1", creator="driver", text=text))
    assert log.set(session, number + 3, "stores/driver-ff-1/0", 0, piece).done  # a run can always start
    restored = ReplicatedState()
    restored.restore(log.replicated_state.snapshot())
    assert restored.size.by_group == log.replicated_state.size.by_group


def test_a_server_can_report_as_many_stores_as_a_cluster_has():
    ids = tuple(f"{number:03}" + '"' * (MOST_STORE_ID - 3) for number in range(MOST_STORES))
    log = Log()
    server = NodeRecord(role="ps", address="tcp://10.0.0.1:1", incarnation=1, serves=ids)
    assert log.set(log.open(), 1, "nodes/ps-0", 0, msgspec.json.encode(server)).done


def test_a_run_of_three_hundred_layers_cut_over_sixteen_workers_is_set_in_pieces():
    record = deep_run()
    log = Log()
    session = log.open()
    submitted, pieces = cut_blob(record)
    assert len(msgspec.json.encode(record)) > MOST_VALUE_BYTES
    for number, piece in enumerate(pieces):
        value = msgspec.json.encode(piece)
        assert len(value) <= MOST_VALUE_BYTES
        assert log.set(session, number + 1, f"run/{number}", 0, value).done
    whole = msgspec.json.encode(submitted)
    another = msgspec.structs.replace(submitted, id="another")
    assert log.set(session, 90, "run", 0, msgspec.json.encode(another)).text == (
        f"run: of program another piece 0 of {len(pieces)} is not there: submit it again"
    )
    assert log.set(session, 91, "run", 0, whole).done
    run = log.replicated_state.map.run
    assert run.has_fixed_of(msgspec.json.decode(msgspec.json.encode(record), type=ProgramRecord))
    assert log.replicated_state.map.pieces == {}
    advanced = msgspec.structs.replace(run, reason="no reason").without_fixed()
    assert log.set(session, 92, "run", run.changed, msgspec.json.encode(advanced)).done
    assert log.replicated_state.map.run.blob == record.blob
    (change,) = log.replicated_state.since(log.replicated_state.map.version - 1, GROUP)
    assert len(msgspec.json.encode(change)) < 500


def test_a_blob_that_is_too_long_for_all_its_pieces_is_refused_with_its_length():
    record = msgspec.structs.replace(run_record(), blob=bytes(2 << 20))
    with pytest.raises(ValueError, match="its blob has 2097152 bytes, 1105920 are the most"):
        cut_blob(record)


json_values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text('a"[]{}\\\n')),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text('[}"\\'), inner, max_size=3)
    ),
)


def depth_of(value):
    """Containers that lie in each other."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth_of, inner), default=0)


@given(json_values)
def test_how_deep_a_record_nests_is_counted_in_its_text(value):
    text, depth = msgspec.json.encode(value), depth_of(value)
    assert not nests_too_deep(text, depth)
    assert depth == 0 or nests_too_deep(text, depth - 1)


DOCS = Path(__file__).parents[3] / "docs"


def mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB"


def test_the_pages_promise_the_shares_of_the_code() -> None:
    page = " ".join(
        (DOCS / name).read_text() for name in ("explanation/security.md", "how-to/controllers.md")
    )
    arrays, small = f"{STORE_PIECES * STORE_PIECE_BYTES >> 10:,} KiB", f"{SMALL_INFO_BYTES >> 10} KiB"
    share = {role: mib(size) for role, size in NODES_BYTES.items()}
    for promise in (
        f"a client has {CREATOR_STORES} stores, all clients have {CLIENT_STORES} of the {MOST_STORES}",
        f"Clients together have at most {CLIENT_STORES} stores, one client at most {CREATOR_STORES}",
        f"the arrays of one store have {arrays}, and of all stores {mib(STORES_BYTES)} of",
        f"of the map's {mib(MOST_MAP_BYTES)}",
        f"all clients together have {share['client']} of the map, and all readers {share['reader']}",
        f"{DEPARTED_KEPT} departed nodes of a role stay",
        f"all workers have {share['worker']} of the map, with {small} of `info` each",
        f"{MOST_INFO_BYTES >> 10} KiB; of a worker, client or reader {small}",
        f"{share['ps']} for `ps` and for `data`, {share['worker']} for `worker`, {share['driver']} for",
        f"of the {MAX_SESSIONS:,} sessions, the role with the most",
        f"(labels of 63 characters, {MOST_HOST} in all)",
    ):
        assert promise in page, promise
    assert share["data"] == share["ps"]
    assert share["client"] == share["reader"] == share["driver"]


def test_one_role_alone_leaves_room_for_a_run() -> None:
    """The list of a run of 300 layers has some 40 KiB, and the pieces of its blob have 1,440 KiB."""
    for role, size in NODES_BYTES.items():
        stores = STORES_BYTES if role == "client" else 0
        assert MOST_MAP_BYTES - stores - size >= 3 << 20
