"""Asks the controllers about the cluster map, whichever of them leads.

Theory of operation
-------------------
All goes over one link, to the leader (`leader_link`); that link is also how the leader knows that we live.

*Changes* are asked for one answer after the other, each with the version that the one before ended at, so
nothing is missed or told twice, whoever answers.

*Compare-and-set* is asked once, however often it is said: its number in our session stays the same over all
links and leaders, until one of them knows what came of it. Where the session is over meanwhile, the map may
still tell that nothing was done; otherwise nobody can tell, and that is the answer.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from adam_async.controller.leader_connection import BUSY, LOST, LeaderLink, unpack_answer
from adam_async.controller.map_history import Change
from adam_async.errors import DeadlineExceeded
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
from adam_async.messages.bounds import MOST_MAP_TEXT_BYTES
from adam_async.run.cluster_map import ClusterMap, EpochRecord, LedgerRecord, NodeRecord, RunPiece, RunRecord
from adam_async.run.config import Waits
from adam_async.runtime.traffic import Traffic
from transport import Identity, Link, Message, Network, RemoteError, RemoteProtocolError

WATCH_S = 1.0
"""A watch without news is answered after this long, where there are several controllers. Other questions may
take as long."""

LONG_WATCH_S = 60.0
"""The same where there is one: if it is gone, its silent link tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One version of the map: what became of the one before, or the whole map where that is not known."""

    group: str
    """Of whose map this is. Of another group's, versions are counted anew, and it begins with a whole map."""
    version: int
    change: Change | None = None
    whole: ClusterMap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a compare-and-set.

    `done` is None where nobody can tell any more: it was done, or never will be.
    """

    done: bool | None
    at: int = 0
    """Version that the key's record has."""
    news: tuple[News, ...] = ()
    """What became of the map beyond the version that was named."""


def version_of(cluster: ClusterMap, key: str) -> int:
    """At which version of the map a key's record last changed; 0 if there is none."""
    record: NodeRecord | RunRecord | RunPiece | EpochRecord | LedgerRecord | None
    if key.startswith("nodes/"):
        record = cluster.nodes.get(key.removeprefix("nodes/"))
    elif key.startswith("run/"):
        record = cluster.pieces.get(key)
    else:
        record = {"run": cluster.run, "epoch": cluster.epoch, "lending": cluster.ledger_record}.get(key)
    return record.changed if record is not None else 0


