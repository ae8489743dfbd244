"""Stores, local clusters and `load_checkpoint` for programs without an event loop.

from adam_async import sync
from adam_async.sync import LocalCluster
"""

from adam_async.store.sync import LocalCluster, ParameterStore, load_checkpoint

__all__ = ["LocalCluster", "ParameterStore", "load_checkpoint"]
