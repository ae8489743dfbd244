"""Content of a checkpoint, and the options of a resumed run."""

from math import isnan

import msgspec
import pytest

from adam_async.checkpoint.checkpoint import (
    CheckpointError,
    check_data,
    check_kept_arrays,
    folder_name,
    resumed_config,
    resumed_options,
    saved_manifest,
)
from adam_async.checkpoint.names import age_order, is_folder_name
from adam_async.run.config import Config
from adam_async.run.counts import Evaluation
from adam_async.run.learning_rate import decide
from adam_async.run.option_sources import make_config
from adam_async.run.result import EpochResult
from adam_async.run.run_record import RunRecord
from adam_async.run.store_record import ArrayRecord
from adam_async.run.training_program import TrainingProgram
from tests.adam_async.checkpoint.checkpoints import CONFIG, DATA, manifest_of, record_of


def test_names_sort_as_checkpoints_were_taken_however_many_there_are():
    taken = [(1, 0), (1, 999_999), (1, 1_000_000), (2, 5), (10_000, 1)]
    names = [folder_name(*each) for each in taken]
    assert names[0] == "checkpoint-0001-000000"
    assert sorted([names[place] for place in (3, 0, 4, 2, 1)], key=age_order) == names
    assert all(map(is_folder_name, names))


@pytest.mark.parametrize(
    "name", ["latest", ".checkpoint-0001-000000.aside", "checkpoint-1", "checkpoint-a-b", "checkpoint-1-2-3"]
)
def test_names_of_checkpoints_are_recognised(name):
    assert not is_folder_name(name)


def test_a_manifest_has_the_facts_of_the_record_of_its_run():
    record = record_of(epoch=3, runs=("a", "b"))
    first, second = record.results
    record = msgspec.structs.replace(
        record,
        results=(first, msgspec.structs.replace(second, loss=None)),
        evaluated=(Evaluation(1, 0.75), Evaluation(2, 0.5, 0.25)),
        train_s=2.5,
    )
    found = saved_manifest(record, (2, 15))
    assert (found.run, found.training, found.name) == ("run-1", ("run-1", "a", "b"), "checkpoint-0002-000015")
    assert (found.config["momentum"], found.config["rate"], found.data) == (0.9, 0.05, DATA)
    assert (found.resume.epoch, len(found.resume.results), found.resume.train_s) == (3, 2, 2.5)
    assert found.epochs == saved_manifest(record, (2, 15)).epochs, "also with a loss that is no number"
    first, second = found.epochs
    assert first == EpochResult(
        epoch=1, images=60, skipped=0, train_loss=0.5, test_accuracy=0.75, train_s=1.5
    )
    assert isnan(second.train_loss)
    assert second.validation_accuracy == 0.25


def test_arrays_of_another_model_are_refused_with_the_first_difference():
    one, other = ArrayRecord("a", (3,)), ArrayRecord("b", (2, 3))
    check_kept_arrays((one, other), (one, other), manifest_of())
    for there, words in (
        ((one,), "run run-1 lacks parameter b; it is of another model"),
        ((one, other, ArrayRecord("x", (1,))), "has a superfluous parameter x"),
        ((one, ArrayRecord("b", (2, 4))), r"has ArrayRecord\(name='b', shape=\(2, 4\).*, and the model "),
    ):
        with pytest.raises(CheckpointError, match=words):
            check_kept_arrays(there, (one, other), manifest_of())


def test_a_resumed_run_may_have_other_numbers_of_roles_and_more_epochs():
    manifest = manifest_of()
    wanted = make_config(
        resumed_options(manifest), {"servers": 3, "replicas": 2, "epochs": 9, "processes": True, "rate": 0.0}
    )
    config = resumed_config(manifest, wanted)
    assert (config.servers, config.replicas, config.epochs, config.processes) == (3, 2, 9, True)
    assert (config.rate, config.momentum) == (0.05, 0.9)


def test_a_rate_that_was_left_open_is_left_open_for_it_depends_on_the_replicas():
    options = msgspec.to_builtins(Config(epochs=3))
    manifest = manifest_of(config=options)
    assert resumed_config(manifest, make_config(resumed_options(manifest), {"replicas": 4})).rate == 0.0
    with pytest.raises(CheckpointError, match=r"rate=0.02 \(there 0.0\)"):
        resumed_config(manifest, make_config(resumed_options(manifest), {"rate": 0.02}))


