"""Benchmarks: each module measures one thing, beside a control, on the harness that all of them share."""

import os

# Before NumPy loads: threads are those of the benchmark, and a BLAS with two of its own is slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
