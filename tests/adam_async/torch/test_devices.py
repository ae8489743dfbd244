"""Staging memory: tensors of several types and shapes go to arrays and come back, on the CPU and on CUDA."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import nn

from adam_async import AdamW, Sgd, sync
from adam_async.torch import RemoteOptimizer, parameter_arrays
from adam_async.torch.devices import StagingBuffers, copy_streams, to_device, to_host

if torch.cuda.is_available():
    torch.zeros(1, device="cuda")  # opens the driver's files, which stay open, before the first test

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_tensors_go_to_arrays_and_values_come_back(device) -> None:
    tensors = {
        "a": torch.arange(6.0, device=device).view(2, 3),
        "b": torch.tensor(7.0, device=device),
        "c": torch.arange(5.0, dtype=torch.float64, device=device),
        "empty": torch.empty(0, 4, device=device),
    }
    buffers = StagingBuffers(tensors, copy_streams(list(tensors.values())))
    found = buffers.download({name: tensors[name] for name in ("c", "a", "b", "empty")})
    assert list(found) == ["c", "a", "b", "empty"]
    for name, array in found.items():
        np.testing.assert_array_equal(array, tensors[name].cpu().numpy())
        assert array.dtype.name == str(tensors[name].dtype).removeprefix("torch.")
    for round_ in range(3):
        buffers.wait_free()
        for array in buffers.arrays.values():
            array[...] += 1
        buffers.upload()
        buffers.copy_into(tensors)
        np.testing.assert_array_equal(tensors["c"].cpu().numpy(), np.arange(5.0) + round_ + 1)
    before = tensors["a"].clone()
    buffers.arrays["a"][...] = 0
    buffers.upload()
    buffers.copy_into({"b": tensors["b"]})
    assert torch.equal(tensors["a"], before)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_tensors_of_a_device_come_to_the_cpu_together_and_go_back(device) -> None:
    tensors = [torch.arange(6.0, device=device).view(2, 3).T, torch.tensor([3, 4], device=device)]
    arrays = to_host(tensors)
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(array, tensor.cpu().numpy())
        again = to_device(torch.from_numpy(array), torch.device(device))
        assert again.device == tensor.device
        assert torch.equal(again, tensor)
    if device == "cpu":
        tensors[1][0] = 7
        assert arrays[1][0] == 7  # the same memory


@pytest.mark.parametrize(
    "options", [{}, {"max_staleness": 1}, {"overlap": True}, {"pull_every": 2}, {"factors": True}], ids=str
)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_module_of_two_types_trains_on_its_device(device, options) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 64), nn.Linear(64, 64).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)).double())

    torch.manual_seed(0)
    module = Mixed().to(device)
    reference = copy.deepcopy(module)
    data = torch.randn(5, 4, 12, device=device)
    rule = Sgd(rate=0.1) if "pull_every" in options else AdamW(rate=0.01)
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=rule) as store:
        theirs = (
            torch.optim.SGD(reference.parameters(), lr=0.1)
            if "pull_every" in options
            else torch.optim.AdamW(reference.parameters(), lr=0.01)
        )
        with RemoteOptimizer(module, store, **options) as optimizer:
            for x in data:
                for model, each in ((module, optimizer), (reference, theirs)):
                    each.zero_grad()
                    model(x).square().mean().backward()
                    each.step()
                if "max_staleness" in options:
                    optimizer.flush()  # so that the next step uses the values with this push
        for name, parameter in module.named_parameters():
            assert parameter.device.type == device
            np.testing.assert_allclose(
                parameter.detach().cpu().numpy(),
                reference.get_parameter(name).detach().cpu().numpy(),
                rtol=2e-4,
                atol=2e-6,
                err_msg=name,
            )
