"""Modules for built-in layers that `torch.nn` lacks, and for networks that are no chain.

Letters: N images, C channels, H rows, W columns, O filters, P output pixels, K values under the kernel in all
input channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from adam_async.model.spec import INPUT, Shape


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
        """Add up, in the order of the inputs."""
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
        edges: Path of each layer, such as ``"fc1"`` or ``"block.fc1"``, in the order of the forward pass,
            with the paths that the layer reads. ``"input"`` stands for the module's argument.
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
