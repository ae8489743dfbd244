"""Pure: the order of firings, and the use of training contexts.

Theory of operation
-------------------
Every event is one method call: `admit`, `deliver`, `fired`, `failed`, `abandon`. An event's effects go to the
queue `effects`, from which the engine takes and carries them out in order. Effects are calls to execute (the
engine reports each exactly once through `fired` or `failed`), outputs, and notices about tags. Events are
methods, not records: several happen per firing, and a record would cost as much as handling it.

A tag moves through these states:

    (early) --admit--> live --all fired and arrived---------> finished
       |                 |
       |              abandon, failed --nothing running-----> abandoned
       |                 |                                        ^
       |                 +--calls running--> abandoned, still running
       +--abandon-------------------------------------------------+

*early*: tokens arrived before the tag was admitted. The scheduler keeps at most `early_limit` such tokens.
*live*: the tag has a slot (of `in_flight`) and a context. *abandoned, still running*: a call of the tag is
unreported, and cannot be stopped. The slot is free at once for another tag; the context is not, because a
thread may still write there. `SettledTags` keeps *finished* and *abandoned* tags; the scheduler drops and
counts their tokens.

A tag has finished when all its nodes have fired and all its inputs have arrived, not when all outputs have
values: a node that only sends is part of the work.

Invariants, checked by `check_invariants` and by property tests: a node fires at most once per tag, and
exactly once if the tag finishes; a context belongs to at most one flight, from when it is admitted until it
and its calls have ended; admission never exceeds `in_flight`; a gated node never exceeds `jobs` calls.

A *gated* node (`jobs` is set) keeps its ready firings in a queue. While a gated node has fewer than `jobs`
running calls, the next call takes up to `batch` ready firings. Batches therefore grow when calls are slow,
and an idle node starts at once. Firings that become ready before the next `open_gates` join one batch; the
engine calls it when no other effect is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from dataflow.errors import DuplicateToken, NoRoom, TagInFlight, TagSettled, TooManyEarlyTokens, UnknownPort
from dataflow.graph import CompiledNode, Graph
from dataflow.jobs import Tag
from dataflow.tokens import Abandoned, BatchCall, Call, ContextFreed, Effect, Finished, Firing, Flight, Output


class _Gate:
    """A gated node's ready firings, and its number of running calls."""

    __slots__ = ("node", "out", "ready")

    def __init__(self, node: CompiledNode) -> None:
        self.node = node
        self.out = 0
        self.ready: deque[Firing] = deque()


