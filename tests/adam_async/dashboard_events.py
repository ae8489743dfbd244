"""Events of runs and clusters that never were, for tests of the dashboard."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from adam_async.dashboard.state import Part, State
from adam_async.run.cluster_status import ClusterStatus, RoleStatus, RunStatus
from adam_async.run.condition import Condition
from adam_async.run.counts import EpochCounts, Evaluation
from adam_async.run.events import (
    AnyEvent,
    EpochEnds,
    Evaluated,
    Predicted,
    PredictedImage,
    RunBegins,
    Sampled,
    ServerCounted,
    StatusSeen,
    WorkerCounted,
)
from adam_async.run.run_copies import BundleCopies, RunCopies
from adam_async.run.series import Sample
from tests.adam_async.role_counts import counts_of

AT = 1.8e9
"""Time of the first event, in seconds since 1970."""


def beginning(run: str = "run-1", **config: object) -> RunBegins:
    options = {"images_per_group": 10, **config}
    return RunBegins(
        at=AT, run=run, driver="driver", model="digits", data="digits", config=options, epochs=9, images=100
    )


def epochs(number: int) -> Iterator[AnyEvent]:
    """Epochs of 100 images and one second each, with falling loss and growing accuracy."""
    for epoch in range(1, number + 1):
        loss, accuracy = 1 / epoch, 1 - 0.5 / epoch
        sample = Sample(
            s=epoch - 0.5,
            epoch=epoch,
            images=100 * epoch - 50,
            loss=loss,
            rate=0.1,
            staleness_mean=1.0,
            bytes=0,
            waited_s=0.0,
        )
        yield Sampled(at=AT + epoch - 0.5, sample=sample)
        yield EpochEnds(at=AT + epoch, epoch=epoch, counts=EpochCounts(images=100, loss=loss, train_s=1.0))
        yield Evaluated(at=AT + epoch, evaluation=Evaluation(epoch, accuracy))


def role(node: str, state: str = "joined") -> RoleStatus:
    return RoleStatus(node=node, role=node.partition("-")[0], state=state, address="", host="box", pid=7)


def status(workers: int = 2, servers: int = 2, **condition: object) -> ClusterStatus:
    """A cluster with two copies of each bundle."""
    names = [f"ps-{n}" for n in range(servers)]
    bundles = tuple(
        BundleCopies(home=name, primary=name, in_sync=(name, names[n - 1]), joining=())
        for n, name in enumerate(names)
    )
    run = RunStatus(
        id="run-1",
        phase="training",
        reason="",
        driver="driver",
        driven=True,
        epoch=1,
        epochs=9,
        finished=3,
        groups=10,
        replicas=workers,
        images=30,
        images_per_s=50.0,
        loss=0.5,
        left_s=20.0,
        test_accuracy=None,
    )
    facts = {
        "verdict": "well",
        "survives": 1,
        "weakest": "the servers of ps-0",
        "limited_by": "compute",
        "live": workers,
        "taking_part": workers,
    }
    return ClusterStatus(
        run=run,
        stores=1,
        roles=(
            *map(role, names),
            role("data-0"),
            *(role(f"worker-{n}", f"replica {n}") for n in range(workers)),
        ),
        copies=RunCopies(copies=2, min_in_sync=1, bundles=bundles),
        store_copies={},
        condition=Condition(**{**facts, **condition}),
    )


def poll(second: int, workers: int = 2, servers: int = 2, **condition: object) -> Iterator[AnyEvent]:
    """The events of one poll: in a second, a worker trains 2 groups and sends each server 1,000 bytes."""
    at = AT + second
    for n in range(servers):
        clients = {
            str(each): {"clock": second, "staleness": {"1": second, "5": second}} for each in range(workers)
        }
        counts = counts_of(
            "ps",
            f"ps-{n}",
            pid=7,
            age_s=second,
            shards=2,
            bytes=64,
            versions={"0": second},
            clients=clients,
            staleness={"1": workers * second, "5": workers * second},
            traffic=[
                {"to": f"worker-{each}", "payload_bytes": 500 * second} for each in range(min(workers, 3))
            ],
        )
        yield ServerCounted(at=at, counts=counts)
    for n in range(workers):
        counts = counts_of(
            "worker",
            f"worker-{n}",
            pid=7,
            age_s=second,
            clock_wait_s=0.25 * second,
            data={"groups": 2 * second},
            traffic=[{"to": f"ps-{each}", "payload_bytes": 1000 * second} for each in range(servers)],
        )
        yield WorkerCounted(at=at, counts=counts)
    yield StatusSeen(at=at, status=status(workers, servers, **condition))


def predicted(epoch: int = 1) -> Predicted:
    def image(label: int, guess: int) -> PredictedImage:
        return PredictedImage(pixels=bytes([0, 80, 160, 240]), label=label, predicted=guess, confidence=0.9)

    return Predicted(
        at=AT,
        epoch=epoch,
        height=2,
        width=2,
        channels=1,
        first=(image(1, 1), image(2, 3)),
        mistakes=(image(2, 3),),
    )


def state_of(*events: AnyEvent) -> State:
    state = State("cluster")
    for event in events:
        state.take(event)
    return state


def seen(state: State, part: Part = "now") -> Any:
    """Return a part of the page as its scripts read it; lists of plain values are tuples."""
    return _shaped(json.loads(state.part(part)))


def _shaped(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{name: _shaped(each) for name, each in value.items()})
    if isinstance(value, list):
        return (
            [_shaped(each) for each in value] if value and isinstance(value[0], dict | list) else tuple(value)
        )
    return value
