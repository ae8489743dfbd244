"""The gradients that a step fills: zeros to add to, dense arrays, factors; each mistake is named."""

import numpy as np
import pytest

from adam_async.errors import ConfigError, StepFailed
from adam_async.run.arrays import ArraySpec, Factors
from adam_async.run.train_step import Batch, Gradients, StepSpec

ARRAYS = {"w": ArraySpec((3, 2)), "v": ArraySpec((3, 2)), "b": ArraySpec((3,))}


def gradients_of() -> Gradients:
    out = Gradients("mine", ARRAYS, {"w": 1}, 4)
    out.begin()
    return out


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def factors_of(rows: int) -> Factors:
    return Factors(ones(rows, 2), 2 * ones(rows, 3))


def test_each_batch_begins_with_zeros_and_takes_sums_and_whole_gradients() -> None:
    out = gradients_of()
    for _ in range(2):
        out.begin()
        out["b"] += ones(3)
        out["b"][0] += 5
        out["v"] = ones(3, 2)
        out["w"] = factors_of(2)
        out.check(weight=2)
    np.testing.assert_array_equal(out.dense("b"), [6, 1, 1])
    np.testing.assert_array_equal(out.dense("v"), ones(3, 2))


def test_factors_of_a_named_matrix_are_kept_and_those_of_another_are_multiplied() -> None:
    out = gradients_of()
    out["w"], out["v"] = factors_of(4), factors_of(4)
    out["w"] = factors_of(2)
    activations, errors = out.factors("w", 3)
    np.testing.assert_array_equal(activations, [[1, 1], [1, 1], [0, 0]])
    np.testing.assert_array_equal(errors, [[2, 2, 2], [2, 2, 2], [0, 0, 0]])
    np.testing.assert_array_equal(out.dense("v"), np.full((3, 2), 8))
    assert out.factors("v", 3) is None


def test_factors_may_have_several_rows_for_each_example() -> None:
    out = Gradients("mine", ARRAYS, {"w": 3}, 2)
    for array in ("v", "b"):
        out[array][...] = 0
    out["w"] = factors_of(5)
    out.check(weight=2)
    activations, errors = out.factors("w", 2)
    assert activations.shape == (6, 2)
    np.testing.assert_array_equal(errors.T @ activations, np.full((3, 2), 10))
    with pytest.raises(StepFailed, match="have 5 rows and the weight is 1: give at most 3 for each example"):
        out.check(weight=1)
    with pytest.raises(StepFailed, match="have 7 rows: give 1 to 6, at most 3 for each example"):
        out["w"] = factors_of(7)


def test_a_gradient_is_copied_so_that_its_memory_may_be_used_again() -> None:
    out, mine = gradients_of(), ones(3)
    out["b"] = mine
    mine[:] = 9
    np.testing.assert_array_equal(out.dense("b"), ones(3))


@pytest.mark.parametrize(
    ("name", "gradient", "said"),
    [
        ("c", ones(3), "the step has no array 'c'; it has 3: 'w', 'v', 'b'"),
        ("b", ones(4), r"the gradient of array 'b' has shape \(4,\), expected \(3,\)"),
        ("b", np.ones(3), r"the gradient of array 'b' has values of type float64.*\.astype\('float32'\)"),
        ("b", [1.0, 2.0, 3.0], "the gradient of array 'b' is a list: give a numpy array"),
        ("b", factors_of(2), "only a matrix has factors"),
        ("w", ones(3, 2), r"travels as factors: set out\['w'\] = Factors"),
        ("w", factors_of(5), "have 5 rows: give 1 to 4"),
        ("w", factors_of(0), "have 0 rows"),
        ("v", factors_of(0), "have 0 rows"),
        (
            "w",
            Factors(ones(2, 3), ones(2, 3)),
            r"`activations` of the factors.*shape \(2, 3\), expected \(2, 2\)",
        ),
        ("w", Factors(ones(2, 2), ones(3, 3)), r"`errors` of the factors.*shape \(3, 3\), expected \(2, 3\)"),
        (
            "v",
            Factors(ones(2, 2), np.ones((2, 3))),
            "`errors` of the factors of array 'v' has values of type",
        ),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_by_name(name: str, gradient: object, said: str) -> None:
    with pytest.raises(StepFailed, match=f"^step mine failed in step: .*{said}"):
        gradients_of()[name] = gradient


def test_a_gradient_that_is_missing_or_has_more_rows_than_the_weight_is_named() -> None:
    out = gradients_of()
    out["w"], out["v"] = factors_of(3), ones(3, 2)
    with pytest.raises(StepFailed, match="the step set no gradient of array 'b'"):
        out.check(weight=3)
    out["b"] = ones(3)
    out.check(weight=3)
    with pytest.raises(StepFailed, match="array 'w' have 3 rows and the weight is 2"):
        out.check(weight=2)
    with pytest.raises(StepFailed, match="cannot be removed"):
        del out["b"]
    assert (list(out), len(out)) == (["w", "v", "b"], 3)


def test_scaled_images_go_from_0_to_1() -> None:
    images = np.array([0, 51, 255], np.uint8).reshape(1, 1, 1, 3)
    scaled = Batch(images, np.zeros(1, np.int64)).scaled(np.float64)
    np.testing.assert_allclose(scaled, [[[[0, 0.2, 1]]]])


def test_the_record_of_a_step_comes_back_and_others_are_refused() -> None:
    spec = StepSpec(name="a:b", args={"hidden": 3}, shape=(1, 8, 8), classes=10)
    assert StepSpec.from_dict(spec.to_dict()) == spec
    assert StepSpec.from_dict({"name": "digits"}) is None
    for wrong in ({"step": 3}, {"step": {"name": "a:b", "shape": [1, 8, 8], "classes": 0}}):
        with pytest.raises(ConfigError, match="the record of"):
            StepSpec.from_dict(wrong)
