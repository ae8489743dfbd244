"""Pure: the client side of exactly-once pushes: questions to one bundle that are sent and not yet answered.

An *exchange* is one push, pull, tick or report of steps on its way to a bundle's primary. Exchanges stay in
the order in which they were first sent. Every failure has one remedy: drop the link, dial again, and send all
open exchanges again, in order, under the same numbers. The primary applies the pushes that the bundle has not
seen, and answers the others again. So a push is applied once, however often it is sent and however often the
primary moves. A pull behind a push on the link still contains the push.

An answer may leave part of a push open: shards with a gap (an earlier push has not arrived), or whose primary
has moved. An exchange with an open part stays open until the remedy is applied.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NotRequired, Protocol, TypedDict, Unpack

import msgspec
from numpy.typing import NDArray

from adam_async.messages import (
    DUPLICATE,
    REFUSED,
    Commands,
    OfEach,
    Part,
    Pull,
    Push,
    Pushed,
    ReportSteps,
    StepReport,
    StepsReported,
    Tick,
    Ticked,
    Values,
    each_of,
    joined,
    pack,
    unpack,
)
from adam_async.run.ids import ShardId
from transport import Message, RemoteProtocolError, TransportError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionIdentity:
    """Identity of a client, under which each of its pushes is applied exactly once."""

    store: str
    session: int
    incarnation: int
    replica: int
    generation: int


class StepFields(TypedDict):
    """Fields of `Push` that are the same in all messages of a step."""

    clock: int
    weight: int
    rate: float
    epoch: NotRequired[int]
    assign: NotRequired[bool]
    groups: NotRequired[tuple[int, ...]]
    loss_sum: NotRequired[float | None]
    recorded: NotRequired[bool]
    vector: NotRequired[int]
    commands: NotRequired[Commands | None]


class PushFields(StepFields):
    """Fields of `Push` that the client's owner gives."""

    parts: tuple[Part, ...]
    shards: tuple[ShardId, ...]
    versions: OfEach
    own_applied: OfEach
    pull: NotRequired[bool]


class Receiver(Protocol):
    """A call of several messages, which takes the answer to each by the message's number in the call."""

    def freed(self) -> None:
        """Record that a push is settled and no send reads its tensors, or that a pull has ended."""
        ...


class PushReceiver(Receiver, Protocol):
    """A call that pushes."""

    def pushed(self, number: int, answer: Pushed, values: NDArray[Any] | None) -> None:
        """Take the acknowledgement of all shards of a push, and the values if the push pulls."""
        ...


class PullReceiver(Receiver, Protocol):
    """A call that pulls."""

    def pulled(self, number: int, answer: Values, values: NDArray[Any]) -> None:
        """Take the values of a pull, one shard after the other, flat."""
        ...

    def behind(self, number: int, answer: Values) -> bool:
        """Take an answer without values, which has the slowest clock and the replicas that are behind.

        An answer without values comes within about half of `answer_s`. Returns whether the caller still wants
        values.
        """
        ...


class Exchange(msgspec.Struct, kw_only=True, eq=False):
    """One question to a bundle, from its first sending until an answer settles it."""

    session: "Session"
    message: Message
    into: Sequence[NDArray[Any]] | None = None
    """Memory for the tensors of the answer."""
    is_push: bool = False
    sent: int = 0
    """Number of times that the exchange was sent."""

    @abstractmethod
    def answered(self, answer: Message) -> bool:
        """Take an answer. Returns True if it settles the exchange, and False to send the exchange again."""

    def settle(self) -> None:
        """Note that the answer has arrived."""

    def arrived(self, answer: Message | TransportError) -> None:
        """Take the link's answer, or the error that replaces it."""
        session, error = self.session, None
        if isinstance(answer, TransportError):
            error = answer
        elif self not in session.open:  # answered before, on an earlier link
            return
        else:
            try:
                is_settled = self.answered(answer)
            except TransportError as malformed:
                error = malformed
            except Exception as defect:
                # No caller awaits the answer: without this, the exchange would stay open for ever.
                session.fail(defect)
                return
            else:
                session.on_progress()
                if is_settled:
                    del session.open[self]
                    session.open_pushes -= self.is_push
                    session.settled += 1
                    self.settle()
                    return
        session.refused(self, error)


