"""The promises of a bundle, checked at each event of a fuzzed one."""

from collections import defaultdict

from tests.adam_async.parameter_server.replication.bundle_parts import Front, Wrong


class BundleCheckers:
    """Checks of a `FuzzedBundle`, which has the attributes `options`, `servers`, `record` and `marks`."""

    def __init__(self):
        self.holders = defaultdict(set)
        """By position and generation, the members that held the entry at some time."""
        self.entries = {}
        """By position, the entry that was committed there first."""
        self.last = 0
        """Position of the last committed entry."""
        self.digests = {}
        """By piece and position, the digest of the piece."""
        self.primaries = {}
        """By generation, the member that acknowledges."""
        self.serving = []
        """Generation and server of each primary so far."""
        self.acked = {}
        """By client and generation, the last push that the generation's primary acknowledged."""

    def check_log(self, core):
        log = core.log
        if not log.start <= log.applied <= log.committed <= log.last:
            raise Wrong(f"{core}")
        if core.held_bytes != sum(entry.nbytes for entry in log.after(log.start)):
            raise Wrong(f"{core} holds other than {core.held_bytes} bytes")
        for entry in log.after(log.applied):
            self.holders[entry.position, entry.generation].add(core.me)

    def commit(self, server, entry):
        known = self.entries.setdefault(entry.position, entry)
        if (known.generation, known.content) != (entry.generation, entry.content):
            raise Wrong(f"{server.me} applies {entry}, and {known} was committed")
        if entry.position > self.last:
            if entry.position != self.last + 1:
                raise Wrong(f"{entry} is committed after {self.last}")
            if not server.core.is_primary:
                raise Wrong(f"{server.me} applies {entry} before a primary has committed it")
            holders = self.holders[entry.position, entry.generation]
            if len(holders) < self.options.min_in_sync:
                raise Wrong(f"{server.me} committed {entry}, which only {holders} held")
            self.last = entry.position
            self.check_members(entry.position - 1)

    def holds(self, core, entry):
        known = core.log.at(entry.position)
        if known is None:
            return core.log.start >= entry.position
        return known.generation == entry.generation

    def check_members(self, start):
        """Each live member in sync holds all committed entries."""
        start = 0 if start == self.last else start
        for name, incarnation in self.record.in_sync:
            server = self.servers[name]
            if not server.alive or server.incarnation != incarnation:
                continue
            for position in range(max(start, server.core.log.start) + 1, self.last + 1):
                if not self.holds(server.core, self.entries[position]):
                    raise Wrong(f"{server.core} lacks {self.entries[position]}, and is in {self.record}")

    def check_piece(self, server, piece):
        state = server.state[piece]
        key = (piece, state.position)
        if self.digests.setdefault(key, state.digest) != state.digest:
            raise Wrong(f"piece {piece} of {server.me} at {state.position} is not that of others")

    def become_primary(self, server, generation):
        other = self.primaries.setdefault(generation, server.me)
        if other != server.me:
            raise Wrong(f"{server.me} and {other} are primaries of generation {generation}")
        if len(server.state) < self.options.pieces:
            raise Wrong(f"{server.me} became primary with {len(server.state)} pieces")
        # A primary that learns late of its own generation may be behind newer ones: it commits nothing.
        acked = [(each[0], number) for each, number in self.acked.items() if each[1] < generation]
        for client, number in acked:
            for piece in server.state.values():
                if piece.numbers.get(client, 0) < number:
                    raise Wrong(f"{server.me} became primary without push {number} of client {client}")
        server.front = Front(generation, server.state[0])
        self.serving.append((generation, server, server.incarnation))
        self.marks["failover"] += generation > 1

    def acknowledge(self, server, client, number):
        for generation, other, incarnation in self.serving:
            if generation > server.front.generation and other.alive and other.incarnation == incarnation:
                if other.front is not None and other.front.applied.get(client, 0) < number:
                    raise Wrong(f"{server.me} acknowledged {number} of {client}, which {other.me} lacks")
        self.at(self.delay(self.options.delay_s), self.client_hears, client, number)
        key = (client, server.front.generation)
        self.acked[key] = max(self.acked.get(key, 0), number)
