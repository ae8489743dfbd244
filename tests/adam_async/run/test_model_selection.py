"""The model that was asked for, or the one that fits; and what is said when none does."""

import numpy as np
import pytest

from adam_async import Config, LocalCluster, synthetic
from adam_async.errors import ConfigError
from adam_async.model.named import NAMED_MODELS, digits, mlp
from adam_async.model.network import Network
from adam_async.run.model_selection import (
    HIDDEN,
    check_fits,
    check_memory,
    check_size,
    choose_model,
    image_size,
    parameter_bytes,
)
from tests.adam_async.own_layer import OWN_LAYERS

DIGITS = {"name": "digits", "shape": [1, 8, 8], "classes": 10}
MNIST = {"name": "mnist", "shape": [1, 28, 28], "classes": 10}
CIFAR = {"name": "cifar-10", "shape": [3, 32, 32], "classes": 10}
LETTERS = {"name": "letters", "shape": [1, 28, 28], "classes": 26}

TOML = """
name = "tiny"
input = [1, 8, 8]
layers = [
    { name = "flat", kind = "flatten" },
    { name = "fc", kind = "dense", outputs = 10 },
    { name = "loss", kind = "softmax_cross_entropy" },
]
"""


@pytest.mark.parametrize(("data", "name"), [(DIGITS, "digits"), (MNIST, "mnist-adam"), (CIFAR, "cifar-conv")])
def test_auto_takes_the_named_model_that_fits(data, name):
    assert choose_model("auto", data) == NAMED_MODELS[name]()


@pytest.mark.parametrize("data", [DIGITS, MNIST, CIFAR], ids=lambda data: data["name"])
@pytest.mark.parametrize("classes", [1, 2, 9])
def test_auto_gives_a_named_model_no_output_that_is_no_class(data, classes):
    spec = choose_model("auto", {**data, "classes": classes})

    assert Network(spec).layers[-1].input_shapes[0] == (classes,)


@pytest.mark.parametrize(
    "data", [LETTERS, {"name": "colour", "shape": [3, 5, 7], "classes": 4}], ids=lambda data: data["name"]
)
def test_auto_makes_one_for_data_that_no_named_model_fits(data):
    spec = choose_model("auto", data)
    check_fits(spec, data)
    assert dict(spec.layers[1].options)["outputs"] == HIDDEN
    assert dict(spec.layers[-2].options)["outputs"] == data["classes"]


@pytest.mark.parametrize("shape", [[3, 16, 16], [3, 51, 64], [3, 17, 200]], ids=str)
def test_auto_makes_convolutions_for_photographs(shape):
    data = {"name": "photos", "shape": shape, "classes": 4}
    spec = choose_model("auto", data)
    check_fits(spec, data)
    assert [layer.kind for layer in spec.layers].count("conv2d") == 3
    assert dict(spec.layers[-2].options)["outputs"] == 4


def test_a_named_model_is_taken_when_it_fits():
    assert choose_model("digits", DIGITS) == digits()


@pytest.mark.parametrize("classes", [3, 26])
def test_a_named_model_gets_an_output_for_each_class(classes):
    spec = choose_model("mnist-adam", {**LETTERS, "classes": classes})
    assert Network(spec).layers[-1].input_shapes[0] == (classes,)


def test_a_file_is_read_as_a_spec():
    assert choose_model("mine.toml", DIGITS, text=TOML).name == "tiny"


