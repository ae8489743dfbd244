"""Compressed shards hold what plain ones hold, and no more than those may."""

import gzip
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from adam_async.cli.data import kind_of
from adam_async.data_server.dataset import Damage, Policy
from adam_async.data_server.sources import limits
from adam_async.data_server.sources.shards import tar_members, unpack
from adam_async.errors import DataError
from adam_async.runtime.disk import Disk
from tests.adam_async.data_server.sources.small import grey, images_and_labels, read, tar, write_small


def shard(count: int = 40, *more: tuple[str | tarfile.TarInfo, bytes]) -> bytes:
    parts = [
        part
        for i in range(count)
        for part in ((f"d/{i:03}.png", grey(i)), (f"d/{i:03}.cls", b"1" if i % 2 else b"0"))
    ]
    return tar(*parts, *more)


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz"])
async def test_a_compressed_shard_holds_what_the_plain_one_holds(tmp_path: Path, ending: str) -> None:
    (tmp_path / "a.tar").write_bytes(shard())
    (tmp_path / f"a{ending}").write_bytes(gzip.compress(shard()))

    plain, unpacked = await read(tmp_path / "a.tar"), await read(tmp_path / f"a{ending}")

    assert images_and_labels(unpacked) == images_and_labels(plain)


async def test_names_of_compressed_shards_say_what_they_are_for(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar.gz").write_bytes(gzip.compress(shard(30)))
    (tmp_path / "train-1.tar").write_bytes(shard(20))
    (tmp_path / "val-0.tgz").write_bytes(gzip.compress(shard(10)))

    found = await read(tmp_path)

    assert (len(found.train_labels), len(found.test_labels)) == (50, 10)


def members(data: bytes, policy: Policy = "error") -> list[str]:
    """The names of the files in a compressed shard."""
    plain = unpack(data, "a.tar.gz")
    return [name for name, _ in tar_members(io.BytesIO(plain), len(plain), "a.tar.gz", Damage(policy))]


def test_several_streams_one_after_the_other_are_one_file() -> None:
    whole = shard()

    parts = gzip.compress(whole[:5000]) + gzip.compress(whole[5000:])

    assert unpack(parts, "a.tar.gz") == whole


def test_a_bomb_is_not_unpacked_further_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FILE_BYTES", 10 << 20)
    bomb = gzip.compress(tar(("a.png", bytes(20 << 20))))
    trailing = gzip.compress(shard() + bytes(20 << 20))

    for data in (bomb, trailing):
        with pytest.raises(DataError, match="unpacks to more than 10485760 bytes"):
            unpack(data, "a.tar.gz")


def test_a_member_that_is_too_large_is_left_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_IMAGE_BYTES", 1 << 16)
    data = gzip.compress(tar(("a.png", bytes((1 << 16) + 1)), ("b.cls", b"1")))

    with pytest.raises(DataError, match=r"'a\.png' has 65537 bytes, expected at most 65536; it is left"):
        members(data)
    assert members(data, "skip") == ["b.cls"]


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (shard(), "not a gzipped tar file, or damaged"),
        (b"", "not a tar file, or damaged"),
        (gzip.compress(b"no tar file at all" * 100), "not a tar file, or damaged"),
        (gzip.compress(shard())[:-200], "cut short"),
        (gzip.compress(shard())[:-4], "cut short"),
        (gzip.compress(shard()[:3000]), "damaged .unexpected end of data"),
        (gzip.compress(shard()[: 20 * 512]), "cut short or damaged"),
        (gzip.compress(shard() + b"more"), "cut short or damaged"),
        (gzip.compress(shard())[:-8] + bytes(8), "damaged"),
    ],
    ids=[
        "plain",
        "empty",
        "text",
        "cut far from its end",
        "cut near its end",
        "of a part of a member",
        "of some members",
        "with more behind it",
        "with a wrong checksum",
    ],
)
def test_an_invalid_or_partial_compressed_shard_is_refused(data: bytes, claim: str) -> None:
    with pytest.raises(DataError, match=claim):
        members(data, "skip")


async def test_names_that_go_up_and_links_stay_damage(tmp_path: Path) -> None:
    link = tarfile.TarInfo("link.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    for member, claim in ((("../up.png", grey(1)), "goes up"), ((link, b""), "is a link")):
        (tmp_path / "a.tar.gz").write_bytes(gzip.compress(shard(40, member)))

        with pytest.raises(DataError, match=claim):
            await read(tmp_path)
        assert (await read(tmp_path, "skip")).source.endswith("1 were damaged and left out")


@pytest.mark.parametrize(
    ("kind", "ending"), [("shards", ".tar"), ("parquet", ".parquet"), ("csv", ".csv"), ("shards", ".tar.gz")]
)
@pytest.mark.parametrize("held_out", ["test", "val"])
async def test_files_may_lie_in_folders_that_say_what_they_are_for(
    tmp_path: Path, kind: str, ending: str, held_out: str
) -> None:
    written = write_small(tmp_path / "small")
    for split, folder in (("train", "train"), ("test", held_out)):
        (tmp_path / "made" / folder).mkdir(parents=True)
        data = (written / kind / f"{split}{ending.removesuffix('.gz')}").read_bytes()
        file = tmp_path / "made" / folder / f"0{ending}"
        file.write_bytes(gzip.compress(data) if ending.endswith(".gz") else data)

    found, flat = await read(tmp_path / "made"), await read(written / kind)

    assert found.train_images.tobytes() == flat.train_images.tobytes()
    assert found.test_images.tobytes() == flat.test_images.tobytes()
    async with Disk() as disk:
        words = [await kind_of(str(folder), None, disk) for folder in (tmp_path / "made", written / kind)]
    assert words[0] == words[1]


async def test_folders_of_files_of_two_kinds_are_refused(tmp_path: Path) -> None:
    written = write_small(tmp_path / "small")
    for split in ("train", "test"):
        (tmp_path / "made" / split).mkdir(parents=True)
        shutil.copy(written / "csv" / f"{split}.csv", tmp_path / "made" / split)
        shutil.copy(written / "shards" / f"{split}.tar", tmp_path / "made" / split)

    with pytest.raises(DataError, match=r"train\.tar and .*train\.csv, which are several data sets"):
        await read(tmp_path / "made")


async def test_a_file_beside_class_folders_changes_nothing(tmp_path: Path) -> None:
    folders = write_small(tmp_path) / "folders"
    (folders / "train" / "labels.csv").write_text("path,label\n")

    assert len((await read(folders)).train_labels) == 24
