"""The pure core of L-BFGS: its iterates are those of the written-out one, also over a lost coordinator."""

import msgspec
import numpy as np
import pytest

from adam_async.lbfgs.minimiser import GRADIENT, POINT, Minimiser, direction
from tests.adam_async.lbfgs import problems
from tests.adam_async.lbfgs.written_out import minimise, two_loops

DECODER = msgspec.msgpack.Decoder(Minimiser)


class Vectors:
    """The servers of a minimiser: they make its moves on the vectors of one process."""

    def __init__(self, function, start):
        self.function = function
        self.vectors = {POINT: start.copy()}

    def make(self, move):
        for command in move.combine:
            self.vectors[command.into] = sum(scale * self.vectors[name] for scale, name in command.terms)
        value = 0.0
        if move.evaluates:
            value, self.vectors[GRADIENT] = self.function(self.vectors[POINT])
        return value, [float(self.vectors[a] @ self.vectors[b]) for a, b in move.dots]


def iterates(minimiser, servers, *, most=50, between=lambda minimiser: minimiser):
    points = []
    while not minimiser.is_done and minimiser.iteration < most:
        before = minimiser.iteration
        minimiser = between(minimiser)
        minimiser.take(*servers.make(minimiser.move))
        if minimiser.iteration > before:
            points.append(servers.vectors[POINT].copy())
    return points, minimiser


@pytest.mark.parametrize("problem", [problems.logistic, problems.network])
def test_iterates_are_those_of_the_written_out_method(problem):
    function, start = problems.whole(*problem())
    expected = minimise(function, start)

    found, done = iterates(Minimiser(tolerance=1e-7), Vectors(function, start))

    assert len(found) == len(expected) > 30
    assert max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True)) < 1e-9
    assert done.norm <= 1e-7 * done.first_norm or len(found) == 50


@pytest.mark.parametrize("exponent", [-300, -100, -40, 40, 100, 300])
def test_a_scale_of_the_values_changes_no_bit_of_the_iterates(exponent):
    function, start = problems.whole(*problems.logistic())
    scale = 2.0**exponent

    def scaled(x):
        value, gradient = function(x)
        return value * scale, gradient * scale

    expected, _ = iterates(Minimiser(tolerance=1e-7), Vectors(function, start))
    found, done = iterates(Minimiser(tolerance=1e-7), Vectors(scaled, start))

    assert "the gradient's norm is" in done.reason
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_minimum_of_a_scaled_objective_is_that_of_scipy(scale):
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra dev)")
    function, start = problems.whole(*problems.logistic())

    def scaled(x):
        value, gradient = function(x)
        return value * scale, gradient * scale

    _, done = iterates(Minimiser(tolerance=1e-8), Vectors(scaled, start), most=500)
    options = {"ftol": 0, "gtol": 0, "maxiter": 5000}
    found = optimize.minimize(scaled, start, jac=True, method="L-BFGS-B", options=options)

    assert "the gradient's norm is" in done.reason
    assert done.value == pytest.approx(found.fun, rel=1e-9)


def test_a_move_that_is_made_twice_by_a_restored_minimiser_changes_no_bit():
    function, start = problems.whole(*problems.network())
    expected, _ = iterates(Minimiser(tolerance=1e-7), Vectors(function, start))
    servers = Vectors(function, start)

    def lose(minimiser):
        packed = msgspec.msgpack.encode(minimiser)
        assert not minimiser.contradiction
        servers.make(minimiser.move)  # a lost coordinator made it and took no answer
        return DECODER.decode(packed)

    found, _ = iterates(Minimiser(tolerance=1e-7), servers, between=lose)

    assert np.array_equal(found, expected)


def test_a_short_history_is_that_of_the_written_out_method():
    function, start = problems.whole(*problems.logistic())
    expected = minimise(function, start, history=2, iterations=20)

    found, _ = iterates(Minimiser(history=2, tolerance=1e-7), Vectors(function, start), most=20)

    assert np.abs(np.array(found) - np.array(expected)).max() < 1e-9


def test_messages_have_the_same_length_for_every_size_of_the_vectors():
    sizes = []
    for hidden in (2, 64):
        function, start = problems.whole(*problems.network(hidden=hidden))
        minimiser, servers = Minimiser(), Vectors(function, start)
        moves = []
        while minimiser.iteration < 15:
            moves.append(minimiser.move)
            minimiser.take(*servers.make(minimiser.move))
        sizes.append(sum(len(msgspec.msgpack.encode(move)) for move in moves if not move.evaluates))

    assert sizes[0] == sizes[1]


