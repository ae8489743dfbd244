"""PyTorch's side of `benchmarks.kernels`: one process, one thread. The script needs only torch.

The script reads a model as JSON from its first line of input, reports ready, and begins at the next line.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch

ROUND_S = 0.02
POOL_IMAGES = 1024
RATE = 0.01


def build(spec: dict[str, Any]) -> tuple[list[str], list[torch.nn.Module]]:
    """Names and modules of a chain of layers; the loss is left out."""
    x, names, modules = torch.zeros(2, *spec["input"]), [], []
    for layer in spec["layers"][:-1]:
        match layer["kind"]:
            case "conv2d":
                module: torch.nn.Module = torch.nn.Conv2d(
                    x.shape[1],
                    layer["filters"],
                    layer["kernel"],
                    stride=layer.get("stride", 1),
                    padding=layer.get("padding", 0),
                )
            case "max_pool":
                module = torch.nn.MaxPool2d(layer["kernel"], layer.get("stride") or layer["kernel"])
            case "average_pool":
                module = torch.nn.AvgPool2d(layer["kernel"], layer.get("stride") or layer["kernel"])
            case "dense":
                module = torch.nn.Linear(x.shape[1], layer["outputs"])
            case "relu":
                module = torch.nn.ReLU()
            case "flatten":
                module = torch.nn.Flatten()
            case kind:
                raise SystemExit(f"this script has no layer of kind {kind!r}")
        x = module(x)
        names.append(layer["name"])
        modules.append(module)
    return names, modules


def train(modules: list[torch.nn.Module], spec: dict[str, Any], options: argparse.Namespace) -> float:
    """Images per second of forward, backward and rule."""
    network = torch.nn.Sequential(*modules)
    rule = torch.optim.SGD(network.parameters(), lr=RATE, momentum=options.momentum)
    images = torch.randint(0, 256, (POOL_IMAGES, *spec["input"]), dtype=torch.uint8)
    labels = torch.randint(0, 10, (POOL_IMAGES,))

    def steps(count: int) -> None:
        for number in range(count):
            start = number * options.group % (POOL_IMAGES - options.group + 1)
            x = images[start : start + options.group].float() / 255
            loss = torch.nn.functional.cross_entropy(network(x), labels[start : start + options.group])
            rule.zero_grad(set_to_none=True)
            loss.backward()
            rule.step()

    steps(10)
    print("ready", flush=True)
    sys.stdin.readline()
    done, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < options.seconds:
        steps(10)
        done += 10
    return float(done * options.group / spent)


def microseconds(step: Any) -> float:
    """Time of one step, as the mean of a round."""
    step()
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < ROUND_S:
        step()
        count += 1
    return 1e6 * spent / count


def layer_times(
    names: list[str], modules: list[torch.nn.Module], spec: dict[str, Any], group: int
) -> dict[str, float]:
    """Microseconds of each layer's forward pass and backward pass."""
    x, found = torch.randn(group, *spec["input"]), {}
    for number, (name, module) in enumerate(zip(names, modules, strict=True)):
        x = x.detach().requires_grad_(number > 0)
        with torch.no_grad():
            found[f"{name} forward"] = microseconds(lambda x=x, module=module: module(x))
        y = module(x)
        wanted = [*([x] if number > 0 else []), *module.parameters()]
        if wanted:
            error = torch.randn_like(y)
            found[f"{name} back"] = microseconds(
                lambda y=y, wanted=wanted, error=error: torch.autograd.grad(
                    y, wanted, error, retain_graph=True
                )
            )
        x = y
    return found


def main() -> None:
    """Make the requested measurement and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--layers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = json.loads(sys.stdin.readline())
    names, modules = build(spec)
    if options.layers:
        print(json.dumps(layer_times(names, modules, spec, options.group)))
    else:
        print(json.dumps({"images_per_s": train(modules, spec, options)}))


if __name__ == "__main__":
    main()
