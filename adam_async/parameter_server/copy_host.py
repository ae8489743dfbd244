"""The services of a server that its copies of bundles need, and the shards as the copies use them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adam_async.controller.client import Confirmation
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import Entry
from adam_async.parameter_server.log_entries import Part
from adam_async.parameter_server.replication.log import Entry as LogEntry
from adam_async.parameter_server.server_links import ServerLinks
from adam_async.run.bundle_record import BundleRecord, Member

Observe = Callable[[Any, LogEntry, Sequence[Part]], None]
"""Callback that is called before a `BundleCopy` applies an entry, with the copy, the entry and its parts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyHost:
    """The services of a server that a copy needs.

    Attributes:
        links: Links to the other members.
        now: Returns the time of the loop's clock, in seconds.
        call_soon: Calls a function in the next iteration of the loop.
        spawn: Starts a task of the server, by name.
        set_record: Sets the bundle's record in the map if the map still has the expected version; returns
            None if the server ends.
        next_member: Returns the server to invite, of those that may join; None if there is none.
        is_live: Whether a server is live in the cluster map.
        notice: Reports a text to the operator: the controllers log it, and it is an event of a run.
        observe: Called before a committed entry is applied, with its copy, the entry and its parts.
    """

    links: ServerLinks
    now: Callable[[], float]
    call_soon: Callable[[Callable[[], None]], object]
    spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    set_record: Callable[[BundleRecord, int], Coroutine[Any, Any, Confirmation | None]]
    next_member: Callable[[Callable[[Member], bool]], Member | None]
    is_live: Callable[[Member], bool]
    notice: Callable[[str], None]
    observe: Observe | None = None


class BundleShards(Protocol):
    """The shards and the front of a bundle on this server."""

    @property
    def bundle(self) -> Bundle:
        """The shards; `reset` replaces them."""
        ...

    def committed(self, entry: Entry) -> None:
        """Take a committed entry, and do its work in later rounds of the loop."""
        ...

    def reset(self) -> None:
        """Begin with new, empty shards: the server joins."""
        ...

    def took_pins(self) -> None:
        """Remove the pins from the disk that were given up while this server was away."""
        ...

    def lead(self) -> None:
        """Order pushes and answer requests from now on."""
        ...

    def follow(self) -> None:
        """Refuse all requests from now on: another server is the primary."""
        ...

    def leave(self) -> None:
        """Drop the shards: the server is no member any more."""
        ...
