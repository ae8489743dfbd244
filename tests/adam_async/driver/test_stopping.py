"""Losses that show a divergence or no learning; the epoch that is kept, and the end by validation images."""

from math import inf, log, nan

import pytest

from adam_async.driver.stopping import EpochChoice, divergence, guessing, guessing_loss, largest_loss
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.result import EpochResult


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


def epoch_of(number, validation, test=0.5):
    return EpochResult(
        epoch=number,
        images=10,
        skipped=0,
        train_loss=1.0,
        test_accuracy=test,
        validation_accuracy=validation,
        train_s=1.0,
    )


def ends_after(choice, accuracies):
    for number, accuracy in enumerate(accuracies, 1):
        if choice.take(epoch_of(number, accuracy), {"of": number}):
            return number
    return None


def test_training_ends_when_nothing_got_better_for_as_long_as_patience_lasts():
    assert ends_after(EpochChoice(patience=2), [0.1, 0.5, 0.4, 0.6, 0.6, 0.6, 0.9]) == 6
    assert ends_after(EpochChoice(patience=2), [0.1, 0.2, 0.2, 0.3]) is None


def test_the_reason_names_the_best_epoch():
    choice = EpochChoice(patience=1)
    choice.take(epoch_of(1, 0.5), {})
    assert "best after epoch 1 (50.00%)" in choice.take(epoch_of(2, 0.4), {})


def test_the_best_epochs_weights_are_kept_and_else_the_last_ones():
    for keep_best, kept in ((True, 2), (False, 4)):
        choice = EpochChoice(keep_best=keep_best)
        ends_after(choice, [0.1, 0.5, 0.4, 0.5])
        assert (choice.epoch, choice.weights) == (kept, {"of": kept})


def test_test_images_decide_nothing_where_there_are_validation_images():
    choice = EpochChoice(keep_best=True, patience=2, until_accuracy=0.9)
    assert not choice.take(epoch_of(1, 0.5, test=0.1), {"of": 1})
    assert not choice.take(epoch_of(2, 0.4, test=1.0), {"of": 2})
    assert choice.epoch == 1
    assert choice.take(epoch_of(3, 0.9, test=0.0), {"of": 3})


def test_patience_counts_across_a_resume_and_the_best_later_epoch_is_kept():
    choice = EpochChoice(patience=3, keep_best=True, before=[epoch_of(1, 0.8), epoch_of(2, 0.5)])
    assert not choice.take(epoch_of(3, 0.6), {"of": 3})
    assert choice.take(epoch_of(4, 0.5), {"of": 4})
    assert choice.epoch == 3
