"""Whole runs with a step of the user's: the numbers are those of a loop in numpy, errors name the step."""

import traceback
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load as load_tensors

from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.checkpoint.trained_model import Model, dump_model
from adam_async.cluster.local import LocalCluster
from adam_async.data_server.dataset import ValidationSplit, sample_of
from adam_async.driver.replay.decode import read_recording
from adam_async.errors import ConfigError, RoleFailed, StepFailed
from adam_async.run.arrays import ArraySpec
from adam_async.run.config import Config
from adam_async.run.user_code import NamedStep, named_step
from tests.adam_async.runs import NETWORKS, SHARDED, check_replay, cluster_of, tiny_dataset
from tests.adam_async.steps import Noted, Softmax, Wrong, text_of

SOFTMAX = "tests.adam_async.steps:softmax"
RATE = 0.5


def config_of(**options):
    return Config(**{"epochs": 2, "threads": 1, "rate": RATE, "schedule": "constant", **options})


def values_of(text: bytes) -> dict[str, np.ndarray]:
    """The inverse of `text_of`."""
    flat, found = np.frombuffer(text, np.float64), {}
    for name, spec in Softmax.arrays.items():
        found[name], flat = flat[: spec.size].reshape(spec.shape), flat[spec.size :]
    return found


def rounds_of(noted: list[Noted]) -> list[list[Noted]]:
    """The calls that read the same values, in the order of these values."""
    found: dict[bytes, list[Noted]] = {}
    for call in noted:
        found.setdefault(call.read, []).append(call)
    return list(found.values())


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("factors", [(), ("w",)], ids=["dense", "factors"])
@pytest.mark.parametrize(
    "options", [{"in_flight": 1}, {"replicas": 2, "consistency": "bsp"}], ids=["one", "bsp"]
)
async def test_a_run_computes_the_numbers_of_a_loop_in_numpy(network, factors, options):
    step = Softmax(factors)
    protocol = "factors" if factors else "auto"
    config = config_of(images_per_group=7, protocol=protocol, **SHARDED, **options)
    async with cluster_of(config, NETWORKS[network](), step=step) as cluster:
        result = await cluster.train()
    rounds = rounds_of(step.noted)
    assert len(step.noted) == 2 * 9
    assert {call.weight for call in step.noted} == {7, 4}
    after = [values_of(calls[0].read) for calls in rounds[1:]] + [result.weights]
    for calls, next_values in zip(rounds, after, strict=True):
        weight = sum(call.weight for call in calls)
        for name, value in values_of(calls[0].read).items():
            mean = sum(call.weight * call.gradient[name] for call in calls) / weight
            np.testing.assert_allclose(next_values[name], value - RATE * mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 2, "consistency": "ssp:1", "pull_every": 2, **SHARDED},
        {"push_every": 3, "clip": 1.0, "rule": "adam", "rate": 0.05},
        {"threads": 2, "pull_every": 3, "servers": 2, "protocol": "factors"},
        {"replicas": 2, "validation": 10, "keep_best": True, "evaluation": "concurrent"},
        {"controllers": 3, "data_servers": 2},
    ],
)
async def test_a_step_learns_in_every_mode(options):
    async with cluster_of(
        config_of(**{"epochs": 8, "rate": 0.1, **options}), step=Softmax(("w",))
    ) as cluster:
        result = await cluster.train()
    assert result.epochs[-1].train_loss < result.epochs[0].train_loss
    assert result.test_accuracy > 0.5
    assert {name: array.shape for name, array in result.weights.items()} == {
        "w": (10, 64),
        "b": (10,),
        "scale": (),
    }


async def test_a_resumed_run_with_a_step_continues_with_the_same_bits(tmp_path: Path):
    options = {"consistency": "bsp", "rule": "sgd", "momentum": 0.9, "rate": 0.05}
    async with cluster_of(config_of(epochs=4, **options), step=SOFTMAX) as cluster:
        whole = await cluster.train()
    async with cluster_of(config_of(**options), step=SOFTMAX, checkpoint=tmp_path) as cluster:
        await cluster.train()
    async with cluster_of(
        config_of(epochs=4, servers=2, **options), step=SOFTMAX, resume=tmp_path
    ) as cluster:
        resumed = await cluster.train()
    assert text_of(resumed.weights) == text_of(whole.weights)

    with pytest.raises(CheckpointError, match=rf"trains step {SOFTMAX}.*give --step {SOFTMAX}"):
        await run(cluster_of(config_of(epochs=5, **options, dtype="float64"), resume=tmp_path))
    other = cluster_of(
        config_of(epochs=5, **options), step=SOFTMAX, step_args={"factors": ["w"]}, resume=tmp_path
    )
    with pytest.raises(CheckpointError, match="trains step"):
        await run(other)


async def test_a_checkpoint_of_a_network_refuses_a_step(tmp_path: Path):
    async with cluster_of(config_of(weights="copy"), checkpoint=tmp_path) as cluster:
        await cluster.train()
    with pytest.raises(CheckpointError, match="trains a network, not step"):
        await run(cluster_of(config_of(epochs=3), step=Wrong(), resume=tmp_path))


async def test_the_saved_model_of_a_step_is_a_plain_file_of_its_arrays():
    async with cluster_of(config_of(), step=Softmax()) as cluster:
        result = await cluster.train()
    saved = load_tensors(dump_model(result.model, result.weights))
    assert text_of(saved) == text_of(result.weights)
    with pytest.raises(ConfigError, match=r"use result\.weights"):
        Model.of(result)


async def run(cluster: LocalCluster) -> None:
    async with cluster:
        await cluster.train()


