"""Recommended is the fastest plan, or nearly so with less; what it sends is what its tensors come to."""

import pytest

from adam_async.cli.plan.choice import (
    NEAR,
    Candidate,
    Conditions,
    PlanKind,
    candidates,
    describe,
    kept_whole,
    make_plan,
    reason,
    recommend,
    recomputed,
)
from adam_async.model import LayerSpec, ModelError, ModelSpec, Network, mlp, named_model
from adam_async.model.partition.planner import LayerTimes, LinkCost, estimated_times
from adam_async.run.config import default_in_flight

BOTH: tuple[PlanKind, ...] = ("vertical", "layers")
QUICK = LinkCost(bytes_per_s=1e12, latency_s=0.0, tensor_s=0.0)
SLOW = LinkCost(bytes_per_s=1e6, latency_s=0.1)


def conditions(link: LinkCost = QUICK, **given: object) -> Conditions:
    return Conditions(**{"link": link, "cores": 2, "own_machines": True, **given})  # type: ignore[arg-type]


def tried(name: str, where: Conditions, *, workers: range = range(1, 5), images: int = 16) -> list[Candidate]:
    network = Network(named_model(name))
    times = [estimated_times(network, images)]
    return candidates(network, times, where, workers=workers, kinds=BOTH)


def one(name: str, kind: PlanKind, workers: int, where: Conditions, images: int = 16) -> Candidate:
    network = Network(named_model(name))
    times = estimated_times(network, images)
    return Candidate(network, make_plan(network, kind, workers, times, where), times, where)


# --- choosing --------------------------------------------------------------------------------


def test_each_number_of_workers_and_kind_is_tried_and_one_worker_once() -> None:
    found = [(each.plan.workers, each.plan.kind) for each in tried("mnist-adam", conditions())]

    assert found == [(1, "vertical"), *((count, kind) for count in (2, 3, 4) for kind in BOTH)]


def test_quick_links_recommend_many_workers_and_slow_ones_of_one_machine_none() -> None:
    quick = recommend(tried("cifar-conv", conditions()))
    slow = recommend(tried("cifar-conv", conditions(SLOW, own_machines=False)))

    assert (quick.plan.workers, quick.plan.kind) == (4, "vertical")
    assert slow.plan.workers == 1


def test_no_candidate_is_much_faster_than_the_recommended_one() -> None:
    for link in (QUICK, LinkCost(), SLOW):
        found = tried("mnist-adam", conditions(link))
        best = recommend(found)
        fastest = max(each.prediction.images_per_s for each in found)
        fewer = [each for each in found if each.plan.workers < best.plan.workers]

        assert best.prediction.images_per_s * NEAR >= fastest
        assert all(each.prediction.images_per_s * NEAR < fastest for each in fewer)


def test_plans_as_fast_as_each_other_are_told_apart_by_what_they_ask_for() -> None:
    network = Network(named_model("mlp"))
    same = dict.fromkeys((layer.name for layer in network.layers), 1e-3)
    where = conditions(own_machines=False, threads=1)
    times = [
        LayerTimes(images=images, seconds={k: v * images for k, v in same.items()}) for images in (64, 8)
    ]
    found = candidates(network, times, where, workers=(1,), kinds=BOTH)

    assert [round(each.prediction.images_per_s) for each in found] == [round(1000 / len(same))] * 2
    assert recommend(found).images == 8


def test_the_reason_names_what_is_taken_what_bounds_it_and_what_it_is_held_against() -> None:
    found = tried("cifar-conv", conditions())
    best = recommend(found)
    said = reason(best, found)
    whole = reason(found[0], found)

    assert said.startswith("Take plan vertical over 4 workers, 16 images per group: ")
    assert f"bounded by {best.prediction.slowest}" in said
    assert "times what one worker makes with the whole model" in said
    assert whole.startswith("Do not cut it: one worker, 16 images per group: ")
    assert "the best cut, plan vertical over 4 workers" in whole
    assert reason(found[1], found[1:3]).count("one worker makes") == 0
    assert reason(found[0], found[:1]) == f"{describe(found[0])}: {_rate(found[0])}."


def _rate(each: Candidate) -> str:
    return f"{each.prediction.images_per_s:,.0f} images/s, bounded by {each.prediction.slowest}"


def test_machines_of_their_own_are_held_against_replicas_that_are_not_cut() -> None:
    found = tried("mnist-adam", conditions(LinkCost()))
    best = max(found[1:], key=lambda each: each.prediction.images_per_s)

    assert "machines may make as replicas" in reason(best, found)


def test_a_model_that_cannot_be_cut_over_so_many_is_refused_only_if_nothing_else_is_left() -> None:
    network = Network(mlp((4, 3), input_shape=(1, 2, 2)))
    times = [estimated_times(network, 1)]
    found = candidates(network, times, conditions(), workers=(1, 40), kinds=("layers",))

    assert [each.plan.workers for each in found] == [1]
    with pytest.raises(ModelError, match="use fewer partitions"):
        candidates(network, times, conditions(), workers=(40,), kinds=("layers",))


# --- conditions ------------------------------------------------------------------------------


