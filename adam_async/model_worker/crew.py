"""Pure: workers of one replica that share a process and a compute pool hand their blocks over by reference.

Theory of operation
-------------------
What is local needs no message (AD-15): where all parts of a replica are in one process, and nothing is to
come between them, a group goes through the segments of all parts in one job of one compute thread.
Everything else is as it is between processes: each worker leases, admits, has a copy of its weights, pushes
what it owns and pulls what it reads.

The worker with part 0 *leads*. Its training contexts are those of all parts, wired to one another once: what
leaves one part is written where the other one reads it, and error gradients are read where they lie. The
other workers *offer* each group that they have admitted; the lead's job begins when all have offered it,
runs the segments of all parts in an order in which whatever one receives has been sent, and hands to each
worker what it shall push.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.client import ImageGroup
from adam_async.model.context import Context
from adam_async.model.exchange import WIRES, Arrival, Departure
from adam_async.model.partition import Partition
from adam_async.model_worker.part_trainer import PartTrainer, Passage
from adam_async.model_worker.training import Admitted, Trained
from dataflow import Firing, Graph, Node, Tag

Offered = ImageGroup | Admitted

LEAD = 0
"""Part whose worker runs the jobs."""


class CrewContext:
    """The contexts of all parts for one group in flight, wired to one another.

    Args:
        parts: All parts.
        group_images: Most images of a group.
    """

    def __init__(self, parts: Sequence[Partition], group_images: int) -> None:
        self._parts = parts
        self.contexts: list[Context] = [part.network.context(group_images) for part in parts]
        self.partial: dict[int, NDArray[Any]] = {
            crossing.number: np.zeros(crossing.values, part.network.dtype)
            for part in parts
            for crossing in part.partial
        }
        """Memory of partial weight gradients, by the number of their crossing."""
        self._wired: set[int] = set()

    def wire(self, images: int) -> None:
        """Lead what crosses to its place, for groups of so many images; the contexts are laid out for
        them."""
        if images in self._wired:
            return
        self._wired.add(images)
        places: dict[int, NDArray[Any]] = {}
        for part, context in zip(self._parts, self.contexts, strict=True):
            for number, layer in enumerate(part.network.layers):
                if isinstance(layer, Arrival):
                    places |= dict(layer.places(context.slots(number)))
        for part, context in zip(self._parts, self.contexts, strict=True):
            for number, layer in enumerate(part.network.layers):
                if isinstance(layer, Arrival | Departure):
                    context.slots(number).views[WIRES] = places


class Crew:
    """The workers of one life of one replica, all in this process.

    Args:
        parts: All parts, in their order.
    """

    def __init__(self, parts: Sequence[Partition]) -> None:
        self._parts = tuple(parts)
        self._order = runnable_order(self._parts)
        self._crossings = len(self._parts[0].layout.crossings)
        self._trainers: dict[int, PartTrainer] = {}
        self._deliver: dict[int, Callable[[str, Tag, Any], None]] = {}
        self._offers: dict[Tag, dict[int, Offered]] = {}
        self.handed_over = 0
        """Blocks that went from one worker to another."""

    def new_context(self, part: int, group_images: int) -> CrewContext | None:
        """Make what one group in flight needs at one worker: all of it at the lead, nothing at the others."""
        return CrewContext(self._parts, group_images) if part == LEAD else None

    def join(self, part: int, trainer: PartTrainer, deliver: Callable[[str, Tag, Any], None]) -> None:
        """A worker takes its place, before its first group.

        Args:
            part: Its part.
            trainer: What runs it.
            deliver: Gives its graph a token, on the loop.
        """
        self._trainers[part] = trainer
        self._deliver[part] = deliver

    def offer(self, part: int, tag: Tag, group: Offered) -> None:
        """A worker other than the lead has admitted a group. On the loop."""
        offers = self._offers.setdefault(tag, {})
        offers[part] = group
        if len(offers) == len(self._parts) - 1:
            del self._offers[tag]
            self._deliver[LEAD]("others", tag, offers)

    # A run that diverges is told by its loss and its refused pushes; a warning per group says nothing more.
    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def train(self, firing: Firing, group: Offered, others: dict[int, Offered]) -> list[Trained]:
        """Take a group through all parts; returns what each worker pushes. On a compute thread."""
        crew: CrewContext = firing.context
        trainers = [self._trainers[place] for place in range(len(self._parts))]
        passages: list[Passage] = []
        for place, (trainer, context) in enumerate(zip(trainers, crew.contexts, strict=True)):
            passages.append(trainer.begin(context, group if place == LEAD else others[place]))
        crew.wire(passages[LEAD].group.lease.images)
        for place, segment in self._order:
            trainers[place].compute(segment, crew.contexts[place], passages[place])
        for part, context in zip(self._parts, crew.contexts, strict=True):
            for crossing in part.partial:
                part.write_partial(context, crossing, crew.partial[crossing.number])
        self.handed_over += self._crossings
        return [
            trainer.finish(context, passage, [crew.partial[c.number] for c in part.sums], firing.scratch)
            for trainer, context, passage, part in zip(
                trainers, crew.contexts, passages, self._parts, strict=True
            )
        ]

    def hand_out(self, tag: Tag, trained: Sequence[Trained]) -> None:
        """Give each worker but the lead what it pushes. On the loop."""
        for part in range(1, len(self._parts)):
            self._deliver[part]("trained", tag, trained[part])


def runnable_order(parts: Sequence[Partition]) -> list[tuple[int, int]]:
    """Order the segments of all parts so that whatever one receives was sent before: (part, segment)."""
    done: list[int] = [0] * len(parts)
    sent: set[int] = set()
    order: list[tuple[int, int]] = []
    while any(number < len(part.segments) for number, part in zip(done, parts, strict=True)):
        before = len(order)
        for place, part in enumerate(parts):
            while done[place] < len(part.segments) and sent.issuperset(part.segments[done[place]].receives):
                sent.update(part.segments[done[place]].sends)
                order.append((place, done[place]))
                done[place] += 1
        assert len(order) > before, "the parts wait for one another"
    return order


def crew_graph(
    crew: Crew, part: int, push: Callable[[Firing, Trained], None], *, waits_for_pull: bool
) -> Graph:
    """The dataflow graph of one worker of a crew.

    Args:
        crew: All workers.
        part: This one's.
        push: Takes groups that are trained; on the loop.
        waits_for_pull: Whether a tag is complete only when token ``landed`` has come.
    """
    inputs = ["group"]
    nodes: list[Node] = []
    if part == LEAD:

        def hand_out(firing: Firing, trained: list[Trained]) -> None:
            crew.hand_out(firing.tag, trained)
            push(firing, trained[LEAD])

        inputs.append("others")
        nodes += [
            Node("train", crew.train, inputs=("group", "others"), outputs=("trained",), heavy=True),
            Node("push", hand_out, inputs=("trained",)),
        ]
    else:

        def offer(firing: Firing, group: Offered) -> None:
            crew.offer(part, firing.tag, group)

        inputs.append("trained")
        nodes += [Node("offer", offer, inputs=("group",)), Node("push", push, inputs=("trained",))]
    if waits_for_pull:
        inputs.append("landed")
        nodes.append(Node("land", _complete, inputs=("landed",)))
    return Graph(inputs=tuple(inputs), nodes=tuple(nodes))


def _complete(firing: Firing, token: None) -> None:
    """The tag is complete; the engine frees its slot and context."""


class CrewShelf:
    """The crews of a process: the workers of one life of a replica find each other here."""

    def __init__(self) -> None:
        self._crews: dict[tuple[str, int, int], Crew] = {}

    def find(self, run: str, replica: int, life: int, make: Callable[[], Sequence[Partition]]) -> Crew:
        """The crew of one life, of parts that are made for it; those of earlier lives are forgotten."""
        over = [key for key in self._crews if key[0] != run or (key[1] == replica and key[2] != life)]
        for key in over:
            del self._crews[key]
        found = self._crews.get((run, replica, life))
        if found is None:
            found = self._crews[run, replica, life] = Crew(make())
        return found
