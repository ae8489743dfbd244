"""Sizes as they are typed: what they mean, and which are refused."""

from pathlib import Path

import msgspec
import pytest

from adam_async.errors import ConfigError
from adam_async.run.config import Config
from adam_async.run.counts import CacheCounts
from adam_async.run.memory_sizes import (
    CacheLimits,
    asked_bytes,
    cache_limits,
    check_room,
    one_of,
    read_memory,
)
from adam_async.run.option_sources import from_environment, from_toml, make_config
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


def test_sizes_are_bytes_by_role() -> None:
    assert read_memory(["worker=2G", "ps=512M"]) == {"worker": 2 << 30, "ps": 512 << 20}
    assert read_memory([]) == {}


@pytest.mark.parametrize(
    ("texts", "claim"),
    [
        (["worker"], "'worker' is not of the form ROLE=SIZE, such as worker=2G"),
        (["gpu=2G"], "roles are controller, ps, data, worker, driver"),
        (["ps=1G", "ps=2G"], "memory names ps twice"),
        (["ps=much"], "memory of ps must be a size such as 512M or 4G, not 'much'"),
        (["ps=-1G"], "memory of ps must be a size"),
        (["ps=63M"], "'ps=63M' is out of bounds: a process gets at least 64M"),
        (["ps=2000T"], "is out of bounds"),
    ],
)
def test_a_wrong_size_is_refused_with_the_form(texts: list[str], claim: str) -> None:
    with pytest.raises(ConfigError, match=claim):
        Config(memory=tuple(texts))


def test_a_file_and_a_variable_set_the_same_sizes() -> None:
    file = from_toml('memory = ["ps=1G", "worker=2G"]\n', source="adam.toml")
    variable = from_environment({"ADAM_MEMORY": "ps=1G,worker=2G"})

    assert make_config(file).memory == make_config(variable).memory == ("ps=1G", "worker=2G")


def test_roles_without_a_size_ask_for_nothing() -> None:
    assert asked_bytes({"ps": 3}, ["ps", "worker", "ps"]) == 6


def test_a_machine_with_too_little_memory_is_named_with_the_cure() -> None:
    check_room("host a", 2 << 30, 2 << 30)
    with pytest.raises(ConfigError, match=r"on host a ask for 2\.5 GiB of memory, and it has 512 MiB: lower"):
        check_room("host a", 5 << 29, 512 << 20)