class PushExchange(Exchange, kw_only=True, eq=False):
    """A push, which owns its tensors until it is settled and no send reads them."""

    call: PushReceiver
    number: int
    pulls: bool
    shards: int
    """Number of shards."""
    reading: int = 0
    """Number of sendings that still read the tensors."""
    settled: bool = False

    def answered(self, answer: Message) -> bool:
        """See `Exchange`. Every shard must have acknowledged the push."""
        acknowledged = unpack(answer, Pushed)
        settled, counts = True, self.session.counts
        for problem in acknowledged.problems:
            if problem.status == DUPLICATE:
                counts.duplicates += 1
            elif problem.status == REFUSED:
                counts.refused += 1
            else:
                settled = False
        if settled:
            if self.pulls and len(answer.tensors) != 1:
                raise _no_values(answer)
            self.call.pushed(self.number, acknowledged, answer.tensors[0] if self.pulls else None)
            # After the call took it: an answer that does not fit is asked for again, and counts once.
            counts.acknowledged += self.shards
        return settled

    def settle(self) -> None:
        """See `Exchange`."""
        self.settled = True
        if not self.reading:
            self.session.free(self.call)

    def released(self) -> None:
        """Note, on any thread, that one sending no longer reads the tensors."""
        session = self.session
        if session.running_loop() is not session.loop:
            # In one process the last view may be dropped by a disk thread or a garbage collection.
            session.pass_on(self.released)
            return
        self.reading -= 1
        if self.settled and not self.reading:
            self.session.free(self.call)


class PullExchange(Exchange, kw_only=True, eq=False):
    """A pull, sent again until an answer has the values."""

    call: PullReceiver
    number: int
    has_shards: bool
    clock: int

    def answered(self, answer: Message) -> bool:
        """See `Exchange`. After an answer without values, pull again while they are wanted."""
        values = unpack(answer, Values)
        if values.versions != () or not self.has_shards:
            if len(answer.tensors) != 1:
                raise _no_values(answer)
            self.call.pulled(self.number, values, answer.tensors[0])
        elif not self.clock:  # such a question would be asked again without an end
            raise RemoteProtocolError("values", "a Values has no values, and the Pull named no clock")
        elif self.call.behind(self.number, values):
            self.session.ask(msgspec.structs.replace(self, sent=0))
            return True
        self.session.free(self.call)
        return True


class TickExchange(Exchange, kw_only=True, eq=False):
    """The end of a step on some shards."""

    def answered(self, answer: Message) -> bool:
        """See `Exchange`."""
        unpack(answer, Ticked)
        return True


class ReportExchange(Exchange, kw_only=True, eq=False):
    """A report of steps that were applied in place."""

    on_answer: Callable[[], None]
    acknowledges: int
    """Number of steps, counted on each shard."""
    refused: int

    def answered(self, answer: Message) -> bool:
        """See `Exchange`."""
        unpack(answer, StepsReported)
        self.session.counts.acknowledged += self.acknowledges
        self.session.counts.refused += self.refused
        self.on_answer()
        return True


def _no_values(answer: Message) -> RemoteProtocolError:
    return RemoteProtocolError("tensors", f"{answer.type} must carry the values as one tensor")


@dataclass(slots=True)
class PushCounts:
    """Outcomes of the client's pushes, counted per shard; `resent` counts exchanges."""

    acknowledged: int = 0
    duplicates: int = 0
    refused: int = 0
    resent: int = 0


class _SharedNumber(msgspec.Struct, eq=False):
    """Last number of shards that were always pushed with the same numbers, in the same messages."""

    shards: tuple[ShardId, ...]
    last: int


