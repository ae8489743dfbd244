"""Pure: what a parameter server says of its shards: versions, clocks, and how stale what they got was."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from adam_async.parameter_server.shard import OTHERS, Shard


def count_shards(shards: Collection[Shard]) -> dict[str, Any]:
    """Add up what the shards of one server counted; keys are text, as JSON wants them."""
    by_replica: dict[str, Counter[int]] = {}
    by_tensor: dict[str, Counter[int]] = {}
    for shard in shards:
        for replica, counts in shard.staleness_of.items():
            if not counts:
                continue  # the map names it, and it has not pushed
            name = str(replica) if replica != OTHERS else "others"
            by_replica.setdefault(name, Counter()).update(counts)
            by_tensor.setdefault(shard.spec.tensor, Counter()).update(counts)
    total: Counter[int] = Counter()
    for counts in by_replica.values():
        total.update(counts)
    lines = [shard.held for shard in shards if shard.held is not None]
    return {
        "shards": len(shards),
        "versions": {str(shard.spec.id): int(shard.version) for shard in shards},
        "staleness": _as_text(total),
        "staleness_by_replica": {name: _as_text(by_replica[name]) for name in sorted(by_replica)},
        "staleness_by_tensor": {name: _as_text(counts) for name, counts in by_tensor.items()},
        "clocks": {str(shard.spec.id): {str(r): c for r, c in shard.clocks.items()} for shard in shards},
        "clock": min((shard.applied_clock() for shard in shards), default=0),
        "held": sum(len(each) for line in lines for each in line.waiting.values()),
        "refused": sum(shard.refused for shard in shards),
        "duplicates": sum(shard.duplicates for shard in shards),
    }


def _as_text(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(staleness): counts[staleness] for staleness in sorted(counts)}
