"""Pure: the memory of the processes of each role, from the texts of ``--memory``.

worker=2G                       each worker asks its engine for 2 GiB
"""

from collections.abc import Iterable, Mapping

from adam_async.errors import ConfigError
from adam_async.run.cache_size import read_size

ROLES = ("controller", "ps", "data", "worker", "driver")
"""Roles with a process of their own; `driver` is the command `train`."""

LEAST_BYTES = 64 << 20
"""Minimum memory of a process, in bytes; Python with NumPy needs about as much."""

MOST_BYTES = 1 << 50
"""Maximum memory of a process, in bytes; a larger size is a mistake."""


def read_memory(texts: Iterable[str], name: str = "memory") -> dict[str, int]:
    """Read the texts of ``--memory``, one for each role; returns bytes by role.

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
        if not LEAST_BYTES <= found[role] <= MOST_BYTES:
            raise ConfigError(
                f"{name} {text[:60]!r} is out of bounds: a process gets at least 64M, such as {role}=2G"
            )
    return found


def check_room(machine: str, asked_bytes: int, available_bytes: int) -> None:
    """Check that a machine has the memory that its processes need.

    Args:
        machine: Name of the machine in the error.
        asked_bytes: Sum of the memory of its processes.
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
    """Return the sum of the memory of some processes, one of each named role, in bytes."""
    return sum(memory.get(role, 0) for role in roles)


def size_text(size: int) -> str:
    """Return a size in words, such as ``2.5 GiB``."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"
