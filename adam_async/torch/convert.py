"""Built-in networks as PyTorch modules, and chains of PyTorch's layers as networks.

    module = to_module(Model.load("out"))
    model = from_module(module, (1, 28, 28))
    model.save("begin")                                     # train --init begin

Names and layouts are the same on both sides: a network's tensor ``fc1.weight`` is the module's parameter
``fc1.weight``, with the same values to the last bit. A layer name with a dot, such as ``block.fc1``, is a
path of nested modules. A layer with the name of a module attribute, such as ``half``, gets an underscore,
``half_``.

A module has no loss. The module takes images as floats from 0 to 1, (N, C, H, W) or (N, features), and
returns scores, the input of the network's loss layer. `Model.predict` also divides uint8 images by 255, and
takes the softmax of the scores.

Letters: N images, C channels, H rows, W columns, O filters, P output pixels, K values under the kernel in all
input channels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adam_async.checkpoint.trained_model import Model, check_finite
from adam_async.errors import ConfigError
from adam_async.model import layers as built_in
from adam_async.model.layer import Layer
from adam_async.model.network import Network
from adam_async.model.spec import INPUT, LayerSpec, ModelSpec, OptionValue, Shape

# --- modules for layers that `torch.nn` lacks, and for networks that are not a chain ----------------


class LocallyConnected(nn.Module):
    """A convolution with separate filters at every output pixel: the layer ``locally_connected``.

    Takes (N, C, H, W). Parameters: weight (O, rows, columns, C, kernel, kernel), bias (O, rows, columns).

    Args:
        input_shape: (C, H, W).
        output_shape: (O, rows, columns).
        kernel: Rows and columns of the kernel.
        stride: Step between output pixels.
        padding: Rows and columns of zeros on each side.
    """

    def __init__(
        self, input_shape: Shape, output_shape: Shape, *, kernel: int, stride: int, padding: int
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.stride = stride
        self.padding = padding
        self.weight = nn.Parameter(torch.zeros(*output_shape, input_shape[0], kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(*output_shape))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the values under the kernel by the filters of each pixel."""
        columns_NKP = nn.functional.unfold(x, self.kernel, padding=self.padding, stride=self.stride)
        filters, rows, columns = self.bias.shape
        weight_OPK = self.weight.reshape(filters, rows * columns, -1)
        y_NOP = torch.einsum("opk,nkp->nop", weight_OPK, columns_NKP)
        return y_NOP.reshape(-1, filters, rows, columns) + self.bias

    def extra_repr(self) -> str:
        """Return shapes and options, for the text of a module."""
        return (
            f"{list(self.weight.shape)}, kernel={self.kernel}, stride={self.stride}, padding={self.padding}"
        )


class Add(nn.Module):
    """The sum of two or more inputs of one shape: the layer ``add``."""

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        """Add the inputs up in their order."""
        for other in others:
            first = first + other
        return first


class Concatenate(nn.Module):
    """Two or more inputs, concatenated along channels or features: the layer ``concatenate``."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Join along the axis after the batch."""
        return torch.cat(inputs, dim=1)