class Scheduler:
    """Decides the firings. Uses no loop, no thread and no clock.

    Args:
        graph: Graph to run.
        in_flight: Maximum number of live tags.
        contexts: One object per live tag, lent when it is admitted; at least `in_flight` of them. More
            contexts allow further admissions while abandoned tags still run. None if tags need no context.
        early_limit: Maximum number of tokens kept for tags that are not admitted yet.
        keep_epochs: Number of epochs whose settled tags are kept tag by tag; see `SettledTags`.

    Raises:
        ValueError: A number is below its minimum, or there are fewer contexts than `in_flight`.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        in_flight: int,
        contexts: Sequence[Any] | None = None,
        early_limit: int = 1024,
        keep_epochs: int = 2,
    ) -> None:
        if in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, not {in_flight}")
        if early_limit < 0:
            raise ValueError(f"early_limit must not be negative, it is {early_limit}")
        if contexts is not None and len(contexts) < in_flight:
            raise ValueError(f"{len(contexts)} contexts are too few for in_flight={in_flight}")
        self.graph = graph
        self.in_flight = in_flight
        self.num_admitted = 0
        self.num_finished = 0
        self.num_abandoned = 0
        self.num_firings = 0
        self.num_dropped = 0
        self._early_limit = early_limit
        self._readers = graph.readers
        self._inputs = {port: index for index, port in enumerate(graph.inputs)}
        self._output_names = [port if port in graph.outputs else None for port in graph.ports]
        self._arities = [node.arity for node in graph.compiled]
        self._unread = {index for index in self._inputs.values() if not graph.readers[index]}
        self._sources = [node for node in graph.compiled if node.arity == 0]
        self.gates = {node.index: _Gate(node) for node in graph.compiled if node.gated}
        """Gated nodes, by their index; without any, `open_gates` has no effect."""
        self._contexts = None if contexts is None else list(contexts)
        # Last in, first out: the context freed last is still in the processor's caches.
        self._free_contexts = [] if contexts is None else list(reversed(contexts))
        self._live: dict[Tag, Flight] = {}
        self._still_running: dict[Tag, Flight] = {}
        self._early: dict[Tag, dict[str, Any]] = {}
        self._num_early = 0
        self._settled = SettledTags(keep_epochs=keep_epochs)
        self.effects: deque[Effect] = deque()

    # Events

    def admit(self, tag: Tag) -> Any:
        """Make `tag` live and return its context; deliver its early tokens.

        Raises:
            NoRoom: `room` is 0.
            TagInFlight, TagSettled: The tag is, or was, in use.
        """
        self.check_admissible(tag)
        if not self.room:
            raise NoRoom(f"{tag} not admitted: {self.describe()}")
        context = None if self._contexts is None else self._free_contexts.pop()
        flight = Flight(
            tag,
            context=context,
            num_nodes=len(self._arities),
            missing=self._arities.copy(),
            unread=len(self._unread),
        )
        self._live[tag] = flight
        self.num_admitted += 1
        for node in self._sources:
            self._ready(node, flight, ())
        early = self._early.pop(tag, None)
        if early is not None:
            self._num_early -= len(early)
            for port, value in early.items():
                self.deliver(port, tag, value)
        return context

    def deliver(self, port: str, tag: Tag, value: Any) -> None:
        """Give external input `port` its value for `tag`.

        Tokens of a settled tag are dropped and counted; tokens of a tag not yet admitted are kept.

        Raises:
            UnknownPort: The graph has no such input.
            DuplicateToken: The tag is live or early, and has that token already.
            TooManyEarlyTokens: The token is early, and `early_limit` are kept already.
        """
        index = self._inputs.get(port)
        if index is None:
            raise UnknownPort(port=port, inputs=self.graph.inputs)
        flight = self._live.get(tag)
        if flight is None:
            self._deliver_early(port, tag, value)
            return
        bit = 1 << index
        if flight.arrived & bit:
            raise DuplicateToken(port=port, tag=tag)
        flight.arrived |= bit
        self._feed(flight, index, value)
        if index in self._unread:
            flight.left -= 1
            if not flight.left:
                self._finish(flight)

    def fired(self, call: Call, result: Any) -> None:
        """Report that `call` was executed, with the result of its `execute`."""
        if call.node.gated:
            self.gates[call.node.index].out -= 1
        pairs: Any = ((call, result),) if type(call) is Firing else zip(call.firings, result, strict=True)
        for firing, values in pairs:
            flight = firing.flight
            flight.running -= 1
            if flight.abandoned:
                self._free_if_idle(flight)
                continue
            assert values is not None, "a call for a live tag was not executed"
            self.num_firings += 1
            flight.left -= 1
            for port, value in zip(firing.node.outputs, values, strict=True):
                self._feed(flight, port, value)
            if not flight.left:
                self._finish(flight)

    def failed(self, call: Call) -> list[Tag]:
        """Report that `call` raised; abandon and return its live tags."""
        if call.node.gated:
            self.gates[call.node.index].out -= 1
        lost = [firing.flight for firing in call.firings if not firing.flight.abandoned]
        for firing in call.firings:
            firing.flight.running -= 1
        for flight in lost:
            self._abandon(flight)
        for firing in call.firings:
            self._free_if_idle(firing.flight)
        return [flight.tag for flight in lost]

    def abandon(self, tag: Tag) -> bool:
        """Abandon a live, early or unknown `tag`; return False if it was settled."""
        flight = self._live.get(tag)
        if flight is not None:
            self._abandon(flight)
            return True
        if tag in self._settled:
            return False
        early = self._early.pop(tag, {})
        self._num_early -= len(early)
        self.num_dropped += len(early)
        self._settled.add(tag)
        return True

    def abandon_all(self) -> None:
        """Abandon every live tag."""
        for flight in list(self._live.values()):
            self._abandon(flight)

    def open_gates(self) -> None:
        """Start calls of gated nodes until `jobs` run or no firing is ready; drop abandoned firings."""
        for gate in self.gates.values():
            node = gate.node
            while gate.ready and gate.out < node.jobs:
                firings: list[Firing] = []
                while gate.ready and len(firings) < node.batch:
                    firing = gate.ready.popleft()
                    if not firing.flight.abandoned:
                        firing.flight.running += 1
                        firings.append(firing)
                if firings:
                    gate.out += 1
                    self.effects.append(firings[0] if node.batch == 1 else BatchCall(node, firings))

    # Queries

    @property
    def room(self) -> int:
        """Number of tags that can be admitted now."""
        slots = self.in_flight - len(self._live)
        return slots if self._contexts is None else min(slots, len(self._free_contexts))

    @property
    def num_live(self) -> int:
        """Number of live tags."""
        return len(self._live)

    @property
    def num_still_running(self) -> int:
        """Number of abandoned tags with a call that still runs."""
        return len(self._still_running)

    @property
    def num_early(self) -> int:
        """Number of tokens kept for tags not yet admitted."""
        return self._num_early

    @property
    def idle(self) -> bool:
        """Whether no tag is live and no call runs."""
        return not self._live and not self._still_running

    def is_settled(self, tag: Tag) -> bool:
        """Return whether `tag` has finished or was abandoned; tags of old epochs count as settled."""
        return tag in self._settled

    def check_admissible(self, tag: Tag) -> None:
        """Raise TagInFlight or TagSettled if `tag` may not be admitted, now or later."""
        if tag in self._live:
            raise TagInFlight(tag=tag)
        if tag in self._settled:
            raise TagSettled(tag=tag)

    def describe(self) -> str:
        """Return one line for messages: the live tags, and the inputs that they lack."""
        lacks = []
        for tag, flight in self._live.items():
            missing = [port for port, index in self._inputs.items() if not flight.arrived >> index & 1]
            waits = f" lacks {', '.join(map(repr, missing))}" if missing else ""
            unread = sum(not flight.arrived >> index & 1 for index in self._unread)
            lacks.append(f"{tuple(tag)} has {flight.left - unread} nodes to fire{waits}")
        return (
            f"{len(self._live)} of {self.in_flight} slots taken, {len(self._still_running)} abandoned and "
            f"still running; {'; '.join(lacks) or 'nothing live'}"
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        assert len(self._live) <= self.in_flight
        assert self._num_early == sum(map(len, self._early.values())) <= self._early_limit
        assert not self._live.keys() & self._still_running.keys()
        assert all(not flight.abandoned and flight.left for flight in self._live.values())
        assert all(flight.abandoned and flight.running > 0 for flight in self._still_running.values())
        assert not any(tag in self._settled for tag in self._live)
        assert self.num_admitted == self.num_finished + self.num_abandoned + len(self._live)
        for gate in self.gates.values():
            assert 0 <= gate.out <= gate.node.jobs
        if self._contexts is not None:
            held = [f.context for f in (*self._live.values(), *self._still_running.values())]
            assert sorted(map(id, held + self._free_contexts)) == sorted(map(id, self._contexts))

    # Consequences

    def _deliver_early(self, port: str, tag: Tag, value: Any) -> None:
        if tag in self._settled:
            self.num_dropped += 1
            return
        early = self._early.get(tag)
        if early is not None and port in early:
            raise DuplicateToken(port=port, tag=tag)
        if self._num_early >= self._early_limit:
            raise TooManyEarlyTokens(port=port, tag=tag, limit=self._early_limit)
        if early is None:
            early = self._early[tag] = {}
        early[port] = value
        self._num_early += 1

    def _feed(self, flight: Flight, port: int, value: Any) -> None:
        """Pass the value of a port to its readers and, if it is an output, to the outside."""
        for node, slot in self._readers[port]:
            if node.arity == 1:
                self._ready(node, flight, (value,))
                continue
            args = flight.args[node.index]
            if args is None:
                args = flight.args[node.index] = [None] * node.arity
            args[slot] = value
            flight.missing[node.index] -= 1
            if not flight.missing[node.index]:
                flight.args[node.index] = None  # the call alone keeps the values
                self._ready(node, flight, args)
        name = self._output_names[port]
        if name is not None:
            self.effects.append(Output(name, flight.tag, value))

    def _ready(self, node: CompiledNode, flight: Flight, args: Sequence[Any]) -> None:
        firing = Firing(node, flight, args)
        if node.gated:
            self.gates[node.index].ready.append(firing)
            return
        flight.running += 1
        self.effects.append(firing)

    def _finish(self, flight: Flight) -> None:
        self.num_finished += 1
        del self._live[flight.tag]
        self._settled.add(flight.tag)
        self._release(flight)
        self.effects.append(Finished(flight.tag))

    def _abandon(self, flight: Flight) -> None:
        flight.abandoned = True
        flight.args.clear()
        self.num_abandoned += 1
        del self._live[flight.tag]
        self._settled.add(flight.tag)
        self.effects.append(Abandoned(flight.tag))
        if flight.running:
            self._still_running[flight.tag] = flight
        else:
            self._release(flight)

    def _release(self, flight: Flight) -> None:
        if self._contexts is not None:
            self._free_contexts.append(flight.context)

    def _free_if_idle(self, flight: Flight) -> None:
        """Free the context of an abandoned tag after the report of its last call."""
        if not flight.running and self._still_running.pop(flight.tag, None) is not None:
            self._release(flight)
            self.effects.append(ContextFreed(flight.tag))


class _Run:
    """The set of all numbers n with start <= n < watermark, and of the numbers in `others`."""

    __slots__ = ("others", "start", "watermark")

    def __init__(self, number: int) -> None:
        self.start = number
        self.watermark = number + 1
        self.others: set[int] = set()

    def add(self, number: int) -> None:
        """Add a number, and extend the range over all numbers in `others` that now adjoin it."""
        if self.start <= number < self.watermark:
            return
        others = self.others
        others.add(number)
        while self.watermark in others:
            others.remove(self.watermark)
            self.watermark += 1
        while self.start - 1 in others:
            self.start -= 1
            others.remove(self.start)

    def __contains__(self, number: int) -> bool:
        return self.start <= number < self.watermark or number in self.others


class SettledTags:
    """The tags that finished or were abandoned, in bounded memory.

    A late token must be recognised as late, and a tag must never run twice. A plain set of all tags would
    grow without end, so two compressions apply:

    - epochs: only the newest `keep_epochs` are kept tag by tag; older epochs count as settled as a whole;
    - numbers: per (epoch, attempt), one range of consecutive numbers is two integers (a start and a
      watermark), and only numbers that unsettled ones separate from the range are in a set. The answer for a
      kept epoch is exact.

    Args:
        keep_epochs: Number of epochs, counted back from the newest seen, that are kept tag by tag.
    """

    def __init__(self, *, keep_epochs: int) -> None:
        if keep_epochs < 1:
            raise ValueError(f"keep_epochs must be at least 1, not {keep_epochs}")
        self._keep_epochs = keep_epochs
        self._oldest: int | None = None
        self._runs: dict[tuple[int, int], _Run] = {}

    def add(self, tag: Tag) -> None:
        epoch, number, attempt = tag
        run = self._runs.get((epoch, attempt))
        if run is not None:
            if number == run.watermark and not run.others:  # tags mostly settle in their order
                run.watermark += 1
            else:
                run.add(number)
            return
        oldest = epoch - self._keep_epochs + 1
        if self._oldest is None or oldest > self._oldest:
            self._oldest = oldest
            self._runs = {key: run for key, run in self._runs.items() if key[0] >= oldest}
        if epoch >= self._oldest:
            self._runs[epoch, attempt] = _Run(number)

    def __contains__(self, tag: Tag) -> bool:
        if self._oldest is not None and tag.epoch < self._oldest:
            return True
        run = self._runs.get((tag.epoch, tag.attempt))
        return run is not None and tag.number in run
