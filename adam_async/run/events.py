"""Pure: the events of a run and of stores, for all that watch: live table, report, files, metrics, callbacks.

An event is one of a few tagged records; its JSON text has the tag in `kind`. Events repeat what roles report
to the driver or an operator, and what the cluster map shows; no role sends events. `report/stream.py` has the
stream.

    run-begins, run-ends                a run and its result
    epoch-ends, evaluated               the counts of an ended epoch; its accuracies
    predicted                           sample images of an evaluation, with their predictions
    sampled                             the sample of each poll: images, loss, rate, staleness, bytes, waits
    status                              roles, copies, condition: the values of `adam-async status`
    controller, data, ps, worker        the counts of one role at a poll
    store, client, step                 counts of a store on a server; of one client; steps of an optimizer
    incident-begins, incident-ends      a loss, a silence, a failover, lacking copies, a wait
    noted                               any other event, in words
    dropped                             number of events that the reader was too slow for
"""

from typing import Annotated, Any, Literal

import msgspec

from adam_async.run.cluster_status import ClusterStatus
from adam_async.run.counts import (
    ControllerCounts,
    Counts,
    DataCounts,
    EpochCounts,
    Evaluation,
    PushCounts,
    ServerCounts,
    StoreCounts,
    WorkerCounts,
)
from adam_async.run.series import Sample

Incident = Literal["lost", "silent", "failover", "copies", "pushes", "wait"]
"""Kind of an incident.

lost: a role was lost; the incident ends when the role returns or is replaced. silent: a live role does not
answer. failover: a bundle had no primary; the incident begins with the loss of the old one. copies: a bundle
lacks copies in sync. pushes: pushes to a bundle wait for copies. wait: a role waits for another one.
"""


Outcome = Literal["finished", "interrupted", "failed"]
"""How a run ended, as its driver knows it."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Any event."""

    at: float = 0.0
    """Time in seconds since 1970; if 0, the stream sets it."""


class RunBegins(Event, frozen=True, kw_only=True, tag="run-begins"):
    """A run begins to train, or a driver continues it."""

    run: str
    """Id of the run."""
    driver: str
    model: str
    data: str
    config: dict[str, Any]
    """Options of the run by name."""
    epochs: int
    """Number of the last epoch."""
    images: int
    """Number of training images per epoch."""


class RunEnds(Event, frozen=True, kw_only=True, tag="run-ends"):
    """A run or its driver ends."""

    run: str
    outcome: Outcome
    reason: str = ""
    """Reason of a failure, in words."""


class EpochEnds(Event, frozen=True, kw_only=True, tag="epoch-ends"):
    """The dealer has ended an epoch."""

    epoch: int
    counts: EpochCounts


class Evaluated(Event, frozen=True, kw_only=True, tag="evaluated"):
    """The driver has evaluated the weights after an epoch."""

    evaluation: Evaluation


ImageSide = Annotated[int, msgspec.Meta(ge=1, le=256)]
"""Height or width of a sample image, in pixels. The bound keeps a file of a stranger from blocking a page."""


class PredictedImage(msgspec.Struct, frozen=True, kw_only=True):
    """One test image and its prediction."""

    pixels: bytes
    """Pixels (height, width, channels), one byte each."""
    label: int
    predicted: int
    confidence: float
    """Probability of the predicted class."""


class Predicted(Event, frozen=True, kw_only=True, tag="predicted"):
    """Test images with predictions by the weights after an epoch; only for streams that show them."""

    epoch: int
    is_later: bool = False
    """Whether the weights are of a later moment, pulled from a run in progress."""
    height: ImageSide
    width: ImageSide
    channels: Annotated[int, msgspec.Meta(ge=1, le=3)]
    first: tuple[PredictedImage, ...]
    """The first test images."""
    mistakes: tuple[PredictedImage, ...]
    """Wrong predictions, the most confident one first."""


class Sampled(Event, frozen=True, kw_only=True, tag="sampled"):
    """The state of the training at one poll of the roles."""

    sample: Sample


class StatusSeen(Event, frozen=True, kw_only=True, tag="status"):
    """The state of the cluster at one poll of the roles."""

    status: ClusterStatus


