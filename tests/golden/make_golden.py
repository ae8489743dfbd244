"""Make the golden files: PyTorch's results for every kind of layer.

    python tests/golden/make_golden.py

It needs NumPy and PyTorch (these files are from 2.13) and no part of this package, and writes one small
.npz per case into its own folder. Arrays are float64 and batch first. Each file has

    kind, options       the layer; options as JSON
    input0, input1...   inputs, and input_error0... their gradients
    weight, bias        if the layer has them, with weight_gradient, bias_gradient
    output              the layer's output; one loss per image if it is a loss
    error               factors of the outputs: gradients are those of ``sum(output * error)``
    labels              instead of error, for a loss: gradients are those of the mean loss
    kept                instead of dice, for dropout: the values that are not dropped
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

HERE = Path(__file__).parent
IMAGES = 2
IMAGE = (3, 6, 5)

Arrays = dict[str, NDArray[Any]]
Options = Mapping[str, Any]

CASES: list[tuple[str, str, dict[str, Any], tuple[tuple[int, ...], ...]]] = [
    ("conv2d", "conv2d", {"filters": 4, "kernel": 3}, (IMAGE,)),
    ("conv2d_stride", "conv2d", {"filters": 2, "kernel": 3, "stride": 2, "padding": 1}, (IMAGE,)),
    ("conv2d_gaps", "conv2d", {"filters": 2, "kernel": 2, "stride": 3, "padding": 2}, (IMAGE,)),
    ("local", "locally_connected", {"filters": 2, "kernel": 3}, (IMAGE,)),
    ("local_stride", "locally_connected", {"filters": 3, "kernel": 2, "stride": 2, "padding": 1}, (IMAGE,)),
    ("max_pool", "max_pool", {"kernel": 2}, ((3, 6, 4),)),
    ("max_pool_overlap", "max_pool", {"kernel": 3, "stride": 2}, (IMAGE,)),
    ("average_pool", "average_pool", {"kernel": 2}, ((3, 6, 4),)),
    ("average_pool_overlap", "average_pool", {"kernel": 3, "stride": 2}, (IMAGE,)),
    ("average_pool_gaps", "average_pool", {"kernel": 2, "stride": 3}, (IMAGE,)),
    ("dense", "dense", {"outputs": 5}, ((7,),)),
    ("relu", "relu", {}, (IMAGE,)),
    ("sigmoid", "sigmoid", {}, (IMAGE,)),
    ("tanh", "tanh", {}, ((9,),)),
    ("dropout", "dropout", {"rate": 0.3}, (IMAGE,)),
    ("norm", "local_response_norm", {"size": 3, "alpha": 0.5, "beta": 0.75, "k": 2.0}, ((5, 4, 3),)),
    ("norm_even", "local_response_norm", {"size": 4, "alpha": 1.0, "beta": 0.5, "k": 1.0}, ((6, 2, 3),)),
    ("norm_defaults", "local_response_norm", {}, ((7, 3, 2),)),
    ("flatten", "flatten", {}, (IMAGE,)),
    ("add", "add", {}, (IMAGE, IMAGE, IMAGE)),
    ("concatenate", "concatenate", {}, (IMAGE, (1, 6, 5), IMAGE)),
    ("softmax", "softmax_cross_entropy", {}, ((5,),)),
    ("softmax_weights", "softmax_cross_entropy", {"class_weights": [0.5, 2.0, 0.0, 1.0, 3.0]}, ((5,),)),
    ("squares", "mean_squared_error", {}, ((5,),)),
    ("squares_image", "mean_squared_error", {}, (IMAGE,)),
]


def parameter_shapes(kind: str, options: Options, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Shapes of weight and bias, independent of the package's own code."""
    if kind == "dense":
        return {"weight": (options["outputs"], shape[0]), "bias": (options["outputs"],)}
    if kind not in ("conv2d", "locally_connected"):
        return {}
    filters, kernel = options["filters"], options["kernel"]
    window = (shape[0], kernel, kernel)
    if kind == "conv2d":
        return {"weight": (filters, *window), "bias": (filters,)}
    padding, stride = options.get("padding", 0), options.get("stride", 1)
    pixels = [(size + 2 * padding - kernel) // stride + 1 for size in shape[1:]]
    return {"weight": (filters, *pixels, *window), "bias": (filters, *pixels)}


def _locally_connected(x: Any, weight: Any, bias: Any, options: Options) -> Any:
    columns = functional.unfold(
        x, options["kernel"], padding=options.get("padding", 0), stride=options.get("stride", 1)
    )
    rows = weight.reshape(weight.shape[0], columns.shape[2], columns.shape[1])
    return torch.einsum("opk,bkp->bop", rows, columns).reshape(-1, *bias.shape) + bias


def layer_output(kind: str, options: Options, inputs: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """PyTorch's output of a layer; `given` has the weight, bias, labels and kept that the layer needs."""
    x, weight, bias = inputs[0], given.get("weight"), given.get("bias")
    stride = options.get("stride") or options.get("kernel")
    simple: dict[str, Callable[[], Any]] = {
        "conv2d": lambda: functional.conv2d(
            x, weight, bias, stride=options.get("stride", 1), padding=options.get("padding", 0)
        ),
        "locally_connected": lambda: _locally_connected(x, weight, bias, options),
        "max_pool": lambda: functional.max_pool2d(x, options["kernel"], stride),
        "average_pool": lambda: functional.avg_pool2d(x, options["kernel"], stride),
        "dense": lambda: functional.linear(x, weight, bias),
        "relu": lambda: functional.relu(x),
        "sigmoid": lambda: torch.sigmoid(x),
        "tanh": lambda: torch.tanh(x),
        "dropout": lambda: x * given["kept"] / (1 - options["rate"]),
        "local_response_norm": lambda: functional.local_response_norm(
            x,
            options.get("size", 5),
            alpha=options.get("alpha", 1e-4),
            beta=options.get("beta", 0.75),
            k=options.get("k", 1.0),
        ),
        "flatten": lambda: x.flatten(1),
        "add": lambda: sum(inputs),
        "concatenate": lambda: torch.cat(list(inputs), dim=1),
        "softmax_cross_entropy": lambda: functional.cross_entropy(
            x,
            given["labels"],
            weight=torch.tensor(options["class_weights"]).double() if "class_weights" in options else None,
            reduction="none",
        ),
        "mean_squared_error": lambda: (
            functional.mse_loss(x, given["labels"], reduction="none").flatten(1).mean(dim=1)
        ),
    }
    return simple[kind]()


def reference(kind: str, options: Options, given: Arrays) -> Arrays:
    """Return output and all gradients of one layer for the arrays in `given`, by their names in the files."""
    tensors = {name: torch.tensor(value) for name, value in given.items()}
    wanted = [name for name in tensors if name.startswith("input") or name in ("weight", "bias")]
    for name in wanted:
        tensors[name].requires_grad_()
    inputs = [tensors[name] for name in wanted if name.startswith("input")]
    output = layer_output(kind, options, inputs, tensors)
    (output.mean() if "labels" in given else (output * tensors["error"]).sum()).backward()
    found = {"output": output.detach().numpy()}
    for name in wanted:
        number = name.removeprefix("input")
        key = f"{name}_gradient" if number == name else f"input_error{number}"
        gradient = tensors[name].grad
        assert gradient is not None, f"PyTorch gives no gradient for {name}"
        found[key] = gradient.numpy()
    return found


def drawn_case(
    kind: str,
    options: Options,
    shapes: Sequence[Sequence[int]],
    dice: np.random.Generator,
    images: int = IMAGES,
) -> Arrays:
    """Draw inputs, parameters, and error or labels."""
    given = {f"input{i}": dice.normal(size=(images, *shape)) for i, shape in enumerate(shapes)}
    for name, shape in parameter_shapes(kind, options, shapes[0]).items():
        given[name] = dice.normal(size=shape)
    if kind == "softmax_cross_entropy":
        given["labels"] = dice.integers(0, shapes[0][0], size=images)
    elif kind == "mean_squared_error":
        given["labels"] = dice.normal(size=(images, *shapes[0]))
    else:
        if kind == "dropout":
            given["kept"] = dice.random(size=(images, *shapes[0])) >= options["rate"]
        with torch.no_grad():
            tensors = {name: torch.tensor(value) for name, value in given.items()}
            inputs = [tensors[f"input{i}"] for i in range(len(shapes))]
            given["error"] = dice.normal(size=tuple(layer_output(kind, options, inputs, tensors).shape))
    return given


def main() -> None:
    for name, kind, options, shapes in CASES:
        dice = np.random.default_rng(zlib.crc32(name.encode()))
        given = drawn_case(kind, options, shapes, dice)
        found = reference(kind, options, given)
        labels = {"kind": np.array(kind), "options": np.array(json.dumps(options))}
        np.savez_compressed(HERE / f"{name}.npz", **labels, **given, **found)


if __name__ == "__main__":
    main()
