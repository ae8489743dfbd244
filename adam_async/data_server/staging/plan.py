"""Pure: which server reads which file of a shared source, and whom the others ask for a copy.

Theory of operation
-------------------
Several data servers see one slow source and want a copy of it each. All of them hold the same list of files
(a manifest: paths and sizes, sorted) and the same list of servers, so that nothing has to be agreed upon:

- File i belongs to server i modulo servers. Its owner reads it from the source, once.
- The others ask for copies in rounds: in round d, server r copies what belongs to server r + d. In each round
  every server is asked by one other. A round whose owner has not been met yet is put off.
- Whoever cannot give a file is followed by the next in the ring that begins at its owner. A server that comes
  to itself in that ring reads the source. So those who are left read the files of a dead server, each file
  one of them, while the others wait for that one. A server only ever waits for one that stands before it in
  the ring of the file, or for one behind it once it refuses the file itself: nobody waits in a circle.
- A server that comes late, or again, first looks whether others already hold what belongs to it, without
  waiting for them.

`Staging` is what one server knows of all this. A file that nobody gives and that cannot be read is an error.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

DIGEST_BYTES = 16


class File(msgspec.Struct, frozen=True, array_like=True):
    """One file of a source."""

    path: str
    """Below the source, with ``/``."""
    size: int
    """In bytes."""


def manifest_digest(files: Sequence[File]) -> str:
    """Digest of a list of files; servers with the same one mean the same file by the same number."""
    return blake2b(msgspec.json.encode(files), digest_size=DIGEST_BYTES).hexdigest()


def first_difference(here: Sequence[File], there: Sequence[File]) -> str | None:
    """Say where two lists of files, or the same slices of them, first differ; None if they do not."""
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
    """Where a file is to be had next."""

    server: int
    """Whom to ask; the server's own number: read the source."""
    patient: bool
    """Whether to wait until that server has it."""


class Staging:
    """What one server knows of a staging.

    Args:
        files: The manifest.
        server: Own number, from 0.
        servers: How many there are.
        tries: Times that one server is asked for one file, or the source read, before the next one's turn.
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
        """Per file, who cannot give it, and why."""
        self._ledger_replicas: set[int] = set()
        self._looked: set[tuple[int, int]] = set()

    def owner(self, file: int) -> int:
        """Who reads this file from the source."""
        return file % self.servers

    def own(self) -> Iterator[int]:
        """The files of this server that it does not hold yet."""
        return self._missing(self.server)

    def rounds(self) -> list[int]:
        """The owners to copy from, by growing distance in the ring, as far as their files are missing."""
        others = [(self.server + distance) % self.servers for distance in range(1, self.servers)]
        return [owner for owner in others if self._held_of[owner] < self._count(owner)]

    def next_round(self, open_to: Collection[int]) -> int | None:
        """The nearest owner to copy from that has been met or is gone; None if there is none yet."""
        for owner in self.rounds():
            if owner in open_to or owner in self._gone:
                return owner
        return None

    def files_of(self, owner: int) -> Iterator[int]:
        """The files of one round that are not held yet."""
        return self._missing(owner)

    def _missing(self, owner: int) -> Iterator[int]:
        return (file for file in range(owner, len(self.files), self.servers) if file not in self._held)

    def _count(self, owner: int) -> int:
        return len(range(owner, len(self.files), self.servers))

    def where(self, file: int) -> Step | None:
        """Where a file is to be had next; None if nobody is left who could give it."""
        owner, reasons = self.owner(file), self._reasons.get(file, {})
        ring = [(owner + distance) % self.servers for distance in range(self.servers)]
        if owner == self.server:
            for server in ring[1:]:
                if server in self._ledger_replicas and server not in self._gone:
                    if (file, server) not in self._looked and server not in reasons:
                        return Step(server, patient=False)
        for server in ring:
            if server not in self._gone and server not in reasons:
                return Step(server, patient=True)
        return None

    def looked(self, file: int, server: int) -> None:
        """Take in that a server that was asked without patience does not hold the file."""
        self._looked.add((file, server))

    def failed(self, file: int, server: int, why: str) -> None:
        """Take in that asking a server for a file, or reading it, failed this time."""
        times = self._failures[file, server] = self._failures.get((file, server), 0) + 1
        if times >= self._tries:
            self.refused(file, server, why)

    def refused(self, file: int, server: int, why: str) -> None:
        """Take in that a server will never give this file; our own number: it cannot be read here."""
        self._reasons.setdefault(file, {})[server] = why

    def lost(self, server: int, why: str) -> None:
        """Take in that a server does not answer; it is not asked again."""
        if server != self.server:
            self._gone.setdefault(server, why)

    def ledger_replica(self, server: int) -> None:
        """Take in that a server holds files that belong to this one."""
        self._ledger_replicas.add(server)

    def hold(self, file: int, checksum: str) -> None:
        """Take in that a file is here, whole."""
        if file not in self._held:
            self._held_of[self.owner(file)] += 1
        self._held[file] = checksum

    def checksum(self, file: int) -> str | None:
        """The checksum of a file that is here, else None."""
        return self._held.get(file)

    def held_of(self, owner: int) -> int:
        """How many files of an owner are here."""
        return self._held_of[owner]

    def readable(self, file: int) -> bool:
        """Whether this server holds a file, or may still come to hold it without being told by others."""
        return file in self._held or self.server not in self._reasons.get(file, {})

    def gone(self, server: int) -> bool:
        """Whether a server is not asked any more."""
        return server in self._gone

    @property
    def complete(self) -> bool:
        """Whether every file is here."""
        return len(self._held) == len(self.files)

    def why(self, file: int) -> str:
        """Say who was asked for a file in vain, and why it failed."""
        reasons = {**self._gone, **self._reasons.get(file, {})}
        here = reasons.pop(self.server, "")
        told = [f"here: {here}"] if here else []
        return "; ".join([*told, *(f"server {number}: {why}" for number, why in sorted(reasons.items()))])
