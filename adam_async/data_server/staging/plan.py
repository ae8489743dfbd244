"""Pure: the plan of a staging: which server reads each file, and from which servers the others copy the file.

Theory of operation
-------------------
Several data servers each need a copy of one slow source. All servers have the same list of files (a manifest:
paths and sizes, sorted) and the same list of servers, so they need no agreement:

- File i belongs to server i modulo servers. The owner reads the file from the source, once.
- The other servers copy files in rounds: in round d, server r copies the files of server r + d. In each round
  every server receives requests from one server. While the owner of a round's files is unreachable but not
  lost, later rounds go first.
- If a server cannot send a file, the request goes to the next server in the ring that begins at the owner. A
  server that finds itself next in that ring reads the source. So the remaining servers read a dead server's
  files: one server reads each file, and the others wait for it. A server waits only for a server before it in
  the ring of the file. A server that has refused the file may wait for a later server. Servers therefore
  never wait in a circle.
- A server that starts late, or again, first asks without waiting whether other servers already have its
  files.

`Staging` is the state of one server. A file that no server sends and that is unreadable is an error.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

DIGEST_BYTES = 16
"""Length of a file list's digest, in bytes."""


class File(msgspec.Struct, frozen=True, array_like=True):
    """One file of a source."""

    path: str
    """Path below the source, with ``/``."""
    size: int
    """Size in bytes."""


def manifest_digest(files: Sequence[File]) -> str:
    """Return a file list's digest; servers with equal digests mean the same file by a number."""
    return blake2b(msgspec.json.encode(files), digest_size=DIGEST_BYTES).hexdigest()


def first_difference(here: Sequence[File], there: Sequence[File]) -> str | None:
    """Describe the first difference between two file lists or slices of them; None if they are equal."""
    for number in range(max(len(here), len(there))):
        one = here[number] if number < len(here) else None
        other = there[number] if number < len(there) else None
        if one != other:
            return f"{_described(one)} here, {_described(other)} there"
    return None


def _described(file: File | None) -> str:
    return "no further file" if file is None else f"{file.path[:200]} of {file.size} bytes"


@dataclass(frozen=True, slots=True)
class Step:
    """Next attempt to get a file."""

    server: int
    """Server for the request; this server's number means the source."""
    patient: bool
    """Whether to wait until that server has the file."""


class Staging:
    """The state of a staging at one server.

    Args:
        tries: How often one server (this one included) fails with a file before the next server is asked.
    """

    def __init__(self, files: Sequence[File], *, server: int, servers: int, tries: int = 3) -> None:
        if not 0 <= server < servers:
            raise ValueError(f"server must be within 0 and {servers - 1}, not {server}")
        self.files = tuple(files)
        self.digest = manifest_digest(self.files)
        self.server = server
        self.servers = servers
        self._tries = tries
        self._held: dict[int, str] = {}
        self._held_of = [0] * servers
        self._gone: dict[int, str] = {}
        self._failures: dict[tuple[int, int], int] = {}
        self._reasons: dict[int, dict[int, str]] = {}
        """Servers that cannot send a file, with the reasons, by file."""
        self._holders: set[int] = set()
        self._looked: set[tuple[int, int]] = set()

    def owner(self, file: int) -> int:
        """Return the server that reads a file from the source."""
        return file % self.servers

    def rounds(self) -> list[int]:
        """Return the owners of missing files, by growing distance in the ring."""
        others = [(self.server + distance) % self.servers for distance in range(1, self.servers)]
        files, servers = len(self.files), self.servers
        return [owner for owner in others if self._held_of[owner] < len(range(owner, files, servers))]

    def next_round(self, open_to: Collection[int]) -> int | None:
        """Return the nearest owner of missing files that is reachable or lost; None without such an owner."""
        for owner in self.rounds():
            if owner in open_to or owner in self._gone:
                return owner
        return None

    def missing_of(self, owner: int) -> Iterator[int]:
        """Yield an owner's missing files; the owner is this server, or a round's."""
        return (file for file in range(owner, len(self.files), self.servers) if file not in self._held)

    def where(self, file: int) -> Step | None:
        """Return the next attempt to get a file; None if no server is left."""
        owner, reasons = self.owner(file), self._reasons.get(file, {})
        ring = [(owner + distance) % self.servers for distance in range(self.servers)]
        if owner == self.server:
            for server in ring[1:]:
                if server in self._holders and server not in self._gone:
                    if (file, server) not in self._looked and server not in reasons:
                        return Step(server, patient=False)
        for server in ring:
            if server not in self._gone and server not in reasons:
                return Step(server, patient=True)
        return None

    def looked(self, file: int, server: int) -> None:
        """Record that a server does not have a file; the request was not to wait."""
        self._looked.add((file, server))

    def failed(self, file: int, server: int, why: str) -> None:
        """Record one failure to copy or read a file."""
        times = self._failures[file, server] = self._failures.get((file, server), 0) + 1
        if times >= self._tries:
            self.refused(file, server, why)

    def refused(self, file: int, server: int, why: str) -> None:
        """Record that a server will never send a file, or that this server cannot read it."""
        self._reasons.setdefault(file, {})[server] = why

    def lost(self, server: int, why: str) -> None:
        """Record the loss of a server, which gets no more requests."""
        if server != self.server:
            self._gone.setdefault(server, why)

    def holder(self, server: int) -> None:
        """Record that another server has files that belong to this server."""
        self._holders.add(server)

    def hold(self, file: int, checksum: str) -> None:
        """Record that this server has a whole file."""
        if file not in self._held:
            self._held_of[self.owner(file)] += 1
        self._held[file] = checksum

    def checksum(self, file: int) -> str | None:
        """Return the checksum of a file that this server has, otherwise None."""
        return self._held.get(file)

    def held_of(self, owner: int) -> int:
        """Return how many of an owner's files this server has."""
        return self._held_of[owner]

    def readable(self, file: int) -> bool:
        """Return whether this server has a file, or may still read it."""
        return file in self._held or self.server not in self._reasons.get(file, {})

    def gone(self, server: int) -> bool:
        return server in self._gone

    @property
    def complete(self) -> bool:
        """Whether this server has every file."""
        return len(self._held) == len(self.files)

    def why(self, file: int) -> str:
        """Describe the failed attempts to get a file."""
        reasons = {**self._gone, **self._reasons.get(file, {})}
        here = reasons.pop(self.server, "")
        own = [f"here: {here}"] if here else []
        return "; ".join([*own, *(f"server {number}: {why}" for number, why in sorted(reasons.items()))])
