"""Pure: types of the ids and numbers in messages.

At run time they are plain `int` and `str`; the types distinguish a shard's number from a bucket's.
"""

from typing import NewType

NodeId = NewType("NodeId", str)
"""Name of one node, unique in a cluster, such as ``ps-0``. A restart keeps the name."""

Replica = NewType("Replica", int)
"""Number of a model replica in a run, from 0."""

ShardId = NewType("ShardId", int)
"""Position of a shard in the shard table of its store, from 0."""

BucketId = NewType("BucketId", int)

Version = NewType("Version", int)
"""Number of pushes applied to a shard so far. The version grows by one per push, on each copy."""

MOST_STEP_NAME = 512
"""Maximum length of a step's import path, in characters."""
