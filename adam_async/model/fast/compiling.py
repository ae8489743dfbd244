"""Compiles kernels in a process of its own, so that training can begin before they are there.

    python -m adam_async.model.fast.compiling float32 0 14 34

The arguments are the type and the numbers of the kernels. What is compiled is kept on the disk.
"""

import sys

import numpy as np

from adam_async.model.fast.program import compile_kernels

if __name__ == "__main__":
    compile_kernels([int(code) for code in sys.argv[2:]], np.dtype(sys.argv[1]))
