"""A checkpoint as one file for other programs: values, and the state of its rules under other names."""

import json
import tracemalloc
from contextlib import aclosing

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load

from adam_async.checkpoint.export import export_of
from adam_async.checkpoint.files import load_checkpoint, open_checkpoint
from adam_async.checkpoint.model_head import RULE_STATE, SUMS, SavedModelError, values_alone
from adam_async.checkpoint.trained_model import load_model, metadata_of
from adam_async.model import Network, mlp
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import CONFIG, checkpoint_of, written

SPEC = mlp((4, 3), input_shape=(1, 2, 2), name="quarters")
ADAM = msgspec.structs.replace(CONFIG, rule="adam", momentum=0.0, shard_bytes=64)


async def export_of_checkpoint(stored, metadata):
    store = stored.pieces.catalogue
    return await export_of(stored.source, store.arrays, store.record.rules, metadata)


async def exported(path, checkpoint, metadata=()):
    """Write a checkpoint, and return its export, and the checkpoint in memory."""
    async with Disk() as disk:
        folder = await written(disk, path)
        await folder.write(checkpoint)
        export = await export_of_checkpoint(await open_checkpoint(path, disk), dict(metadata))
        async with aclosing(export.parts()) as parts:
            data = b"".join([bytes(part) async for part in parts])
        assert (len(data), data[: len(export.head)]) == (export.nbytes, export.head)
        return data, await load_checkpoint(path, disk)


def filled(checkpoint):
    """Give each number of a checkpoint another value."""
    for start, array in enumerate((*checkpoint.weights.values(), *checkpoint.state.values())):
        array[...] = (np.arange(array.size) + 10_000 * start).reshape(array.shape)
    return checkpoint


async def test_an_export_has_the_values_and_the_rule_state_of_each_tensor_aligned(tmp_path):
    data, kept = await exported(tmp_path, filled(checkpoint_of(3)))
    found = load(data)
    state = {RULE_STATE + name: array for name, array in kept.state.items()}
    assert found.keys() == kept.weights.keys() | state.keys()
    assert {name for name in found if name.startswith(RULE_STATE)} == {
        f"rule_state/{array}/first/{tensor}"
        for array in ("mean", "square", "steps")
        for tensor in ("weights", "biases")
    }
    for name, array in {**kept.weights, **state}.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert json.loads(header.pop("__metadata__")[SUMS]).keys() == found.keys()
    for entry in header.values():
        assert (8 + size + entry["data_offsets"][0]) % (int(entry["dtype"][1:]) // 8) == 0


async def test_a_model_takes_the_values_of_an_export_and_nothing_of_its_rule_state(tmp_path):
    weights = {"fc1.weight": np.eye(3, 4, dtype=np.float32), "fc1.bias": np.ones(3, np.float32)}
    names = ("north", "east", "south")
    checkpoint = checkpoint_of(3, spec=SPEC.to_dict(), weights=weights, config=ADAM)
    for array in checkpoint.state.values():
        array[...] = 7
    data, _ = await exported(tmp_path, checkpoint, metadata_of(Network(SPEC), names))
    assert len(load(data)) == 8
    model = load_model(data)
    assert (model.network.spec, model.class_names) == (SPEC, names)
    assert model.weights.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(model.weights[name], array)


def test_a_file_without_rule_state_is_read_as_it_is_and_a_truncated_one_is_refused():
    head = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = len(head).to_bytes(8, "little") + head + bytes(8)
    assert values_alone(data, "it") is data
    with pytest.raises(SavedModelError, match="it is truncated"):
        values_alone(data[:-1], "it")


async def test_an_export_has_one_tensor_in_memory_at_a_time(tmp_path):
    """16 tensors of 1 MiB have 2 MiB of rule state each."""
    weights = {f"w{number}": np.zeros((512, 512), np.float32) for number in range(16)}
    config = msgspec.structs.replace(ADAM, shard_bytes=1 << 18)
    async with Disk() as disk:
        folder = await written(disk, tmp_path)
        await folder.write(checkpoint_of(3, weights=weights, config=config))
        stored = await open_checkpoint(tmp_path, disk)
        tracemalloc.start()
        try:
            export = await export_of_checkpoint(stored, {})
            await disk.write_atomic(tmp_path / "export", export.parts())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (tmp_path / "export").stat().st_size == export.nbytes > 48 << 20
    assert peak < 24 << 20
