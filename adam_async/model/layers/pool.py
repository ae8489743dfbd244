"""Pure: the geometry of pooling.

Squares are taken one axis after the other: down the columns into intermediate values ("tall"), then across
the rows. Two passes of ``kernel`` operands do the work of ``kernel * kernel``, and the first of them runs
over whole rows of memory.
"""

from collections.abc import Mapping
from typing import ClassVar

from adam_async.model.layer import Array, Cut, Layer, Slots
from adam_async.model.spec import LayerSpec, OptionValue, Shape

Views = tuple[Array, ...]


class Pool(Layer):
    """One value per square and channel.

    Options: kernel, stride (0: the kernel's size). Rows and columns that fill no square are left out.
    Subclasses keep intermediate values in the scratch arrays `tall` and `tall_error`, of `tall_shape`.
    """

    OPTIONS: ClassVar[Mapping[str, OptionValue | None]] = {"kernel": None, "stride": 0}
    CUT: ClassVar[Cut] = "rows"

    def __init__(self, spec: LayerSpec, input_shapes: tuple[Shape, ...]) -> None:
        super().__init__(spec, input_shapes)
        channels, height, width = self.image_input()
        self.kernel = self.integer("kernel", minimum=1)
        self.stride = self.integer("stride", minimum=0) or self.kernel
        if min(height, width) < self.kernel:
            raise self.refusal(f"a kernel of {self.kernel} does not fit an input of {height}x{width}")
        rows, columns = ((size - self.kernel) // self.stride + 1 for size in (height, width))
        self.output_shape = (channels, rows, columns)

    @property
    def _tiles(self) -> bool:
        """Whether squares neither overlap nor leave gaps: the way back writes every input exactly once."""
        _, rows, columns = self.output_shape
        covered = (rows * self.kernel, columns * self.kernel)
        return self.stride == self.kernel and covered == self.input_shapes[0][1:]

    def needs(self, block: range, position: int = 0) -> range:
        """Rows under the squares of the given output rows."""
        if not block:
            return range(0)
        return range(block.start * self.stride, (block.stop - 1) * self.stride + self.kernel)

    def tall_shape(self, images: int) -> Shape:
        """Shape of what lies between the two passes."""
        channels, rows, _ = self.output_shape
        return (channels, rows, self.input_shapes[0][2], images)

    def prepare(self, slots: Slots) -> None:
        """Cut input and intermediate values into one strided view per kernel position."""
        slots.views["down"] = self._operands(slots.inputs[0], axis=1)
        slots.views["across"] = self._operands(slots.scratch["tall"], axis=2)
        slots.views["across_error"] = self._operands(slots.scratch["tall_error"], axis=2)
        if slots.input_errors[0] is not None:
            slots.views["down_error"] = self._operands(slots.input_errors[0], axis=1)

    def _operands(self, array: Array, axis: int) -> Views:
        reach = self.stride * (self.output_shape[axis] - 1) + 1
        cuts = (slice(start, start + reach, self.stride) for start in range(self.kernel))
        return tuple(array[:, cut] if axis == 1 else array[:, :, cut] for cut in cuts)
