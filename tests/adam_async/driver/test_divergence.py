"""Losses that show a divergence."""

from math import inf, log, nan

import pytest

from adam_async.driver.stopping import divergence, guessing, guessing_loss, largest_loss
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.spec import LayerSpec, ModelSpec


def model_with(loss, **options):
    layers = (
        LayerSpec.of("flat", "flatten"),
        LayerSpec.of("fc", "dense", outputs=4),
        LayerSpec.of("loss", loss, **options),
    )
    return Network(ModelSpec(name="small", input_shape=(1, 2, 2), layers=layers))


@pytest.mark.parametrize("loss", [nan, inf, 23.1])
def test_a_loss_far_beyond_guessing_diverges_with_remedies(loss):
    message = divergence(loss, largest=10 * log(10), epoch=3, rate=0.5)
    assert "the loss of epoch 3" in message
    assert "--rate 0.05" in message


def test_an_ordinary_loss_does_not_diverge():
    assert divergence(log(10), largest=largest_loss(Network(digits())), epoch=1, rate=0.1) == ""


def test_the_bound_is_that_of_guessing_times_ten():
    assert largest_loss(model_with("softmax_cross_entropy")) == pytest.approx(10 * log(4))
    weighted = model_with("softmax_cross_entropy", class_weights=(1.0, 1.0, 1.0, 5.0))
    assert largest_loss(weighted) == pytest.approx(50 * log(4))


def test_a_loss_without_a_scale_of_its_own_has_no_bound():
    assert largest_loss(model_with("mean_squared_error")) == inf


LEAST = 0.99 * log(4)


def guess(loss, accuracy=0.3, *, least=LEAST, steps=60, rule="sgd"):
    return guessing(loss, accuracy, least=least, classes=4, steps=steps, rule=rule, rate=0.5)


def test_the_loss_of_guessing_after_many_steps_is_reported_with_remedies():
    message = guess(log(4))
    assert message.startswith("the model has not learnt: its training loss 1.386 is no better than guessing")
    assert "--rate 0.05, it was 0.5), --rule adam or" in message
    assert "--rule" not in guess(log(4), rule="adam")


@pytest.mark.parametrize(
    "how", [{"loss": 1.3}, {"steps": 59}, {"accuracy": 0.4}, {"loss": nan}, {"loss": inf}, {"least": inf}]
)
def test_a_run_that_learns_or_is_short_or_diverges_has_no_warning_of_guessing(how):
    assert guess(**{"loss": log(4), **how}) == ""


def test_the_loss_of_guessing_is_that_of_as_many_classes_as_there_are():
    assert guessing_loss(model_with("softmax_cross_entropy"), 10) == pytest.approx(0.99 * log(4))
    assert guessing_loss(model_with("softmax_cross_entropy"), 3) == pytest.approx(0.99 * log(3))
    assert guessing_loss(model_with("mean_squared_error"), 4) == inf
    weighted = model_with("softmax_cross_entropy", class_weights=(1.0, 1.0, 1.0, 5.0))
    assert guessing_loss(weighted, 4) == inf
