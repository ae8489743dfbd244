"""Speeds and delays are read as people write them, and what may mean two things is refused."""

import pytest

from adam_async.cli.link_speed import parse_bandwidth, parse_latency
from adam_async.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("1Gbit/s", 125e6),
        ("10 Gbit/s", 1.25e9),
        ("100Mbps", 12.5e6),
        ("2.5gbit", 312.5e6),
        ("125MB/s", 125e6),
        ("100MBps", 100e6),
        ("1GiB/s", 2**30),
        ("64 KiB/s", 2**16),
        ("1e9B/s", 1e9),
        ("125000000 B/s", 125e6),
        ("20 bytes/s", 20.0),
    ],
)
def test_a_bandwidth_comes_to_bytes_per_second(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text", ["", "fast", "1G", "5gb/s", "-1", "0", "1e400", "nan", "1 Qbit/s", "1 2MB/s"]
)
def test_text_that_is_no_bandwidth_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--bandwidth '.*' is not a bandwidth: write 1Gbit/s, 125MB/s, or"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0.1ms", 1e-4),
        ("50us", 5e-5),
        ("50 µs", 5e-5),
        ("2s", 2.0),
        ("300ns", 3e-7),
        ("1e-4s", 1e-4),
        ("0ms", 0),
    ],
)
def test_a_latency_comes_to_seconds(text: str, seconds: float) -> None:
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "3m", "-1ms", "1e400", "nan", "1 ms 2"])
def test_text_that_is_no_latency_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--latency '.*' is not a latency: write 0.1ms, 50us, or"):
        parse_latency(text)


@pytest.mark.parametrize("text", ["5", "0", "1e-4", " 5 "])
def test_a_latency_without_a_unit_is_refused_with_those_it_may_have(text: str) -> None:
    plain = text.strip()
    with pytest.raises(ConfigError, match=f"has no unit: write {plain}us, {plain}ms or {plain}s$"):
        parse_latency(text)


@pytest.mark.parametrize("text", ["1", "1e9", "125000000 "])
def test_a_bandwidth_without_a_unit_is_refused_and_the_way_to_write_it_works(text: str) -> None:
    with pytest.raises(ConfigError, match=r"has no unit: write .* as in 1Gbit/s or 125MB/s; ") as refused:
        parse_bandwidth(text)
    assert parse_bandwidth(str(refused.value).split()[-1]) == float(text)
