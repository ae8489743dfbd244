"""Roles that may set, change and delete stores in the cluster map, and that send messages about them."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from adam_async.controller.permissions import FORBIDDEN, Attempt, PermissionTable
from adam_async.messages import LoadShards, Pull, Push, ReadShards, Tick
from adam_async.messages.body import ROLES
from adam_async.messages.table import TABLE
from adam_async.model.rules import Sgd
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.store_record import ArraysPiece, StoreRecord
from adam_async.run.training_program import ProgramRecord
from transport import Identity


def store(id: str, **fields: Any) -> StoreRecord:
    record = StoreRecord(id=id, rules=(Sgd(),), arrays=1, nbytes=4, state_arrays=0, pieces=1, shard_bytes=64)
    return msgspec.structs.replace(record, **fields)


OF_RUN, OF_CLIENTS = store("a", program="run-1", changed=2), store("b", changed=3)
RUN = ProgramRecord(id="run-1", driver="driver-1", incarnation=1, changed=2)
DRIVER = NodeRecord(role="driver", address="", incarnation=255)
MAP = ClusterMap(version=3, nodes={"driver-1": DRIVER}, run=RUN, stores={"run": OF_RUN, "mine": OF_CLIENTS})
PIECE = ArraysPiece(store="new", text=b"[]")


def attempt(role: str, key: str, value: Mapping[str, Any], expected: int) -> Attempt:
    peer = Identity(role=role, node=f"{role}-1", incarnation=1)
    return Attempt(peer=peer, key=key, value=value, expected=expected)


def permitted(key: str, record: StoreRecord | ArraysPiece) -> set[str]:
    """Return the roles that may set a key."""
    value = msgspec.to_builtins(record)
    expected = record.changed
    found = {
        role: PermissionTable().refusal(attempt(role, key, {**value, "creator": f"{role}-1"}, expected), MAP)
        for role in ROLES
    }
    assert {refusal.code for refusal in found.values() if refusal} <= {FORBIDDEN}
    return {role for role, refusal in found.items() if refusal is None}


@pytest.mark.parametrize(
    ("key", "record", "roles"),
    [
        ("stores/new", store("new"), {"driver", "client"}),
        ("stores/new/0", PIECE, {"driver", "client"}),
        ("stores/new", store("new", program="run-1"), {"driver"}),
        ("stores/mine", msgspec.structs.replace(OF_CLIENTS, phase="deleted"), {"driver", "client"}),
        ("stores/run", msgspec.structs.replace(OF_RUN, phase="deleted"), {"driver"}),
        ("stores/run", msgspec.structs.replace(OF_RUN, program=""), {"driver"}),
        ("stores/run/0", PIECE, {"driver"}),
    ],
)
def test_clients_set_stores_of_clients_and_drivers_all(
    key: str, record: StoreRecord | ArraysPiece, roles: set[str]
) -> None:
    assert permitted(key, record) == roles


def test_a_client_creates_stores_in_its_own_name_only() -> None:
    value = msgspec.to_builtins(store("new", creator="client-2"))
    refusal = PermissionTable().refusal(attempt("client", "stores/new", value, 0), MAP)
    assert refusal is not None
    assert refusal.code == FORBIDDEN


def refused(key: str, record: StoreRecord | ArraysPiece, cluster: ClusterMap = MAP) -> bool:
    """Return whether the client ``client-1`` may not set a key."""
    value = msgspec.to_builtins(record)
    return PermissionTable().refusal(attempt("client", key, value, record.changed), cluster) is not None


@pytest.mark.parametrize("creator", ["client-1-2", "client-10", "client-2", "driver-1", ""])
def test_a_client_sets_pieces_of_its_own_stores_only(creator: str) -> None:
    assert not refused("stores/new/0", msgspec.structs.replace(PIECE, creator="client-1"))
    assert refused("stores/new/0", msgspec.structs.replace(PIECE, creator=creator, store="client-1-2-new"))


@pytest.mark.parametrize("text", ["run-1", "driver-1-ff-1", "driver-1-ff-27"])
def test_a_client_takes_no_name_and_no_id_of_a_program_of_a_live_driver(text: str) -> None:
    own = store("new", creator="client-1")
    assert not refused("stores/driver-1-fe-1", own)
    assert refused(f"stores/{text}", own)
    assert refused("stores/new", msgspec.structs.replace(own, id=text))
    assert refused("stores/new/0", msgspec.structs.replace(PIECE, creator="client-1", store=text))


def with_creator(
    *, live: bool, program: str = "", phase: str = "training", role: str = "client"
) -> ClusterMap:
    """Return a map with a store of ``client-2``, or of a program."""
    theirs = store("b", creator="client-2", program=program, changed=3)
    creator = NodeRecord(role=role, address="", incarnation=1, live=live)
    run = msgspec.structs.replace(RUN, phase=phase)
    return ClusterMap(version=3, nodes={"client-2": creator}, run=run, stores={"theirs": theirs})


@pytest.mark.parametrize(
    ("cluster", "may"),
    [
        (with_creator(live=True), False),
        (with_creator(live=False), True),
        (with_creator(live=True, role="reader"), True),  # it has the creator's name, and created nothing
        (with_creator(live=True, role="driver"), False),
        (with_creator(live=True, program="run-1", phase="finished"), False),
        (with_creator(live=False, program="run-1", phase="finished"), True),
        (with_creator(live=False, program="run-1"), False),
    ],
)
def test_a_client_deletes_a_store_of_another_only_after_its_creator_and_its_program(
    cluster: ClusterMap, may: bool
) -> None:
    deleted = msgspec.structs.replace(cluster.stores["theirs"], phase="deleted")
    assert refused("stores/theirs", deleted, cluster) != may
    assert refused("stores/theirs", msgspec.structs.replace(deleted, creator="client-1"), cluster) != may


@pytest.mark.parametrize(
    ("incarnation", "live", "may"), [(1, True, True), (2, True, False), (2, False, True)]
)
def test_another_incarnation_of_the_creator_neither_creates_nor_deletes_in_its_name(
    incarnation: int, live: bool, may: bool
) -> None:
    creator = NodeRecord(role="client", address="", incarnation=incarnation, live=live)
    mine = store("b", creator="client-1", changed=3)
    cluster = ClusterMap(version=3, nodes={"client-1": creator}, stores={"mine": mine})
    own = store("new", creator="client-1")
    assert refused("stores/mine", msgspec.structs.replace(mine, phase="deleted"), cluster) != may
    assert refused("stores/new", own, cluster) != may
    assert refused("stores/new/0", msgspec.structs.replace(PIECE, creator="client-1"), cluster) != may


def test_a_reader_sends_servers_pulls_and_no_values() -> None:
    def senders(message: type) -> set[str]:
        return {role for role, receiver in TABLE[message] if receiver == "ps"}

    assert "reader" in senders(Pull)
    for message in (Push, Tick, LoadShards, ReadShards):
        assert "reader" not in senders(message)
    for message in (Push, Tick, LoadShards, Pull):
        assert "client" in senders(message)
