"""Pure: the bandwidth and latency of links, from text with units."""

import math
import re

from adam_async.errors import ConfigError

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([^\d\s].*)?", re.IGNORECASE)

_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Read a bandwidth such as ``1Gbit/s``, ``100Mbps``, ``125MB/s`` or ``1GiB/s``, in bytes per second.

    Raises:
        ConfigError: The text is not a bandwidth, has no unit, or is not above 0.
    """
    wrong = f"--bandwidth {text!r} is not a bandwidth: write 1Gbit/s, 125MB/s, or another one above 0"
    number, unit = _split(text, wrong)
    if not unit and 0 < number < math.inf:
        raise ConfigError(
            f"--bandwidth {text!r} has no unit: write bits or bytes per second, as in 1Gbit/s or 125MB/s; "
            f"{text.strip()} bytes per second are {text.strip()}B/s"
        )
    found = re.fullmatch(r"([kmgt]i?)?(bit|b|bytes?)?(/s|ps)?", unit, re.IGNORECASE)
    if found is None or (found[1] and not found[2]):
        raise ConfigError(wrong)
    prefix, kind = (found[1] or "").lower(), found[2] or "B"
    bits = kind.lower() == "bit" or (kind == "b" and found[3] == "ps")
    if prefix not in _FACTORS or (kind == "b" and not bits):  # "b" alone means bits or bytes
        raise ConfigError(wrong)
    speed = number * _FACTORS[prefix] / (8 if bits else 1)
    if not 0 < speed < math.inf:
        raise ConfigError(wrong)
    return speed


def parse_latency(text: str) -> float:
    """Read a latency such as ``0.1ms``, ``50us``, ``300ns`` or ``2s``, in seconds.

    Raises:
        ConfigError: The text is not a latency, has no unit, or is below 0.
    """
    wrong = f"--latency {text!r} is not a latency: write 0.1ms, 50us, or another one of 0 or more"
    number, unit = _split(text, wrong)
    if not unit and 0 <= number < math.inf:
        plain = text.strip()
        raise ConfigError(f"--latency {text!r} has no unit: write {plain}us, {plain}ms or {plain}s")
    if unit not in _SECONDS or not 0 <= number < math.inf:
        raise ConfigError(wrong)
    return number * _SECONDS[unit]


def _split(text: str, wrong: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ConfigError(wrong)
    return float(found[1]), (found[2] or "").strip()