class ShardNumbers:
    """The number of the last push to each shard of one bundle."""

    def __init__(self) -> None:
        self._last: dict[ShardId, int] = {}
        """Last number of each shard that has no shared one."""
        self._shared: dict[tuple[ShardId, ...], _SharedNumber] = {}
        self._shared_of: dict[ShardId, _SharedNumber] = {}

    def next(self, shards: tuple[ShardId, ...]) -> OfEach:
        """Give the next number on each shard, from 1 without gaps."""
        shared = self._shared.get(shards)
        if shared is not None:
            shared.last += 1
            return shared.last
        self._separate(shards)
        numbers = joined([self._last.get(shard, 0) + 1 for shard in shards])
        if isinstance(numbers, int) and len(set(shards)) == len(shards):
            shared = self._shared[shards] = _SharedNumber(shards, numbers)
            self._shared_of.update(dict.fromkeys(shards, shared))
        else:
            self._last.update(zip(shards, each_of(numbers, len(shards)), strict=True))
        return numbers

    def _separate(self, shards: Sequence[ShardId]) -> None:
        """Dissolve the shared numbers of some shards."""
        for shard in shards if self._shared else ():
            shared = self._shared_of.get(shard)
            if shared is not None:
                del self._shared[shared.shards]
                self._last.update(dict.fromkeys(shared.shards, shared.last))
                for member in shared.shards:
                    del self._shared_of[member]

    def last(self, shards: Sequence[ShardId]) -> OfEach:
        """Return the last number given on each of some shards; 0 for a shard without a number."""
        shared = self._shared.get(tuple(shards))
        if shared is not None:
            return shared.last
        found = [self._shared_of.get(shard) for shard in shards]
        return joined(
            [
                self._last.get(shard, 0) if shared is None else shared.last
                for shard, shared in zip(shards, found, strict=True)
            ]
        )

    def all(self) -> dict[ShardId, int]:
        """Return the last number given on each shard that was pushed."""
        return {**self._last, **{shard: shared.last for shard, shared in self._shared_of.items()}}

    def next_steps(self, shards: Sequence[ShardId], steps: int) -> int:
        """Give numbers to several steps, each on all of these shards; returns the first number."""
        self._separate(shards)
        first = self._last.get(shards[0], 0) + 1
        self._last.update(dict.fromkeys(shards, first + steps - 1))
        return first