class Counted(Event, frozen=True, kw_only=True):
    """The counts of one role at one poll."""

    counts: Counts


class ControllerCounted(Counted, frozen=True, kw_only=True, tag="controller"):
    """The counts of a controller."""

    counts: ControllerCounts


class DataCounted(Counted, frozen=True, kw_only=True, tag="data"):
    """The counts of a data server."""

    counts: DataCounts


class ServerCounted(Counted, frozen=True, kw_only=True, tag="ps"):
    """The counts of a parameter server."""

    counts: ServerCounts


class WorkerCounted(Counted, frozen=True, kw_only=True, tag="worker"):
    """The counts of a worker."""

    counts: WorkerCounts


class StoreCounted(Event, frozen=True, kw_only=True, tag="store"):
    """Counts of a store's shards on one server."""

    store: str
    node: str
    counts: StoreCounts


class ClientCounted(Event, frozen=True, kw_only=True, tag="client"):
    """Counts of one client of a store, sent by itself."""

    store: str
    node: str
    clock: int
    """Number of steps that the client has ended; 0 in a store without clocks."""
    counts: PushCounts


class StepsTaken(Event, frozen=True, kw_only=True, tag="step"):
    """The steps of a `RemoteOptimizer` so far."""

    store: str
    steps: int
    pushes: int
    unanswered: int
    """Number of pushes that are not answered."""
    loss: float | None = None
    """Loss of the last step's closure; None without a closure, or if not finite."""


class IncidentBegins(Event, frozen=True, kw_only=True, tag="incident-begins"):
    """An incident begins. Kind and subject together name the incident until its end."""

    incident: Incident
    subject: str
    """Node, or home of a bundle."""
    text: str = ""
    """Sentence about the incident; empty if another event has the sentence."""
    deadline_s: float | None = None
    """Time in seconds after which a wait fails; None without a deadline."""
    cure: str = ""
    """Action that ends the incident sooner."""


class IncidentEnds(Event, frozen=True, kw_only=True, tag="incident-ends"):
    """An incident ends."""

    incident: Incident
    subject: str
    lasted_s: float
    """Time since the beginning of the incident, in seconds."""
    text: str = ""


class Noted(Event, frozen=True, kw_only=True, tag="noted"):
    """Any event without a record type of its own."""

    text: str


class Dropped(Event, frozen=True, kw_only=True, tag="dropped"):
    """The reader was too slow: the stream dropped this many events, the oldest ones first."""

    events: Annotated[int, msgspec.Meta(ge=1)]


AnyEvent = (
    RunBegins
    | RunEnds
    | EpochEnds
    | Evaluated
    | Predicted
    | Sampled
    | StatusSeen
    | ControllerCounted
    | DataCounted
    | ServerCounted
    | WorkerCounted
    | StoreCounted
    | ClientCounted
    | StepsTaken
    | IncidentBegins
    | IncidentEnds
    | Noted
    | Dropped
)

_COUNTED: dict[type[Counts], type[Any]] = {
    ControllerCounts: ControllerCounted,
    DataCounts: DataCounted,
    ServerCounts: ServerCounted,
    WorkerCounts: WorkerCounted,
}

_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def read_event(line: bytes) -> AnyEvent:
    """Read one line of an event file. Raises msgspec.DecodeError: the bytes are no event."""
    return _DECODER.decode(line)


def counted(counts: Counts) -> AnyEvent | None:
    """Return the event with a role's counts; None for a role without such an event, such as a driver."""
    kind = _COUNTED.get(type(counts))
    return kind(counts=counts) if kind is not None else None


def text_of(event: Event) -> str:
    """Return the sentence of an event for people; empty for an event that is numbers."""
    return event.text if isinstance(event, IncidentBegins | IncidentEnds | Noted) else ""


def replaces(event: Event) -> str:
    """Return the name under which an event replaces an earlier, unread one; empty if every event counts."""
    match event:
        case Counted():
            return f"{type(event).__name__} {event.counts.node}"
        case StoreCounted() | ClientCounted():
            return f"{type(event).__name__} {event.store} {event.node}"
        case StatusSeen() | StepsTaken() | Predicted():
            return type(event).__name__
        case _:
            return ""
