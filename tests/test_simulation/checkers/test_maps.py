"""A map that goes back, a second table or dealer, a returning store or incarnation is refused."""

import msgspec
import pytest

from adam_async.controller.replicated_state import Open, ReplicatedState, Set, command_bytes
from adam_async.model.rules import Sgd
from adam_async.run.cluster_map import ClusterMap, DealerRecord, NodeRecord
from adam_async.run.map_changes import difference
from adam_async.run.store_record import BundleRecord, StoreRecord
from tests.simulation.checkers.maps import Maps
from tests.simulation.scenario import Violation


def node(incarnation, *, changed, live=True):
    return NodeRecord(role="ps", address="x", incarnation=incarnation, live=live, changed=changed)


def dealer(term, name, run="r"):
    return DealerRecord(run=run, term=term, node=name, incarnation=1)


def stores(generation, *buckets, id="s", phase="open"):
    record = StoreRecord(
        id=id,
        rules=(Sgd(),),
        arrays=1,
        nbytes=4,
        state_arrays=0,
        pieces=1,
        shard_bytes=4,
        phase=phase,
        buckets=buckets,
        generation=generation,
    )
    return {"stores": {"default": record}, "placements": generation}


def follow(*fields):
    maps = Maps()
    for version, each in enumerate(fields, start=1):
        maps.follow(ClusterMap(version=version, **each))
    return maps


def test_a_map_that_goes_forward_passes():
    maps = follow(
        {"nodes": {"a": node(1, changed=1)}, **stores(1, phase="placing")},
        {"nodes": {"a": node(1, changed=1)}, **stores(1, "a")},
        {"nodes": {"a": node(1, changed=2, live=False)}, **stores(1, "a", phase="failed")},
        {"nodes": {"a": node(2, changed=3)}, **stores(2, "b", id="t"), "dealer": dealer(1, "d")},
        {"nodes": {"a": node(2, changed=3)}, "placements": 2, "dealer": dealer(2, "e")},
        {"nodes": {"a": node(2, changed=3)}, "placements": 2, "dealer": dealer(1, "d", run="another")},
    )
    assert maps.lost == 1


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({"placements": 2}, {"placements": 1}, "I4: the number of placements went back"),
        (stores(1, "a"), stores(1, "b"), "I3: generation 1 has two tables"),
        (stores(1, "a"), stores(1, "a", id="t"), "I3: generation 1 has two tables"),
        (stores(1, "a"), stores(1, "a", phase="loading"), "I4: store default went back from open to loading"),
        (
            {"dealer": dealer(1, "d")},
            {"dealer": dealer(1, "e")},
            "I3: .* both deal out groups in term 1 of r",
        ),
        ({"dealer": dealer(2, "d")}, {"dealer": dealer(1, "e")}, "I4: the dealer of r went back"),
        ({"nodes": {"a": node(1, changed=2)}}, {"nodes": {"a": node(1, changed=1)}}, "I4: a went back"),
    ],
)
def test_a_map_that_goes_back_or_has_two_versions_of_one_number_is_refused(before, after, what):
    with pytest.raises(Violation, match=what):
        follow(before, after)


def bundle(generation, *in_sync, joining=(), store="s"):
    record = BundleRecord(
        store=store,
        generation=generation,
        in_sync=tuple((name, 1) for name in in_sync),
        joining=tuple((name, 1) for name in joining),
    )
    return {"bundles": {"bundles/default/a": record}}


def test_a_bundle_whose_primary_moves_with_its_generation_passes():
    follow(
        bundle(1, "a", joining="b"),
        bundle(1, "a", "b"),
        bundle(2, "b", joining="c"),
        bundle(2, "b", "c"),
        bundle(3, "c"),
        bundle(3),
        bundle(1, "d", store="t"),
    )


@pytest.mark.parametrize(
    ("maps", "what"),
    [
        (
            [bundle(1, "a"), bundle(1, "b")],
            "I3: .* both are the primary of bundles/default/a in generation 1",
        ),
        ([bundle(1, "a"), {}, bundle(1, "b")], "I3: .* both are the primary"),
        ([bundle(2, "a"), bundle(1, "b")], "I4: bundles/default/a went back from generation 2 to 1"),
        (
            [bundle(1, "a", joining="b"), bundle(1, "a", "c")],
            "I4: .*'c', 1.* is in sync in bundles/default/a",
        ),
    ],
)
def test_a_bundle_with_two_primaries_or_an_alien_in_sync_is_refused(maps, what):
    with pytest.raises(Violation, match=what):
        follow(*maps)


def test_a_server_that_joined_in_a_version_left_out_may_be_in_sync():
    maps = Maps()
    maps.follow(ClusterMap(version=1, **bundle(1, "a")))
    maps.follow(ClusterMap(version=3, **bundle(1, "a", "b")))


def test_a_removed_store_never_returns():
    with pytest.raises(Violation, match="I4: store default is s again, which was removed"):
        follow(stores(1, "a"), {"placements": 1}, stores(2, "a"))


def test_a_replaced_incarnation_never_returns():
    with pytest.raises(Violation, match="I4: a is live as incarnation 1 after a later one"):
        follow(*({"nodes": {"a": node(number, changed=at)}} for at, number in enumerate((1, 2, 1))))


def test_each_version_of_a_machine_is_checked_once_with_none_left_out():
    replicated_state, maps = ReplicatedState(), Maps()
    session = replicated_state.apply(1, command_bytes(Open())).at
    for number, incarnation in enumerate((1, 2), start=1):
        value = {"role": "ps", "address": "local://x", "incarnation": incarnation}
        command = Set(
            session=session,
            number=number,
            key="nodes/a",
            expected=number - 1,
            value=msgspec.json.encode(value),
        )
        assert replicated_state.apply(1 + number, command_bytes(command)).done
    # The machine refuses the return of an incarnation, so the test changes its map directly.
    before = replicated_state.map
    back = {"a": node(1, changed=before.version + 1)}
    replicated_state.state.map = msgspec.structs.replace(before, version=before.version + 1, nodes=back)
    replicated_state.history.add(difference(before, replicated_state.map))
    with pytest.raises(Violation, match="as incarnation 1 after a later one"):
        maps.saw(replicated_state)
