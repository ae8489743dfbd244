"""Event-driven dataflow graphs for asyncio: a node fires once all its inputs for a tag have arrived.

A `Graph` describes nodes joined by named ports. An `Engine` runs a graph for many tags at once: light nodes
on the loop, heavy nodes in a `ComputePool`. A pure `Scheduler` makes all decisions. Standard library only.

A caller admits tags and delivers tokens to `engine.py`. The engine reports these events to `scheduler.py`,
carries out the effects, and submits heavy calls to `pool.py`. Completed calls return through a mailbox
(`jobs.py`), as further events.

    graph.py               start here: nodes and ports, checked once (readers, writers, cycles)
    tokens.py              tokens, firings, calls of nodes, effects
    scheduler.py           states of a tag; firings, exactly once per finished tag; training contexts
    engine.py              shell of the scheduler: turns, light nodes, backlog of heavy calls, failures, end
    waiters.py             callers that wait, each with a deadline: for admission, room, idleness
    jobs.py                the name of a unit of work; a job, the interface of a pool, and the queue from its
                           threads to the loop
    pool.py                compute threads, which run jobs; a limit of jobs; threads slowed on purpose, or
                           stopped at a gate for as long as the loop needs
    errors.py              errors of graphs, engines and pools
"""

from dataflow.engine import Engine as Engine
from dataflow.engine import EngineSettings as EngineSettings
from dataflow.engine import EngineStatistics as EngineStatistics
from dataflow.engine import OnOutput as OnOutput
from dataflow.engine import Trace as Trace
from dataflow.errors import DataflowError as DataflowError
from dataflow.errors import DuplicateToken as DuplicateToken
from dataflow.errors import EngineClosed as EngineClosed
from dataflow.errors import GraphError as GraphError
from dataflow.errors import NodeFailed as NodeFailed
from dataflow.errors import NoRoom as NoRoom
from dataflow.errors import PoolClosed as PoolClosed
from dataflow.errors import TagError as TagError
from dataflow.errors import TagInFlight as TagInFlight
from dataflow.errors import TagSettled as TagSettled
from dataflow.errors import TokenError as TokenError
from dataflow.errors import TooManyEarlyTokens as TooManyEarlyTokens
from dataflow.errors import UnknownPort as UnknownPort
from dataflow.errors import WaitTimedOut as WaitTimedOut
from dataflow.errors import WrongOutputs as WrongOutputs
from dataflow.graph import Graph as Graph
from dataflow.graph import Node as Node
from dataflow.jobs import Job as Job
from dataflow.jobs import JobPool as JobPool
from dataflow.jobs import Tag as Tag
from dataflow.pool import ComputePool as ComputePool
from dataflow.pool import Gate as Gate
from dataflow.pool import MakePool as MakePool
from dataflow.pool import PoolStatistics as PoolStatistics
from dataflow.scheduler import Scheduler as Scheduler
from dataflow.tokens import Abandoned as Abandoned
from dataflow.tokens import BatchCall as BatchCall
from dataflow.tokens import ContextFreed as ContextFreed
from dataflow.tokens import Effect as Effect
from dataflow.tokens import Finished as Finished
from dataflow.tokens import Firing as Firing
from dataflow.tokens import Output as Output
from dataflow.tokens import Token as Token
from dataflow.tokens import TraceRecord as TraceRecord
