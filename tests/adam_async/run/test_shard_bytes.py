"""The default size of a shard is one constant, and other limits leave room for it."""

from pathlib import Path

import numpy as np
import pytest

from adam_async.parameter_server.apply import PIECE_WORK
from adam_async.parameter_server.service import TURN_WORK
from adam_async.parameter_server.shard_pieces import PIECE_BYTES
from adam_async.persistence.rounds import YIELD_BYTES
from adam_async.run.config import OPTIONS, SHARD_BYTES
from adam_async.run.shard_table import MOST_SHARD_BYTES

VALUES = SHARD_BYTES // np.dtype(np.float32).itemsize
STORE_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "store.md"


def test_a_shard_of_the_default_size_needs_no_second_piece_of_any_work() -> None:
    """A larger default would take a longer way without a word: its partners have reasons of their own."""
    assert VALUES <= PIECE_WORK  # a push is applied at once
    assert 4 * VALUES <= TURN_WORK  # several clients in one round of the loop
    assert SHARD_BYTES <= PIECE_BYTES  # one piece of a copy
    assert SHARD_BYTES <= YIELD_BYTES  # one turn of a round of the disk
    assert SHARD_BYTES <= MOST_SHARD_BYTES  # one message


def test_a_bucket_of_the_optimizer_fills_a_shard_of_the_default_size() -> None:
    pytest.importorskip("torch")
    from adam_async.torch.gradients import BUCKET_BYTES

    assert BUCKET_BYTES >= SHARD_BYTES


def test_pages_and_options_have_the_default_size() -> None:
    assert OPTIONS["shard_bytes"].default == SHARD_BYTES
    (row,) = [line for line in STORE_PAGE.read_text().splitlines() if line.startswith("| `shard_bytes` |")]
    assert f"| `{SHARD_BYTES}` |" in row