WRONG = {
    "raises": "failed in step: ValueError: no scale",
    "loss": r"failed in step: the loss is nan in group \d of epoch 1; all arrays are finite: lower the rate",
    "weight": "failed in step: the weight is 0: return the number of examples.*1 to 4",
    "unset": r"the step set no gradient of array 'w': fill out\['w'\]",
    "nothing": r"the step returned None: return StepOutcome\(loss, weight=len\(batch\)\)",
    "shape": r"the gradient of array 'b' has shape \(11,\), expected \(10,\)",
    "type": r"the gradient of array 'b' has values of type float64.*\.astype\('float32'\)",
    "name": "the step has no array 'c'; it has 2: 'w', 'b'",
    "writes": "failed in step: ValueError: assignment destination is read-only",
    "accuracy": "failed in evaluate: the step returned {}, without accuracy",
    "no value": "failed in initial: the step returned no value of array 'b'",
    "value of another shape": r"failed in initial: the value of array 'b' has shape \(11,\)",
    "value that is not finite": "the value of array 'b' has entries that are not finite",
}


@pytest.mark.parametrize("how", WRONG)
async def test_a_mistake_of_a_step_ends_the_run_and_is_named(how):
    with pytest.raises(StepFailed, match=rf"step tests.adam_async.steps:Wrong .*{WRONG[how]}"):
        await run(cluster_of(config_of(images_per_group=4), step=Wrong(how)))


async def test_an_error_in_a_step_keeps_its_cause_and_its_traceback():
    with pytest.raises(StepFailed) as failure:
        await run(cluster_of(config_of(), step=Wrong("raises")))
    assert isinstance(failure.value.__cause__, ValueError)
    assert isinstance(failure.value.__cause__.__cause__, KeyError)
    trace = "".join(traceback.format_exception(failure.value))
    assert '{}["scale"]' in trace


async def test_a_loss_that_is_not_finite_is_allowed_by_keep_going():
    async with cluster_of(config_of(keep_going=True), step=Wrong("loss")) as cluster:
        result = await cluster.train()
    assert [epoch.images for epoch in result.epochs] == [60, 60]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": "aliased"}, "weights=aliased excludes a step .*: it trains in place.*leave weights out"),
        ({"partitions": 2}, "partitions=2 excludes a step .*: a step has no layers to cut; add replicas"),
        ({"plan": "layers"}, "plan=layers excludes a step .*: it is about a cut network.*leave plan out"),
        ({"model": "mlp"}, "model=mlp excludes a step .*: both name what is trained"),
    ],
)
def test_options_of_networks_are_refused_with_their_remedy(options, said):
    with pytest.raises(ConfigError, match=said):
        cluster_of(config_of(**options), step=Softmax())


class Averaging(Softmax):
    """Derives the mean of some training images, and evaluates only with it."""

    sample = 30

    def derived(self, values, batches):
        return {"mean": np.concatenate([batch.images for batch in batches]).mean(axis=0)}

    def evaluate(self, values, batch):
        assert values["mean"].any()
        return super().evaluate(values, batch)


@pytest.mark.parametrize("data_servers", [1, 2])
async def test_a_sample_of_the_training_images_reaches_evaluation_and_saved_model(data_servers):
    data = tiny_dataset(60)
    config = config_of(validation=20, data_servers=data_servers, seed=3)
    async with cluster_of(config, step=Averaging()) as cluster:
        result = await cluster.train()
    trained = ValidationSplit.of(data.train_labels, count=20, seed=3).trained
    chosen = sample_of(trained, 30, seed=3)
    saved = load_tensors(dump_model(result.model, result.weights))
    np.testing.assert_allclose(saved["mean"], data.train_images[chosen].mean(axis=0))


async def test_a_step_that_is_not_deterministic_is_not_recorded():
    with pytest.raises(ConfigError, match="Softmax is not deterministic: leave record out"):
        await run(cluster_of(config_of(record=True), step=Softmax()))


async def test_a_record_of_a_deterministic_step_replays_to_the_last_bit():
    step, data = Averaging(("w",)), tiny_dataset(60)
    step.deterministic = True
    async with cluster_of(config_of(record=True, replicas=2, pull_every=2, **SHARDED), step=step) as cluster:
        result = await cluster.train()
    assert isinstance(result.record, bytes)
    check_replay(result.record, data, named_step(step, None))
    with pytest.raises(ConfigError, match=r"the record trains step .*if you trust it, give --step"):
        read_recording(result.record, origin="it")


class Changed(Wrong):
    """A step that only the driver has."""


class Wider(Softmax):
    """The step of a driver with another version of the code."""

    arrays = {**Softmax.arrays, "w": ArraySpec((12, 64), "float64")}

    def initial(self, seed):
        return {**super().initial(seed), "w": np.zeros((12, 64))}


async def test_a_worker_with_other_arrays_than_the_store_refuses_the_run():
    async with cluster_of(config_of(), step=Softmax()) as cluster:
        driver = cluster.driver
        name = driver._inputs.step.name
        driver._inputs = type(driver._inputs)(step=NamedStep(Wider(), name))
        with pytest.raises(
            RoleFailed, match=r"worker-0 cannot .*array 'w' is float64\[10, 64\] here, and float64\[12, 64\]"
        ):
            await cluster.train()


async def test_a_worker_without_the_step_refuses_the_run_and_serves_the_next():
    async with cluster_of(config_of()) as cluster:
        driver = cluster.driver
        inputs = driver._inputs
        driver._inputs = type(inputs)(step=NamedStep(Changed(), "package.steps:factory"))
        driver._asked = msgspec.structs.replace(driver._asked, weights="copy")
        with pytest.raises(RoleFailed, match=r"worker-0 cannot train the run: .*--allow-step package\.steps"):
            await cluster.train()
        driver._inputs = inputs
        result = await cluster.train()
    assert [epoch.images for epoch in result.epochs] == [60, 60]
