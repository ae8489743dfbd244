"""The client of the cluster map, whichever controller leads.

Theory of operation
-------------------
All requests use one link, to the leader (`leader_connection`). This link shows the leader that the node is
alive.

*Changes.* Requests for changes run one at a time, each from the version at which the last answer ended. So
each version arrives once, whichever controller answers.

*Compare-and-set.* The controllers apply a request once, however often the client sends it. A request's number
in the session stays the same over all links and leaders, until a leader answers with its outcome. If the
session has ended by then, the map may still show that the request had no effect; otherwise the outcome is
unknown.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from adam_async.controller.leader_connection import BUSY, LOST, LeaderConnection, unpack_answer
from adam_async.messages import (
    NOT_LEADER,
    SESSION_OVER,
    CompareAndSet,
    GetMap,
    MapState,
    OpenSession,
    SessionOpened,
    WatchMap,
    pack,
    read_text_tensor,
    text_tensor,
    unpack,
)
from adam_async.messages.body import MOST_MAP_TEXT_BYTES
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.map_changes import Change
from adam_async.runtime.clock import Within
from transport import Link, Message, RemoteError, RemoteProtocolError

WATCH_S = 1.0
"""Maximum wait of a watch without changes if there are several controllers, in seconds. Any other request
that is not answered in this time counts as silence of the controller."""

LONG_WATCH_S = 60.0
"""Maximum wait in seconds of a watch on a single controller; the end of its link shows that it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapUpdate:
    """One version of the map: the change from the previous version, or the whole map."""

    group: str
    """Group of controllers with this map. Another group counts versions anew and begins with a whole map."""
    version: int
    change: Change | None = None
    whole: ClusterMap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a compare-and-set.

    `done` is None if it is unknown whether the change was made.
    """

    done: bool | None
    at: int = 0
    """Version of the key's record."""
    updates: tuple[MapUpdate, ...] = ()
    """Updates of the map after the version named in the request."""


