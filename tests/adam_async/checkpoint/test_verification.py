"""A verification reads every byte of a checkpoint, and finds each changed one by its file."""

import os
from hashlib import sha256

import msgspec
import numpy as np
import pytest

from adam_async.checkpoint import manifest, verification
from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.manifest import Checkpoint, manifest_file, read_manifest
from adam_async.checkpoint.verification import verify_checkpoint
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import checkpoint_of, manifest_of

NAME = "checkpoint-0002-000003"
MODEL_FILE = "model-00001-of-00001.safetensors"


async def written(disk, path, checkpoint):
    """Write a checkpoint; returns its folder."""
    folder = CheckpointFolder(path, disk)
    await folder.take_up(None)
    await folder.write(checkpoint)
    return path / NAME


def forge(path, data):
    """Replace a file, and give the manifest its size and digest, as a forger does."""
    path.write_bytes(data)
    manifest = path.parent / "manifest.json"
    found = read_manifest(manifest.read_bytes(), "m")
    files = [
        msgspec.structs.replace(each, bytes=len(data), sha256=sha256(data).hexdigest())
        if each.name == path.name
        else each
        for each in found.files
    ]
    manifest.write_bytes(manifest_file(msgspec.structs.replace(found, files=tuple(files))))


async def test_a_whole_checkpoint_is_whole_by_all_its_bytes(tmp_path):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, checkpoint_of())
        before = disk.statistics().read_bytes
        found = await verify_checkpoint(folder, disk)
        assert (found.whole, found.files, found.problems) == (True, 4, ())
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        assert found.bytes == sum(sizes.values()) - sizes["manifest.json"]
        assert disk.statistics().read_bytes - before == sum(sizes.values())


@pytest.mark.parametrize("stride", [pytest.param(1, marks=[pytest.mark.thorough, pytest.mark.slow]), 37])
async def test_a_flipped_bit_in_any_byte_is_found_and_its_file_is_named(tmp_path, stride):
    flips = 0
    async with Disk() as disk:
        folder = await written(disk, tmp_path, checkpoint_of(rows=1))
        for path in folder.iterdir():
            data = path.read_bytes()
            for place in range(0, len(data), stride):
                path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
                found = await verify_checkpoint(folder, disk)
                assert [problem.file for problem in found.problems] == [path.name]
                assert not found.whole
                flips += 1
            path.write_bytes(data)
        assert (await verify_checkpoint(folder, disk)).whole
    assert flips > 4000 / stride


@pytest.mark.parametrize("piece_bytes", [7, 64, 4 << 20])
async def test_damage_within_values_has_the_place_of_its_block(tmp_path, monkeypatch, piece_bytes):
    for module in (manifest, verification):
        monkeypatch.setattr(module, "BLOCK_BYTES", 100)
    monkeypatch.setattr(verification, "PIECE_BYTES", piece_bytes)
    async with Disk() as disk:
        folder = await written(disk, tmp_path, checkpoint_of(rows=2))
        path = folder / MODEL_FILE
        data = bytearray(path.read_bytes())
        assert (await verify_checkpoint(folder, disk)).whole
        values_at = len(data) - 2 * 30 * 4 - 30 * 8
        data[values_at + 2 * 30 * 4 + 230] ^= 64  # in the third block of the second tensor
        path.write_bytes(data)
        (problem,) = (await verify_checkpoint(folder, disk)).problems
    assert problem.offset == values_at + 2 * 30 * 4 + 200
    assert "its checksum is wrong" in problem.text
    assert f" to {len(data):,}, in first/biases, differ from their CRC-32" in problem.text


@pytest.mark.parametrize("file", ["manifest.json", MODEL_FILE, "model.safetensors.index.json"])
async def test_a_missing_or_shortened_file_is_named(tmp_path, file):
    async with Disk() as disk:
        folder = await written(disk, tmp_path, checkpoint_of())
        os.truncate(folder / file, 100)
        (cut,) = (await verify_checkpoint(folder, disk)).problems
        (folder / file).unlink()
        (gone,) = (await verify_checkpoint(folder, disk)).problems
    assert (cut.file, gone.file) == (file, file)
    assert str(folder / file) in cut.text
    assert gone.text == f"{folder / file} is missing"


HEADERS = {
    "a huge header": ((1 << 60).to_bytes(8, "little"), "the header would have", 0),
    "no header": (b"\x07", "at least 8", 0),
    "no JSON": (b"\x02" + bytes(7) + b"{[", "the header cannot be read", 8),
    "a tensor outside": ({"x": ("F32", [2], [0, 8])}, "the tensors of the header end at byte", 8),
    "two tensors in one place": (
        {"x": ("F32", [1], [0, 4]), "y": ("F32", [1], [0, 4])},
        "gives 'y' the bytes 0 to 4",
        8,
    ),
    "a shape of another size": ({"x": ("F32", [1 << 62, 1 << 62], [0, 4])}, "gives 'x' the bytes 0 to 4", 8),
    "no checksum": ({"x": ("F32", [1], [0, 4])}, "the header has no CRC-32 of 'x'", 8),
    "an unknown type": ({"x": ("X9", [1], [0, 4])}, "Invalid enum value 'X9'", 8),
}


@pytest.mark.parametrize("kind", HEADERS)
async def test_a_forged_header_is_a_problem_at_its_offset(tmp_path, kind):
    head, words, offset = HEADERS[kind]
    if isinstance(head, dict):
        fields = ("dtype", "shape", "data_offsets")
        text = msgspec.json.encode(
            {name: dict(zip(fields, each, strict=True)) for name, each in head.items()}
        )
        head = len(text).to_bytes(8, "little") + text + bytes(4)
    async with Disk() as disk:
        folder = await written(disk, tmp_path, checkpoint_of())
        forge(folder / MODEL_FILE, head)
        (problem,) = (await verify_checkpoint(folder, disk)).problems
    assert words in problem.text
    assert (problem.file, problem.offset) == (MODEL_FILE, offset)


@pytest.mark.parametrize("piece_bytes", [4 << 20, 8, 1])
async def test_values_that_are_not_finite_are_counted_from_their_offset(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(verification, "PIECE_BYTES", piece_bytes)
    odd, broad = np.ones(3, np.float32), np.ones((2, 2))
    broad[1, 0], broad[1, 1] = np.nan, -np.inf  # values of 8 bytes that begin between two multiples of 8
    state = {"steps/odd": np.full(3, -1, np.int64)}  # bytes that are no finite float
    checkpoint = Checkpoint(manifest=manifest_of(), weights={"odd": odd, "broad": broad}, state=state)
    async with Disk() as disk:
        folder = await written(disk, tmp_path, checkpoint)
        found = await verify_checkpoint(folder, disk)
    (problem,) = found.problems
    data = (folder / MODEL_FILE).read_bytes()
    assert problem.offset == len(data) - 16
    assert np.isnan(np.frombuffer(data[problem.offset :][:8], np.float64))
    assert f"2 values are not finite, the first one at byte {problem.offset:,}, in broad" in problem.text
