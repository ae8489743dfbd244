"""Whole runs with a module of PyTorch: the numbers of `torch.optim`, all consistencies, and saved models."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from torch.nn import functional

from adam_async.checkpoint.trained_model import dump_model
from adam_async.cluster.local import LocalCluster
from adam_async.driver.replay.decode import read_recording
from adam_async.errors import ConfigError
from adam_async.run.config import Config
from adam_async.run.user_code import import_step
from adam_async.torch.step import TorchBatch, TorchStep
from tests.adam_async.runs import check_replay, cluster_of, tiny_dataset
from tests.adam_async.torch.modules import Residual, Tokens, characters_step, dropout_step, mlp, residual_step

RATE = 0.3


def config_of(**options: Any) -> Config:
    return Config(**{"epochs": 2, "threads": 1, "rate": RATE, "schedule": "constant", **options})


class Seen:
    """A `forward` that keeps the batches of training in their order."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []

    def __call__(self, module: nn.Module, batch: TorchBatch) -> Tensor:
        if batch.epoch:
            self.batches.append((batch.images.clone(), batch.labels.clone()))
        found: Tensor = module(batch.scaled())
        return found


@pytest.mark.parametrize("protocol", ["auto", "delta", "factors"])
@pytest.mark.parametrize(
    "make", [mlp, lambda: Residual().double(), Tokens], ids=["mlp", "residual", "several rows per image"]
)
async def test_one_replica_in_lockstep_takes_the_steps_of_torch_optim(
    make: Callable[[], nn.Module], protocol: str
) -> None:
    torch.manual_seed(2)
    module, seen = make(), Seen()
    config = config_of(
        consistency="bsp", images_per_group=20, protocol=protocol, momentum=0.9, rule="sgd", rate=0.05
    )
    step = TorchStep(module, functional.cross_entropy, forward=seen)
    async with cluster_of(config, step=step) as cluster:
        result = await cluster.train()

    assert len(seen.batches) == 6
    module.train()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    for images, labels in seen.batches:
        optimizer.zero_grad()
        functional.cross_entropy(module(images.double() / 255), labels).backward()
        optimizer.step()
    for name, value in result.weights.items():
        expected = module.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-9)


async def test_factors_with_several_rows_per_image_are_sent_if_they_have_fewer_bytes() -> None:
    weights, sent = [], []
    for protocol in ("auto", "delta"):
        torch.manual_seed(0)
        # The limit of the gradient is computed from its factors.
        config = config_of(epochs=1, consistency="bsp", images_per_group=5, protocol=protocol, clip=0.5)
        async with cluster_of(config, step=TorchStep(Tokens(), functional.cross_entropy)) as cluster:
            result = await cluster.train()
        weights.append(result.weights)
        rows = result.statistics["worker-0"].traffic
        sent.append(sum(row.payload_bytes for row in rows if row.type == "Push"))
    # In float64: ten rows of each matrix of (32, 32) and (20, 32), and a bias of 32.
    steps = sent[1] // (8 * (32 * 32 + 20 * 32 + 32))
    assert sent == [steps * 8 * (10 * 64 + 10 * 52 + 32), steps * 8 * (32 * 32 + 20 * 32 + 32)]
    for name, value in weights[1].items():
        np.testing.assert_allclose(weights[0][name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 2, "threads": 2},
        {"replicas": 2, "consistency": "ssp:1", "servers": 2},
        {"replicas": 2, "consistency": "bsp", "copies": 2, "servers": 2},
        {"rule": "adam", "rate": 0.01, "clip": 1.0, "push_every": 2},
        {"validation": 100, "evaluation": "concurrent", "data_servers": 2},
    ],
)
async def test_a_residual_network_learns_and_is_evaluated_with_its_statistics(
    options: dict[str, Any],
) -> None:
    config = config_of(**{"data": "digits", "rate": 0.05, **options})
    async with LocalCluster(config, step=residual_step()) as cluster:
        result = await cluster.train()
    assert result.test_accuracy > 0.85
    module = Residual()
    module.load_state_dict(load_tensors(dump_model(result.model, result.weights)))
    images, labels = next(iter(cluster.driver._parts.evaluator._sets.values()))
    scores = module.eval()(torch.from_numpy(images.copy()) / 255)
    right = (scores.argmax(1).numpy() == labels).mean()
    assert right == pytest.approx(result.test_accuracy, abs=0.01)


@pytest.mark.slow
async def test_a_language_model_learns_the_next_token() -> None:
    config = config_of(data="digits", rule="adam", rate=0.01, epochs=1)
    async with LocalCluster(config, step=characters_step()) as cluster:
        result = await cluster.train()
    assert result.test_accuracy > 0.3  # the most frequent token has a share of 0.27


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 2, "servers": 2, "pull_every": 2},
        {"replicas": 2, "consistency": "bsp", "rule": "adam", "rate": 0.01},
    ],
    ids=["asp", "bsp"],
)
async def test_a_record_of_a_module_replays_to_the_last_bit(options: dict[str, Any]) -> None:
    path, data = "tests.adam_async.torch.modules:residual_step", tiny_dataset(60)
    config = config_of(record=True, protocol="factors", images_per_group=10, **options)
    async with cluster_of(config, step=path) as cluster:
        result = await cluster.train()
    assert isinstance(result.record, bytes)
    step = import_step(path, {})
    assert check_replay(result.record, data, step).groups == 12
    with pytest.raises(ConfigError, match=r"the record trains step .*: if you trust it, give --step"):
        read_recording(result.record, origin="it")


async def test_a_module_with_random_numbers_is_not_recorded() -> None:
    async with cluster_of(config_of(record=True), step=dropout_step()) as cluster:
        with pytest.raises(ConfigError, match=r"step .*:TorchStep is not deterministic: leave record out"):
            await cluster.train()


async def test_a_resumed_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    path, options = "tests.adam_async.torch.modules:mlp_step", {"consistency": "bsp", "momentum": 0.9}
    async with cluster_of(config_of(epochs=4, rule="sgd", **options), step=path) as cluster:
        whole = await cluster.train()
    async with cluster_of(config_of(rule="sgd", **options), step=path, checkpoint=tmp_path) as cluster:
        await cluster.train()
    async with cluster_of(config_of(epochs=4, rule="sgd", **options), step=path, resume=tmp_path) as cluster:
        resumed = await cluster.train()
    assert all(np.array_equal(value, whole.weights[name]) for name, value in resumed.weights.items())


def batch_normalised() -> nn.Module:
    shape = tiny_dataset().image_shape
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(prod(shape)), nn.Linear(prod(shape), 10))


@pytest.mark.parametrize(
    ("size", "validation", "cure"), [(59, 0, 60), (1, 0, 2), (7, 3, 9), (29, 1, 30)], ids=str
)
async def test_a_last_group_that_the_module_cannot_train_is_refused_before_training(
    size: int, validation: int, cure: int
) -> None:
    step = TorchStep(batch_normalised(), functional.cross_entropy)
    images = len(tiny_dataset().train_labels)
    assert (images - validation) % size in (0, 1)
    config = config_of(images_per_group=size, validation=validation, epochs=1)
    async with cluster_of(config, step=step) as cluster:
        with pytest.raises(ConfigError, match=rf"has 1 of the .*give --images-per-group {cure}$"):
            await cluster.train()

    step = TorchStep(batch_normalised(), functional.cross_entropy)
    config = config_of(images_per_group=cure, validation=validation, epochs=1)
    async with cluster_of(config, step=step) as cluster:
        assert len((await cluster.train()).epochs) == 1
