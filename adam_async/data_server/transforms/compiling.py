"""Compiles the transforms' kernels in a separate process, so that a run can begin before they are ready.

    python -m adam_async.data_server.transforms.compiling

The compiled kernels are stored on disk.
"""

from adam_async.data_server.transforms.pipeline import kernels_of

# A separate process, because compilation holds the interpreter's lock.
if __name__ == "__main__":
    kernels_of("numba")