class Session:
    """One client's numbers and open exchanges with one bundle; a subclass sends the exchanges.

    Args:
        identity: Identity of the client.
        limit: Number of unacknowledged pushes after which admission waits.
        answer_s: Deadline of an answer, in seconds.
        copies: Whether pushes copy their tensors, so that no server reads the caller's memory.
        on_progress: Called for each answer.
        running_loop: Returns the event loop of the calling thread.
    """

    def __init__(
        self,
        identity: SessionIdentity,
        *,
        limit: int,
        answer_s: float,
        copies: bool,
        on_progress: Callable[[], object],
        running_loop: Callable[[], object],
    ) -> None:
        self._identity: dict[str, Any] = asdict(identity)
        """Fields of each message that names the client."""
        self._answer_s = answer_s
        self._copies = copies
        self.limit = limit
        self.numbers = ShardNumbers()
        self.open: dict[Exchange, None] = {}
        self.open_pushes = 0
        self.counts = PushCounts()
        self.settled = 0
        """Number of exchanges that were settled on the present link."""
        self.on_progress = on_progress
        self.running_loop = running_loop
        self.loop = running_loop()

    @abstractmethod
    def _send(self, exchange: Exchange) -> None:
        """Send an open exchange after the earlier ones."""

    @abstractmethod
    def refused(self, exchange: Exchange, error: TransportError | None) -> None:
        """Send all open exchanges again: one has an error or, for None, an answer that settles it in part."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """End the client with an error of one of its calls."""

    @abstractmethod
    def free(self, call: Receiver) -> None:
        """Call `Receiver.freed`; an error ends the client."""

    @abstractmethod
    def pass_on(self, callback: Callable[[], None]) -> None:
        """Run a callback on the client's loop, from another thread."""

    def push(
        self,
        tensors: Sequence[NDArray[Any]],
        call: PushReceiver,
        number: int = 0,
        into: NDArray[Any] | None = None,
        **fields: Unpack[PushFields],
    ) -> None:
        """Push gradients under the next numbers. Never waits; see `ParameterClient.admit`.

        Args:
            call: Takes the answer, once every shard has acknowledged the push or refused non-finite values.
                The push is later *freed*, once no send reads the tensors: only then may the caller write to
                them again.
            number: Number of the message in its call.
            into: Memory for the values of a push that pulls; by default pooled memory.
            fields: Fields of the message.
        """
        # Copy first: there may be no memory for the copies, and a number without its push would be a gap.
        sent = [each.copy() for each in tensors] if self._copies else tensors
        shards = fields["shards"]
        numbers = self.numbers.next(shards)
        if fields.get("commands") is not None:
            fields["shards"] = shards[:1]  # the bundle has them all
        body = Push(**self._identity, numbers=numbers, **fields)
        exchange = PushExchange(
            session=self,
            message=pack(body, sent),
            into=None if into is None else (into,),
            is_push=True,
            call=call,
            number=number,
            pulls=body.pull,
            shards=len(shards),
        )
        self.open[exchange] = None
        self.open_pushes += 1
        self._send(exchange)

    def pull(
        self,
        shards: tuple[ShardId, ...],
        call: PullReceiver,
        number: int = 0,
        clock: int = 0,
        into: NDArray[Any] | None = None,
        vector: int = 0,
    ) -> None:
        """Ask for values that contain all earlier pushes of this client; in bsp, those up to `clock`. Never
        waits.

        Args:
            call: Takes the answer and the values, one shard after the other, flat.
            number: Number of the message in its call.
            clock: Clock up to which the values must contain all pushes of live replicas; 0 for the current
                values. The client pulls again until the values are available.
            into: Memory for the values; by default pooled memory.
            vector: Number of the vector to read; 0 for the values.
        """
        body = Pull(
            store=self._identity["store"],
            generation=self._identity["generation"],
            shards=shards,
            clock=clock,
            wait_s=self._answer_s / 2 if clock else 0.0,
            vector=vector,
        )
        self.ask(
            PullExchange(
                session=self,
                message=pack(body),
                into=None if into is None else (into,),
                call=call,
                number=number,
                has_shards=bool(shards),
                clock=clock,
            )
        )

    def tick(self, shards: tuple[ShardId, ...], clock: int, epoch: int = 0) -> None:
        """Report that this client has ended step `clock` on these shards. Never waits.

        Args:
            epoch: In ssp and bsp the epoch of the step, if known.
        """
        body = Tick(
            **self._identity, clock=clock, shards=shards, numbers=self.numbers.last(shards), epoch=epoch
        )
        self.ask(TickExchange(session=self, message=pack(body)))

    def report_steps(
        self, shards: tuple[ShardId, ...], steps: tuple[StepReport, ...], on_answer: Callable[[], None]
    ) -> None:
        """Report steps that were applied in place, under the next numbers. Never waits.

        Args:
            shards: All shards of this bundle; every step was applied to each.
            on_answer: Called once, when the primary has counted the steps.
        """
        body = ReportSteps(
            **self._identity, shards=shards, number=self.numbers.next_steps(shards, len(steps)), steps=steps
        )
        self.ask(
            ReportExchange(
                session=self,
                message=pack(body),
                is_push=True,
                on_answer=on_answer,
                acknowledges=len(shards) * len(steps),
                refused=sum([len(step.refused) for step in steps]),
            )
        )

    def ask(self, exchange: Exchange) -> None:
        """Open an exchange, and send it."""
        self.open[exchange] = None
        self.open_pushes += exchange.is_push
        self._send(exchange)

    def to_send_again(self) -> list[Exchange]:
        """Return all open exchanges, in the order in which they were first sent."""
        self.counts.resent += sum(exchange.sent > 0 for exchange in self.open)
        return list(self.open)
