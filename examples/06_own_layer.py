"""Write a layer, check its gradients by finite differences, train a network with it in a cluster."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from adam_async import Config, Disk, LocalCluster, load_dataset, model
from adam_async.model.gradcheck import check_layer
from adam_async.model.keyed_random import Dice


class LearnedRelu(model.Layer):
    """x if x is positive, otherwise slope * x; each channel or feature learns its slope."""

    def __init__(self, spec, input_shapes):
        super().__init__(spec, input_shapes)  # sets output_shape to the shape of the input
        self.parameters = (self.tensor("slope", self.output_shape[:1], bound=0.2),)

    def scratch(self, images):  # arrays that live as long as the context; None is the network's dtype
        shape = (*self.output_shape, images)  # inside a context the images are the last axis
        return {"low": (shape, None), "positive": (shape, np.bool_)}

    def forward(self, weights, slots):
        x, low, positive = slots.inputs[0], slots.scratch["low"], slots.scratch["positive"]
        np.minimum(x, 0, out=low)
        np.multiply(low.T, weights[f"{self.name}.slope"], out=slots.output.T)
        np.copyto(slots.output, x, where=np.greater(x, 0, out=positive))

    def backward(self, weights, slots):  # from the output's error gradient to that of the input
        np.multiply(slots.error.T, weights[f"{self.name}.slope"], out=slots.input_errors[0].T)
        np.copyto(slots.input_errors[0], slots.error, where=slots.scratch["positive"])

    def delta(self, slots, kind, out):  # the gradient of the slopes
        pair = (array.reshape(out.size, -1) for array in (slots.error, slots.scratch["low"]))
        np.einsum("cn,cn->c", *pair, out=out)


async def main(epochs: int = 20) -> float:
    check_layer(LearnedRelu(model.LayerSpec.of("it", "learned_relu"), ((3, 5, 4),)), Dice(1))
    plain, kinds = model.named_model("digits"), model.BUILTIN_LAYERS | {"learned_relu": LearnedRelu}
    layers = tuple(replace(it, kind="learned_relu") if it.kind == "relu" else it for it in plain.layers)
    async with Disk() as disk:
        data = await load_dataset("digits", disk, cache_dir=Path())
    config = Config(epochs=epochs, momentum=0.9)
    async with LocalCluster(
        config, dataset=data, spec=replace(plain, layers=layers), layers=kinds
    ) as cluster:
        result = await cluster.train()
    print(f"test accuracy {result.test_accuracy:.1%}, slopes {result.weights['relu2.slope'].round(2)[:6]}")
    return result.test_accuracy


if __name__ == "__main__":
    asyncio.run(main())
