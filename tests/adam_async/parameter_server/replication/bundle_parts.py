"""The parts of a fuzzed bundle: its options, the state of its members, its processes and its links."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from zlib import crc32


class Wrong(AssertionError):
    """A promise was broken."""


class Options:
    """Random settings of one world."""

    def __init__(self, seed):
        dice = random.Random(f"{seed}/options")
        self.copies = dice.choice((1, 2, 2, 3, 3, 3))
        self.servers = self.copies + dice.choice((0, 1, 2))
        self.min_in_sync = min(self.copies, dice.choice((1, 2)))
        self.pieces = dice.choice((1, 2, 4))
        self.chaos_s = dice.choice((5, 10, 15))
        self.delay_s = dice.choice((0.002, 0.01, 0.05))
        self.map_delay_s = dice.choice((0.005, 0.05, 0.3))
        self.apply_s = dice.choice((0.0005, 0.005, 0.03))
        self.piece_s = dice.choice((0.001, 0.05, 0.2))
        self.report_s = dice.choice((0, 0.001, 0.02))
        self.lost_outcomes = dice.choice((0, 0.1, 0.5))
        self.late_messages = dice.choice((0, 0.3, 1))
        """Probability that the messages under way on a broken link still arrive."""
        self.patience_s = dice.choice((0.4, 1.0))
        self.impatience = dice.choice((0, 0, 0.01))
        """Probability of a takeover without reason, in each tick."""
        self.handovers = dice.choice((0, 0, 0.02))
        self.clients = dice.choice((1, 3))
        self.budget = dice.choice((300, 10**6))
        self.fault_every_s = dice.choice((0.3, 0.8, 2))
        self.faults = dice.sample(
            ("kill", "kill", "kill primary", "kill two", "freeze", "freeze primary", "link", "cut", "deaf"),
            dice.randint(2, 6),
        )
        self.pieces_apart = dice.random() < 0.5
        """Whether pieces have a link of their own, so that they pass entries and entries pass them."""

    def __repr__(self):
        return f"Options({vars(self)})"


@dataclass
class Piece:
    """A piece of the state: a position, and a digest of all entries up to it."""

    position: int = 0
    digest: int = 0
    numbers: dict = field(default_factory=dict)
    """The last push of each client."""

    def apply(self, entry):
        for client, number in entry.content:
            if number != self.numbers.get(client, 0) + 1:
                raise Wrong(f"push {number} of client {client} after {self.numbers.get(client, 0)}")
            self.numbers[client] = number
        text = f"{entry.position} {entry.generation} {entry.content} {self.digest}"
        self.position, self.digest = entry.position, crc32(text.encode())

    def copy(self):
        return Piece(self.position, self.digest, dict(self.numbers))


class Front:
    """The volatile state of a primary."""

    def __init__(self, generation, piece):
        self.generation = generation
        self.applied = dict(piece.numbers)
        self.ordered = dict(piece.numbers)


class Server:
    """One process: a core, its copy of the state, and the events that wait while it is frozen."""

    def __init__(self, name):
        self.name = name
        self.incarnation = 0
        self.alive = False
        self.frozen_until = 0.0
        self.backlog = []

    @property
    def me(self):
        return (self.name, self.incarnation)

    def start(self, core, state, now):
        self.core, self.state = core, state
        self.alive = True
        self.queue = deque()
        self.rounds = 0
        self.front = None
        self.copy = 0
        """Grows whenever the state is dropped."""
        self.heard = {}
        self.waits_since = {}
        self.reporting = self.applying = False
        self.proposals = 0
        self.started = now
        self.handing_over_since = None


class Link:
    """One connection of two processes, first in, first out in both directions; perhaps another for pieces."""

    def __init__(self, one, two):
        self.ends = {one.name: one.me, two.name: two.me}
        self.open = {one.name: False, two.name: False}
        self.broken = False
        self.arrives_late = False
        self.last = Counter()
        """By receiver and lane, the time of the last delivery."""
