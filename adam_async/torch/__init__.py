"""PyTorch modules on parameter servers. This room needs the extra ``torch``; no other room imports it.

store = adam_async.sync.ParameterStore.open("local", parameter_arrays(model), rule=Sgd(rate=0.1))
optimizer = RemoteOptimizer(model, store)
for x, y in loader:
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

try:
    import torch  # noqa: F401 - only whether it is there
except ImportError as error:
    raise ImportError(
        'adam_async.torch needs PyTorch, which the extra installs: pip install "adam-async[torch]"'
    ) from error

from adam_async.torch.parameters import ModuleParameters, parameter_arrays

__all__ = ["ModuleParameters", "parameter_arrays"]
