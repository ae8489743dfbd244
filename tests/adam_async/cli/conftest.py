"""Fixtures of the tests of commands."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_handlers() -> Iterator[None]:
    """Restore the state that `log_to_stderr` sets."""
    root = logging.getLogger()
    handlers, level, quiet = root.handlers[:], root.level, logging.getLogger("asyncio").level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("asyncio").setLevel(quiet)
