"""Pure: kernels that load the next group's images and targets and count steps, within one call.

A compute thread that trains group after group in Python needs the interpreter's lock twice per group, and
waits for it while an event loop works. `program.run_groups` therefore trains several groups in one call
without the lock, with compiled code between two groups.
"""

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from adam_async.model.fast.memory import floats, kernel


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], ir.PointerType())

        return types.CPointer(kind)(types.int64), emit

    return pointer


# Bytes and words: `memory` has pointers to numbers of the network's type and to 64-bit integers.
_bytes_at, _words_at = _pointer_to(types.uint8), _pointer_to(types.int32)


@intrinsic
def add_steps(typing: Any, address: Any, steps: Any) -> Any:
    """Add to a count atomically, because other threads add to it, too; return the old count."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count = builder.inttoptr(arguments[0], ir.PointerType())
        # `monotonic`: the count orders no other memory; threads share weights without locks.
        return builder.atomic_rmw("add", count, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), emit


@kernel
def load_images(source, layout, levels, like):
    """Read a group's images, batch first, into the context's input, batch last.

    Args:
        source: Address of the images: bytes if `levels` has entries, otherwise numbers of the network's type.
        layout: int64: address of the input, number of features of an image, number of images.
        levels: Value of each byte; empty if the images are not bytes.
        like: Any number of the network's type.
    """
    features, images = layout[1], layout[2]
    target = floats(layout[0], features * images, like)
    # Both orders of loops step over one of the arrays; this one writes runs and reads with steps.
    if levels.size:
        # A table in place of a division per value; it has the bits of `Context.load`.
        pixels = carray(_bytes_at(source), features * images)
        for feature in range(features):
            for image in range(images):
                target[feature * images + image] = levels[pixels[image * features + feature]]
    else:
        values = floats(source, features * images, like)
        for feature in range(features):
            for image in range(images):
                target[feature * images + image] = values[image * features + feature]


@kernel
def load_targets(source, target_arrays):
    """Copy a group's targets to the loss layer.

    Args:
        source: Address of the targets, one array after the other.
        target_arrays: int64 (arrays, 2): address of each array in the loss layer, and its number of 4-byte
            words.
    """
    for array in range(target_arrays.shape[0]):
        # Words fit the integers and the numbers of all losses, so one kernel copies both.
        words = target_arrays[array, 1]
        to, kept = carray(_words_at(target_arrays[array, 0]), words), carray(_words_at(source), words)
        for i in range(words):
            to[i] = kept[i]
        source += 4 * words
