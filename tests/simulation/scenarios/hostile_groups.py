"""A hostile peer that names groups of images in its pushes.

A push's groups mark images as trained, and keep other workers' gradients for these groups out of the values.
So a server takes groups only from generations in its map. Groups that no push can have are refused for good:
an answer that asks the peer to try again would let it wait for ever.

    sent = await forge_groups(dial, states, cluster.map.epoch, first=session, by_client=False, answer_s=3.0)
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from adam_async.messages import ReportSteps, StepReport, pack
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.state import ServerState
from adam_async.run.cluster_map import EpochRecord
from tests.simulation.scenario import Violation
from tests.simulation.scenarios.hostile_facts import push_to
from tests.simulation.scenarios.hostile_splits import REPLICA
from transport import CallTimeout, Link, Message, RemoteError, TransportError

FOR_GOOD = ("malformed", "wrong-run")
"""Codes of a refusal after which no peer tries again."""


@dataclass(frozen=True, slots=True)
class _Forgery:
    """A message that a server must refuse."""

    name: str
    message: Message
    for_good: bool
    """Whether no server can ever take it; otherwise the server may wait for a newer map."""


def _shards(state: ServerState) -> list[Shard]:
    """Return shards that share tables, so that a push to all of them splits none."""
    shards = [shard for shard in state.shards.values() if not shard.spec.frozen]
    return [shard for shard in shards if shard.tables is shards[0].tables] if shards else []


def _forgeries(state: ServerState, epoch: EpochRecord, session: int) -> Iterator[_Forgery]:
    """Yield forged messages from a worker to a run's store, or from a client to a clients' store."""
    shards = _shards(state)
    replica = REPLICA + session % 1000
    push = push_to(state, shards, replica=replica, session=session, generation=session)
    zeros = [np.zeros(sum(shard.spec.size for shard in shards), shards[0].values.dtype)]
    number, middle = epoch.number, epoch.groups // 2

    def forged(name: str, *, for_good: bool = True, **fields: object) -> _Forgery:
        return _Forgery(name, pack(msgspec.structs.replace(push, **fields), zeros), for_good)

    if not state.program:
        name = "groups of a store with clocks" if state.clocked else "groups without an order"
        yield forged(name, groups=(1, 0, 1) if state.clocked else (1, 2, 1))
        return
    yield forged("groups of another epoch than that of the push", epoch=number, groups=(number + 1, 0, 1))
    beyond = (number, epoch.groups, epoch.groups + 1)
    yield forged("a group beyond the epoch", epoch=number, groups=beyond)
    own = (number, middle, middle + 1)
    yield forged("groups of a generation that the map does not name", for_good=False, groups=own)
    step = StepReport(clock=0, weight=1, staleness=0, groups=own)
    report = ReportSteps(
        store=push.store,
        session=session,
        incarnation=session,
        replica=replica,
        generation=push.generation,
        shards=push.shards,
        number=1,
        steps=(step,),
    )
    yield _Forgery("a step in a store that is not trained in place", pack(report), for_good=True)


async def forge_groups(
    dial: Callable[[], Awaitable[Link]],
    states: Sequence[ServerState],
    epoch: EpochRecord | None,
    *,
    first: int,
    answer_s: float,
) -> int:
    """Send forged messages to each of several stores on a server.

    Args:
        dial: Returns a new link to the server, when awaited.
        states: The states of the stores on the server.
        epoch: Epoch in progress.
        first: Number of the first invented session; each store gets two.
        answer_s: Time limit of an answer, in seconds.

    Returns the number of messages.

    Raises:
        Violation: The server took groups, or asks to try again what it can never take.
    """
    sent = 0
    link = await dial()
    for at, state in enumerate(states):
        if epoch is None or not _shards(state) or (state.program and state.bundle.epoch != epoch.number):
            continue
        session = first + 2 * at
        for forgery in _forgeries(state, epoch, session):
            if link.closed:
                link = await dial()
            sent += await _send(link, forgery, answer_s)
        sent += await _send_behind_another(link, state, epoch, session + 1, answer_s)
    link.abort()
    return sent


async def _send(link: Link, forgery: _Forgery, answer_s: float) -> int:
    try:
        answer = await link.call(forgery.message, timeout_s=answer_s)
    except RemoteError as error:
        if error.code == "not-ready":  # the store lacks values, and the server has checked nothing yet
            return 0
        if forgery.for_good and error.code not in FOR_GOOD:
            text = f"the server has refused {forgery.name} with {error.code!r}: {error}"
            raise Violation("bad fields are refused", text) from None
    except (TransportError, CallTimeout):
        pass
    else:
        raise Violation("groups belong to their workers", f"the server took {forgery.name}: {answer!r}")
    return 1


async def _send_behind_another(
    link: Link, state: ServerState, epoch: EpochRecord, session: int, answer_s: float
) -> int:
    """Send a push with groups behind one without groups, whose checks may serve both."""
    if not state.program or state.synchronous or state.bundle.log is not None or link.closed:
        return 0
    shards = _shards(state)
    zeros = [np.zeros(sum(shard.spec.size for shard in shards), shards[0].values.dtype)]
    push = push_to(state, shards, replica=REPLICA + session % 1000, session=session, generation=session)
    try:
        await link.call(pack(push, zeros), timeout_s=answer_s)
    except (TransportError, CallTimeout):
        return 1
    groups = (epoch.number, epoch.groups // 2, epoch.groups // 2 + 1)
    later = pack(msgspec.structs.replace(push, numbers=2, groups=groups), zeros)
    return 1 + await _send(link, _Forgery("groups behind a push without any", later, False), answer_s)
