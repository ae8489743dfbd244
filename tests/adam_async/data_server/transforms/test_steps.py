"""Every wrong option has an error of its own, which names step, option and value, and says what is right."""

import re

import numpy as np
import pytest

from adam_async.data_server.transforms.recipe import Recipe
from adam_async.data_server.transforms.steps import KINDS, REQUIRED, check_step
from adam_async.errors import ConfigError

RIGHT = {
    "shift": {"pixels": 2},
    "flip": {},
    "rotate": {"degrees": 10.5},
    "scale": {"by": 0.1},
    "shear": {"by": 0.1},
    "elastic": {"pixels": 4},
    "crop": {},
    "pad": {"pixels": 2},
    "brightness": {"by": 0.1},
    "contrast": {"by": 0.1},
    "noise": {"levels": 5},
    "cutout": {"pixels": 3},
    "normalise": {},
}
OPTIONS = [(kind, key) for kind, options in KINDS.items() for key in options]
NUMBERS = [(kind, key) for kind, key in OPTIONS if not (KINDS[kind][key].choices or KINDS[kind][key].flag)]


def test_every_kind_is_tested_here():
    assert set(RIGHT) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_options_have_their_defaults(kind):
    step = check_step({"kind": kind, **RIGHT[kind]}, "step 1")

    assert set(step.options) == set(KINDS[kind])
    assert REQUIRED not in step.options.values()
    for key, value in RIGHT[kind].items():
        assert step.options[key] == value


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in RIGHT for key in RIGHT[kind]])
def test_an_option_without_a_default_must_be_given(kind, key):
    options = {name: value for name, value in RIGHT[kind].items() if name != key}

    with pytest.raises(ConfigError, match=rf"step 4 \({kind}\) needs the option '{key}', a "):
        check_step({"kind": kind, **options}, "step 4")


@pytest.mark.parametrize(("kind", "key"), OPTIONS)
@pytest.mark.parametrize("value", ["soft", None, [], {}, ["x"]])
def test_a_value_of_the_wrong_kind_is_refused(kind, key, value):
    with pytest.raises(ConfigError, match=rf"step 2 \({kind}\): {key} = {re.escape(repr(value))}, expected "):
        check_step({"kind": kind, **RIGHT[kind], key: value}, "step 2")


@pytest.mark.parametrize(("kind", "key"), NUMBERS)
@pytest.mark.parametrize("value", [-1, 1e9, float("nan"), float("inf"), True, "3"])
def test_a_number_out_of_its_range_is_refused(kind, key, value):
    with pytest.raises(
        ConfigError, match=rf"step 2 \({kind}\): {key} = {value!r}, expected a .*number from .* to"
    ):
        check_step({"kind": kind, **RIGHT[kind], key: value}, "step 2")


@pytest.mark.parametrize(("kind", "key"), [(k, key) for k, key in NUMBERS if KINDS[k][key].whole])
def test_a_fraction_is_refused_where_a_whole_number_is_needed(kind, key):
    with pytest.raises(ConfigError, match=rf"{key} = 2.5, expected a whole number"):
        check_step({"kind": kind, **RIGHT[kind], key: 2.5}, "step 2")


@pytest.mark.parametrize(
    ("step", "claim"),
    [
        (3, "step 1 is 3, expected a table with a kind"),
        ({}, "step 1 has no kind; known kinds: shift, flip"),
        ({"kind": "blur"}, "step 1 has the kind 'blur'; known kinds: shift, .*, normalise"),
        ({"kind": ["flip"]}, r"step 1 has the kind \['flip'\]"),
        ({"kind": "flip", "axis": 2}, r"step 1 \(flip\) has no option 'axis' = 2; known: direction, chance"),
        ({"kind": "shift", "pixels": 1.5}, "pixels = 1.5, expected a whole number; .* whole = false"),
        ({"kind": "flip", "direction": "up"}, 'direction = \'up\', expected "horizontal" or "vertical"'),
        ({"kind": "shift", "pixels": 2, "whole": 1}, "whole = 1, expected true or false"),
        ({"kind": "pad", "pixels": 2, "edge": "wrap"}, 'edge = \'wrap\', expected "black" or "repeat"'),
        ({"kind": "normalise", "mean": 3}, "std = None, give both mean and std, or neither"),
        ({"kind": "normalise", "std": [3]}, "mean = None, give both mean and std, or neither"),
    ],
)
def test_other_errors_say_what_to_do(step, claim):
    with pytest.raises(ConfigError, match=claim):
        check_step(step, "step 1")


@pytest.mark.parametrize(
    ("step", "claim"),
    [
        ({"kind": "crop", "rows": 33, "padding": 2}, r"step 2 \(crop\): rows = 33, expected at most 32"),
        ({"kind": "crop", "columns": 29}, r"step 2 \(crop\): columns = 29, expected at most 28"),
        ({"kind": "normalise", "mean": [1, 2], "std": 3}, r"mean = \[1, 2\], expected as .* channels: 1"),
        ({"kind": "normalise", "mean": 1, "std": [3, 4]}, r"std = \[3, 4\], expected as .* channels: 1"),
    ],
)
def test_options_that_do_not_fit_the_images_are_refused(step, claim):
    with pytest.raises(ConfigError, match=claim):
        Recipe.of([{"kind": "flip"}, step], (1, 28, 28), kernels="numpy")


def test_a_later_step_sees_the_shape_that_an_earlier_one_makes():
    steps = [{"kind": "pad", "pixels": 3}, {"kind": "crop", "rows": 34, "columns": 33}]

    assert Recipe.of(steps, (1, 28, 28), kernels="numpy").output_shape == (1, 34, 33)


@pytest.mark.parametrize("draws", [-1, 1.5, "two", np.int64(3)])
def test_the_draws_of_a_users_function_are_a_whole_number(draws):
    with pytest.raises(ConfigError, match=r"step 1 \(mine\): draws = .* expected a whole number"):
        check_step({"kind": "mine", "draws": draws}, "step 1", ["mine"])


def test_options_of_a_users_function_are_not_ours_to_check():
    step = check_step({"kind": "mine", "anything": None}, "step 1", ["mine"])

    assert step.options == {"draws": 4, "anything": None}
