"""Content of a checkpoint, and the options of a resumed run."""

import json
from math import isnan, nan

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load

from adam_async.checkpoint.manifest import (
    CheckpointError,
    EpochValues,
    check_data,
    epoch_values,
    folder_name,
    index_file,
    manifest_file,
    read_manifest,
    resumed_config,
    resumed_options,
    split,
    tensor_file,
)
from adam_async.checkpoint.names import age_order, is_folder_name
from adam_async.messages.loss_sums import LossSum
from adam_async.run.config import Config
from adam_async.run.learning_rate import decide
from adam_async.run.option_sources import make_config
from tests.adam_async.checkpoint.checkpoints import DATA, manifest_of, result_of


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


def test_a_tensor_file_is_read_by_the_library():
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b/c": np.array([1.5, np.inf]),
        "counts": np.array([2**40], np.int64),
        "nothing": np.empty((0, 3), np.float32),
    }
    data = b"".join(tensor_file(arrays))
    found = load(data)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    assert int.from_bytes(data[:8], "little") % 8 == 0


def test_tensors_are_spread_over_files_in_order_and_a_large_one_has_its_own():
    sizes = {"a": 3, "b": 5, "c": 20, "d": 1, "e": 8}
    arrays = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
    assert list(split("model", arrays, limit=8).values()) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(split("model", arrays, limit=8))[1] == "model-00002-of-00004.safetensors"
    assert list(split("state", arrays, limit=100)) == ["state-00001-of-00001.safetensors"]
    assert split("state", {}) == {}


def test_the_index_has_the_file_of_each_parameter():
    arrays = {"a": np.zeros(3, np.float32), "b": np.zeros(1, np.float32)}
    index = json.loads(index_file({"one": ["a"], "two": ["b"]}, arrays))
    assert index == {"metadata": {"total_size": 16}, "weight_map": {"a": "one", "b": "two"}}


def test_a_manifest_is_read_back_whole():
    manifest = manifest_of(epochs=epoch_values([result_of(1), result_of(2, loss=nan)]))
    found = read_manifest(manifest_file(manifest), "m")
    assert msgspec.structs.replace(found, checksum="") == manifest
    first, second = found.epoch_results
    assert first == result_of(1)
    assert isnan(second.train_loss)


def test_any_changed_character_of_a_manifest_is_noticed():
    text = manifest_file(manifest_of())
    for place in range(len(text)):
        for bit in (0, 5, 7):  # bit 5 is the case of a letter, and bit 7 is not ASCII
            changed = text[:place] + bytes([text[place] ^ 1 << bit]) + text[place + 1 :]
            with pytest.raises(CheckpointError):
                read_manifest(changed, "m")


@pytest.mark.parametrize("losses", [(), ({2: LossSum(0, 1)},), ({2: LossSum(-1, None)},)])
def test_losses_that_no_shard_can_have_are_damage(losses):
    with pytest.raises(CheckpointError, match="m is damaged: its sets of groups: "):
        read_manifest(manifest_file(manifest_of(losses=losses)), "m")


@pytest.mark.parametrize("number", [0, 9])
def test_a_manifest_of_another_format_is_named_with_a_cure(number):
    text = manifest_file(manifest_of(format=f"adam-async/checkpoint/{number}"))
    named = f"m has the format 'adam-async/checkpoint/{number}'; this version reads .*: finish the run with"
    with pytest.raises(CheckpointError, match=named):
        read_manifest(text, "m")


def test_a_manifest_is_an_object():
    with pytest.raises(CheckpointError, match="m is damaged: it is not the JSON of a manifest"):
        read_manifest(b"[]", "m")


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
    manifest = manifest_of(config=options, rate=0.06)
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


def test_other_data_are_refused_with_the_difference():
    check_data(manifest_of(), {**DATA, "source": "elsewhere"})
    with pytest.raises(CheckpointError, match="data whose train_images is 60, but here it is 61"):
        check_data(manifest_of(), {**DATA, "train_images": 61})


def test_each_epoch_of_a_run_is_converted_once():
    values, epochs = EpochValues(), [result_of(1), result_of(2, loss=nan)]
    first = values.of(epochs)
    epochs.append(result_of(3))
    later = values.of(epochs)
    assert first == epoch_values(epochs[:2])
    assert later == epoch_values(epochs)
    assert [one is other for one, other in zip(first, later, strict=False)] == [True, True]
    assert values.of(epochs[:1]) == epoch_values(epochs[:1])
    another = [result_of(1, loss=2.0), *epochs[1:]]
    assert values.of(another) == epoch_values(another)