class LayerGraph(nn.Module):
    """A graph in which each layer may read any earlier ones. The module returns the output of the last layer.

    Args:
        children: Names and modules; a module may contain further modules.
        edges: In forward order, the path of each layer, such as ``"fc1"`` or ``"block.fc1"``, with the paths
            that the layer reads. ``"input"`` is the module's argument.
    """

    def __init__(
        self, children: Sequence[tuple[str, nn.Module]], edges: Sequence[tuple[str, tuple[str, ...]]]
    ) -> None:
        super().__init__()
        self.edges = tuple(edges)
        for name, module in children:
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers in their order."""
        values = {INPUT: x}
        for path, sources in self.edges:
            x = values[path] = self.get_submodule(path)(*(values[source] for source in sources))
        return x


SOFTMAX_LOSS = LayerSpec.of("loss", "softmax_cross_entropy")
"""Default loss layer of a network that is made of a module."""

ANY_MODULE = "adam_async.torch.TorchStep trains any module"
"""Text of the remedy, in errors about a module that is no network of built-in layers."""

Options = dict[str, OptionValue]


def to_module(model: Model) -> nn.Module:
    """Make a PyTorch module with the outputs of a model's network.

    A chain of layers becomes an `nn.Sequential`, another network a `LayerGraph`. The module is in evaluation
    mode, has the network's dtype, and shares no memory with the model. Parameters of frozen layers have
    ``requires_grad`` False. If several values in a max pooling window equal the maximum, the module may give
    the gradient to another of them than the network does.

    Returns:
        A module from images, floats from 0 to 1, to scores. The module's ``state_dict`` has the names of
            ``model.weights``, except for layers with the name of a module attribute.

    Raises:
        ConfigError: PyTorch has no equal of a layer, or no valid path for it; the loss reads another layer
            than the last; or a weight is missing, not finite, or has the wrong shape.
    """
    network = model.network
    *layers, loss = network.layers
    paths = {INPUT: INPUT} | {layer.name: _path_of(layer.name) for layer in layers}
    # On the device meta tensors have no values, so PyTorch's random generator stays unchanged.
    with torch.device("meta"):
        modules = [(paths[layer.name], _module_of(layer, number)) for number, layer in enumerate(layers)]
    whole: nn.Module = _nested(modules)
    *_, output = INPUT, *(layer.name for layer in layers)
    if loss.spec.inputs != (output,):
        read = ", ".join(loss.spec.inputs)
        raise loss.refusal(f"reads {read}, but a module returns one output, that of {output!r}")
    edges = [(paths[layer.name], tuple(paths[source] for source in layer.spec.inputs)) for layer in layers]
    # Names such as a.x, b, a.y change the order of a chain: submodules of one prefix follow one another.
    if edges != list(_chain_edges(path for path, _ in _leaves(whole))):
        whole = LayerGraph(list(whole.named_children()), edges)
    whole.load_state_dict(_tensors(model, paths), assign=True)
    return whole.eval()


_EMPTY = nn.Sequential(), LayerGraph((), ())
"""Empty modules of both types that `to_module` returns; a layer named like one of their attributes gets
another name."""


def _path_of(name: str) -> str:
    """Return a layer's path: its name, with an underscore after each part that names an attribute."""
    parts = (f"{part}_" if any(hasattr(it, part) for it in _EMPTY) else part for part in name.split("."))
    return ".".join(parts)


def _module_of(layer: Layer, number: int) -> nn.Module:
    """Make one layer's PyTorch module; its parameters have no values yet."""
    return _kind_of_module(layer, number).requires_grad_(not layer.frozen)


def _kind_of_module(layer: Layer, number: int) -> nn.Module:
    # A user's layer may extend a built-in one, and compute something else.
    if not type(layer).__module__.startswith("adam_async.model."):
        raise _no_equal(layer, number)
    channels = layer.input_shapes[0][0]
    match layer:
        case built_in.Conv2d():
            return nn.Conv2d(
                channels, layer.filters, layer.kernel, stride=layer.stride, padding=layer.padding
            )
        case built_in.LocallyConnected():
            return LocallyConnected(
                layer.input_shapes[0],
                layer.output_shape,
                kernel=layer.kernel,
                stride=layer.stride,
                padding=layer.padding,
            )
        case built_in.MaxPool():
            return nn.MaxPool2d(layer.kernel, layer.stride)
        case built_in.AveragePool():
            return nn.AvgPool2d(layer.kernel, layer.stride)
        case built_in.Dense():
            return nn.Linear(channels, layer.output_shape[0])
        case built_in.Dropout():
            return nn.Dropout(layer.rate)
        case built_in.LocalResponseNorm():
            return nn.LocalResponseNorm(layer.size, alpha=layer.alpha, beta=layer.beta, k=layer.k)
    for kind, module in _PLAIN.items():
        if isinstance(layer, kind):
            return module()
    raise _no_equal(layer, number)


