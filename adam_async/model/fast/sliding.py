"""Pure: what a convolution and a locally connected layer share: a packed input and the runs in it."""

import numpy as np

from adam_async.model.fast.compiled import Compiled
from adam_async.model.fast.tape import Op
from adam_async.model.fast.tiles import DOT_ROWS
from adam_async.model.layer import Array, ScratchSpec, Slots
from adam_async.model.layers.sliding import SlidingKernel
from adam_async.model.spec import Shape


class FastSliding(Compiled, SlidingKernel):
    """Geometry of a sliding kernel. Goes before the NumPy layer among the bases."""

    def _packed(self) -> bool:
        return bool(self.padding) or self.stride > 1

    def _packed_shape(self, images: int) -> Shape:
        channels, rows, columns, _ = self.padded_shape(images)
        return (channels, rows, self.stride, -(-columns // self.stride), images)

    def scratch(self, images: int) -> dict[str, ScratchSpec]:
        """Packed input and input error, where they differ from the images."""
        if not self._packed():
            return {}
        shape = self._packed_shape(images)
        return {"packed": (shape, None), "packed_error": (shape, None)}

    def prepare(self, slots: Slots) -> None:
        """Say where the runs under the kernel start, and where each filter's output does."""
        channels, rows, stride, width, images = self._packed_shape(slots.images)
        c, y, x = np.indices((channels, self.kernel, self.kernel)).reshape(3, -1)
        starts = (((c * rows + y) * stride + x % stride) * width + x // stride) * images
        slots.views["runs"] = _whole_blocks(starts)
        slots.views["weights"] = np.arange(starts.size)
        slots.views["filters"] = _whole_blocks(np.arange(self.filters) * slots.output[0].size)

    def _source(self, slots: Slots) -> Array:
        return slots.scratch["packed"] if self._packed() else slots.inputs[0]

    def _line(self, images: int) -> int:
        """Values from the runs of one output line to those of the next."""
        _, _, stride, width, _ = self._packed_shape(images)
        return stride * stride * width * images

    def _pack_op(self, code: int, slots: Slots, packed: Array, image: Array) -> Op:
        _, rows, stride, width, _ = self._packed_shape(slots.images)
        place = (rows, width, stride, self.top, self.padding)
        return Op.of(code, *self.input_shapes[0], slots.images, packed, image, *place)


def _whole_blocks(starts: Array) -> Array:
    """Fill a table up to whole blocks of dot products, by repeating its last entry."""
    return np.pad(starts, (0, -starts.size % DOT_ROWS), mode="edge")