@pytest.mark.parametrize(
    ("wanted", "data", "said"),
    [
        ("mnist-adam", DIGITS, r"takes images of \(1, 28, 28\).* but digits has \(1, 8, 8\); choose"),
        ("resnet", DIGITS, "unknown model 'resnet'; known: auto, mnist-adam, mlp, digits"),
        ("mine.toml", DIGITS, r"unknown model 'mine.toml' \(the file was not read\)"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_both_shapes_and_a_remedy(wanted, data, said):
    with pytest.raises(ConfigError, match=said):
        choose_model(wanted, data)


@pytest.mark.parametrize("text", ["name = ", 'name = "x"', TOML.replace("dense", "dance")])
def test_a_bad_file_is_a_configuration_error(text):
    with pytest.raises(ConfigError):
        choose_model("mine.toml", DIGITS, text=text)


def test_a_spec_that_a_caller_brings_is_held_against_the_data():
    check_fits(digits(), {**DIGITS, "classes": 3})
    with pytest.raises(ConfigError, match="takes images of"):
        check_fits(mlp(), DIGITS)
    with pytest.raises(ConfigError, match=r"digits has 10; choose .* give its last dense layer 10 outputs"):
        check_fits(mlp((64, 4), input_shape=(1, 8, 8)), DIGITS)


def test_a_model_with_nothing_to_train_is_refused():
    empty = "\n".join(line for line in TOML.splitlines() if "dense" not in line)
    with pytest.raises(ConfigError, match="has nothing to train"):
        choose_model("mine.toml", DIGITS, text=empty)


def test_the_model_mlp_is_made_for_any_image():
    spec = choose_model("mlp", LETTERS)

    check_fits(spec, LETTERS)
    assert spec.name == "mlp"
    assert choose_model("mlp", MNIST) == mlp()


def test_images_get_the_size_asked_for_or_that_of_the_model():
    assert image_size("48x64", "mnist-adam") == (64, 48)
    assert image_size("", "mnist-adam") == (28, 28)
    assert image_size("", "mine.toml", text=TOML.replace("[1, 8, 8]", "[1, 6, 9]")) == (9, 6)
    assert image_size("", "auto", spec=digits()) == (8, 8)
    assert image_size("", "auto") is image_size("", "mlp") is None


def test_a_size_that_the_data_do_not_have_is_refused():
    check_size("", DIGITS)
    check_size("8x8", DIGITS)
    with pytest.raises(ConfigError, match="size=8x9 does not fit digits, whose images are 8x8"):
        check_size("8x9", DIGITS)


def test_a_saved_model_for_other_images_is_refused_with_both_shapes():
    with pytest.raises(
        ConfigError, match=r"saved model 'digits' takes images of \(1, 8, 8\).* mnist has \(1, 28, 28\)"
    ):
        choose_model("auto", MNIST, init=digits())
    assert choose_model("auto", DIGITS, init=digits()) == digits()


def test_a_file_may_use_layers_of_the_caller():
    text = TOML.replace('{ name = "fc"', '{ name = "twice", kind = "doubled" },\n    { name = "fc"')
    assert choose_model("mine.toml", DIGITS, text=text, layers=OWN_LAYERS).name == "tiny"
    with pytest.raises(ConfigError, match="unknown kind 'doubled'"):
        choose_model("mine.toml", DIGITS, text=text)


PHOTOS = Network(mlp((3 * 900 * 1200, 256, 4), input_shape=(3, 900, 1200)))
IN_PLACE, COPIES = Config(weights="aliased"), Config(weights="copy", replicas=2)


def test_a_run_needs_several_times_its_parameters() -> None:
    one = PHOTOS.num_parameters * np.dtype(np.float32).itemsize

    assert parameter_bytes(PHOTOS, IN_PLACE) == 4 * one
    assert parameter_bytes(PHOTOS, COPIES) == 10 * one
    for more, sizes in (
        ({}, 12),
        ({"link": "tcp"}, 10),
        ({"copies": 3, "servers": 3}, 10),
        ({"consistency": "bsp"}, 10),
        ({"record": True}, 10),
    ):
        processes = Config(weights="copy", replicas=2, processes=True, **more)  # type: ignore[arg-type]
        assert parameter_bytes(PHOTOS, processes) == sizes * one, "shared memory has two sheets of values"
    assert parameter_bytes(PHOTOS, Config(weights="aliased", rule="adam")) == 8 * one


def test_too_little_memory_is_refused_with_what_there_is_and_what_to_do() -> None:
    check_memory(PHOTOS, IN_PLACE, 14 << 30)
    with pytest.raises(ConfigError, match=r"829,441,284 parameters.* about 13\.3 GB.* 8\.6 GB.*--size"):
        check_memory(PHOTOS, IN_PLACE, 8 << 30)


async def test_a_cluster_refuses_it_before_any_parameter_is_made() -> None:
    async with LocalCluster(
        Config(data_servers=1), dataset=synthetic(50), available_bytes=lambda: 1 << 20
    ) as cluster:
        with pytest.raises(ConfigError, match=r"needs about .* GB of memory, but 0\.0 GB are available"):
            await cluster.train()
