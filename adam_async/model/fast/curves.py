"""Pure: elementwise kernels, and exponential, tanh and the logistic function.

Numba has no vector library of these functions, and one call per value takes three times as long as NumPy. In
float32 they are therefore polynomials, made of vector instructions. float64, for exact comparisons, calls the
C library.

    e**x = 2**n * e**r,   n = x / log 2 rounded,   |r| <= log 2 / 2
    e**r - 1 = r + r**2 * q(r)

q is the polynomial of degree 4 with the smallest maximum error of e**r, 3e-9. Every function follows from
e**r - 1 and 2**n: tanh from e**2|x| - 1, which keeps small x exact to the last bits. Errors are at most 2e-7
relative to the result, unless the result is a denormal number; NaN stays NaN.

To round, the code adds and subtracts a number so large that all nearby floats are integers; the sum's last
bits are n. A compiler that reorders sums would remove both operations, so these kernels are compiled without
reordering.
"""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from adam_async.model.fast.memory import exact, floats, kernel
from adam_async.model.fast.vectors import I32


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
    # The loop has only one array, because a loop over two that may overlap does not become vector code.
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
        # Read both in any case, because a loop without a branch becomes vector code.
        error, output = to[i], y[i]
        to[i] = error if output > zero else zero


@kernel
def add(t, like, hyper):
    """Compute to = a + b. Fields: n to a b."""
    n = t[1]
    # A sum of many arrays accumulates in one of them, without a copy.
    if t[2] != t[3]:
        copy(t, like, hyper)
    to, b = floats(t[2], n, like), floats(t[4], n, like)
    for i in range(n):
        to[i] += b[i]


@kernel
def multiply_values(t, like, hyper):
    """Compute to = a * b. Fields: n to a b."""
    n = t[1]
    # A dropout may work in its input's memory, and then it copies nothing.
    if t[2] != t[3]:
        copy(t, like, hyper)
    to, b = floats(t[2], n, like), floats(t[4], n, like)
    for i in range(n):
        to[i] *= b[i]


_ROUNDER = 1.5 * 2**23
_LOG2_E = 1.44269504088896341
_LOG_2 = (0.693359375, -2.12194440054690583e-4)
"""Two numbers whose sum is log 2; a product of the first number and the integer n has no rounding error."""
_Q = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.00836874544620514, 0.0013814539415761828)
_EXP_BOUNDS = (-104.0, 89.0)
"""Bounds of x beyond which e**x is 0 or infinite; within them, two powers of two can express 2**n."""
_TANH_BOUND = 20.0
"""Bound of 2|x|, beyond which tanh |x| is rounded to 1."""


