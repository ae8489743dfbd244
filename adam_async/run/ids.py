"""Pure: types of the ids and numbers in messages.

They are plain `int` and `str` at run time; the types keep the number of a shard apart from that of a bucket.
"""

from typing import NewType

NodeId = NewType("NodeId", str)
"""Name of one node, such as ``ps-0``. Unique in a cluster; a restart keeps it."""

Replica = NewType("Replica", int)
"""Number of a model replica in a run, from 0."""

ShardId = NewType("ShardId", int)
"""Position of a shard in the run's shard table, from 0."""

BucketId = NewType("BucketId", int)

Version = NewType("Version", int)
"""Number of pushes applied to a shard so far. It grows by one per push, on the primary only."""
