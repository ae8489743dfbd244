"""An operator's requests to a run's driver: log lines of a role, more or fewer roles, an ordered end.

The operator joins the cluster with a driver's keys, and puts a request into the `info` of its own node
record. The run's driver sees it in the cluster map, acts, and puts the answer into its own `info`. So the
driver needs no listener, and the controllers no further kind of key. Only members that may set such a record
can ask. Once the operator's node is no longer live, the driver removes the answer.

The driver answers one request after the other, and keeps the answers to at most `MOST_ANSWERS` operators.
If further operators wait, the driver removes its oldest answer after `KEPT_S`, so operators that stay in the
cluster do not block others.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Protocol

import msgspec

from adam_async.controller.client import Membership
from adam_async.errors import AdamError, ConfigError, DeadlineExceeded, RunFailed
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import MOST_WORKERS
from adam_async.run.store_record import Member
from adam_async.run.training_program import MOST_PROGRAM_ID
from transport import TransportError

logger = logging.getLogger(__name__)

REQUEST, ANSWERS = "request", "answers"
"""Keys of `NodeRecord.info`: an operator's request, and a driver's answers by operator."""

MOST_ANSWERS = 3
"""Maximum number of answers that a driver keeps in its record."""

KEPT_S = 10.0
"""Minimum time in seconds for an operator to read its answer before another answer replaces it."""

RETRY_S = 1.0
"""Pause before a driver sends answers again that did not reach the controllers, in seconds."""

IDLE_S = 3600.0
"""Maximum wait for a change of the cluster map if no operator waits, in seconds."""

MOST_ANSWER_BYTES = 8 << 10
"""Maximum size of an answer as JSON text, in bytes; a longer answer loses its first lines."""

MOST_REFUSAL = 1000
"""Maximum length of the reason in a refusal, in characters."""

MOST_FROZEN_S = 600.0
"""Maximum time for which a role is frozen, in seconds."""

Action = Literal["logs", "scale", "stop", "kill", "freeze", "add"]
"""Action that an operator may ask for."""

FAULTS = ("kill", "freeze", "add")
"""Actions that the driver carries out only with `--allow-operations`."""

AddedRole = Literal["ps", "worker"]
"""Role that ``add`` starts."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    run: Annotated[str, msgspec.Meta(max_length=MOST_PROGRAM_ID)]
    """Id of the run. The driver of another run does not act."""
    action: Action
    node: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Node id of the role, for ``logs``, ``kill`` and ``freeze``."""
    workers: Annotated[int, msgspec.Meta(ge=0, le=MOST_WORKERS)] = 0
    """Number of workers, for ``scale``."""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_FROZEN_S)] = 0.0
    """Time after which a frozen role goes on, for ``freeze``."""
    role: AddedRole | None = None
    """Role for ``add``."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's answer."""

    lines: tuple[str, ...] = ()
    refusal: str = ""
    """Why the driver did not act; empty if it did."""


class Operations(Protocol):
    """The operations that an operator may request from the cluster that started the roles."""

    def last_lines(self, node: str) -> tuple[str, ...]:
        """Return the newest lines of a role's stderr.

        Raises:
            ConfigError: The cluster started no role of this name.
        """

    async def scale(self, workers: int) -> str:
        """Start or end workers until the cluster has this number of them; return a sentence about the change.

        Raises:
            AdamError: The number does not fit the run, or a worker could not start.
        """

    def kill(self, node: str) -> str:
        """Kill a role with SIGKILL; return a sentence.

        Raises:
            ConfigError: The cluster started no role of this name, or the run would not survive its loss.
        """

    def freeze(self, node: str, seconds: float) -> str:
        """Stop a role with SIGSTOP, and resume it after some seconds; return a sentence.

        Raises:
            ConfigError: The cluster started no role of this name, or the role is on another machine.
        """

    async def add(self, role: AddedRole) -> str:
        """Start one more role of a kind; return a sentence.

        Raises:
            AdamError: The role could not start.
        """


