"""PyTorch modules on parameter servers. This room needs the extra ``torch``; no other room imports it.

`RemoteOptimizer` trains a module in a loop of the program:

    store = adam_async.sync.ParameterStore.open("local", parameter_arrays(model), rule=Sgd(rate=0.1))
    optimizer = RemoteOptimizer(model, store)
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

`TorchStep` trains a module with `adam-async train`, and `from_torch` reads its data from a PyTorch dataset.
`to_module` makes a module of a network of this package, and `from_module` a network of a module.
"""

try:
    import torch  # noqa: F401 - a missing package gets an error with its remedy
except ImportError as error:
    raise ImportError(
        'adam_async.torch needs PyTorch, which the extra installs: pip install "adam-async[torch]"'
    ) from error

from adam_async.torch.buffers import arrays_with_buffers
from adam_async.torch.convert import from_module, to_module
from adam_async.torch.datasets import from_torch
from adam_async.torch.optimizer import RemoteOptimizer
from adam_async.torch.parameters import ModuleParameters, parameter_arrays
from adam_async.torch.step import TorchBatch, TorchStep

__all__ = [
    "ModuleParameters",
    "RemoteOptimizer",
    "TorchBatch",
    "TorchStep",
    "arrays_with_buffers",
    "from_module",
    "from_torch",
    "parameter_arrays",
    "to_module",
]
