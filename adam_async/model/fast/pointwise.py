"""Pure: elementwise kernels."""

from adam_async.model.fast.memory import floats, kernel


@kernel
def copy(t, like, hyper):
    """Copy an array. Fields: n to source."""
    n = t[1]
    to, values = floats(t[2], n, like), floats(t[3], n, like)
    for i in range(n):
        to[i] = values[i]


@kernel
def clear(t, like, hyper):
    """Fill an array with zeros. Fields: n to."""
    n, zero = t[1], like * 0
    to = floats(t[2], n, like)
    for i in range(n):
        to[i] = zero


@kernel
def relu(t, like, hyper):
    """Compute the larger of x and 0; a NaN stays. Fields: n output input."""
    n, zero = t[1], like * 0
    if t[2] != t[3]:
        copy(t, like, hyper)
    # The loop has only one array, because a loop over two that may overlap is not vector code.
    y = floats(t[2], n, like)
    for i in range(n):
        value = y[i]
        y[i] = zero if value <= zero else value


@kernel
def relu_back(t, like, hyper):
    """Pass the error if the output is positive. Fields: n input_error error output."""
    n, zero = t[1], like * 0
    if t[2] != t[3]:
        copy(t, like, hyper)
    to, y = floats(t[2], n, like), floats(t[4], n, like)
    for i in range(n):
        # Both are read in any case, because a loop without a branch becomes vector code.
        error, output = to[i], y[i]
        to[i] = error if output > zero else zero


@kernel
def add(t, like, hyper):
    """Compute to = a + b. Fields: n to a b."""
    n = t[1]
    # A sum of many arrays is added up in one of them, without a copy.
    if t[2] != t[3]:
        copy(t, like, hyper)
    to, b = floats(t[2], n, like), floats(t[4], n, like)
    for i in range(n):
        to[i] += b[i]


@kernel
def multiply_values(t, like, hyper):
    """Compute to = a * b. Fields: n to a b."""
    n = t[1]
    # A dropout may work in the memory of its input, and then copies nothing.
    if t[2] != t[3]:
        copy(t, like, hyper)
    to, b = floats(t[2], n, like), floats(t[4], n, like)
    for i in range(n):
        to[i] *= b[i]
