"""Clients and workers that join and leave keep no descriptor, region, thread or memory of the server."""

import pytest

from tests.processes.joins import links, workers

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

MOST_BYTES = 4 << 20
"""Growth of a process that passes for noise of its allocator, in bytes."""


async def test_links_in_shared_memory_leave_nothing_at_either_end() -> None:
    growth = await links(40)
    assert max(growth.values()) < MOST_BYTES


def test_workers_in_place_leave_nothing_at_the_server() -> None:
    assert workers(3)["server"] < MOST_BYTES