def test_workers_of_one_machine_share_its_cores_and_others_do_not() -> None:
    shared, apart = conditions(cores=8, own_machines=False), conditions(cores=8)

    assert [shared.threads_of(workers) for workers in (1, 2, 3, 100)] == [8, 4, 2, 1]
    assert [apart.threads_of(workers) for workers in (1, 3)] == [8, 8]
    for each, threads in ((shared, 4), (apart, 8)):
        assert each.in_flight_of(2) == default_in_flight(threads, 2)
    assert (conditions(threads=3).threads_of(9), conditions(in_flight=5).in_flight_of(9)) == (3, 5)


def test_more_threads_than_cores_make_nothing_faster() -> None:
    for own in (True, False):
        few, many = (one("mlp", "vertical", 1, conditions(threads=t, own_machines=own)) for t in (2, 16))
        assert many.prediction.images_per_s == few.prediction.images_per_s


def test_working_sets_of_all_threads_of_a_machine_share_its_cache() -> None:
    apart = one("digits", "vertical", 2, conditions(threads=2))
    shared = one("digits", "vertical", 2, conditions(threads=2, own_machines=False))
    sizes = [each.total for each in apart.working_sets]
    at_once = -(-2 * max(sizes) // 1024)

    assert apart.fits_in(at_once)
    assert not apart.fits_in(at_once - 2)
    assert not shared.fits_in(at_once)
    assert shared.fits_in(-(-2 * sum(sizes) // 1024))
    assert shared.fits_in(None)


# --- bytes -----------------------------------------------------------------------------------


def test_bytes_that_cross_are_those_of_the_layout() -> None:
    found = one("mnist-adam", "layers", 2, conditions(), images=16)

    assert found.crossing_bytes == 16 * 4 * sum(
        crossing.values for crossing in found.parts[0].layout.crossings
    )


def test_each_tensor_is_pushed_once_in_whole_whatever_the_plan() -> None:
    for kind in BOTH:
        for workers in (1, 2, 3):
            found = one("mnist-adam", kind, workers, conditions())
            rows = [row for each in found.protocols for row in each]
            wanted = {p.name: p.size * 4 for p in found.network.parameters}

            assert sum(row.delta_bytes for row in rows) == sum(wanted.values())
            for name, size in wanted.items():
                assert sum(row.delta_bytes for row in rows if row.tensor == name) == size


def test_dense_rows_travel_as_factors_where_those_are_fewer_bytes() -> None:
    found = one("mnist-adam", "vertical", 2, conditions(servers=3), images=16)
    row = next(row for row in found.protocols[0] if row.tensor == "fc2.weight")

    assert (row.delta_bytes, row.chosen) == (200 * 400 * 4, "factors")
    # Activations go to each server that holds some of the rows, errors once.
    assert row.factor_bytes is not None
    assert (row.factor_bytes // (16 * 4) - 200) % 400 == 0
    assert found.pushed_bytes(0) == sum(
        row.delta_bytes if row.chosen == "delta" else row.factor_bytes or 0 for row in found.protocols[0]
    )


def test_a_worker_pulls_what_it_trains_and_one_that_trains_in_place_nothing() -> None:
    cut = one("mnist-adam", "vertical", 2, conditions())
    alone = one("mnist-adam", "vertical", 1, conditions(own_machines=False))
    away = one("mnist-adam", "vertical", 1, conditions())

    dense = 4 * (200 * 321 + 200 * 401 + 5 * 401)
    assert [cut.pulled_bytes(worker) for worker in (0, 1)] == [dense + 4 * 5280] * 2
    assert (alone.pushed_bytes(0), alone.pulled_bytes(0)) == (0, 0)
    assert away.pulled_bytes(0) == 4 * 298_090
    assert "servers" in str(one("mnist-adam", "vertical", 1, conditions(SLOW)).prediction.slowest)


def test_frozen_layers_are_neither_pushed_nor_pulled() -> None:
    layers = [LayerSpec.of("fc1", "dense", outputs=6, frozen=True), LayerSpec.of("fc2", "dense", outputs=4)]
    spec = ModelSpec(
        name="frozen", input_shape=(8,), layers=(*layers, LayerSpec.of("loss", "softmax_cross_entropy"))
    )
    network, where = Network(spec), conditions()
    times = estimated_times(network, 2)
    found = Candidate(network, make_plan(network, "vertical", 2, times, where), times, where)

    assert {row.tensor for each in found.protocols for row in each} == {"fc2.weight", "fc2.bias"}
    assert sum(found.pulled_bytes(worker) for worker in (0, 1)) == 4 * 4 * 7


# --- layers ----------------------------------------------------------------------------------


def test_layers_that_are_whole_or_recomputed_are_named_and_those_that_only_move_are_neither() -> None:
    exchanged = one("mnist-adam", "vertical", 2, conditions(halo="exchange"))
    again = one("mnist-adam", "vertical", 2, conditions(halo="recompute"))
    alone = one("mnist-adam", "vertical", 1, conditions())

    assert dict(kept_whole(exchanged.plan)) == {"loss": "a loss reads every score"}
    assert recomputed(exchanged) == ()
    assert recomputed(again) == ("conv1", "relu1", "pool1")
    assert (dict(kept_whole(alone.plan)), recomputed(alone)) == ({}, ())
