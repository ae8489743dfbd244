"""Copies of a module get the values of a run: on shared memory, or through staging memory."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch.nn import functional

from adam_async.run.step_model import StepModel
from adam_async.run.train_step import StepSpec
from adam_async.torch.module_copy import ModuleCopy
from adam_async.torch.step import TorchStep
from tests.adam_async.torch.modules import Residual, Tokens, mlp

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
)


def values_of(step: TorchStep, seed: int) -> dict[str, np.ndarray]:
    values = dict(step.initial(seed))
    for array in values.values():
        array.flags.writeable = False
    return values


@pytest.mark.parametrize("staged", [False, True], ids=["shared memory", "staging memory"])
def test_each_load_gives_the_parameters_the_values_and_leaves_these_unchanged(staged) -> None:
    step = TorchStep(Residual, functional.cross_entropy)
    copy = ModuleCopy(Residual(), step.arrays, None, staged=staged)
    x = torch.rand(3, 1, 8, 8)
    for seed in (1, 2):
        values = values_of(step, seed)
        before = {name: array.copy() for name, array in values.items()}
        copy.load({**values, "norm.running_mean": np.full(8, 0.5, np.float32)})
        for name, parameter in copy.parameters.items():
            np.testing.assert_array_equal(parameter.detach().numpy(), values[name])
            assert np.shares_memory(parameter.detach().numpy(), values[name]) is not staged
        assert (copy.module.norm.running_mean == 0.5).all()
        copy.module(x).square().sum().backward()
        copy.check_unchanged()
        copy.release()
        assert all(parameter.grad is None for parameter in copy.parameters.values())
        assert all(np.array_equal(array, before[name]) for name, array in values.items())


@pytest.mark.parametrize(
    "make", [mlp, Tokens, lambda: Residual().double()], ids=["mlp", "tokens", "residual"]
)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_step_on_a_device_has_the_gradients_of_the_cpu(device, make) -> None:
    module = make()
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (6, 1, 8, 8), np.uint8), random.integers(0, 10, 6, np.int64)
    found = []
    for each in ("cpu", device):
        step = TorchStep(module.to(each), functional.cross_entropy)
        spec = StepSpec(name="s", shape=(1, 8, 8), classes=10, constants=step.constants, sample=step.sample)
        model = StepModel(step, spec)
        context = model.context(6)
        values = step.initial(0)
        for _ in range(2):  # the second time with the copy of the first
            context.load(images, labels, keys=(1, 0))
            loss = model.forward(values, context)
        gradients = {name: np.empty(array.shape, array.dtype) for name, array in step.arrays.items()}
        model.deltas(context, gradients)
        model.take_sample(images, labels)
        found.append((loss, gradients, model.tensors(values)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)
    for first, second in zip(found[0][1:], found[1][1:], strict=True):
        assert first.keys() == second.keys()
        for name, expected in first.items():
            np.testing.assert_allclose(second[name], expected, rtol=1e-9, atol=1e-9, err_msg=name)
