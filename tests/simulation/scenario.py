"""A scenario: a simulated cluster, its faults, and the invariants that must hold.

    MEMBERS = Scenario(
        name="members",
        about="members of one controller crash, freeze and are cut off",
        kinds=("crash", "freeze", "cut"),
        least_operations=200,
        plan=draw_plan,      # from its dice alone: options and faults of one seed
        run=run,             # async (world, plan, ledger): raises Violation if an invariant does not hold
    )

The scenario runs on no machine and has access to all machines of its `World`:

    async def run(world: World, plan: Plan, ledger: Ledger) -> None:
        worker = world.node("worker-0")
        worker.start(worker_program)
        await asyncio.sleep(5.0)
        worker.crash()

A program is a coroutine function with its `Node` as argument; a restart calls it again. A program that raises
fails the run, unless its start permits errors.

The `Ledger` records the events of a run. A run fails if a fault of its plan was never done. A seed counts
only if all faults had an effect and enough operations completed, so an idle scenario is not a success.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from tests.simulation.disk import DiskConditions, SimulatedDisk
from tests.simulation.disk_model import DiskModel
from tests.simulation.fault_points import unkind as unkind_points
from tests.simulation.host import Host
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import SimulatedNetwork
from tests.simulation.plan import Fault, Plan
from tests.simulation.random_streams import RandomStream
from tests.simulation.wire import Conditions

T = TypeVar("T")

Program = Callable[["Node"], Coroutine[Any, Any, object]]


def takes_at_once(incarnation: int) -> bool:
    """Return whether a parameter server may take pushes on the short way: three of four drawn ones may."""
    return incarnation % 4 > 0


class Node:
    """A machine.

    Attributes:
        uptimes: Start and end of each incarnation, in seconds; a running one's end is None.
        disk_model: Content of the machine's disk, which survives crashes.
    """

    def __init__(self, world: "World", name: str) -> None:
        self.name = name
        self.incarnation = 0
        self.uptimes: list[tuple[float, float | None]] = []
        self._world = world
        self.disk_model = self._new_disk_model()
        self.disk_conditions = DiskConditions()
        self._program: Program | None = None
        self._may_fail = False
        self.host = Host(name)
        self.host.up = False
        world.network.attach(self.host)
        world.network.vanish(self.host)
        self.task: asyncio.Task[object] | None = None

    def _new_disk_model(self) -> DiskModel:
        return DiskModel(self._world.loop.dice(f"drive/{self.name}/{self.incarnation}"))

    def open_disk(self) -> SimulatedDisk:
        """Open the disk of the machine for the present incarnation."""
        dice = self._world.loop.dice(f"disk/{self.name}/{self.incarnation}")
        return SimulatedDisk(self._world.loop, self.disk_model, self.disk_conditions, dice)

    @property
    def is_beside_others(self) -> bool:
        """Whether the machine is a process of the host with links in shared memory."""
        return self._world.network.shares(self.name)

    def entropy(self, count: int) -> bytes:
        """Return random bytes of a stream that only this incarnation uses."""
        return self._entropy.bytes(count)

    def start(
        self,
        program: Program,
        *,
        time: float = 0.0,
        rate: float = 1.0,
        step_s: float = 0.0,
        may_fail: bool = False,
    ) -> None:
        """Start the next incarnation.

        Args:
            time: Present time of the machine's clock, in seconds.
            rate: Seconds of the machine's clock per second of the simulation.
            step_s: Duration in seconds of each step of the machine's code, for a slow machine.

        Raises:
            RuntimeError: The machine runs already.
        """
        if self.host.up:
            raise RuntimeError(f"{self.name} runs already: crash it first")
        world = self._world
        self.incarnation += 1
        self.uptimes.append((world.loop.now, None))
        self._program, self._may_fail = program, may_fail
        self._entropy = world.loop.dice(f"entropy/{self.name}/{self.incarnation}")
        self.host = Host(self.name, now=world.loop.now, time=time, rate=rate, step_s=step_s)
        world.network.attach(self.host)
        name = f"{self.name}/{self.incarnation}"
        self.task = world.loop.spawn(program(self), name, self.host.context.copy())
        self.task.add_done_callback(self._ended)

    def restart(
        self, *, time: float = 0.0, rate: float = 1.0, step_s: float = 0.0, empty_disk: bool = False
    ) -> None:
        """Run the same program again, as after a crash; with `empty_disk`, on a new disk.

        Raises:
            RuntimeError: The machine runs, or never ran.
        """
        if self._program is None:
            raise RuntimeError(f"{self.name} never ran: start it")
        if empty_disk:
            self.disk_model = self._new_disk_model()
        self.start(self._program, time=time, rate=rate, step_s=step_s, may_fail=self._may_fail)

    def crash(self) -> None:
        """Cut the power: memory is lost, unsynced data may be lost, and no peer gets a message."""
        self._world.network.vanish(self.host)
        self._world.loop.crash(self.host)
        self.disk_model.crash()
        self._note_end()

    def kill(self) -> None:
        """Kill the program with -9: its memory is lost, and the kernel closes its connections."""
        self._world.loop.crash(self.host)
        self._world.network.kill(self.host)
        self._note_end()

    def freeze(self) -> None:
        """Stop the program until `thaw`; its kernel continues."""
        self._world.loop.freeze(self.host)

    def thaw(self) -> None:
        """Resume the program; the machine's clock also runs during a freeze."""
        self._world.loop.thaw(self.host)

    def set_clock(self, *, time: float | None = None, rate: float = 1.0) -> None:
        """Set the time (None: unchanged) and rate of the machine's clock."""
        self._world.loop.set_clock(self.host, time=time, rate=rate)

    def slow(self, step_s: float) -> None:
        """Set the duration in seconds of each step of the machine's code; 0: steps take no time."""
        self.host.step_s = step_s

    def _note_end(self) -> None:
        if self.uptimes and self.uptimes[-1][1] is None:
            self.uptimes[-1] = (self.uptimes[-1][0], self._world.loop.now)

    def _ended(self, task: asyncio.Task[object]) -> None:
        if task is self.task:
            self._note_end()
        if not task.cancelled() and task.exception() is not None and not self._may_fail:
            self._world.loop.call_exception_handler(
                {"message": f"the program of {self.name} raised", "exception": task.exception()}
            )

    def __repr__(self) -> str:
        return f"<Node {self.name}/{self.incarnation} {self.host!r}>"


