"""Compiles kernels in a separate process, so that training can begin before they are ready.

    python -m adam_async.model.fast.compiling float32 0 14 34

The arguments are the type of the values and the numbers of the kernels. The compiled kernels are stored on
disk.
"""

import sys

import numpy as np

from adam_async.model.fast.program import compile_kernels

# A separate process, because compilation holds the interpreter's lock.
if __name__ == "__main__":
    compile_kernels([int(code) for code in sys.argv[2:]], np.dtype(sys.argv[1]))