class OperatorRequests:
    """The requests to one driver, and its answers.

    Args:
        membership: Membership of the driver.
        run: Returns the id of the current run; empty without one.
        stop: Ends the run in order.

    Attributes:
        operations: The cluster that started the roles; None if they were started by hand.
        allows_faults: Whether operators may kill, freeze and add roles.

    The caller runs `serve` as a task of its group.
    """

    def __init__(self, membership: Membership, *, run: Callable[[], str], stop: Callable[[], None]) -> None:
        self.operations: Operations | None = None
        self.allows_faults = False
        self._membership = membership
        self._run = run
        self._stop = stop
        self._answers: dict[Member, Answer] = {}
        self._since: dict[Member, float] = {}
        """Time of the answer to each live operator, including operators whose answers were removed."""
        self._published: dict[str, Any] = {}

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        while True:
            cluster = self._membership.map
            asked = requests_in(cluster, self._membership.member)
            self._answers = {member: self._answers[member] for member in asked if member in self._answers}
            self._since = {member: self._since[member] for member in asked if member in self._since}
            for member, request in asked.items():
                if member not in self._since and self._has_room():
                    self._answers[member] = await self.answer(request)
                    self._since[member] = asyncio.get_running_loop().time()
            pause_s = IDLE_S if await self._publish() else RETRY_S
            if len(self._since) < len(asked):
                pause_s = min(pause_s, self._full_s())
            with contextlib.suppress(DeadlineExceeded):
                await self._membership.wait_for(lambda m: m is not cluster, "a request", pause_s)  # noqa: B023

    def _has_room(self) -> bool:
        """Remove the oldest answer if it is `KEPT_S` old; return whether there is room for another."""
        if len(self._answers) == MOST_ANSWERS and not self._full_s():
            del self._answers[min(self._answers, key=self._since.__getitem__)]
        return len(self._answers) < MOST_ANSWERS

    def _full_s(self) -> float:
        """Return the seconds until the oldest answer may be removed."""
        oldest = min(self._since[member] for member in self._answers)
        return max(oldest + KEPT_S - asyncio.get_running_loop().time(), 0.0)

    async def answer(self, request: Request | str) -> Answer:
        """Carry out a request; `request` is a text with the fault if the operator's request is invalid."""
        if isinstance(request, str):
            return Answer(refusal=request)
        if request.run != self._run() or not request.run:
            return Answer(refusal=f"this driver does not train run {request.run}")
        if request.action == "stop":
            self._stop()
            return Answer(lines=("the run ends after the groups in flight; its driver writes the results",))
        if self.operations is None:
            return Answer(
                refusal="the driver did not start the roles of this run: read their lines, and start or end "
                "workers, on their machines"
            )
        if request.action in FAULTS and not self.allows_faults:
            return Answer(refusal="operators may not end or add roles: start train with --allow-operations")
        try:
            return Answer(lines=await self._carry_out(request, self.operations))
        except AdamError as error:
            return Answer(refusal=str(error)[:MOST_REFUSAL])

    async def _carry_out(self, request: Request, operations: Operations) -> tuple[str, ...]:
        match request.action:
            case "logs":
                return _fitting(operations.last_lines(request.node))
            case "kill":
                return (operations.kill(request.node),)
            case "freeze":
                return (operations.freeze(request.node, request.seconds),)
            case "add":
                return (await operations.add(request.role or "worker"),)
            case _:
                return (await operations.scale(request.workers),)

    async def _publish(self) -> bool:
        """Put the answers into the driver's record; return whether the controllers have them."""
        answers = {
            _word(member): msgspec.to_builtins(answer) for member, answer in sorted(self._answers.items())
        }
        if answers == self._published:
            return True
        try:
            await self._membership.set_info(**{ANSWERS: answers})
        except (AdamError, TransportError) as error:
            logger.info("an answer did not reach the controllers: %s", error)
            return False
        self._published = answers
        return True


async def ask(membership: Membership, request: Request, *, within_s: float) -> tuple[str, ...]:
    """As an operator, ask a run's driver; return the lines of its answer.

    Raises:
        ConfigError: The driver refused the request; the error has its reason.
        DeadlineExceeded: The driver did not answer in time.
        RunFailed: The run is over, replaced, or without a live driver, or the answer is invalid.
    """
    await membership.set_info(**{REQUEST: msgspec.to_builtins(request)})
    cluster = await membership.wait_for(
        lambda newest: answer_in(newest, request.run, membership.member) is not None,
        f"the driver of run {request.run} to answer",
        within_s,
    )
    answer = answer_in(cluster, request.run, membership.member)
    assert answer is not None
    if isinstance(answer, str):
        raise RunFailed(answer)
    if answer.refusal:
        raise ConfigError(answer.refusal)
    return answer.lines


def requests_in(cluster: ClusterMap, driver: Member) -> Mapping[Member, Request | str]:
    """Return the requests of all live operators; for an invalid request, return a text with its fault.

    Args:
        driver: Node and incarnation of the asked driver, whose own record has no request.
    """
    found: dict[Member, Request | str] = {}
    for name in cluster.live("driver"):
        node = cluster.nodes[name]
        member = name, node.incarnation
        if REQUEST not in node.info or member == driver:
            continue
        try:
            found[member] = msgspec.convert(node.info[REQUEST], Request)
        except msgspec.ValidationError as error:
            # The error may quote a value of any length, and a record that is too large would hold no answer.
            found[member] = f"the driver cannot read the request: {str(error)[:MOST_REFUSAL]}"
    return found


def answer_in(cluster: ClusterMap, run: str, operator: Member) -> Answer | str | None:
    """Return a driver's answer to an operator; None while the answer may still arrive; a text with the reason
    if it cannot arrive or is invalid."""
    program = cluster.run
    if program is None or program.id != run:
        return f"run {run} is no longer in the cluster map"
    node = cluster.nodes.get(program.driver)
    found = node.info.get(ANSWERS, {}) if node is not None else {}
    if isinstance(found, dict) and _word(operator) in found:
        try:
            return msgspec.convert(found[_word(operator)], Answer)
        except msgspec.ValidationError as error:
            return f"the answer of driver {program.driver} is invalid: {error}"
    if program.over:
        return f"run {run} is over: {program.reason or program.phase}"
    if cluster.driven:
        return None
    return f"run {run} has lost its driver, {program.driver}: first take it over, with train --attach"


def _word(operator: Member) -> str:
    node, incarnation = operator
    return f"{node}/{incarnation:x}"


def _fitting(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the last lines that fit into one answer."""
    kept: list[str] = []
    left = MOST_ANSWER_BYTES
    for line in reversed(tuple(lines)):
        left -= len(msgspec.json.encode(line)) + 1
        if left < 0:
            break
        kept.append(line)
    return tuple(reversed(kept))
