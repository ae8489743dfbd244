"""Event-driven dataflow graphs for asyncio: a node fires once all its inputs for a tag have arrived.

A `Graph` describes nodes joined by named ports. An `Engine` runs a graph for many tags at once: light nodes
on the loop, heavy nodes in a `ComputePool`. A pure `Scheduler` makes all decisions. Standard library only.

A caller admits tags and delivers tokens to `engine.py`. The engine reports these events to `scheduler.py`,
carries out the effects, and submits heavy calls to `pool.py`. Completed calls return through `mailbox.py`, as
further events.

    graph.py               start here: nodes and ports, checked once (readers, writers, cycles)
    tags.py, tokens.py     the name of a unit of work; tokens, firings, calls of nodes, effects
    scheduler.py           states of a tag; firings, exactly once per finished tag; training contexts
    engine.py              shell of the scheduler: turns, light nodes, backlog of heavy calls, failures, end
    waiters.py             callers that wait, each with a deadline: for admission, room, idleness
    jobs.py                a job, and the interface of a pool
    gate.py                stops threads between two units of their work, for as long as the loop needs
    pool.py                compute threads, which run jobs; a limit of jobs; threads slowed on purpose
    mailbox.py             the queue from threads to the loop: many items, one wake-up
    errors.py              errors of graphs, engines and pools
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
    TagError,
    TagInFlight,
    TagSettled,
    TokenError,
    TooManyEarlyTokens,
    UnknownPort,
    WaitTimedOut,
    WrongOutputs,
)
from dataflow.gate import Gate
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
    "Gate",
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
    "TagError",
    "TagInFlight",
    "TagSettled",
    "Token",
    "TokenError",
    "TooManyEarlyTokens",
    "Trace",
    "TraceRecord",
    "UnknownPort",
    "WaitTimedOut",
    "WrongOutputs",
]
