"""Network namespaces of a test, and the names of all that the machine has."""

import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.drill.network_namespaces import NamespaceNetwork, namespace_network


@asynccontextmanager
async def hosts(names: Sequence[str], *, paths: int = 1) -> AsyncIterator[NamespaceNetwork]:
    """Make the hosts, or skip the test with the reason of the system."""
    made = False
    try:
        async with namespace_network(names, paths=paths) as network:
            made = True
            yield network
    except OSError as error:
        if made:
            raise
        pytest.skip(f"needs root and network namespaces: {error}")


def listed() -> set[str]:
    """Return the names of all namespaces and interfaces."""
    spaces = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    links = subprocess.run(["ip", "-o", "link", "show"], check=True, capture_output=True, text=True).stdout
    names = {line.split()[0] for line in spaces.splitlines()}
    return names | {line.split()[1].partition("@")[0].rstrip(":") for line in links.splitlines()}
