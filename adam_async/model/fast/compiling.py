"""Compiles kernels in a separate process, so that training can begin before they are ready.

    python -m adam_async.model.fast.compiling float32 0 14 34

The arguments are the type of the values and the numbers of the kernels; without numbers, the kernel of update
rules is compiled. The compiled kernels are stored on disk.
"""

import sys

import numpy as np

from adam_async.model.fast.batches import CompiledBatches
from adam_async.model.fast.program import compile_kernels
from adam_async.model.rules import Sgd

# A separate process, because compilation holds the interpreter's lock.
if __name__ == "__main__":
    dtype, codes = np.dtype(sys.argv[1]), [int(code) for code in sys.argv[2:]]
    if codes:
        compile_kernels(codes, dtype)
    else:
        CompiledBatches(Sgd(), dtype)
