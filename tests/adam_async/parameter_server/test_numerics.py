"""Which settings of a server change the last bits of applied pushes, and which are reported as numerics."""

import json
import os
import subprocess
import sys

import pytest

from adam_async.runtime.machine import apply_numerics

pytestmark = pytest.mark.slow  # compiles kernels

APPLY = """
import hashlib, sys
import numpy as np
from adam_async.messages import Part, Push
from adam_async.model.kernels import make_batches
from adam_async.model.rules import Adagrad, Adam, AdamW, Sgd
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.gradients import DeltaPart, FactorPart, PushGradients, product_bound
from adam_async.parameter_server.storage import own_shards
from adam_async.run.ids import BucketId, ShardId
from adam_async.run.shard_table import ShardSpec

numbers, digest = np.random.default_rng(5), hashlib.sha256()
for dtype in ("float32", "float64"):
    for rule in (
        Sgd(), Sgd(momentum=0.9, weight_decay=0.01), Sgd(momentum=0.9, nesterov=True), Adagrad(),
        Adam(), AdamW(weight_decay=0.1),
    ):
        specs = [
            ShardSpec(
                id=ShardId(number), tensor="w", start=8000 * number, stop=8000 * (number + 1),
                row_size=80, bucket=BucketId(0), dtype=dtype,
            )
            for number in range(2)
        ]
        shards = own_shards(specs, [rule])
        for shard in shards:
            shard.values[:] = numbers.normal(size=8000)
        applier = Applier(rule, specs, dtype, batches=make_batches(rule, np.dtype(dtype), sys.argv[1]))
        for images in (3, 16, 80):
            x = [numbers.normal(size=(80, images)).astype(dtype) for _ in range(5)]
            errors = [numbers.normal(size=(200, images)).astype(dtype) for _ in range(5)]
            factors = [
                PushGradients((FactorPart(a, e, (100, 100), 0.01, product_bound(a, e)),))
                for a, e in zip(x, errors)
            ]
            deltas = [
                PushGradients((DeltaPart(flat.astype(dtype), (8000, 8000), 0.01, True),))
                for flat in numbers.normal(size=(5, 16000))
            ]
            applier.apply_pushes(shards, factors)
            applier.apply_pushes(shards, deltas)
            applier.apply_sum(shards, factors, scale=0.2, rate=0.01)
        for shard in shards:
            digest.update(shard.values.tobytes())
            for name in sorted(shard.rule_state):
                digest.update(shard.rule_state[name].tobytes())
print(digest.hexdigest())
"""

NUMERICS = """
import json
import numpy as np
from adam_async.runtime.machine import apply_numerics
print(json.dumps(dict(apply_numerics())))
"""


def output(script, *arguments, **environment):
    """Run a script in a process with these variables; returns its last line."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_kernels_and_registers_of_two_servers_change_no_bit_of_applied_pushes():
    numpy = output(APPLY, "numpy")
    assert output(APPLY, "numba") == numpy
    if "avx2" not in processor_flags():
        pytest.skip("this processor has no AVX2")
    assert output(APPLY, "numba", ADAM_VECTORS="avx2") == numpy


def test_another_choice_of_blas_kernels_is_reported_as_other_numerics():
    if "avx512f" not in processor_flags():
        pytest.skip("this processor has one kind of BLAS kernels only")
    here = json.loads(output(NUMERICS))
    # OpenBLAS takes the kernels of Haswell by itself on some processors with AVX-512.
    forced = "Sandybridge" if here["blas core"] == "Haswell" else "Haswell"
    other = json.loads(output(NUMERICS, OPENBLAS_CORETYPE=forced))
    assert here == dict(apply_numerics())
    assert {name for name in here if here[name] != other[name]} == {"blas core"}
    assert other["blas core"] == forced


def processor_flags():
    with open("/proc/cpuinfo") as file:
        return next((line.split() for line in file if line.startswith("flags")), [])
