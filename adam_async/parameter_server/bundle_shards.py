"""Pure: the shards and the front of a bundle on one server, as a `BundleCopy` uses them."""

from typing import Protocol

from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import Entry


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

    def lead(self) -> None:
        """Order pushes and answer requests from now on."""
        ...

    def follow(self) -> None:
        """Refuse all requests from now on: another server is the primary."""
        ...

    def leave(self) -> None:
        """Drop the shards: the server is no member any more."""
        ...
