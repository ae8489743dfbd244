"""Layers are timed by the given clock; their times add up to the time of a whole pass."""

from itertools import count

import numpy as np
import pytest

from adam_async.driver.calibration import LEAST_PASSES, SECONDS, calibrate
from adam_async.model import LayerSpec, ModelError, ModelSpec, Network, mlp, named_model
from adam_async.model.network import Network as Whole
from adam_async.model.partition.planner import layers_plan

layer = LayerSpec.of


class Clock:
    """Moves on by itself, by a step at each look."""

    def __init__(self, step: float) -> None:
        self.step = step
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * self.step


def test_layer_times_add_up_to_the_time_of_a_whole_pass() -> None:
    network = Network(named_model("digits"))
    times = calibrate(network, 4, clock=Clock(1e-3))

    # A look before and one behind: a pass takes one step, each layer one forward and one back.
    each = 1e-3 / len(network.layers)
    assert times.seconds == pytest.approx({layer.name: each for layer in network.layers})
    assert (times.images, times.measured) == (4, True)


def test_a_slow_clock_still_sees_a_few_passes_and_a_fast_one_ends_in_time() -> None:
    network = Network(mlp((4, 3), input_shape=(1, 2, 2)))
    looks_per_pass = 2 + 4 * len(network.layers) + 1
    slow, fast = Clock(10 * SECONDS), Clock(1e-9)
    calibrate(network, 1, clock=slow)
    calibrate(network, 1, clock=fast)

    assert slow.looks <= looks_per_pass * (LEAST_PASSES + 1) + 2
    assert fast.looks < 1000 * looks_per_pass


def test_a_layer_that_takes_longer_is_seen_to() -> None:
    """The clock runs only while the middle layer of three works."""
    network = Network(named_model("mlp"))
    now = 0.0

    def forward_layers(*arguments: object) -> None:
        nonlocal now
        Whole.forward_layers(network, *arguments)  # type: ignore[arg-type]
        now += 2.0 if arguments[2] == range(3, 4) else 0.5

    network.forward_layers = forward_layers  # type: ignore[method-assign, assignment]
    times = calibrate(network, 2, clock=lambda: now)

    slow = network.layers[3].name
    assert max(times.seconds, key=lambda name: times.seconds[name]) == slow
    assert times.seconds[slow] == pytest.approx(4 * times.seconds["flat"])


@pytest.mark.parametrize("kernels", ["numpy", "auto"])
def test_every_kind_of_layer_can_be_timed(kernels: str) -> None:
    spec = ModelSpec(
        name="odd",
        input_shape=(1, 6, 6),
        layers=(
            layer("conv1", "conv2d", filters=3, kernel=3, frozen=True),
            layer("norm1", "local_response_norm"),
            layer("drop1", "dropout"),
            layer("local1", "locally_connected", filters=2, kernel=3),
            layer("flat", "flatten"),
            layer("fc1", "dense", outputs=4),
            layer("loss", "mean_squared_error"),
        ),
    )
    ticks = count()
    times = calibrate(Network(spec, kernels=kernels), 3, clock=lambda: next(ticks) * 1.0)

    assert list(times.seconds) == [each.name for each in spec.layers]
    assert all(np.isfinite(seconds) and seconds > 0 for seconds in times.seconds.values())


def test_a_network_that_makes_images_can_be_timed() -> None:
    layers = (layer("conv1", "conv2d", filters=2, kernel=3, padding=1), layer("loss", "mean_squared_error"))
    network = Network(ModelSpec(name="painter", input_shape=(2, 4, 4), layers=layers))

    assert list(calibrate(network, 3, clock=Clock(1e-3)).seconds) == ["conv1", "loss"]


def test_a_plan_depends_on_measured_times() -> None:
    network = Network(named_model("mlp"))
    plan = layers_plan(network, 2, times=calibrate(network, 2, clock=Clock(1e-3)))

    assert [len(each.blocks) for each in plan.layers] == [2] * len(network.layers)


def test_a_group_without_images_is_refused() -> None:
    with pytest.raises(ModelError, match="at least 1 image, not 0"):
        calibrate(Network(named_model("digits")), 0, clock=Clock(1.0))
