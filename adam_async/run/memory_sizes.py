"""Memory sizes in options: a data server's for images, a process's for its peers, a role's process.

A text of ``--memory`` gives the memory of a role's processes:

    worker=2G                   each worker asks its engine for 2 GiB
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from adam_async.errors import ConfigError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

MOST_BYTES = (1 << 53) - 1
"""Maximum size in bytes: that of a `messages.body.Count`, in which a role reports it."""

AUTO = "auto"

SHARE_OF_AVAILABLE = 2
"""Divisor of the available memory: by default, the data servers of a machine together use the quotient."""

LEAST_BUDGET_BYTES = 1 << 20
"""Minimum memory budget of a process, in bytes; with less memory, links would wait for each other."""


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Limits of a data server's memory and disk for images."""

    size_bytes: int
    """Memory in bytes for decoded images, blocks made ahead, and answers in transit."""
    asked: bool = True
    """Whether the user gave the size; otherwise available memory decides it."""
    spill: Path | None = None
    """Folder for decoded images beyond `size_bytes`; None: no folder."""

    def __post_init__(self) -> None:
        if self.size_bytes < 1:
            raise ConfigError(
                f"a cache of {self.size_bytes} bytes holds no image: give --cache a size such as 512M or 4G, "
                "or auto"
            )


def cache_limits(cache: str, spill: str, *, available_bytes: int, name: str = "cache") -> CacheLimits:
    """Read the options `cache` and `spill`.

    Args:
        cache: ``auto``, or ``auto/N`` for one of N data servers that share a machine, or a size such as
            ``512M`` or ``4G``; without a letter in bytes.
        spill: A folder; empty for none.
        available_bytes: Memory available to this process, for ``auto``.
        name: Option `cache` in the spelling of its source.

    Raises:
        ConfigError: `cache` is not a size, or is 0.
    """
    folder = Path(spill) if spill else None
    shared = re.fullmatch(rf"{AUTO}(?:/([1-9]\d{{0,3}}))?", cache, re.ASCII)
    if shared is not None:
        share = available_bytes // (SHARE_OF_AVAILABLE * int(shared[1] or 1))
        return CacheLimits(max(share, 1), asked=False, spill=folder)
    return CacheLimits(read_size(name, cache, besides="auto or "), spill=folder)


def read_size(name: str, text: str, *, besides: str = "") -> int:
    """Read a size such as ``512M`` or ``4G``; without a letter it is in bytes.

    Args:
        besides: Permitted values other than sizes, for the error.

    Raises:
        ConfigError: The text is not a size, or the size is above `MOST_BYTES`.
    """
    found = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if found is None:
        raise ConfigError(f"{name} must be {besides}a size such as 512M or 4G, not {text!r:.200}")
    size = int(found[1]) * UNITS[found[2].upper()]
    if size > MOST_BYTES:
        raise ConfigError(f"{name} must be below 8192T, not {text!r}")
    return size


def read_budget(name: str, text: str) -> int:
    """Read the number of bytes that a process may hold for its peers.

    Raises:
        ConfigError: The text is not a size, or the size is below `LEAST_BUDGET_BYTES`.
    """
    size = read_size(name, text)
    if size < LEAST_BUDGET_BYTES:
        raise ConfigError(f"{name} must be at least 1M, not {text!r:.200}; the default is 512M")
    return size


def room_for_whole(cache: CacheLimits | None, *, available_bytes: int) -> int:
    """Return the memory for a source that has to be decoded as a whole, in bytes.

    Args:
        cache: Limits from the options. A requested size may raise this memory, but not lower it.
    """
    automatic = available_bytes // SHARE_OF_AVAILABLE
    if cache is None:
        return automatic
    return max(cache.size_bytes, automatic) if cache.asked else cache.size_bytes


def one_of(cache: str, servers: int) -> str:
    """Return the option `cache` for one of several data servers that share a machine."""
    return f"{AUTO}/{servers}" if cache == AUTO and servers > 1 else cache


ROLES = ("controller", "ps", "data", "worker", "driver")
"""Roles that have a separate process; `driver` is the command `train`."""

LEAST_PROCESS_BYTES = 64 << 20
"""Minimum memory of a process in bytes: about what Python with NumPy needs."""

MOST_PROCESS_BYTES = 1 << 50
"""Maximum memory of a process in bytes; a larger size is a mistake."""


def read_memory(texts: Iterable[str], name: str = "memory") -> dict[str, int]:
    """Read the texts of ``--memory``, one per role; return bytes by role.

    Args:
        name: The option in the spelling of its source.

    Raises:
        ConfigError: A text has another form, an unknown role, a role twice, or a size out of bounds.
    """
    found: dict[str, int] = {}
    for text in texts:
        role, equals, size = text.partition("=")
        role = role.strip()
        if not equals or role not in ROLES:
            raise ConfigError(
                f"{name} {text[:60]!r} is not of the form ROLE=SIZE, such as worker=2G; roles are "
                f"{', '.join(ROLES)}"
            )
        if role in found:
            raise ConfigError(f"{name} names {role} twice: name each role once")
        found[role] = read_size(f"{name} of {role}", size)
        if not LEAST_PROCESS_BYTES <= found[role] <= MOST_PROCESS_BYTES:
            raise ConfigError(
                f"{name} {text[:60]!r} is out of bounds: a process gets at least 64M, such as {role}=2G"
            )
    return found


def check_room(machine: str, asked_bytes: int, available_bytes: int) -> None:
    """Check that a machine has as much memory as its processes need.

    Args:
        machine: Name of the machine in the error.
        asked_bytes: Total memory of the machine's processes.
        available_bytes: Memory that they can have.

    Raises:
        ConfigError: The machine has less.
    """
    if asked_bytes > available_bytes:
        raise ConfigError(
            f"the processes on {machine} ask for {size_text(asked_bytes)} of memory, and it has "
            f"{size_text(available_bytes)}: lower --memory, start fewer roles, or add machines"
        )


def asked_bytes(memory: Mapping[str, int], roles: Iterable[str]) -> int:
    """Return the total memory of some processes, one per named role, in bytes."""
    return sum(memory.get(role, 0) for role in roles)


def size_text(size: int) -> str:
    """Return a size in words, such as ``2.5 GiB``."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"
