"""Names of sources, and missing ones."""

from pathlib import Path

import pytest

from adam_async.data_server.sources.names import NAMES, check_exists
from adam_async.data_server.sources.published import PUBLISHED
from adam_async.errors import DataError


def test_every_published_data_set_has_its_name() -> None:
    assert set(PUBLISHED) <= set(NAMES)


@pytest.mark.parametrize(
    "source", [*NAMES, "synthetic:40", "tcp://host:1", "package.module:function", "here", "x" * 300]
)
def test_a_source_that_may_exist_is_left_to_its_loader(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    check_exists(source)


def test_a_missing_source_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(DataError, match=r"^digts does not exist \(did you mean digits\?\); name a folder"):
        check_exists("digts")
