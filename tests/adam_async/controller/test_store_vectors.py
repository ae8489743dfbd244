"""Vectors in the cluster map: their numbers, their memory, and the clients that may change them."""

import msgspec
import pytest

from adam_async.controller.permissions import FORBIDDEN, Attempt, PermissionTable
from adam_async.controller.store_rules import set_store
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.store_record import (
    NUM_BUCKETS,
    ArrayRecord,
    BundleRecord,
    VectorRecord,
    bundle_key,
    cut_arrays,
)
from tests.adam_async.cluster_maps import node, store_record
from transport import Identity

LISTED = (ArrayRecord("w", (1024,)), ArrayRecord("b", (16,)), ArrayRecord("still", (8,), frozen=True))
CLIENT = NodeRecord(role="client", address="", incarnation=1, store="s")


def map_of(memory=1 << 20, **fields):
    """A map with an open store of clients on one server with this memory, in bytes."""
    store = store_record("s", LISTED, phase="open", buckets=("ps-0",) * NUM_BUCKETS, changed=4, **fields)
    pieces = {f"stores/model/{at}": piece for at, piece in enumerate(cut_arrays("s", LISTED))}
    bundle = BundleRecord(store="s", in_sync=(("ps-0", 1),))
    return ClusterMap(
        version=5,
        nodes={"ps-0": node("ps", info={"memory_bytes": memory}), "client-1": CLIENT},
        stores={"model": msgspec.structs.replace(store, bucket_bytes=(4096 // NUM_BUCKETS,) * NUM_BUCKETS)},
        arrays=pieces,
        bundles={bundle_key("model", "ps-0"): bundle},
    )


def with_vectors(cluster, *vectors):
    """The map, or the fault, after a client has set these vectors."""
    return set_store(cluster, "model", msgspec.structs.replace(cluster.stores["model"], vectors=vectors))


def test_a_number_is_never_given_again():
    cluster = with_vectors(map_of(), VectorRecord("x"), VectorRecord("y", ("b",)))
    x, y = cluster.stores["model"].vectors
    assert (x.number, y.number) == (1, 2)
    cluster = with_vectors(with_vectors(cluster, x), x, VectorRecord("y"))
    store = cluster.stores["model"]
    assert [vector.number for vector in store.vectors] == [1, 3]
    assert (store.vectors_made, store.changed) == (3, cluster.version + 1)
    assert "was deleted, or changed" in with_vectors(cluster, x, y)


def test_memory_counts_the_values_that_a_vector_has():
    cluster = with_vectors(map_of(), VectorRecord("x"), VectorRecord("y", ("b",)))
    assert sum(cluster.stores["model"].vector_bytes) == 4 * (1024 + 16 + 16)
    assert with_vectors(cluster).stores["model"].vector_bytes == ()


@pytest.mark.parametrize(("memory", "fits"), [(12288 + 4160, True), (12288 + 4159, False)])
def test_a_vector_for_which_a_server_lacks_memory_is_refused_with_the_number_of_bytes(memory, fits):
    outcome = with_vectors(map_of(memory), VectorRecord("x"))
    if fits:
        assert outcome.stores["model"].vectors
    else:
        assert "the vectors need 4160 further bytes on ps-0, which has 4159 bytes free" in outcome


@pytest.mark.parametrize(
    ("vector", "why"),
    [
        (VectorRecord("x", ("still",)), "no array 'still' that is pushed to"),
        (VectorRecord("x", ("absent",)), "no array 'absent' that is pushed to"),
        (VectorRecord("b"), "a vector or an array 'b'"),
        (VectorRecord("x", number=7), "was deleted, or changed"),
        (VectorRecord("x", ("w", "w")), "names an array twice"),
        (VectorRecord("x", ("w",) * 20_000), "names an array twice"),
    ],
)
def test_a_wrong_vector_is_a_fault(vector, why):
    assert why in with_vectors(map_of(), vector)


def test_other_fields_of_an_open_store_stay():
    cluster = map_of()
    old = cluster.stores["model"]
    new = msgspec.structs.replace(old, vectors=(VectorRecord("x"),), phase="placing", buckets=(), epoch=7)
    changed = set_store(cluster, "model", new).stores["model"]
    assert (changed.phase, changed.buckets, changed.epoch) == ("open", old.buckets, old.epoch)
    assert "exists" in set_store(cluster, "model", msgspec.structs.replace(new, durable=True))


@pytest.mark.parametrize(
    ("role", "client", "fields", "is_permitted"),
    [
        ("client", {}, {}, True),
        ("client", {"store": "other"}, {}, False),
        ("client", {}, {"durable": True}, False),
        ("client", {}, {"phase": "failed"}, False),
        ("reader", {}, {}, False),
        ("worker", {}, {}, False),
    ],
)
def test_only_clients_of_a_store_change_its_vectors_and_nothing_else(role, client, fields, is_permitted):
    cluster = map_of()
    cluster.nodes["client-1"] = msgspec.structs.replace(CLIENT, **client)
    new = msgspec.structs.replace(cluster.stores["model"], vectors=(VectorRecord("x"),), **fields)
    peer = Identity(role=role, node="client-1", incarnation=1)
    found = PermissionTable().refusal(
        Attempt(peer=peer, key="stores/model", value=msgspec.to_builtins(new), expected=4), cluster
    )
    assert (found is None) is is_permitted
    assert found is None or found.code == FORBIDDEN
