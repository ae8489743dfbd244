"""Sources that are refused by their names and by the names in their folders."""

from pathlib import Path

import pytest

from adam_async.data_server.sources.kinds import NAMES, FoundFiles, check_source, find_files
from adam_async.data_server.sources.published_sets import PUBLISHED
from adam_async.errors import DataError


@pytest.mark.parametrize(
    "source", [*NAMES, "synthetic:40", "tcp://host:1", "package.module:function", "here.csv"]
)
def test_a_source_that_may_be_one_is_left_to_its_loader(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.csv").touch()
    check_source(source)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("digts", r"^digts does not exist \(did you mean digits\?\); name a folder"),
        ("http://host/x", "^http://host/x is an address"),
        ("x" * 300, "cannot be read: File name too long"),
        ("empty", "^empty holds no data set: expected .*; found nothing$"),
        ("words.txt", "^words.txt is neither a folder nor an .npz"),
        ("words.txt/below", "^words.txt/below is neither a folder nor an .npz"),
        ("words.zip", "; unpack words.zip, and name the folder with its content$"),
        ("circle", "^circle cannot be read: Too many levels of symbolic links$"),
        ("part", "^part lacks train-labels-idx1-ubyte"),
        ("arrays", "^arrays lacks y_train.npy, x_test.npy, y_test.npy; add"),
        ("both", "^both holds a.parquet and b.csv, which are several data sets"),
        ("flat", r"^flat holds no data set: .*; found a.png; did you mean --data \.\?$"),
        ("deep", r"^deep has images deeper than in class folders, .* did you mean --data deep/x/y\?$"),
        ("photos", "^photos/test/cat is a class that photos/train lacks"),
    ],
)
def test_a_source_of_the_wrong_kind_is_refused_by_its_names_alone(
    source: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        *("words.txt", "words.zip", "part/train-images-idx3-ubyte.gz", "arrays/x_train.npy", "flat/a.png"),
        *("both/a.parquet", "both/b.csv", "deep/x/y/cat/a.png", "deep/x/y/dog/a.png"),
        *("photos/train/dog/a.png", "photos/test/dog/b.png", "photos/test/cat/c.png"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(DataError, match=error):
        check_source(source)


def test_a_link_in_a_circle_beside_class_folders_is_no_class(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").touch()
    (tmp_path / "circle").symlink_to("circle")
    assert find_files(tmp_path) == FoundFiles(kind="folders", files=((tmp_path, None),))


def test_every_published_data_set_has_its_name() -> None:
    assert set(PUBLISHED) <= set(NAMES)