@pytest.mark.parametrize("change", [{}, {"until_accuracy": 0.99}, {"replicas": 4}])
def test_a_resumed_run_goes_on_along_the_curve_of_its_rate(change):
    began = msgspec.structs.replace(decide(Config(), 4), rate=0.0)
    manifest = manifest_of(config=msgspec.to_builtins(began))
    for wanted in (Config(**change), make_config(resumed_options(manifest), change)):
        resumed = decide(resumed_config(manifest, wanted), 4)
        assert (resumed.schedule, resumed.warm_up, resumed.epochs) == ("cosine", 1.0, 3)
        assert resumed.rate == decide(Config(replicas=resumed.replicas), 4).rate


def test_a_run_that_began_at_a_constant_rate_keeps_it_when_no_accuracy_ends_it_any_more():
    began = Config(until_accuracy=0.99, epochs=3, schedule="constant")
    manifest = manifest_of(config=msgspec.to_builtins(began))
    assert decide(resumed_config(manifest, Config(epochs=3)), 4).schedule == "constant"


def test_a_resumed_run_cannot_be_recorded_and_one_that_was_can_be_resumed():
    manifest = manifest_of(config=msgspec.to_builtins(Config(epochs=3, rate=0.05, record=True)))
    assert not resumed_config(manifest, make_config(resumed_options(manifest))).record
    with pytest.raises(CheckpointError, match="a record begins where its run does"):
        resumed_config(manifest, make_config(resumed_options(manifest), {"record": True}))


def test_a_resumed_run_may_use_another_machines_memory_and_disk():
    manifest = manifest_of()
    change = {"cache": "4G", "spill": "/fast/disk"}
    resumed = resumed_config(manifest, make_config(resumed_options(manifest), change))
    assert (resumed.cache, resumed.spill) == ("4G", "/fast/disk")


def test_options_that_a_resumed_run_cannot_change_are_named_with_both_values():
    manifest = manifest_of()
    wanted = make_config(resumed_options(manifest), {"momentum": 0.5, "images_per_group": 8})
    with pytest.raises(CheckpointError) as refused:
        resumed_config(manifest, wanted)
    assert "images_per_group=8 (there 4), momentum=0.5 (there 0.9); leave them out" in str(refused.value)


def test_the_error_of_a_finished_run_names_the_option_to_train_on():
    resume = msgspec.structs.replace(manifest_of().resume, epoch=4)
    manifest = manifest_of(15, epoch=3, resume=resume)
    with pytest.raises(CheckpointError, match=r"has trained 3 epochs, and epochs=3 .* give --epochs 4 or"):
        resumed_config(manifest, make_config(resumed_options(manifest)))
    assert resumed_config(manifest, make_config(resumed_options(manifest), {"epochs": 4})).epochs == 4


def test_a_run_that_trained_in_place_decides_anew_how_it_trains():
    options = {**msgspec.to_builtins(Config()), "weights": "aliased"}
    assert resumed_options(manifest_of(config=options))["weights"] == "auto"
    assert resumed_options(manifest_of(config={**options, "weights": "copy"}))["weights"] == "copy"


@pytest.mark.parametrize("asked", ["auto", "delta"])
def test_a_run_decides_the_form_of_gradients_anew_unless_its_caller_named_one(asked):
    config = msgspec.structs.replace(CONFIG, protocol="delta")
    program = TrainingProgram(config=config, spec={"name": "a model"}, asked_protocol=asked)
    record = RunRecord(program=program.record("run-1", ("driver", 1)))
    assert resumed_options(saved_manifest(record))["protocol"] == asked


def test_other_data_are_refused_with_the_difference():
    check_data(manifest_of(), {**DATA, "source": "elsewhere"})
    with pytest.raises(CheckpointError, match="data whose train_images is 60, but here it is 61"):
        check_data(manifest_of(), {**DATA, "train_images": 61})
    with pytest.raises(CheckpointError, match=r"^run run-1 was trained on data whose train_images is"):
        check_data(saved_manifest(record_of()), {**DATA, "train_images": 61})