class MapClient:
    """Asks whichever controller leads. Arguments are those of `LeaderLink`.

    Whatever asks may raise what `LeaderLink.find` raises. Close it at the end: it holds a link.
    """

    def __init__(
        self, *, network: Network, controllers: str, identity: Identity, waits: Waits, traffic: Traffic
    ) -> None:
        self._leader = LeaderLink(
            network=network, controllers=controllers, identity=identity, waits=waits, traffic=traffic
        )
        self._waits = waits
        self._session = 0
        self._session_of: str | None = None
        """Group in which it was opened; in another one the same number is somebody else's session."""
        self._number = 0
        self._asking = asyncio.Lock()

    @property
    def leader(self) -> str:
        """Address of the controller that leads, as far as we know; empty while we look for it."""
        return self._leader.address

    @property
    def leading(self) -> str:
        """Node id of the controller that leads, as far as we know; empty while we look for it."""
        return self._leader.node

    @property
    def controllers(self) -> tuple[str, ...]:
        """Addresses of all controllers: those that we were given, or if that was one, what a leader named."""
        return self._leader.addresses

    def close(self) -> None:
        """Give up the link. Whoever asks, now or later, is told with `LinkClosed`."""
        self._leader.close()

    # --- questions ---------------------------------------------------------------------------

    async def get(self, *, timeout_s: float | None = None) -> News:
        """Return the whole map, with all that was answered to anybody before this was asked.

        Raises:
            DeadlineExceeded: No leader answered within `timeout_s`, by default `call_s`.
        """
        async with self._deadline("the controller to say the cluster map", timeout_s):
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
        """Set a key if its record still has version `expected`. One is asked at a time; others wait.

        Args:
            key: Such as ``nodes/worker-0``.
            expected: 0 if it must not exist.
            value: The new record.
            after: The outcome tells what became of the map beyond this version; -1: the whole map.
            group: Of whose map these are versions. Another group is not asked: then it is not done. Empty: of
                whoever leads.
            timeout_s: By default `call_s`.

        Raises:
            DeadlineExceeded: No leader answered in time. It may have been done, or may yet be.
            RemoteError: It was refused, with the code ``invalid`` or ``taken``; nothing was done.
        """
        async with self._deadline(f"the controller to set {key}", timeout_s), self._asking:
            return await self._compare_and_set(key, expected, value, after, group)

    async def _compare_and_set(self, key: str, expected: int, value: Any, after: int, group: str) -> Outcome:
        leader = self._leader
        number = 0
        said_in: str | None = None  # the group in whose log it may be, or may yet come
        while True:
            link = await leader.find(after, group)
            if said_in not in (None, leader.group):
                return Outcome(done=None, news=(await self._whole(),))
            if group not in ("", leader.group):
                return Outcome(done=False, news=(await self._whole(),))
            before = said_in
            try:
                if self._session_of != leader.group:
                    await self._open(link)
                    number = 0
                    continue  # perhaps over another link
                if not number:
                    self._number = number = self._number + 1
                question = CompareAndSet(
                    key=key, expected=expected, session=self._session, number=number, after=after, group=group
                )
                said_in = leader.group
                answer = await leader.say(link, pack(question, [text_tensor(value)]), WATCH_S)
                body = unpack_answer(answer)
                news = tuple(_read(answer, after, group)) if link is leader.link else ()
                return Outcome(done=body.done, at=body.at, news=news)
            except RemoteError as error:
                if error.code in (NOT_LEADER, BUSY, SESSION_OVER):
                    said_in = before
                if error.code != SESSION_OVER:
                    await leader.refused(link, error)
                    continue
                self._session_of = None
                if said_in is not None:
                    # A session that is over does nothing any more: the map is the last word.
                    told = await self._whole()
                    at = version_of(told.whole, key) if told.whole is not None else 0
                    if told.group != said_in or at != expected:
                        return Outcome(done=None, at=at, news=(told,))
                    said_in = None
            except LOST as error:
                leader.lose(link, error)

    async def _open(self, link: Link) -> None:
        answer = await self._leader.say(link, pack(OpenSession()), WATCH_S)
        if link is self._leader.link:
            self._session = unpack(answer, SessionOpened).session
            self._session_of, self._number = self._leader.group, 0

    async def _whole(self) -> News:
        while True:
            link = await self._leader.find(-1, "")
            try:
                answer = await self._leader.say(link, pack(GetMap()), WATCH_S)
                state = unpack(answer, MapState)
                whole: ClusterMap = read_text_tensor(answer, ClusterMap, MOST_MAP_TEXT_BYTES)
                return News(group=state.group, version=state.version, whole=whole)
            except RemoteError as error:
                await self._leader.refused(link, error)
            except LOST as error:
                self._leader.lose(link, error)

    @asynccontextmanager
    async def _deadline(self, what: str, timeout_s: float | None) -> AsyncIterator[None]:
        timeout_s = self._waits.call_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise DeadlineExceeded(what, timeout_s) from None

    # --- changes -----------------------------------------------------------------------------

    async def changes(self, after: int = -1, group: str = "") -> AsyncGenerator[News, None]:
        """Every version beyond `after`, once, in order and without a gap. Ends only by cancellation.

        What is no longer known version by version comes as a whole map, and says so: at the beginning, after
        a long absence, and where another group leads. Close it (`contextlib.aclosing`).

        Args:
            after: The last version that is known; -1: begin with the whole map.
            group: Of whose map that is a version.
        """
        leader = self._leader
        while True:
            link = await leader.find(after, group)
            first, leader.first_word = leader.first_word, None
            try:
                if first is not None and first[:2] == (after, group):
                    answer = first[2]
                else:
                    wait_s = WATCH_S if leader.several else LONG_WATCH_S
                    watch = WatchMap(after=after, group=group, wait_s=wait_s)
                    answer = await leader.say(link, pack(watch), wait_s)
                found = _read(answer, after, group)
            except RemoteError as error:
                await leader.refused(link, error)
                continue
            except LOST as error:
                leader.lose(link, error)
                continue
            if link is not leader.link:
                continue  # there is a newer leader, and this answer may be older than what that one said
            for news in found:
                yield news
                after, group = news.version, news.group

    def __repr__(self) -> str:
        return f"<MapClient over {self._leader!r}>"


def _read(answer: Message, after: int, group: str) -> list[News]:
    """What an answer tells of the versions beyond the one that was named in the question.

    Raises:
        RemoteProtocolError: There is a gap, or it is no such answer.
    """
    body = unpack_answer(answer)
    if isinstance(body, MapState):
        if body.group == group and body.version <= after:
            return []
        whole: ClusterMap = read_text_tensor(answer, ClusterMap, MOST_MAP_TEXT_BYTES)
        return [News(group=body.group, version=body.version, whole=whole)]
    changes: list[Change] = read_text_tensor(answer, list[Change], MOST_MAP_TEXT_BYTES)
    if changes and (body.group != group or after < 0):
        raise RemoteProtocolError("changes", f"they are of group {body.group!r}, asked for were {group!r}'s")
    for expected, change in enumerate(changes, after + 1):
        if change.version != expected:
            raise RemoteProtocolError("changes", f"version {change.version} came where {expected} was next")
    return [News(group=group, version=change.version, change=change) for change in changes]
