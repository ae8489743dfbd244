"""One function per role, which runs the role as an `async with` block.

The command line, child processes and programs that start single roles use these functions. A role serves run
after run until its block ends.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.log_file import LogFile
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.service import DataServer
from adam_async.data_server.standalone import DataHost
from adam_async.driver.training_rules import PROGRAM_KINDS
from adam_async.errors import BindFailed, first_cause
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.parameter_server.server_disk import opened_disk
from adam_async.parameter_server.server_links import CopiesPath
from adam_async.parameter_server.service import ParameterServer
from adam_async.run.config import FLUSH_S, Waits
from adam_async.run.user_code import StepSource
from adam_async.runtime.machine import apply_numerics, available_bytes
from adam_async.runtime.timeline import Timeline
from adam_async.worker.run_session import ComputeSettings
from adam_async.worker.service import ModelWorker
from dataflow import ComputePool
from transport import BufferPool, Identity, Network


class Role(Protocol):
    """A running role."""

    address: str

    async def joined(self) -> None:
        """Wait until the role is a member of the cluster."""

    def unready(self) -> str:
        """Return the reason why the role does not serve now; empty if it serves."""


_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The parameters of a role in its cluster and in its process.

    Attributes:
        node: Node id, unique in the cluster.
        bind: Address to listen on, ``tcp://host:port``; port 0: any free port.
        controller: Address of the controller, or the addresses of several, joined by commas; empty for a
            controller.
        network: Links to the other roles.
        buffers: Memory for received messages; the network's own pool.
        waits: Deadlines.
        entropy: Random bytes for the incarnation and session ids.
        timeline: Records the work of the role.
        layers: Kinds of layers that models may use, the same in all workers of a cluster.
        steps: Steps of the user's that a worker may run.
        functions: Functions of the user's that the transforms of a run may name, by import path.
        copies: Path of a parameter server to the other servers; None: they use `bind` too.
    """

    node: str
    bind: str
    controller: str = ""
    network: Network
    buffers: BufferPool
    waits: Waits
    entropy: Callable[[int], bytes]
    timeline: Timeline | None = None
    layers: Mapping[str, type[Layer]] = field(default_factory=lambda: BUILTIN_LAYERS)
    steps: StepSource = field(default_factory=StepSource)
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    copies: CopiesPath | None = None

    def settings(self, role: str) -> RoleSettings:
        """Return the settings of a role for a new incarnation of the node."""
        incarnation = int.from_bytes(self.entropy(7), "little")
        return RoleSettings(
            network=self.network,
            address=self.bind,
            identity=Identity(role=role, node=self.node, incarnation=incarnation),
            waits=self.waits,
            controller=self.controller,
            # The driver reads the profiles of members only.
            timeline=self.timeline if self.controller else None,
        )


@asynccontextmanager
async def _listening(role: AbstractAsyncContextManager[_R], place: Place) -> AsyncIterator[_R]:
    async with AsyncExitStack() as stack:
        try:
            running = await stack.enter_async_context(role)
        except (OSError, ExceptionGroup) as error:
            cause = first_cause(error)
            if isinstance(cause, OSError):
                # Loops put "error while attempting to bind on address (...): " before the system's words.
                raise BindFailed(place.bind, (cause.strerror or str(cause)).split("): ")[-1]) from None
            raise
        yield running


def controller(
    place: Place, *, peers: Mapping[str, str] = {}, alone: bool = True, file: LogFile | None = None
) -> AbstractAsyncContextManager[Controller]:
    """Run a controller.

    Args:
        place: Place of the controller.
        peers: Addresses of all controllers of its group by node id, with its own.
        alone: Whether the controller is a group of one; a larger group without `peers` gets them from
            `Controller.group.set_addresses` when all controllers listen.
        file: Log file of the controller's state, which it reads after a restart.

    Raises:
        BindFailed: The address is not available.
        BindRefused: Other machines can reach the address, and the role has no token.
    """
    role = Controller(
        replace(place, controller="").settings("controller"),  # a controller of a group is no member of it
        ConsensusSetup(entropy=place.entropy, file=file),
        peers=peers,
        alone=alone,
        kinds=PROGRAM_KINDS,
    )
    return _listening(role, place)


@asynccontextmanager
async def parameter_server(
    place: Place, *, folder: Path | None = None, flush_s: float = FLUSH_S
) -> AsyncIterator[ParameterServer]:
    """Run a parameter server; for errors see `controller`, and for those of a folder `opened_disk`.

    Args:
        place: Place of the server.
        folder: Folder in which the server keeps its shards; None: in memory only.
        flush_s: Time between two rounds of writing to it, in seconds.
    """
    async with AsyncExitStack() as stack:
        disk = None
        if folder is not None:
            disk = await stack.enter_async_context(opened_disk(folder, flush_s=flush_s))
        role = ParameterServer(
            place.settings("ps"),
            make_pool=ComputePool,
            buffers=place.buffers,
            available_bytes=available_bytes,
            numerics=apply_numerics(),
            copies=place.copies,
            disk=disk,
        )
        yield await stack.enter_async_context(_listening(role, place))


def data_server(place: Place, dataset: Dataset) -> AbstractAsyncContextManager[DataServer]:
    """Run a data server of a data set; for errors see `controller`."""
    return _listening(DataServer(place.settings("data"), dataset, functions=place.functions), place)


def data_host(place: Place, dataset: Dataset) -> AbstractAsyncContextManager[DataHost]:
    """Run a standalone data server, which clusters invite; for errors see `controller`."""
    role = DataHost(place.settings("data"), dataset, entropy=place.entropy, functions=place.functions)
    return _listening(role, place)


def model_worker(
    place: Place, *, threads: int, in_flight: int, pace: float = 1.0
) -> AbstractAsyncContextManager[ModelWorker]:
    """Run a model worker; for errors see `controller`.

    Args:
        place: Place of the data host.
        threads: Compute threads.
        in_flight: Groups in flight; 0: twice the threads of its replica.
        pace: Share of a core's time that each thread may use.
    """
    role = ModelWorker(
        place.settings("worker"),
        ComputeSettings(threads=threads, in_flight=in_flight, pace=pace),
        buffers=place.buffers,
        entropy=place.entropy,
        layers=place.layers,
        steps=place.steps,
    )
    return _listening(role, place)