class _Floats:
    """Instructions for float32, emitted at the builder's position."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.type = ir.FloatType()

    def constant(self, value: float) -> Any:
        return ir.Constant(self.type, value)

    def multiply_add(self, a: Any, b: Any, total: Any) -> Any:
        """Return a * b + total, rounded once if the machine has a fused instruction, else twice."""
        # `contract` allows a fused instruction and nothing else, so the rounding of n stays.
        product = self.builder.fmul(a, b, flags=["contract"])
        return self.builder.fadd(product, total, flags=["contract"])

    def bounded(self, x: Any, low: float, high: float) -> Any:
        """Clip x; a NaN stays, because every comparison with it is false."""
        builder = self.builder
        for name, bound in (("<", self.constant(low)), (">", self.constant(high))):
            x = builder.select(builder.fcmp_ordered(name, x, bound), bound, x)
        return x

    def power_of_two(self, n: Any) -> Any:
        """Return 2**n, for n from -126 to 127."""
        # The exponent of a float32 has a bias of 127 and begins at bit 23.
        biased = self.builder.add(n, ir.Constant(I32, 127))
        return self.builder.bitcast(self.builder.shl(biased, ir.Constant(I32, 23)), self.type)

    def reduced(self, x: Any) -> tuple[Any, Any]:
        """Return the integer n, and e**r - 1."""
        builder, rounder = self.builder, self.constant(_ROUNDER)
        # The rounder is 1.5 * 2**23, not 2**23: sums with a negative n keep the exponent, too.
        shifted = builder.fadd(builder.fmul(x, self.constant(_LOG2_E)), rounder)
        n = builder.fsub(shifted, rounder)
        # n times the first part of log 2 is exact, so r loses only the rounding of the second.
        r = x
        for part in _LOG_2:
            r = self.multiply_add(n, self.constant(-part), r)
        q = self.constant(_Q[-1])
        for coefficient in reversed(_Q[:-1]):
            q = self.multiply_add(q, r, self.constant(coefficient))
        # Add r last: it is the largest term, and a small r stays exact.
        grown = self.multiply_add(builder.fmul(r, r), q, r)
        # The two numbers have the same exponent, so the difference of their bits is n as an integer.
        bits = builder.sub(builder.bitcast(shifted, I32), builder.bitcast(rounder, I32))
        return bits, grown

    def exponential(self, x: Any) -> Any:
        """Return e**x; 0 or infinity beyond the bounds, and NaN for NaN."""
        builder = self.builder
        n, grown = self.reduced(self.bounded(x, *_EXP_BOUNDS))
        # Use two factors: the smallest and largest results are not 2**n times a number near 1.
        half = builder.ashr(n, ir.Constant(I32, 1))
        result = builder.fadd(grown, self.constant(1.0))
        for power in (half, builder.sub(n, half)):
            result = builder.fmul(result, self.power_of_two(power))
        return result

    def tanh(self, x: Any) -> Any:
        """Return the hyperbolic tangent of x; for x near 0 it keeps its relative precision."""
        # tanh is odd: compute it from |x|, and give the result the sign bit of x.
        builder, sign = self.builder, ir.Constant(I32, -(2**31))
        bits = builder.bitcast(x, I32)
        size = builder.bitcast(builder.and_(bits, builder.not_(sign)), self.type)
        n, grown = self.reduced(self.bounded(builder.fadd(size, size), 0.0, _TANH_BOUND))
        # One power of two suffices: within the bound n is at most 29.
        power = self.power_of_two(n)
        # e**2|x| - 1 without its rounding near 0: for n = 0 this is `grown` itself.
        less_one = self.multiply_add(power, grown, builder.fsub(power, self.constant(1.0)))
        result = builder.fdiv(less_one, builder.fadd(less_one, self.constant(2.0)))
        return builder.bitcast(builder.or_(builder.bitcast(result, I32), builder.and_(bits, sign)), self.type)

    def logistic(self, x: Any) -> Any:
        """Return 1 / (1 + e**-x), from 0 to 1."""
        builder, one = self.builder, self.constant(1.0)
        # An infinite e**-x gives 0, the limit.
        return builder.fdiv(one, builder.fadd(one, self.exponential(builder.fneg(x))))


@intrinsic
def exponential(typing: Any, x: Any) -> Any:
    """Compute e**x."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if x == types.float32:
            return _Floats(builder).exponential(arguments[0])
        return _library(context, builder, math.exp, arguments[0])

    return x(x), emit


@intrinsic
def tanh_of(typing: Any, x: Any) -> Any:
    """Compute the hyperbolic tangent."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if x == types.float32:
            return _Floats(builder).tanh(arguments[0])
        return _library(context, builder, math.tanh, arguments[0])

    return x(x), emit


@intrinsic
def logistic_of(typing: Any, x: Any) -> Any:
    """Compute 1 / (1 + e**-x)."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if x == types.float32:
            return _Floats(builder).logistic(arguments[0])
        one = ir.Constant(ir.DoubleType(), 1.0)
        power = _library(context, builder, math.exp, builder.fneg(arguments[0]))
        return builder.fdiv(one, builder.fadd(one, power))

    return x(x), emit


def _library(context: Any, builder: Any, function: Any, x: Any) -> Any:
    signature = types.float64(types.float64)
    context.typing_context.resolve_value_type(function)
    return context.get_function(function, signature)(builder, [x])


@exact
def tanh(t, like, hyper):
    """Compute tanh. Fields: n output input."""
    n = t[1]
    # Copy first and work in place, because a loop over one array becomes vector code; see `relu`.
    if t[2] != t[3]:
        copy(t, like, hyper)
    y = floats(t[2], n, like)
    for i in range(n):
        y[i] = tanh_of(y[i])


@kernel
def tanh_back(t, like, hyper):
    """Multiply errors by 1 - y * y. Fields: n input_error error output."""
    n = t[1]
    if t[2] != t[3]:
        copy(t, like, hyper)
    to, y = floats(t[2], n, like), floats(t[4], n, like)
    one = y.dtype.type(1)
    for i in range(n):
        to[i] *= one - y[i] * y[i]


@exact
def sigmoid(t, like, hyper):
    """Compute the logistic function. Fields: n output input."""
    n = t[1]
    if t[2] != t[3]:
        copy(t, like, hyper)
    y = floats(t[2], n, like)
    for i in range(n):
        y[i] = logistic_of(y[i])


@kernel
def sigmoid_back(t, like, hyper):
    """Multiply errors by y * (1 - y). Fields: n input_error error output."""
    n = t[1]
    if t[2] != t[3]:
        copy(t, like, hyper)
    to, y = floats(t[2], n, like), floats(t[4], n, like)
    one = y.dtype.type(1)
    for i in range(n):
        to[i] *= y[i] * (one - y[i])
