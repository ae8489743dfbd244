"""Tar shards: labels, hostile members, and shards that are cut short."""

import os
import tarfile
from pathlib import Path

import pytest

from adam_async.data_server.sources import limits
from adam_async.errors import DataError
from tests.adam_async.data_server.sources.small import described, grey, read, tar


def members(label: bytes = b"1", suffix: str = "cls", count: int = 40) -> list[tuple[str, bytes]]:
    """Return images of two classes, with their labels as the shards of others have them."""
    return [
        part
        for i in range(count)
        for part in ((f"d/{i:03}.png", grey(i)), (f"d/{i:03}.{suffix}", label if i % 2 else b"0"))
    ]


def write(folder: Path, *more: tuple[str | tarfile.TarInfo, bytes]) -> Path:
    (folder / "a.tar").write_bytes(tar(*members(), *more))
    return folder / "a.tar"


async def test_labels_may_be_numbers_names_or_fields_of_an_object(tmp_path: Path) -> None:
    for suffix, odd, even, names in [
        ("cls", b"1\n", b"0", ()),
        ("cls", b"dog", b"cat", ("cat", "dog")),
        ("json", described(1), described("0"), ()),
        ("json", described("dog"), b'{"cls": "cat"}', ("cat", "dog")),
    ]:
        parts = [
            part
            for i in range(40)
            for part in (
                (f"{i:03}.seg.png", b"?"),
                (f"{i:03}.png", grey(i)),
                (f"{i:03}.{suffix}", odd if i % 2 else even),
            )
        ]
        (tmp_path / "a.tar").write_bytes(tar(*parts))
        dataset = await read(tmp_path)

        assert dataset.class_names == names
        assert dataset.train_labels.tolist() == [int(i) % 2 for i in dataset.train_images[:, 0, 0, 0]]


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("member", "claim"),
    [
        ("../evil.png", "'../evil.png' has a name that is absolute or goes up"),
        ("d/../../evil.png", "goes up"),
        ("/tmp/evil.png", "absolute"),
        (special("d/x.png", tarfile.SYMTYPE, "/etc/passwd"), "is a link"),
        (special("d/x.png", tarfile.LNKTYPE, "d/000.png"), "is a link"),
        (special("d/x.png", tarfile.CHRTYPE), "is no ordinary file"),
        (special("d/x.png", tarfile.BLKTYPE), "is no ordinary file"),
        (special("d/x.png", tarfile.FIFOTYPE), "is no ordinary file"),
    ],
)
async def test_a_hostile_member_is_refused_and_nothing_is_written(
    tmp_path: Path, member: str | tarfile.TarInfo, claim: str
) -> None:
    path = write(tmp_path, (member, grey(1) if isinstance(member, str) else b""))
    with pytest.raises(DataError) as error:
        await read(path)
    dataset = await read(path, "skip")

    assert claim in str(error.value)
    assert len(dataset.train_labels) + len(dataset.test_labels) == 40
    assert len(dataset.damaged) == 1
    assert os.listdir(tmp_path) == ["a.tar"]
    assert not (tmp_path.parent / "evil.png").exists()


@pytest.mark.parametrize(
    ("more", "claim"),
    [
        ([("z.png", grey(1))], "z has png, but neither .cls nor .json"),
        ([("z.cls", b"1")], "z has cls, but no image"),
        ([("z.png", grey(1)), ("z.json", b"{")], "z has a label that cannot be read"),
        ([("z.png", grey(1)), ("z.json", b"[" * 60_000)], "z has a label that cannot be read"),
        ([("z.png", grey(1)), ("z.json", b"[1]")], 'z.json has no "label" or "cls"'),
        ([("z.png", grey(1)), ("z.cls", b"\xff")], "z has a label that cannot be read"),
        ([("z.png", grey(1)), ("z.cls", b"1" * 70_000)], "z has a label file of 70000 bytes"),
        ([("z.png", grey(1)), ("z.cls", b"-1")], "z has the label '-1', expected a class number from 0"),
        ([("z.png", grey(1)), ("z.cls", b"cat")], "z has the label 'cat', expected a class number from 0"),
        ([("z.png", b""), ("z.cls", b"1")], "z is no PNG"),
    ],
)
async def test_a_damaged_sample_is_named_or_left_out(
    tmp_path: Path, more: list[tuple[str, bytes]], claim: str
) -> None:
    path = write(tmp_path, *more)
    with pytest.raises(DataError) as error:
        await read(path)
    dataset = await read(path, "skip")

    assert claim in str(error.value)
    assert len(dataset.damaged) == 1
    assert len(dataset.train_labels) + len(dataset.test_labels) == 40


async def test_a_shard_that_is_cut_short_is_an_error_whatever_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))
    for size in (0, 100, 512, 700, 1024, 2048, end // 2, end):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"a.tar.*(cut short|not a tar file)"):
            await read(path, "skip")


async def test_a_damaged_header_in_the_middle_does_not_pass_for_the_end(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b"d/020.png")] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"after 40 members, at byte .* neither another one nor the end"):
        await read(path)


async def test_a_packed_shard_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(DataError, match="compressed, expected a plain tar file; unpack it"):
        await read(tmp_path)


async def test_members_are_counted_and_measured_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    monkeypatch.setattr(limits, "MAX_MEMBERS", 10)
    with pytest.raises(DataError, match=r"a.tar holds more than 10 members"):
        await read(path)
    monkeypatch.setattr(limits, "MAX_IMAGE_BYTES", 5)
    with pytest.raises(DataError, match=r"'d/000.png' has \d+ bytes, expected at most 5"):
        await read(path)
    monkeypatch.setattr(limits, "MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match=r"a.tar has \d+ bytes, expected at most 100"):
        await read(path)
