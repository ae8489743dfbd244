"""A part of the preparation ends with its result, with its error, or with the stop of the run."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from adam_async import Config, Dataset, Disk, LocalCluster, Model, RunResult, make_dataset
from adam_async.checkpoint.checkpoint import StoredCheckpoint
from adam_async.checkpoint.trained_model import dump_model
from adam_async.cli.options import TrainOptions
from adam_async.cli.terminal import Terminal
from adam_async.cli.train import configure, run_training
from adam_async.cluster import sync
from adam_async.driver.preparation import StartingValues, unless_stopped
from adam_async.errors import ConfigError, DeadlineExceeded, RunFailed
from adam_async.model import Network, mlp
from adam_async.model.keyed_random import Dice
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.model_selection import image_size, with_outputs
from tests.adam_async.persistence.disks import on_a_node
from tests.worlds import inside


async def wait_for_ever(cancelled: list[str], begun: asyncio.Event) -> None:
    begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.append("cancelled")


async def test_without_a_stop_the_work_has_its_result() -> None:
    async def work() -> int:
        return 7

    assert await unless_stopped(work(), asyncio.Event()) == 7


async def test_a_stop_cancels_the_work_and_fails_the_run() -> None:
    stopping, cancelled = asyncio.Event(), list[str]()

    with pytest.raises(RunFailed, match="stopped before its first epoch"):
        await unless_stopped(wait_for_ever(cancelled, begun=stopping), stopping)
    assert cancelled == ["cancelled"]


async def test_an_error_of_the_work_leaves_the_caller_uncancelled() -> None:
    async def work() -> None:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        await unless_stopped(work(), asyncio.Event())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("pause_s", [100.0, 130.0])
@inside(on_a_node)
async def test_a_checkpoint_may_take_long_to_load_while_the_servers_take_its_shards(node, pause_s) -> None:
    class Servers:
        """Servers that take one of five parts after each pause."""

        run_store = object()

        async def wait_placed(self, _) -> "Servers":
            return self

        async def load(self, store, source, *, loaded) -> None:
            for _ in range(5):
                await asyncio.sleep(pause_s)
                loaded()

    servers = Servers()
    values = StartingValues(copies=servers, readiness=servers, pool=None, note=pytest.fail)
    checkpoint = StoredCheckpoint(manifest=None, record=None, pieces=None, states=(), source=None)
    loading = values.load("run", Config(), None, checkpoint)
    if pause_s < Config().waits.prepare_s:
        await loading
    else:
        with pytest.raises(DeadlineExceeded, match="the servers to take up their shards"):
            await loading


async def test_cancelling_the_caller_cancels_the_work() -> None:
    cancelled, begun = list[str](), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        caller = group.create_task(unless_stopped(wait_for_ever(cancelled, begun), asyncio.Event()))
        await begun.wait()
        caller.cancel()
    assert caller.cancelled()
    assert cancelled == ["cancelled"]


SAVED = mlp((16, 6, 4), input_shape=(1, 4, 4), name="saved")
STILL = Config(epochs=1, rate=1e-20, threads=1, kernels="numpy", images_per_group=4)
"""A run whose steps are too small to change a float32 value."""


def saved_model() -> Model:
    network = Network(SAVED)
    return Model(network, network.initial_weights(Dice(99)), ("a", "b", "c", "d"))


def same(values: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)


def bars(classes: int) -> Dataset:
    labels = np.arange(24) % classes
    images = np.zeros((24, 4, 4), np.uint8)
    images[np.arange(24), labels] = 255
    return make_dataset(
        name="bars",
        source="made here",
        train=(images, labels),
        test=(images, labels),
        origins=("a", "b", "c", "d"),
    )


async def trained(config: Config, dataset: Dataset, **more) -> RunResult:
    async with LocalCluster(config, dataset=dataset, init=saved_model(), **more) as cluster:
        return await cluster.train()


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "aliased"},
        {"weights": "copy", "replicas": 2, "servers": 2},
        {"consistency": "bsp", "replicas": 2, "rule": "adam"},
    ],
    ids=str,
)
async def test_a_run_begins_with_the_saved_tensors(options: dict) -> None:
    result = await trained(Config(**{**_fields(STILL), **options}), bars(4))

    for name, value in saved_model().weights.items():
        same(result.weights[name], value)
    (event,) = [each["event"] for each in result.events]
    assert event == "4 of 4 tensors come from the saved model 'saved'; no fresh tensors"
    assert [epoch.images for epoch in result.epochs] == [24]


async def test_another_number_of_classes_gets_a_fresh_head_that_is_named() -> None:
    result = await trained(STILL, bars(3))

    fresh = result.model.initial_weights(Dice(STILL.seed))
    same(result.weights["fc1.weight"], saved_model().weights["fc1.weight"])
    same(result.weights["fc2.weight"], fresh["fc2.weight"])
    assert result.events[0]["event"].endswith("fresh: fc2.weight [3, 6], fc2.bias [3]")


async def test_each_training_begins_with_the_saved_tensors() -> None:
    async with LocalCluster(STILL, dataset=bars(4), init=saved_model()) as cluster:
        first, second = await cluster.train(), await cluster.train()

    for name, value in first.weights.items():
        same(second.weights[name], value)


async def test_an_interrupted_run_goes_on_from_its_checkpoint_without_the_saved_model(tmp_path: Path) -> None:
    async with LocalCluster(STILL, dataset=bars(4), init=saved_model(), checkpoint=tmp_path) as cluster:
        await cluster.train()
    more = Config(**{**_fields(STILL), "epochs": 2})
    async with LocalCluster(more, dataset=bars(4), resume=tmp_path) as cluster:
        result = await cluster.train()

    assert [epoch.epoch for epoch in result.epochs] == [1, 2]
    same(result.weights["fc1.weight"], saved_model().weights["fc1.weight"])


async def test_models_without_a_common_tensor_are_refused() -> None:
    other = mlp((16, 7, 4), input_shape=(1, 4, 4), name="other")
    layers = tuple(
        LayerSpec.of(f"my-{layer.name}", layer.kind, **dict(layer.options)) for layer in other.layers
    )

    with pytest.raises(ConfigError, match="'saved' has no tensor with a name and shape of model 'other'"):
        await trained(STILL, bars(4), spec=ModelSpec(name="other", input_shape=(1, 4, 4), layers=layers))


async def test_a_record_cannot_begin_with_a_saved_model() -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        await trained(Config(**{**_fields(STILL), "record": True}), bars(4))


def test_programs_without_a_loop_begin_with_a_saved_model_too() -> None:
    with sync.LocalCluster(STILL, dataset=bars(4), init=saved_model()) as cluster:
        result = cluster.train()

    same(result.weights["fc1.weight"], saved_model().weights["fc1.weight"])


async def test_the_command_train_begins_with_a_saved_model_and_notes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved_model()
    (tmp_path / "model.safetensors").write_bytes(dump_model(model.network, model.weights))
    np.savez(
        tmp_path / "bars.npz", **{f"{k}_{s}": v for s in ("train", "test") for k, v in _arrays().items()}
    )
    asked = TrainOptions(init=tmp_path, data=str(tmp_path / "bars.npz"), epochs=1, kernels="numpy")

    await run_training(asked, {}, Terminal())

    printed = "".join(capsys.readouterr())
    assert printed.count("4 of 4 tensors come from the saved model 'saved'") == 1
    with pytest.raises(ConfigError, match="--init and --resume both set the first weights"):
        async with Disk() as disk:
            await configure(TrainOptions(init=tmp_path, resume=tmp_path), {}, disk)


def test_a_head_changes_with_the_classes_and_loses_their_weights() -> None:
    weighted = LayerSpec.of("loss", "softmax_cross_entropy", class_weights=(1.0, 2.0, 1.0, 1.0))
    spec = ModelSpec(name="w", input_shape=(1, 4, 4), layers=(*SAVED.layers[:-1], weighted))

    assert with_outputs(spec, 4) == spec
    changed = with_outputs(spec, 2)
    assert Network(changed).parameter("fc2.weight").shape == (2, 6)
    assert changed.layers[-1].options == ()


def test_images_get_the_size_of_the_saved_model_unless_another_one_is_named() -> None:
    assert image_size("", "auto", init=SAVED) == (4, 4)
    assert image_size("", "cifar-conv", init=SAVED) == (32, 32)


def _arrays() -> dict[str, np.ndarray]:
    return {"x": bars(4).train_images, "y": bars(4).train_labels}


def _fields(config: Config) -> dict:
    return {name: getattr(config, name) for name in config.__struct_fields__}
