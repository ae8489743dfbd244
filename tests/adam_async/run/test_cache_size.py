"""Sizes as they are typed: what they mean, and which are refused."""

from pathlib import Path

import msgspec
import pytest

from adam_async.errors import ConfigError
from adam_async.run.cache_size import CacheLimits, cache_limits, one_of
from adam_async.run.config import Config
from adam_async.run.counts import CacheCounts
from adam_async.runtime.machine import available_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512M", 512 << 20), ("4G", 4 << 30), ("4g", 4 << 30), ("64 KiB", 64 << 10), ("2GB", 2 << 30)],
)
def test_a_size_is_a_number_with_a_letter(text: str, size: int) -> None:
    assert cache_limits(text, "", available_bytes=7) == CacheLimits(size)


def test_without_a_size_it_is_half_of_what_is_available() -> None:
    assert cache_limits("auto", "/spilled", available_bytes=1000) == CacheLimits(
        500, asked=False, spill=Path("/spilled")
    )
    assert available_bytes() > 1 << 20


def test_servers_of_one_machine_divide_that_half_and_keep_to_a_size() -> None:
    assert cache_limits(one_of("auto", 4), "", available_bytes=1000) == CacheLimits(125, asked=False)
    assert cache_limits("auto/7", "", available_bytes=3) == CacheLimits(1, asked=False)
    assert one_of("auto", 1) == "auto"
    assert one_of("4G", 4) == "4G"


def test_a_size_that_no_count_of_a_role_has_is_refused() -> None:
    most = cache_limits("8191T", "", available_bytes=7).size_bytes
    counts = CacheCounts(resident_images=0, resident_bytes=0, budget_bytes=most)
    assert msgspec.json.decode(msgspec.json.encode(counts), type=CacheCounts) == counts
    for text in ("8192T", "999999999999999G"):
        with pytest.raises(ConfigError, match=f"cache must be below 8192T, not '{text}'"):
            Config(cache=text)


@pytest.mark.parametrize("text", ["", "much", "-1", "1.5G", "4P", "٤G", "auto/0", "auto/", "auto/٤"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cache must be auto or a size such as 512M or 4G, not"):
        Config(cache=text)


def test_a_cache_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="a cache of 0 bytes holds no image: give --cache a size such as"):
        Config(cache="0")