class World:
    """The loop, network and machines of one simulated run."""

    def __init__(self, loop: SimulatedLoop, conditions: Conditions | None = None) -> None:
        self.loop = loop
        self.network = SimulatedNetwork(loop, conditions)
        self.nodes: dict[str, Node] = {}
        self.dice = loop.dice("workload")

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self.loop.now

    def node(self, name: str) -> Node:
        """Return the machine with that name; the first call makes it."""
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(self, name)
        return node


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[T]):
    """Outcome of a simulated run."""

    result: T
    replay_hash: str
    steps: int
    now: float
    trace: list[str] | None
    marks: dict[str, int]
    """Counts of marks and of fired fault points; empty if fault points were off."""


def simulate(
    scenario: Callable[[World], Coroutine[Any, Any, T]],
    *,
    seed: int | str,
    shuffled: bool = False,
    conditions: Conditions | None = None,
    limit_s: float = 3600.0,
    keep_trace: bool = False,
    unkind: bool = False,
) -> Outcome[T]:
    """Run a scenario from its beginning to its end; then end the programs of all machines.

    Args:
        scenario: Coroutine function of the world; its errors are raised here.
        shuffled: Run ready steps in any order; see `SimulatedLoop`.
        limit_s: Time limit in seconds of the simulation.
        keep_trace: Keep every line that the replay hash covers, to compare two runs.
        unkind: Switch on the fault points of product code; see `fault_points`.

    Raises:
        SimulationFailed: The run cannot continue, or a task or callback failed without a waiter.
    """
    # The base class names methods that no simulated run may use; they raise NotImplementedError.
    loop = SimulatedLoop(  # type: ignore[abstract]
        seed, shuffled=shuffled, limit_s=limit_s, keep_trace=keep_trace
    )
    try:
        switched: AbstractContextManager[Counter[str]] = (
            unkind_points(loop.dice("buggify")) if unkind else nullcontext(Counter())
        )
        with switched as marks:
            result = loop.run(scenario(World(loop, conditions)))
        return Outcome(
            result=result,
            replay_hash=loop.replay_hash,
            steps=loop.steps,
            now=loop.now,
            trace=loop.trace,
            marks=dict(marks),
        )
    except BaseException as error:
        error.add_note(
            f"simulated with seed={seed!r}, shuffled={shuffled}, unkind={unkind}, limit_s={limit_s:g}, "
            f"{conditions or Conditions()}; it ended after {loop.steps} steps at {loop.now} s"
        )
        raise
    finally:
        loop.close()


