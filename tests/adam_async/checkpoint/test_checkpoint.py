"""The pieces of a checkpoint are those of a server's disk, for the shards of its run."""

import numpy as np
import pytest

from adam_async.checkpoint.checkpoint import StoredPieces
from adam_async.errors import DataError
from adam_async.parameter_server.shard_transfer import state_of
from adam_async.persistence.records import StateName
from adam_async.run.config import Config
from tests.adam_async.checkpoint.checkpoints import checkpoint_of

RULES = {
    "sgd": {"rule": "sgd"},
    "nesterov": {"rule": "sgd", "momentum": 0.9, "nesterov": True},
    "adagrad": {"rule": "adagrad"},
    "adamw": {"rule": "adamw", "weight_decay": 0.1},
}


@pytest.mark.parametrize("consistency", ["asp", "bsp"])
@pytest.mark.parametrize("rule", RULES)
async def test_pieces_have_all_shards_with_their_rule_state_and_tables(rule, consistency):
    config = Config(**RULES[rule], consistency=consistency, images_per_group=4, shard_bytes=2048)
    checkpoint = checkpoint_of(3, config=config)
    for start, array in enumerate((*checkpoint.weights.values(), *checkpoint.state.values())):
        array[...] = (np.arange(array.size) + 10_000 * start).reshape(array.shape)
    stored = StoredPieces(checkpoint.catalogue)
    tensors, states = stored.new_tensors(), {}
    for state in reversed([state async for state in checkpoint.pieces()]):
        parts = [memoryview(part) for part in state.parts]
        for shard in stored.shards(state.key.name, parts, "a piece"):
            tensors.take(shard)
            states[int(shard.spec.id)] = state_of(shard)
    assert tuple(states[number] for number in sorted(states)) == checkpoint.states
    for ours, theirs in ((tensors.weights, checkpoint.weights), (tensors.state, checkpoint.state)):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], array) for name, array in theirs.items())


async def test_small_shards_with_equal_tables_have_them_once_in_a_piece():
    arrays = {f"array-{number}": np.zeros(1, np.float32) for number in range(2000)}
    async for state in checkpoint_of(weights=arrays).pieces():
        assert state.nbytes < 40_000  # a table for each shard takes 80,000


def test_a_piece_that_its_store_does_not_have_is_refused():
    stored = StoredPieces(checkpoint_of().catalogue)
    with pytest.raises(DataError, match="it is no piece of store run-1"):
        stored.shards(StateName("ps-9", 1), [], "it")
