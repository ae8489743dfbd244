"""PyTorch modules on parameter servers. This room needs the extra ``torch``.

Outside this room only functions of the command `adam-async export` import it.

`RemoteOptimizer` trains a module in a loop of the program:

    store = adam_async.sync.ParameterStore.open("local", parameter_arrays(model), rule=Sgd(rate=0.1))
    optimizer = RemoteOptimizer(model, store)
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

`TorchStep` trains a module with `adam-async train`, and `from_torch` reads its data from a PyTorch dataset.
`to_module` turns a network of this package into a module, and `from_module` a module into a network.

The optimizer collects a step's gradients (`gradients.py`), and begins an exchange with the store
(`exchanges.py`): a push, and a pull if one is due. A `TorchStep` loads a run's values into a copy of the
module (`module_copy.py`), and writes a batch's gradients for the worker, which pushes them.

    optimizer.py             start here: `RemoteOptimizer`: steps, local steps, pulled values, state
    parameters.py            parameters of a module as arrays of a store, checked; parameter groups, resolved;
                             the entry in a `state_dict`
    gradients.py             gradients of one step, checked; their sums over several steps; pushes during the
                             backward pass, from hooks on the parameters
    exchanges.py             pushes and pulls in flight, in order (`max_staleness`); steps between pulls
    changes.py               changes of parameters by the program, found before a pull undoes them
    buffers.py               buffers of a module, such as BatchNorm statistics: local, averaged, push or pull
For the optimizer and for `TorchStep`:
    devices.py               staging memory, pinned on CUDA; copies to and from a GPU
    factors.py               weight gradients of `nn.Linear` as two factors, captured by hooks
Training by `adam-async train`:
    step.py                  `TorchStep`: gradients of a batch, evaluation, running statistics
    module_copy.py           a copy of the module for one thread, with the values of a run; random streams of
                             PyTorch, Python and NumPy, seeded and restored
    datasets.py              `from_torch`: a PyTorch dataset as data of a run
Conversion:
    convert.py               `to_module`, `from_module`; modules for layers that `torch.nn` lacks
    onnx.py                  networks as ONNX files, checked in onnxruntime; needs the extra ``onnx``
"""

from adam_async.errors import install_command

try:
    import torch  # noqa: F401 - a missing package gets an error with its remedy
except ImportError as error:
    raise ImportError(
        f"adam_async.torch needs PyTorch, of the extra `torch`: {install_command('torch')}"
    ) from error

from adam_async.torch.buffers import arrays_with_buffers as arrays_with_buffers
from adam_async.torch.convert import from_module as from_module
from adam_async.torch.convert import to_module as to_module
from adam_async.torch.datasets import from_torch as from_torch
from adam_async.torch.optimizer import RemoteOptimizer as RemoteOptimizer
from adam_async.torch.parameters import ModuleParameters as ModuleParameters
from adam_async.torch.parameters import parameter_arrays as parameter_arrays
from adam_async.torch.step import TorchBatch as TorchBatch
from adam_async.torch.step import TorchStep as TorchStep