class Violation(Exception):
    """An invariant did not hold.

    Args:
        invariant: Name of the invariant: ``I6``, or a name of the scenario.
    """

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


async def settle(
    world: World, problem: Callable[[], str], *, within_s: float, invariant: str, step_s: float = 0.05
) -> None:
    """Wait until `problem` returns an empty text, and check it at intervals of `step_s`.

    Raises:
        Violation: `problem` still returns a text after `within_s`.
    """
    by = world.now + within_s
    while text := problem():
        if world.now > by:
            raise Violation(invariant, f"{within_s:g} s after the last fault {text}")
        await asyncio.sleep(step_s)


class Span(msgspec.Struct, frozen=True):
    """An event at a node, with a duration or at one moment; times are simulated seconds."""

    node: str
    kind: str
    """Name of the lane: life, crash, cut, leader, ..."""
    text: str
    begun: float
    ended: float | None
    """End of the event, in seconds; None if the event is one moment."""


class Ledger:
    """Record of the events of one run.

    Args:
        clock: Time of the simulation, in seconds.

    Attributes:
        faults: Number of faults that struck, by kind.
        misses: Number of faults without a noticeable effect, by kind.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.faults: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.operations = 0
        self.leader_changes = 0
        self.counts: Counter[str] = Counter()
        self.spans: list[Span] = []

    def fired(self, fault: Fault) -> None:
        """Record a fault that struck. Call the function once the effect of the fault is certain."""
        self.faults[fault.kind] += 1

    def missed(self, fault: Fault) -> None:
        """Record a fault that ended without a noticeable effect."""
        self.misses[fault.kind] += 1

    def note(self, kind: str, node: str, text: str) -> None:
        """Record an event of this moment."""
        self.spans.append(Span(node, kind, text, self._clock(), None))

    def span(self, kind: str, node: str, text: str, begun: float) -> None:
        """Record an event from `begun` until now."""
        self.spans.append(Span(node, kind, text, begun, self._clock()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario.

    Attributes:
        kinds: Kinds of faults that must all strike for a seed to count.
        least_operations: Number of client operations that must complete for a seed to count.
        least_leader_changes: Number of leader changes that a seed needs to count.
        events: Names of counts of the ledger. A seed must reach one of these to count; without names there is
            no such condition.
        limit_s: Time limit of a run, in seconds of the simulation.
        marks: Names of counts of the ledger, of marks and of fault points. If no seed of many reaches one of
            them, these seeds fail together.
        plan: Draws the plan of a run from its random stream only.
        run: Carries out the plan and checks the invariants; raises `Violation`.
    """

    name: str
    about: str
    kinds: tuple[str, ...]
    plan: Callable[[RandomStream], Plan]
    run: Callable[[World, Plan, Ledger], Coroutine[Any, Any, object]]
    least_operations: int = 0
    least_leader_changes: int = 0
    events: tuple[str, ...] = ()
    limit_s: float = 600.0
    marks: tuple[str, ...] = ()