def test_a_pair_without_curvature_is_left_out():
    function, start = problems.whole(*problems.logistic())
    servers, minimiser = Vectors(function, start), Minimiser()
    for _ in range(3):
        minimiser.take(*servers.make(minimiser.move))
    assert minimiser.phase == "pair"

    minimiser.take(0.0, [1.0, -1.0, 0.0, 1.0, 0.0, 0.5])  # s.s, s.y, s.g, y.y, y.g, g.g

    assert minimiser.slots == ()
    assert minimiser.iteration == 1


@pytest.mark.parametrize("phase", ["turn", "search", "pair"])
def test_a_refused_move_leaves_values_that_fall_further(phase):
    function, start = problems.whole(*problems.network())
    servers, minimiser = Vectors(function, start), Minimiser(tolerance=1e-7)
    _, minimiser = iterates(minimiser, servers, most=6)
    while minimiser.phase != phase:
        minimiser.take(*servers.make(minimiser.move))
    value = minimiser.value

    assert minimiser.refused()
    DECODER.decode(msgspec.msgpack.encode(minimiser))
    found, _ = iterates(minimiser, servers, most=12)

    assert function(found[-1])[0] < value


def test_a_refused_direction_of_the_gradient_alone_has_no_remedy():
    function, start = problems.whole(*problems.network())
    minimiser = Minimiser()
    minimiser.take(*Vectors(function, start).make(minimiser.move))

    assert minimiser.phase == "turn"
    assert not minimiser.refused()


def test_inner_products_beyond_float64_drop_the_history():
    function, start = problems.whole(*problems.network())
    servers, minimiser = Vectors(function, start), Minimiser()
    _, minimiser = iterates(minimiser, servers, most=3)
    while minimiser.phase != "pair":
        minimiser.take(*servers.make(minimiser.move))
    move = minimiser.move
    _, products = servers.make(move)
    products[move.dots.index(("s3", "s0"))] = float("nan")

    minimiser.take(0.0, products)

    assert minimiser.slots == ()
    assert np.isfinite([scale for sums in minimiser.move.combine for scale, _ in sums.terms]).all()


def test_a_value_that_is_not_finite_at_the_beginning_ends_it_with_the_reason():
    minimiser = Minimiser()

    minimiser.take(float("nan"), [1.0])

    assert minimiser.is_done
    assert "nan" in minimiser.reason


def test_an_objective_without_a_lower_value_ends_at_the_base():
    def wrong(x):
        return float(x @ x), -2 * x  # the gradient points away from lower values

    start = np.ones(3)
    servers = Vectors(wrong, start)

    _, done = iterates(Minimiser(), servers)

    assert done.is_done
    assert "no step along the negative gradient" in done.reason
    assert np.array_equal(servers.vectors[POINT], start)


def test_a_failed_search_drops_the_history_and_goes_on():
    function, start = problems.whole(*problems.network())
    servers, minimiser = Vectors(function, start), Minimiser(tolerance=1e-7)
    _, minimiser = iterates(minimiser, servers, most=6)
    while minimiser.phase != "turn":
        minimiser.take(*servers.make(minimiser.move))
    base = servers.vectors[POINT].copy()

    servers.make(minimiser.move)
    minimiser.take(0.0, [1.0])  # no descent along the direction
    assert minimiser.phase == "back"
    assert minimiser.slots == ()
    minimiser.take(*servers.make(minimiser.move))
    found, done = iterates(minimiser, servers, most=60)

    assert np.array_equal(servers.vectors[POINT], found[-1])
    assert function(found[-1])[0] < function(base)[0]
    assert done.reason == "" or "gradient" in done.reason


def test_a_stored_minimiser_out_of_bounds_is_refused():
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode({"history": 1000}))
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(msgspec.msgpack.encode({"phase": "elsewhere"}))


@pytest.mark.parametrize("pairs", [0, 1, 3, 10])
def test_coefficients_give_the_direction_of_the_two_loops_on_vectors(pairs):
    rng = np.random.default_rng(pairs)
    matrix = rng.normal(size=(40, 40))
    hessian = matrix @ matrix.T + np.eye(40)
    steps = [rng.normal(size=40) for _ in range(pairs)]
    changes = [hessian @ s for s in steps]
    gradient = rng.normal(size=40)
    basis = np.array([*steps, *changes, gradient])

    found = np.array(direction((basis @ basis.T).tolist())) @ basis

    expected = -two_loops(gradient, list(zip(steps, changes, strict=True)))
    assert np.abs(found - expected).max() < 1e-9 * np.abs(expected).max()
