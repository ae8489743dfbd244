"""A saved model comes back as it was; anything else is refused with the reason."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from adam_async.checkpoint.model_head import SUMS
from adam_async.checkpoint.names import FILE_NAME
from adam_async.checkpoint.trained_model import SavedModelError, dump_model, load_model, save_model
from adam_async.model import Network, mlp, named_model
from adam_async.model.keyed_random import Dice
from adam_async.runtime.disk import Disk

NETWORK = Network(named_model("digits"))
WEIGHTS = NETWORK.initial_weights(Dice(1))
DATA = dump_model(NETWORK, WEIGHTS)


def with_header(change) -> bytes:
    """The file with another header before the same tensors."""
    size = int.from_bytes(DATA[:8], "little")
    header = json.loads(DATA[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + DATA[8 + size :]


def test_a_model_comes_back_as_it_was_saved() -> None:
    saved = load_model(DATA)
    weights = saved.weights

    assert saved.network.spec == NETWORK.spec
    assert saved.trained_names == ()
    assert weights.keys() == WEIGHTS.keys()
    for name, value in WEIGHTS.items():
        assert weights[name].dtype == np.float32
        np.testing.assert_array_equal(weights[name], value)


def test_float64_weights_stay_float64() -> None:
    network = Network(mlp((4, 3, 2), input_shape=(4,)), np.float64)
    weights = network.initial_weights(Dice(1))

    loaded = load_model(dump_model(network, weights)).weights

    assert loaded["fc1.weight"].dtype == np.float64
    np.testing.assert_array_equal(loaded["fc1.weight"], weights["fc1.weight"])


def test_names_of_classes_come_back_in_their_order() -> None:
    saved = load_model(dump_model(NETWORK, WEIGHTS, ("zebra", "ant")))

    assert saved.trained_names == ("zebra", "ant")


@pytest.mark.parametrize(
    ("names", "reason"),
    [(["a"] * 11, "names 11 classes, but its model has 10 outputs"), ([3], "damaged metadata: class_names")],
)
def test_names_that_the_model_cannot_have_are_refused(names: list, reason: str) -> None:
    def name(header) -> None:
        ours = json.loads(header["__metadata__"]["adam-async"])
        header["__metadata__"]["adam-async"] = json.dumps({**ours, "class_names": names})

    with pytest.raises(SavedModelError, match=reason):
        load_model(with_header(name))


def test_equal_weights_give_equal_bytes_in_any_order() -> None:
    other_order = {name: WEIGHTS[name].copy() for name in reversed(WEIGHTS)}

    assert dump_model(NETWORK, other_order) == DATA


@pytest.mark.slow
def test_another_process_writes_the_same_bytes() -> None:
    program = (
        "import hashlib; from adam_async.model.keyed_random import Dice; from adam_async.model import *;"
        "from adam_async.checkpoint.trained_model import dump_model; n = Network(named_model('digits'));"
        "print(hashlib.sha256(dump_model(n, n.initial_weights(Dice(1)))).hexdigest())"
    )
    digests = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }

    assert len(digests) == 1


@pytest.mark.parametrize("length", [0, 7, 8, 40, len(DATA) // 2, len(DATA) - 1])
def test_a_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(SavedModelError, match=r"m\.safetensors (is truncated|has \d bytes)"):
        load_model(DATA[:length], origin="m.safetensors")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"P6 255 255 255 a picture", "not a safetensors file"),
        (b"\x04\0\0\0\0\0\0\0null", "not a safetensors file"),
        (save({"a": np.zeros(3, np.float32)}), "without a model's spec"),
        (save({}, metadata={"adam-async": "{"}), "damaged metadata"),
        (save({}, metadata={"adam-async": "[" * 100_000}), "damaged metadata"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "not a safetensors file"),
        (save({}, metadata={"adam-async": '{"format_version": "9", "spec": {}}'}), "has the format '9'"),
        (
            save({}, metadata={"adam-async": '{"format_version": "adam-async/model/1", "spec": {}}'}),
            "holds no valid spec: a model needs the key 'name'",
        ),
        (DATA + b"more", "is damaged"),
    ],
)
def test_an_invalid_model_file_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(SavedModelError, match=f"the model file .*{reason}"):
        load_model(data)


@pytest.mark.parametrize("place", [-1, -9000, -len(DATA) // 2])
def test_a_changed_bit_of_a_weight_is_refused_with_the_tensor(place: int) -> None:
    data = bytearray(DATA)
    data[place] ^= 1
    with pytest.raises(SavedModelError, match=r"the bytes of 'fc\d\.\w+' are not those that were written"):
        load_model(bytes(data))


@pytest.mark.parametrize("sums", ["7", "{", "[" * 100_000])
def test_checksums_that_cannot_be_read_are_refused(sums: str) -> None:
    data = with_header(lambda header: header["__metadata__"].update({SUMS: sums}))
    with pytest.raises(SavedModelError, match=r"the checksums under .* are no JSON object"):
        load_model(data)


def test_a_file_of_another_program_without_checksums_is_read() -> None:
    data = with_header(lambda header: header["__metadata__"].pop(SUMS))
    assert load_model(data).weights.keys() == WEIGHTS.keys()


def test_a_missing_tensor_is_named() -> None:
    tensors = {name: value for name, value in WEIGHTS.items() if name != "fc2.bias"}

    with pytest.raises(SavedModelError, match=r"lacks fc2\.bias, which model 'digits' has"):
        dump_model(NETWORK, tensors)
    with pytest.raises(SavedModelError, match=r"lacks fc2\.bias"):
        load_model(_resaved(tensors))


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("fc9.bias", np.zeros(3, np.float32), "has fc9.bias, which model 'digits' does not have"),
        ("fc2.bias", np.zeros(11, np.float32), "fc2.bias has shape [11], but model 'digits' needs [10]"),
        ("fc2.bias", np.zeros(10, np.int32), "fc2.bias holds int32"),
    ],
)
def test_a_wrong_tensor_is_named_with_its_problem(name: str, values: np.ndarray, problem: str) -> None:
    with pytest.raises(SavedModelError, match=re.escape(problem)):
        load_model(_resaved({**WEIGHTS, name: values}))


def test_a_shape_that_lies_about_the_bytes_is_refused() -> None:
    def stretch(header) -> None:
        header["fc2.bias"]["shape"] = [11]

    with pytest.raises(SavedModelError, match="damaged"):
        load_model(with_header(stretch))


async def test_a_model_is_written_as_one_file_of_a_fixed_name(tmp_path: Path) -> None:
    async with Disk() as disk:
        path = await save_model(NETWORK, WEIGHTS, tmp_path / "out", disk)
        names = await disk.names(tmp_path / "out")

    assert path == tmp_path / "out" / FILE_NAME
    assert names == [FILE_NAME]
    assert path.read_bytes() == DATA


def _resaved(tensors) -> bytes:
    """Other tensors under the metadata of the model."""
    size = int.from_bytes(DATA[:8], "little")
    return save(tensors, metadata=json.loads(DATA[8 : 8 + size])["__metadata__"])
