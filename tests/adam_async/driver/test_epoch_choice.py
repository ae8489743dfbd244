"""Which epoch is kept and when training ends: by validation images, never by test images."""

from adam_async.driver.stopping import EpochChoice
from adam_async.run.result import EpochResult


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
