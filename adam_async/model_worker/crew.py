"""Pure: workers of one replica that share a process and a compute pool hand their blocks over by reference.

Theory of operation
-------------------
What is local needs no message (AD-15): where all parts of a replica are in one process, and nothing is to
come between them, a group goes through the segments of all parts in one job of one compute thread.
Everything else is as it is between processes: each worker leases, admits, has a copy of its weights, pushes
what it owns and pulls what it reads.

A worker *offers* each group that it has admitted, with its context. The worker with part 0 leads: its job
begins when all others have offered the group, runs the segments of all parts in an order in which whatever
one receives has been sent, and hands to each worker what it shall push.
"""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from adam_async.data_server.client import ImageGroup
from adam_async.model.partition import Partition
from adam_async.model_worker.part_trainer import PartTrainer, Passage
from adam_async.model_worker.training import Admitted, Trained
from dataflow import Firing, Graph, Node, Tag

Offer = tuple[Firing, ImageGroup | Admitted]

LEAD = 0
"""Part whose worker runs the jobs."""


class Crew:
    """The workers of one life of one replica, all in this process.

    Args:
        parts: How many there are.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._trainers: dict[int, tuple[PartTrainer, Partition]] = {}
        self._deliver: dict[int, Callable[[str, Tag, Any], None]] = {}
        self._offers: dict[Tag, dict[int, Offer]] = {}
        self._order: list[tuple[int, int]] | None = None
        self.handed_over = 0
        """Blocks that went from one worker to another."""

    def join(
        self,
        part: int,
        trainer: PartTrainer,
        partition: Partition,
        deliver: Callable[[str, Tag, Any], None],
    ) -> None:
        """A worker takes its place, before its first group.

        Args:
            part: Its part.
            trainer: What runs it.
            partition: The part itself.
            deliver: Gives its graph a token, on the loop.
        """
        self._trainers[part] = trainer, partition
        self._deliver[part] = deliver

    def offer(self, part: int, firing: Firing, group: ImageGroup | Admitted) -> None:
        """A worker other than the lead has admitted a group. On the loop."""
        offers = self._offers.setdefault(firing.tag, {})
        offers[part] = firing, group
        if len(offers) == self._parts - 1:
            del self._offers[firing.tag]
            self._deliver[LEAD]("others", firing.tag, offers)

    def train(self, firing: Firing, group: ImageGroup | Admitted, others: dict[int, Offer]) -> list[Trained]:
        """Take a group through all parts; returns what each worker pushes. On a compute thread."""
        order = self._order
        if order is None:
            order = self._order = runnable_order([self._trainers[part][1] for part in range(self._parts)])
        offers = [(firing, group) if part == LEAD else others[part] for part in range(self._parts)]
        passages: list[Passage] = []
        for part, (own, offered) in enumerate(offers):
            passages.append(self._trainers[part][0].begin(own, offered))
        wires = self._wires(firing, passages[0].group.lease.images)
        for part, segment in order:
            self._trainers[part][0].run_local(segment, offers[part][0], passages[part], wires)
        for part, (own, _) in enumerate(offers):
            partition = self._trainers[part][1]
            for crossing in partition.partial:
                partition.write_partial(own.context, crossing, wires[crossing.number])
        self.handed_over += len(wires)
        return [
            self._finish(part, firing, offers[part][0], passages[part], wires) for part in range(self._parts)
        ]

    def _finish(
        self, part: int, lead: Firing, own: Firing, passage: Passage, wires: dict[int, NDArray[Any]]
    ) -> Trained:
        trainer, partition = self._trainers[part]
        parts = [wires[crossing.number] for crossing in partition.sums]
        return trainer.finish(own, passage, parts, scratch=lead.scratch)

    def _wires(self, firing: Firing, images: int) -> dict[int, NDArray[Any]]:
        """Memory of all crossings, kept with the lead's context."""
        kept: dict[Any, Any] = firing.context.tapes
        wires: dict[int, NDArray[Any]] | None = kept.get("wires")
        if wires is None:
            wires = {}
            for trainer, partition in self._trainers.values():
                wires |= {
                    crossing.number: trainer.new_wire(partition.wire_shape(crossing, images))
                    for crossing in partition.outgoing
                }
            kept["wires"] = wires
        return wires

    def hand_out(self, firing: Firing, trained: Sequence[Trained]) -> None:
        """Give each worker but the lead what it pushes. On the loop."""
        for part in range(1, self._parts):
            self._deliver[part]("trained", firing.tag, trained[part])


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
            crew.hand_out(firing, trained)
            push(firing, trained[LEAD])

        inputs.append("others")
        nodes += [
            Node("train", crew.train, inputs=("group", "others"), outputs=("trained",), heavy=True),
            Node("push", hand_out, inputs=("trained",)),
        ]
    else:

        def offer(firing: Firing, group: ImageGroup | Admitted) -> None:
            crew.offer(part, firing, group)

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

    def find(self, run: str, replica: int, life: int, *, parts: int) -> Crew:
        """The crew of one life; those of earlier lives are forgotten."""
        for key in [
            key for key in self._crews if (key[:2] == (run, replica) and key[2] != life) or key[0] != run
        ]:
            del self._crews[key]
        return self._crews.setdefault((run, replica, life), Crew(parts))