class MapClient(LeaderConnection):
    """Sends requests to the leader. Arguments are those of `LeaderConnection`.

    Every request may raise the errors of `LeaderConnection.find`. Close the client at the end: it holds a
    link.
    """

    _session = 0
    _session_of: str | None = None
    """Group of the session; in another group the same number may be another client's session."""
    _number = 0

    @cached_property
    def _asking(self) -> asyncio.Lock:
        """Lock of a change, because changes run one at a time."""
        return asyncio.Lock()

    # --- questions ---------------------------------------------------------------------------

    async def get(self, *, timeout_s: float | None = None) -> MapUpdate:
        """Return the whole map, with all changes acknowledged before this request.

        Raises:
            DeadlineExceeded: No leader answered within `timeout_s`, by default `call_s`.
        """
        async with self._deadline("the controller to send the cluster map", timeout_s):
            return await self._whole()

    async def compare_and_set(
        self,
        key: str,
        expected: int,
        value: Any,
        *,
        after: int = -1,
        group: str = "",
        timeout_s: float | None = None,
    ) -> Outcome:
        """Set a key if its record still has version `expected`. One request runs at a time; others wait.

        Args:
            key: Key of the record, such as ``nodes/worker-0``.
            expected: Expected version; 0 if the record must not exist.
            after: Version after which the outcome has updates of the map; -1: the whole map.
            group: Group of the versions. Another group applies nothing. Empty: any group.
            timeout_s: Deadline in seconds, by default `call_s`.

        Raises:
            DeadlineExceeded: No leader answered in time. The change may still take effect.
            RemoteError: The leader refused the change, with a code such as ``invalid``, ``taken`` or
                ``forbidden``; it has no effect.
        """
        async with self._deadline(f"the controller to set {key}", timeout_s), self._asking:
            return await self._compare_and_set(key, expected, value, after, group)

    async def _compare_and_set(self, key: str, expected: int, value: Any, after: int, group: str) -> Outcome:
        number = 0
        sent_in: str | None = None  # the group whose log may have the request, or may get it later
        while True:
            link = await self.find(after, group)
            if sent_in not in (None, self.group):
                return Outcome(done=None, updates=(await self._whole(),))
            if group not in ("", self.group):
                return Outcome(done=False, updates=(await self._whole(),))
            before = sent_in
            try:
                if self._session_of != self.group:
                    await self._open(link)
                    number = 0
                    continue  # the session may have been opened over another link
                # The number is drawn once: a repeated request must be recognised as the same one.
                if not number:
                    self._number = number = self._number + 1
                question = CompareAndSet(
                    key=key, expected=expected, session=self._session, number=number, after=after, group=group
                )
                sent_in = self.group
                answer = await self.call(link, pack(question, [text_tensor(value)]), WATCH_S)
                body = unpack_answer(answer)
                if link is not self.link:
                    continue  # the present leader repeats these updates, which may be old
                return Outcome(done=body.done, at=body.at, updates=tuple(_read(answer, after, group)))
            except RemoteError as error:
                # This attempt put nothing into the log, but an earlier attempt may have.
                if error.code in (NOT_LEADER, BUSY, SESSION_OVER):
                    sent_in = before
                if error.code != SESSION_OVER:
                    await self.refused(link, error)
                    continue
                self._session_of = None
                if sent_in is not None:
                    # An ended session applies no request. So an unchanged record shows that this request had
                    # no effect: send it again in a new session.
                    newest = await self._whole()
                    at = newest.whole.version_of(key) if newest.whole is not None else 0
                    if newest.group != sent_in or at != expected:
                        return Outcome(done=None, at=at, updates=(newest,))
                    sent_in = None
            except LOST as error:
                self.lose(link, error)

    async def _open(self, link: Link) -> None:
        answer = await self.call(link, pack(OpenSession()), WATCH_S)
        # On a former leader's link, `group` may already be that of another group.
        if link is self.link:
            self._session = unpack(answer, SessionOpened).session
            self._session_of, self._number = self.group, 0

    async def _whole(self) -> MapUpdate:
        while True:
            link = await self.find(-1, "")
            try:
                answer = await self.call(link, pack(GetMap()), WATCH_S)
                state = unpack(answer, MapState)
                whole: ClusterMap = read_text_tensor(answer, ClusterMap, MOST_MAP_TEXT_BYTES)
                return MapUpdate(group=state.group, version=state.version, whole=whole)
            except RemoteError as error:
                await self.refused(link, error)
            except LOST as error:
                self.lose(link, error)

    def _deadline(self, what: str, timeout_s: float | None) -> Within:
        return Within(self._waits.call_s if timeout_s is None else timeout_s, what)

    # --- changes -----------------------------------------------------------------------------

    async def changes(self, after: int = -1, group: str = "") -> AsyncGenerator[MapUpdate, None]:
        """Yield every version after `after`, once, in order and without a gap.

        The iteration ends only by cancellation or an error.

        A whole map replaces versions that the controllers no longer keep: at the beginning, after a long
        absence, and from another group. Close the generator (`contextlib.aclosing`).

        Args:
            after: The last known version; -1: begin with the whole map.
        """
        while True:
            link = await self.find(after, group)
            first, self.first_answer = self.first_answer, None
            try:
                if first is not None and first[:2] == (after, group):
                    answer = first[2]
                else:
                    wait_s = WATCH_S if self.several else LONG_WATCH_S
                    watch = WatchMap(after=after, group=group, wait_s=wait_s)
                    answer = await self.call(link, pack(watch), wait_s)
                found = _read(answer, after, group)
            except RemoteError as error:
                await self.refused(link, error)
                continue
            except LOST as error:
                self.lose(link, error)
                continue
            if link is not self.link:
                continue  # a newer leader exists, whose answers may be newer than this one
            for update in found:
                yield update
                after, group = update.version, update.group


def _read(answer: Message, after: int, group: str) -> list[MapUpdate]:
    """Return the updates in an answer, after the version in the request.

    Raises:
        RemoteProtocolError: The versions have a gap, or the message has another type.
    """
    body = unpack_answer(answer)
    if isinstance(body, MapState):
        if body.group == group and body.version <= after:
            return []
        whole: ClusterMap = read_text_tensor(answer, ClusterMap, MOST_MAP_TEXT_BYTES)
        return [MapUpdate(group=body.group, version=body.version, whole=whole)]
    changes: list[Change] = read_text_tensor(answer, list[Change], MOST_MAP_TEXT_BYTES)
    if changes and (body.group != group or after < 0):
        raise RemoteProtocolError("changes", f"they are of group {body.group!r}, not of {group!r}")
    for expected, change in enumerate(changes, after + 1):
        if change.version != expected:
            raise RemoteProtocolError("changes", f"version {change.version} arrived, {expected} was next")
    return [MapUpdate(group=group, version=change.version, change=change) for change in changes]
