"""Compiles kernels in a separate process, so that training can begin before they are ready.

    python -m adam_async.model.fast.compiling float32 0 14 34

The arguments are the type of the values and the numbers of the kernels. Without numbers the process compiles
the kernel of update rules; with the word `vectors`, the kernels of vectors. The compiled kernels are stored
on disk.
"""

import sys

import numpy as np

from adam_async.model.fast.batches import CompiledBatches
from adam_async.model.fast.program import compile_kernels
from adam_async.model.fast.sums import CompiledVectors
from adam_async.model.rules import Sgd
from adam_async.model.vectors import VECTORS

# A separate process, because compilation holds the interpreter's lock.
if __name__ == "__main__":
    dtype, codes = np.dtype(sys.argv[1]), sys.argv[2:]
    if codes == [VECTORS]:
        CompiledVectors(dtype)
    elif codes:
        compile_kernels([int(code) for code in codes], dtype)
    else:
        CompiledBatches(Sgd(), dtype)
