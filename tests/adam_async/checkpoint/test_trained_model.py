"""A trained model classifies images, with the class names of its training data."""

import os
from pathlib import Path

import numpy as np
import pytest

from adam_async import Config, LocalCluster, Model, make_dataset
from adam_async.checkpoint.names import FILE_NAME
from adam_async.checkpoint.trained_model import SavedModelError, dump_model
from adam_async.errors import ConfigError, ModelError
from adam_async.model import Network, mlp
from adam_async.model.keyed_random import Dice
from adam_async.model.spec import LayerSpec, ModelSpec

SPEC = mlp((4, 3), input_shape=(1, 2, 2), name="quarters")
"""Four pixels, three classes: class k is where pixel k is the brightest."""

WEIGHTS = {"fc1.weight": np.eye(3, 4, dtype=np.float32) * 50, "fc1.bias": np.zeros(3, np.float32)}
NAMES = ("north", "east", "south")


def pictures(shown: list[int]) -> np.ndarray:
    images = np.zeros((len(shown), 1, 2, 2), np.uint8)
    images.reshape(len(shown), 4)[np.arange(len(shown)), shown] = 255
    return images


def write_model(folder: Path) -> Path:
    path = folder / FILE_NAME
    path.write_bytes(dump_model(Network(SPEC), WEIGHTS, NAMES))
    return path


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_any_number_of_images_is_classified(tmp_path: Path, count: int) -> None:
    shown = [number % 3 for number in range(count)]

    found = Model.load(write_model(tmp_path)).predict(pictures(shown))

    assert found.names == [NAMES[number] for number in shown]
    assert found.numbers.tolist() == shown
    assert found.probabilities.shape == (count, 3)
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1)


def test_the_likeliest_classes_come_first_with_their_probabilities(tmp_path: Path) -> None:
    model = Model.load(str(tmp_path / write_model(tmp_path)))
    image = np.array([[[[0, 255], [127, 0]]]], np.uint8)

    (first, share), (second, less) = model.predict(image).best(0, 2)

    assert (first, second) == ("east", "south")
    assert share == pytest.approx(1 / (1 + np.exp(-50 * (1 - 127 / 255)) + np.exp(-50)))
    assert 0 < less < share


def test_a_folder_stands_for_the_model_in_it(tmp_path: Path) -> None:
    write_model(tmp_path)

    assert Model.load(tmp_path).class_names == NAMES


def test_a_class_without_a_name_is_called_by_its_number() -> None:
    assert Model(Network(SPEC), WEIGHTS).predict(pictures([2])).names == ["2"]


def test_a_file_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"; from checkpoints `adam-async checkpoint export {tmp_path} FILE`"
    ):
        Model.load(tmp_path)
    with pytest.raises(ConfigError, match=r"gone\.safetensors cannot be read: No such file"):
        Model.load(tmp_path / "gone.safetensors")
    (tmp_path / "other").write_bytes(b"something else that is long")
    with pytest.raises(SavedModelError, match="other is not a safetensors file"):
        Model.load(tmp_path / "other")


@pytest.mark.parametrize("kind", ["pipe", "device", "larger than the memory"])
def test_a_model_that_is_no_file_for_this_machine_is_an_error_and_no_wait(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 43)  # without a block on the disk
    said = "has 8796093022208 bytes, expected at most" if kind.startswith("larger") else "is a pipe, a socket"
    with pytest.raises(ConfigError, match=rf"model {path} cannot be read: 'model\.safetensors' {said}"):
        Model.load(tmp_path)


def test_outputs_that_are_no_probabilities_are_not_shown_as_such() -> None:
    layers = (*SPEC.layers[:-1], LayerSpec.of("loss", "mean_squared_error"))
    model = Model(Network(ModelSpec(name="r", input_shape=(1, 2, 2), layers=layers)), WEIGHTS)

    with pytest.raises(ConfigError, match="model 'r' ends in mean_squared_error"):
        model.predict(pictures([0]))


def test_a_model_is_evaluated_on_data_with_some_of_its_classes() -> None:
    dataset = make_dataset(
        name="south",
        source="made here",
        train=(pictures([2]), np.array([0])),
        test=(pictures([2, 2, 1]), np.array([0, 0, 0])),
        origins=("a", "b", "c", "d"),
        class_names=("south",),
    )

    found = Model(Network(SPEC), WEIGHTS, NAMES).evaluate(dataset)

    assert [(row.name, row.images, row.right) for row in found.classes] == [("south", 3, 2)]


async def test_a_trained_model_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    shown = [number % 3 for number in range(60)]
    dataset = make_dataset(
        name="quarters",
        source="made here",
        train=(pictures(shown), np.array(shown)),
        test=(pictures(shown), np.array(shown)),
        origins=("a", "b", "c", "d"),
        class_names=NAMES,
    )
    async with LocalCluster(Config(epochs=1, kernels="numpy"), dataset=dataset, spec=SPEC) as cluster:
        result = await cluster.train()
    Model.of(result).save(tmp_path / "out")
    tmp_path = tmp_path / "out"

    assert Model.of(result).class_names == Model.load(tmp_path).class_names == NAMES


def test_other_types_than_pixels_are_refused() -> None:
    with pytest.raises(ModelError, match="uint8 or floating point, not int64"):
        Model(Network(SPEC), WEIGHTS).predict(pictures([0]).astype(np.int64))


def test_a_model_is_written_whole_or_refused_by_name(tmp_path: Path) -> None:
    model = Model(Network(SPEC), WEIGHTS, NAMES)

    assert model.save(tmp_path / "a" / "b").read_bytes() == dump_model(Network(SPEC), WEIGHTS, NAMES)
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [FILE_NAME]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/model\.safetensors cannot be written"):
        model.save(tmp_path / "file")


@pytest.mark.parametrize(
    ("images", "claim"),
    [
        (pictures([0])[0, 0], r"shape \[2, 2\], which is one image; give several: images\[np\.newaxis\]"),
        ([[[1, 2], [3]]], "images must be one array"),
        ([[[1, 2], [3, 4]]], "uint8 or floating point, not int64"),
        (pictures([0]).astype(np.float32), "must lie between 0 and 1, not between 0 and 255"),
    ],
)
def test_invalid_images_are_refused_with_a_remedy(images: object, claim: str) -> None:
    with pytest.raises(ModelError, match=claim):
        Model(Network(SPEC), WEIGHTS).predict(images)


def test_one_image_with_its_channel_is_one_of_several() -> None:
    assert Model(Network(SPEC), WEIGHTS).predict(pictures([2])[0]).numbers.tolist() == [2]


def test_one_image_of_three_channels_is_refused() -> None:
    network = Network(mlp((12, 3), input_shape=(3, 2, 2)))
    model = Model(network, network.initial_weights(Dice(1)))

    with pytest.raises(ModelError, match=r"shape \[3, 2, 2\], which is one image"):
        model.predict(np.zeros((3, 2, 2), np.uint8))
