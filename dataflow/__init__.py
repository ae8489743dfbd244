"""Event-driven dataflow graphs for asyncio: a node fires once all its inputs for a tag have arrived.

A `Graph` describes nodes joined by named ports. An `Engine` runs a graph for many tags at once: light nodes
on the loop, heavy nodes in a `ComputePool`. A pure `Scheduler` makes all decisions. Standard library only.
"""

from dataflow.engine import Engine, EngineSettings, EngineStatistics, OnOutput, Trace
from dataflow.errors import (
    DataflowError,
    DuplicateToken,
    EngineClosed,
    GraphError,
    NodeFailed,
    NoRoom,
    PoolClosed,
    TagAbandoned,
    TagError,
    TagInFlight,
    TagSettled,
    TagUnknown,
    TokenError,
    TooManyEarlyTokens,
    UnknownPort,
    WaitTimedOut,
    WrongOutputs,
)
from dataflow.graph import Graph, Node
from dataflow.jobs import Job, JobPool
from dataflow.pool import ComputePool, MakePool, PoolStatistics
from dataflow.scheduler import Scheduler
from dataflow.tags import Tag
from dataflow.tokens import (
    Abandoned,
    BatchCall,
    ContextFreed,
    Effect,
    Finished,
    Firing,
    Output,
    Token,
    TraceRecord,
)

__all__ = [
    "Abandoned",
    "BatchCall",
    "ComputePool",
    "ContextFreed",
    "DataflowError",
    "DuplicateToken",
    "Effect",
    "Engine",
    "EngineClosed",
    "EngineSettings",
    "EngineStatistics",
    "Finished",
    "Firing",
    "Graph",
    "GraphError",
    "Job",
    "JobPool",
    "MakePool",
    "NoRoom",
    "Node",
    "NodeFailed",
    "OnOutput",
    "Output",
    "PoolClosed",
    "PoolStatistics",
    "Scheduler",
    "Tag",
    "TagAbandoned",
    "TagError",
    "TagInFlight",
    "TagSettled",
    "TagUnknown",
    "Token",
    "TokenError",
    "TooManyEarlyTokens",
    "Trace",
    "TraceRecord",
    "UnknownPort",
    "WaitTimedOut",
    "WrongOutputs",
]
