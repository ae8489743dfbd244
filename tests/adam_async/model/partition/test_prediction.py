"""The cost of a plan equals a count by hand, and its slowest part bounds the predicted rate."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.model import ModelError, Network, mlp, named_model
from adam_async.model.named import NAMED_MODELS
from adam_async.model.partition.network import Partition
from adam_async.model.partition.plan import PartitionPlan
from adam_async.model.partition.planner import (
    FORWARD,
    LayerTimes,
    LinkCost,
    Prediction,
    chain_seconds,
    crossing_bytes,
    estimated_times,
    layers_plan,
    longest_chain,
    predict,
    predicted_seconds,
    vertical_plan,
    worker_seconds,
)

FREE = LinkCost(bytes_per_s=1e30, latency_s=0.0, tensor_s=0.0)


def parts_of(network: Network, plan: PartitionPlan) -> list[Partition]:
    return [Partition(network, plan, worker) for worker in range(plan.workers)]


@cache
def parts_of_model(name: str, kind: str, workers: int) -> list[Partition]:
    network = Network(named_model(name))
    make = layers_plan if kind == "layers" else vertical_plan
    return parts_of(network, make(network, workers))


def two_layers() -> list[Partition]:
    """Two dense layers, the first with its flatten and rectifier on one worker, the second on another."""
    network = Network(mlp((12, 5, 3), input_shape=(1, 3, 4)))
    return parts_of(network, layers_plan(network, 2))


TIMES = LayerTimes(images=7, seconds={"flat": 0.5, "fc1": 3.0, "relu1": 1.0, "fc2": 5.0, "loss": 0.25})


def prediction(parts: list[Partition], link: LinkCost, *, in_flight: int = 2) -> Prediction:
    nothing = [0] * len(parts)
    times = estimated_times(parts[0].network, 16) if len(parts) == 1 else TIMES
    return predict(
        parts, times, link, threads=1, in_flight=in_flight, pushed=nothing, pulled=nothing, servers=1
    )


# --- chains ----------------------------------------------------------------------------------


def longest_by_recursion(parts: list[Partition]) -> int:
    """Compute the same by another method: the longest path back from every segment."""
    senders = {
        number: (part.worker, place)
        for part in parts
        for place, segment in enumerate(part.segments)
        for number in segment.sends
    }

    @cache
    def before(worker: int, place: int) -> int:
        found = [before(worker, place - 1)] if place else [0]
        found += [1 + before(*senders[number]) for number in parts[worker].segments[place].receives]
        return max(found)

    ends = [before(part.worker, len(part.segments) - 1) for part in parts]
    return max(*ends, *(1 + ends[c.source] for part in parts for c in part.partial), 0)


@pytest.mark.parametrize("kind", ["vertical", "layers"])
@pytest.mark.parametrize("name", NAMED_MODELS)
@given(workers=st.integers(2, 3))
def test_the_longest_chain_is_the_longest_path_through_all_segments(
    name: str, kind: str, workers: int
) -> None:
    parts = parts_of_model(name, kind, workers)

    assert longest_chain(parts) == longest_by_recursion(parts)


def test_the_network_of_the_paper_has_one_crossing_after_each_cut_layer_and_one_back() -> None:
    network = Network(named_model("mnist-adam"))

    # pool1, pool2, fc1, fc2 and fc3 forward and back; no halo of pool1 is sent if it is recomputed.
    assert longest_chain(parts_of(network, vertical_plan(network, 2, halo="exchange"))) == 10
    assert longest_chain(parts_of(network, vertical_plan(network, 2, halo="recompute"))) == 9


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_consecutive_layers_pass_a_group_down_the_workers_and_back(workers: int) -> None:
    assert longest_chain(parts_of_model("mnist-adam", "layers", workers)) == 2 * (workers - 1)


def test_a_chain_without_latency_takes_what_its_layers_take() -> None:
    parts = two_layers()

    assert chain_seconds(parts, TIMES, FREE) == pytest.approx(sum(TIMES.seconds.values()))


def test_every_crossing_of_a_chain_adds_latency_both_handlings_and_its_bytes() -> None:
    parts = two_layers()
    link = LinkCost(bytes_per_s=10.0, latency_s=100.0, tensor_s=7.0)
    size = 5 * 7 * 4  # the rectifier's output of a group, in float32

    wanted = sum(TIMES.seconds.values()) + 2 * (100.0 + 2 * 7.0 + size / 10.0)
    assert chain_seconds(parts, TIMES, link) == pytest.approx(wanted)


def test_workers_that_compute_side_by_side_share_the_time_of_a_chain() -> None:
    network = Network(named_model("mlp"))
    times = estimated_times(network, 16)
    one, two = (chain_seconds(parts_of(network, vertical_plan(network, p)), times, FREE) for p in (1, 2))

    assert one == pytest.approx(sum(times.seconds.values()))
    assert two == pytest.approx(one / 2, rel=0.05)


def test_parts_of_some_workers_only_are_refused() -> None:
    parts = parts_of_model("digits", "vertical", 3)

    with pytest.raises(ModelError, match=r"parts of workers \[0, 1, 2\], in this order, not of \[0, 2\]"):
        longest_chain([parts[0], parts[2]])
    with pytest.raises(ModelError, match=r"not of \[1, 0, 2\]"):
        longest_chain([parts[1], parts[0], parts[2]])
    with pytest.raises(ModelError, match="in this order, not of"):
        longest_chain([])


# --- rates -----------------------------------------------------------------------------------


def test_a_worker_takes_its_share_of_each_layer() -> None:
    assert worker_seconds(two_layers()[0].layout, TIMES) == [4.5, 5.25]


def test_activations_grow_with_the_group_and_weight_gradients_do_not() -> None:
    crossings = parts_of_model("digits", "vertical", 2)[0].layout.crossings

    for crossing in crossings:
        factor = 1 if crossing.kind == "gradient" else 10
        assert crossing_bytes(crossing, 10, 4) == factor * crossing_bytes(crossing, 1, 4)
    assert {crossing.kind for crossing in crossings} == {"activation", "error", "gradient"}


def test_the_slowest_of_workers_links_and_latency_bounds_the_rate() -> None:
    parts = two_layers()
    size = 5 * 7 * 4
    quick = prediction(parts, FREE, in_flight=100)
    narrow = prediction(parts, LinkCost(bytes_per_s=size / 50.0, latency_s=0.0, tensor_s=0.0), in_flight=100)
    far = prediction(parts, LinkCost(bytes_per_s=1e30, latency_s=1000.0, tensor_s=0.0), in_flight=4)

    assert (str(quick.slowest), quick.slowest.seconds) == ("compute of worker 1", 5.25)
    assert quick.images_per_s == pytest.approx(7 / 5.25)
    assert (str(narrow.slowest), narrow.slowest.seconds) == ("link 0-1", 50.0)
    assert (str(far.slowest), far.slowest.seconds) == ("latency", pytest.approx((9.75 + 2 * 1000.0) / 4))


def test_tensors_cost_time_of_the_sender_and_of_the_receiver() -> None:
    found = prediction(two_layers(), LinkCost(bytes_per_s=1e30, latency_s=0.0, tensor_s=2.0))

    assert [bound.seconds for bound in found.bounds if bound.what == "compute"] == [4.5 + 4.0, 5.25 + 4.0]


def test_threads_share_what_a_worker_computes() -> None:
    parts = two_layers()
    found = predict(parts, TIMES, FREE, threads=3, in_flight=9, pushed=[0, 0], pulled=[0, 0], servers=1)

    assert found.slowest.seconds == pytest.approx(5.25 / 3)
    assert found.chain_s == pytest.approx(9.75)


def test_workers_on_one_machine_have_no_more_cores_than_it_has() -> None:
    parts, nothing = two_layers(), [0, 0]
    link = LinkCost(bytes_per_s=1e30, latency_s=0.0, tensor_s=0.25)

    def slowest(cores: int | None) -> tuple[str, float]:
        found = predict(
            parts,
            TIMES,
            link,
            threads=2,
            in_flight=99,
            pushed=nothing,
            pulled=nothing,
            servers=1,
            shared_cores=cores,
        )
        return str(found.slowest), found.slowest.seconds

    # Two tensors cross, and each is handled at both ends.
    assert slowest(1) == ("cores of the machine", 9.75 + 4 * 0.25)
    assert slowest(8) == slowest(None) == ("compute of worker 1", 5.25 / 2 + 2 * 0.25)


def test_servers_are_reached_over_a_link_of_each_worker_and_one_of_each_server() -> None:
    parts = two_layers()
    link = LinkCost(bytes_per_s=10.0, latency_s=0.0, tensor_s=0.0)
    found = predict(
        parts, TIMES, link, threads=1, in_flight=2, pushed=[500, 100], pulled=[200, 700], servers=3
    )

    of_servers = {str(bound): bound.seconds for bound in found.bounds if bound.what == "servers"}
    assert of_servers == {
        "link of worker 0 to the servers": 50.0,
        "link of worker 1 to the servers": 70.0,
        "links of the servers": 30.0,
    }


@given(latency_s=st.floats(0.0, 50.0), tensor_s=st.floats(0.0, 5.0))
def test_the_needed_groups_in_flight_hide_latency_and_one_less_does_not(
    latency_s: float, tensor_s: float
) -> None:
    parts = two_layers()
    link = LinkCost(latency_s=latency_s, tensor_s=tensor_s)
    needed = prediction(parts, link).needed_in_flight
    enough = prediction(parts, link, in_flight=needed)

    assert enough.slowest.seconds == pytest.approx(
        max(b.seconds for b in enough.bounds if b.what != "latency")
    )
    if needed > 1:
        assert prediction(parts, link, in_flight=needed - 1).slowest.what == "latency"


@given(
    kind=st.sampled_from(["vertical", "layers"]),
    workers=st.integers(1, 4),
    bandwidth=st.floats(1e3, 1e12),
    faster=st.floats(1.0, 1e3),
)
def test_a_faster_link_never_makes_a_replica_slower(
    kind: str, workers: int, bandwidth: float, faster: float
) -> None:
    parts = parts_of_model("digits", kind, min(workers, 3))
    times = estimated_times(Network(named_model("digits")), 16)
    slow, fast = (
        predicted_seconds(parts[0].layout, times, LinkCost(bytes_per_s=speed), item_bytes=4)
        for speed in (bandwidth, bandwidth * faster)
    )

    assert fast <= slow


def test_forward_is_the_smaller_part_of_a_layer() -> None:
    parts = two_layers()
    begin = TIMES.seconds["flat"] + TIMES.seconds["fc1"] + TIMES.seconds["relu1"]
    only_first = LayerTimes(images=7, seconds={**dict.fromkeys(TIMES.seconds, 0.0), "fc1": 3.0})

    assert 0 < FORWARD < 0.5
    assert chain_seconds(parts, only_first, FREE) == pytest.approx(3.0)
    assert chain_seconds(parts[:1] + parts[1:], TIMES, FREE) > begin
