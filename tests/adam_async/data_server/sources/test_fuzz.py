"""A data set with any damage to its bytes is loaded or refused with a `DataError`."""

import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adam_async.data_server.dataset import Dataset, Policy
from adam_async.errors import DataError
from tests.adam_async.data_server.sources.small import FORMATS, read, write_small

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("small"))


def damage(data: bytes, at: float, cut: bool, flips: list[tuple[float, int]]) -> bytes:
    """Flip some bits, and perhaps cut the end off; places are shares of the length."""
    changed = bytearray(data)
    for place, bit in flips:
        changed[int(place * len(data))] ^= 1 << bit
    return bytes(changed[: int(at * len(data))] if cut else changed)


SHARE = st.floats(0, 1, exclude_max=True)


async def outcome_of(path: Path, policy: Policy) -> Dataset | str:
    try:
        return await read(path, policy)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    which=SHARE,
    at=SHARE,
    cut=st.booleans(),
    flips=st.lists(st.tuples(SHARE, st.integers(0, 7)), min_size=1, max_size=4),
)
async def test_damage_is_never_anything_but_an_error_of_the_data(
    small: Path, kind: str, which: float, at: float, cut: bool, flips: list[tuple[float, int]]
) -> None:
    files = sorted(path for path in (small / kind).rglob("*") if path.is_file())
    path = files[int(which * len(files))]
    whole = path.read_bytes()
    path.write_bytes(damage(whole, at, cut, flips))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a decoder's doubts about damaged bytes are not at issue
            for policy in ("error", "skip"):
                outcome = await outcome_of(small / kind, policy)
                assert isinstance(outcome, Dataset) or str(small / kind) in outcome
    finally:
        path.write_bytes(whole)
