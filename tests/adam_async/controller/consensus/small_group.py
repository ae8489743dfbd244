"""A few cores whose messages are delivered by hand, for tests that read like a conversation."""

from adam_async.controller.consensus import core, events, membership, records
from adam_async.controller.consensus.membership import Settings

LONG_S = 10.0
"""Longer than any time-out here."""


class SmallGroup:
    """Founders by their names; each word lies in `wire` until it is delivered."""

    def __init__(self, names="abc", *, joiners="", **settings):
        self.settings = Settings(**settings)
        self.now = 0.0
        self.wire = []
        self.seen = {}
        """By name, effects that are neither words nor records."""
        self.disks = {}
        self.slow = set()
        """Those whose records are not on disk before somebody says so."""
        self.unsynced = {}
        self.cores = {}
        for name in names:
            self.start(name, records.bootstrapped(name, names))
        for name in joiners:
            self.start(name, records.Saved(me=name))

    def start(self, name, saved):
        self.seen[name] = []
        self.unsynced[name] = []
        self.disks[name] = list(saved.records())
        self.cores[name] = core.Core(saved, self.settings, draw=lambda: 0.5, now=self.now)

    def restart(self, name):
        """End a life and begin the next, with what was on disk."""
        data = records.Writer().frame(tuple(self.disks[name]))
        saved, _ = records.recover(data, origin=name)
        self.start(name, saved)

    def __getitem__(self, name):
        return self.cores[name]

    def give(self, name, event):
        """Hand over one event. Returns the effects that are neither words nor records."""
        node, kept = self.cores[name], []
        for effect in node.handle(event, now=self.now):
            kind = type(effect).__name__
            if kind == "Send":
                self.wire.append(effect.message)
            elif kind != "Persist":
                kept.append(effect)
            else:
                self.unsynced[name].append(effect)
                if name not in self.slow:
                    kept += self.sync(name)
        node.check_invariants()
        self.seen[name] += kept
        return kept

    def sync(self, name):
        """All records of a node are on disk now. Returns what follows from that."""
        written, self.unsynced[name] = self.unsynced[name], []
        for persist in written:
            self.disks[name] += persist.records
        return self.give(name, events.Persisted(written[-1].number))

    def tick(self, name, after_s=LONG_S):
        self.now += after_s
        return self.give(name, events.Tick())

    def hand(self, message):
        """Deliver one word."""
        return self.give(message.to, events.Received(message))

    def take(self, kind=None, to=None):
        """Take words from the wire: those of a kind, and to somebody, if that is said."""
        taken = [m for m in self.wire if kind in (None, type(m).__name__) and to in (None, m.to)]
        self.wire = [m for m in self.wire if not any(m is other for other in taken)]
        return taken

    def deliver(self, among=None):
        """Deliver all words, and those that follow; those to or from others than `among` are lost."""
        for _ in range(1000):
            if not self.wire:
                return
            message = self.wire.pop(0)
            if among is None or (message.sender in among and message.to in among):
                self.hand(message)
        raise AssertionError(f"they do not stop talking: {self.wire[:3]}")

    def elect(self, name, among=None):
        """Let a node become the leader, with the votes of those who are reached."""
        self.now += LONG_S
        self.tick(name)
        self.deliver(among)
        assert self.cores[name].role.value == "leader", self.cores

    def propose(self, name, command=b"x", tag="write"):
        return self.give(name, events.Propose(tag, command))

    def change(self, name, kind, node, tag="change"):
        return self.give(name, events.Change(tag, membership.Step(kind, node)))

    def beat(self, name, among=None):
        """Let a leader speak, and all be answered."""
        self.tick(name, 0.2)
        self.deliver(among)

    def log(self, name):
        return [(entry.term, entry.command) for entry in self.cores[name].log.entries]