_PLAIN: Mapping[type[Layer], Callable[[], nn.Module]] = {
    built_in.Relu: nn.ReLU,
    built_in.Sigmoid: nn.Sigmoid,
    built_in.Tanh: nn.Tanh,
    built_in.Flatten: nn.Flatten,
    built_in.Add: Add,
    built_in.Concatenate: Concatenate,
}
"""Modules of the layers without options."""


def _no_equal(layer: Layer, number: int) -> ConfigError:
    return ConfigError(
        f"layer {layer.name!r} ({layer.spec.kind}), number {number} of the network, has no equal in PyTorch; "
        "use a layer of docs/reference/layers.md, or write this one as a torch.nn.Module and load "
        "model.weights into it"
    )


def _nested(modules: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    """Put each module at its path, such as ``"block.fc1"``, below one root."""
    root = nn.Sequential()
    for path, module in modules:
        *folders, name = path.split(".")
        home = root
        for folder in folders:
            inner = home._modules.setdefault(folder, nn.Sequential())
            if type(inner) is not nn.Sequential:
                raise _bad_path(path)
            home = inner
        if not all((*folders, name)) or name in home._modules:
            raise _bad_path(path)
        home.add_module(name, module)
    return root


def _bad_path(path: str) -> ConfigError:
    return ConfigError(
        f"layer {path!r} cannot have this path in PyTorch: a part of it is empty, or another layer is at the "
        "path or at its beginning; rename the layer"
    )


def _chain_edges(paths: Iterator[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each layer of a chain with the layer that it reads."""
    source = INPUT
    for path in paths:
        yield path, (source,)
        source = path


def _tensors(model: Model, paths: Mapping[str, str]) -> dict[str, Any]:
    """Return copies of a model's weights as tensors, by their names in the module."""
    found = {}
    # A module has no loss layer, so it has no parameters of a user's loss.
    for parameter in chain.from_iterable(layer.parameters for layer in model.network.layers[:-1]):
        value = model.weights.get(parameter.name)
        shape = "missing" if value is None else f"of shape {list(value.shape)}"
        if value is None or value.shape != parameter.shape:
            raise ConfigError(
                f"weight {parameter.name!r} is {shape}, but the network needs {list(parameter.shape)}; load "
                "the model again"
            )
        check_finite(parameter.name, value)
        tensor = torch.from_numpy(np.array(value, model.network.dtype, order="C"))
        found[f"{paths[parameter.layer]}.{parameter.kind}"] = tensor
    return found


def from_module(
    module: nn.Module, input_shape: Sequence[int], *, loss: LayerSpec = SOFTMAX_LOSS, name: str = "module"
) -> Model:
    """Make a model of a module: an `nn.Sequential`, nested to any depth, of layers that this package has.

    Known layers are Linear, Conv2d, MaxPool2d, AvgPool2d, ReLU, Sigmoid, Tanh, Dropout, LocalResponseNorm,
    Flatten, Identity (the network has no layer for it), and all that `to_module` returns. A layer's name is
    its path in the module, such as ``"0"`` or ``"features.0"``. A layer is frozen if all its parameters have
    ``requires_grad`` False. The call does not change the module.

    ``model.save(folder)`` writes the file for ``train --init folder``; `LocalCluster` takes ``init=model``.

    Args:
        module: A module that returns scores. Leave a final softmax out: the loss layer has one.
        input_shape: Shape of one image, (channels, rows, columns), or (features,).
        loss: Loss layer, which a module does not have.
        name: Name of the network.

    Returns:
        The network and copies of the parameters, with the same dtype and bits.

    Raises:
        ConfigError: A submodule has another type, or options that no layer here has; the error has its path,
            its type and the remedy. Or parameters are not finite, shared, or neither float32 nor float64.
        SpecError: The layers do not fit `input_shape` or `loss`.
    """
    if not isinstance(module, nn.Sequential | LayerGraph):
        raise _refusal("", module, "is no nn.Sequential; put the layers of a chain into one")
    leaves = dict(_leaves(module))
    if isinstance(module, LayerGraph):
        edges = list(module.edges)
    else:
        edges = list(_chain_edges(path for path, leaf in leaves.items() if type(leaf) is not nn.Identity))
    described = [_spec_of(path, leaves[path], sources) for path, sources in edges]
    spec = ModelSpec(name=name, input_shape=tuple(input_shape), layers=(*described, loss))
    parameters = _parameters(leaves)
    dtypes = {value.dtype for value in parameters.values()} or {np.dtype(np.float32)}
    if len(dtypes) > 1:
        raise ConfigError("parameters have two dtypes, float32 and float64; call module.float() first")
    network = Network(spec, dtypes.pop(), kernels="auto")
    for parameter in network.parameters:
        shape = parameters[parameter.name].shape
        if shape != parameter.shape:
            raise ConfigError(
                f"parameter {parameter.name!r} has shape {list(shape)}, but its layer needs "
                f"{list(parameter.shape)} for images of {list(input_shape)}; give the input_shape of the "
                "module's data"
            )
    return Model(network, parameters)


def _leaves(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules inside nested chains, with their paths, in call order."""
    _check_plain(path, module)
    # `named_children` leaves out the second entry of a module that is in a chain twice.
    for name, child in module._modules.items():
        inner = f"{path}.{name}" if path else name
        if type(child) is nn.Sequential:
            yield from _leaves(child, inner)
        else:
            _check_plain(inner, child)
            yield inner, child


def _check_plain(path: str, module: nn.Module) -> None:
    """Refuse a module with hooks or its own `forward`, which may change what its type computes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for attribute in hooks:
        if getattr(module, attribute, None):
            raise _refusal(path, module, f"has hooks ({attribute}), which a network cannot have; remove them")
    if "forward" in getattr(module, "__dict__", {}):
        raise _refusal(path, module, "has a `forward` of its own, which a network cannot have")


def _refusal(path: str, module: nn.Module, reason: str) -> ConfigError:
    where = f"submodule {path!r}" if path else "the module"
    return ConfigError(f"{where} ({type(module).__name__}) {reason}; {ANY_MODULE}")


_FIXED: Mapping[type, Mapping[str, object]] = {
    nn.Linear: {},
    nn.Conv2d: {"dilation": 1, "groups": 1, "padding_mode": "zeros"},
    nn.MaxPool2d: {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False},
    nn.AvgPool2d: {"padding": 0, "ceil_mode": False, "divisor_override": None},
    nn.ReLU: {},
    nn.Sigmoid: {},
    nn.Tanh: {},
    nn.Dropout: {},
    nn.LocalResponseNorm: {},
    nn.Flatten: {"start_dim": 1, "end_dim": -1},
    LocallyConnected: {},
    Add: {},
    Concatenate: {},
}
"""Known types of modules, each with the attributes for which a layer of this package supports only one value,
and this value."""


def _spec_of(path: str, leaf: nn.Module, sources: tuple[str, ...]) -> LayerSpec:
    """Describe one module as a layer."""
    if type(leaf) in (nn.Softmax, nn.LogSoftmax, nn.Softmax2d):
        raise _refusal(path, leaf, "belongs to the loss layer, which has a softmax of its own; leave it out")
    if type(leaf) not in _FIXED:
        known = ", ".join(kind.__name__ for kind in _FIXED)
        raise _refusal(path, leaf, f"has no equal layer; known: Sequential, {known}")
    if path == INPUT:
        raise _refusal(path, leaf, f"has the name {INPUT!r}, which stands for the images; rename it")
    for attribute, wanted in _FIXED[type(leaf)].items():
        value = getattr(leaf, attribute)
        if value != wanted and value != (wanted, wanted):
            raise _refusal(path, leaf, f"has {attribute}={value!r}; a layer here has {wanted!r}")
    kind, options = _kind_and_options(path, leaf)
    if _is_frozen(path, leaf):
        options["frozen"] = True
    return LayerSpec.of(path, kind, inputs=sources, **options)


def _kind_and_options(path: str, leaf: nn.Module) -> tuple[str, Options]:
    match leaf:
        case nn.Linear():
            return "dense", {"outputs": leaf.out_features}
        case nn.Conv2d():
            sizes: Options = {
                "kernel": _square(path, leaf, "kernel_size"),
                "stride": _square(path, leaf, "stride"),
            }
            return "conv2d", {"filters": leaf.out_channels, **sizes, "padding": _padding(path, leaf)}
        case LocallyConnected():
            sizes = {"kernel": leaf.kernel, "stride": leaf.stride, "padding": leaf.padding}
            return "locally_connected", {"filters": leaf.bias.shape[0], **sizes}
        case nn.MaxPool2d() | nn.AvgPool2d():
            kind = "max_pool" if isinstance(leaf, nn.MaxPool2d) else "average_pool"
            kernel, stride = _square(path, leaf, "kernel_size"), _square(path, leaf, "stride")
            return kind, {"kernel": kernel, "stride": stride}
        case nn.Dropout():
            return "dropout", {"rate": leaf.p}
        case nn.LocalResponseNorm():
            factors = {"alpha": leaf.alpha, "beta": leaf.beta, "k": leaf.k}
            return "local_response_norm", {"size": leaf.size, **factors}
    kinds = {nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.Flatten: "flatten"}
    return {**kinds, Add: "add", Concatenate: "concatenate"}[type(leaf)], {}


def _square(path: str, leaf: nn.Module, attribute: str) -> int:
    """Read a size that is one number, or two equal ones."""
    value = getattr(leaf, attribute)
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if len(set(sizes)) != 1:
        raise _refusal(path, leaf, f"has {attribute}={value}, which is not square")
    return int(sizes[0])


def _padding(path: str, leaf: nn.Module) -> int:
    """Read the padding of a convolution; ``"same"`` needs an odd kernel, which pads both sides equally."""
    if leaf.padding == "valid":
        return 0
    if leaf.padding != "same":
        return _square(path, leaf, "padding")
    kernel = _square(path, leaf, "kernel_size")
    if kernel % 2 == 0:
        raise _refusal(path, leaf, "pads one side by more than the other; give the padding as a number")
    return kernel // 2


def _is_frozen(path: str, leaf: nn.Module) -> bool:
    flags = {parameter.requires_grad for parameter in leaf.parameters()}
    if len(flags) > 1:
        raise _refusal(path, leaf, "trains only some of its parameters; a layer trains all or none")
    return flags == {False}


def _parameters(leaves: Mapping[str, nn.Module]) -> dict[str, NDArray[Any]]:
    """Return copies of all parameters, by the names of a network's tensors."""
    owners: dict[int, str] = {}
    found: dict[str, NDArray[Any]] = {}
    for path, leaf in leaves.items():
        for kind, parameter in leaf._parameters.items():
            if parameter is None:
                raise _refusal(path, leaf, f"has no {kind}, which a layer here has; give it one of zeros")
            if id(parameter) in owners:
                raise _refusal(path, leaf, f"shares its {kind} with {owners[id(parameter)]!r}")
            owners[id(parameter)] = f"{path}.{kind}"
            found[f"{path}.{kind}"] = _values(f"{path}.{kind}", parameter)
    return found


def _values(name: str, parameter: Any) -> NDArray[Any]:
    if parameter.is_meta:
        raise ConfigError(f"parameter {name!r} is on the device meta, which has no values; load values first")
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"parameter {name!r} has dtype {parameter.dtype}, expected torch.float32 or torch.float64; call "
            "module.float() first"
        )
    value = np.array(parameter.detach().cpu().numpy(), order="C")
    if not np.isfinite(value).all():
        raise ConfigError(f"parameter {name!r} has values that are not finite; load finite values first")
    return value
