"""A few members of a bundle whose links deliver at once, and a map that a test changes by hand."""

from collections import defaultdict, deque

import msgspec

from adam_async.parameter_server.replication.local_copy import (
    Apply,
    BecamePrimary,
    Bundle,
    CopyPiece,
    ProposeRecord,
    Send,
    StartAnew,
    TakePiece,
)
from adam_async.parameter_server.replication.member import BundleMember
from adam_async.run.store_record import BundleRecord

A, B, C = ("a", 1), ("b", 1), ("c", 1)


class SmallBundle:
    """Members with links in pairs. Entries are applied at once, unless `applies` is False."""

    def __init__(self, *in_sync, outside=(), min_in_sync=1, pieces=1, linked=True):
        self.record = BundleRecord(store="s", in_sync=in_sync, changed=1)
        bundle = Bundle(store="s", home="a", pieces=pieces, min_in_sync=min_in_sync)
        self.members = {me: BundleMember(me, bundle, self.record) for me in (*in_sync, *outside)}
        self.applies = True
        self.waiting = defaultdict(deque)
        """By receiver, the messages under way."""
        self.lost = set()
        self.applied = defaultdict(list)
        """By member, the contents of the entries that it has applied."""
        self.events = defaultdict(list)
        """By member, all effects but messages."""
        self.settle()
        if linked:
            for me in self.members:
                for other in self.members:
                    if other != me:
                        self.members[me].link_up(other)
            self.settle()

    def __getitem__(self, me):
        return self.members[me]

    def propose(self, me, *contents, deliver=True):
        """Propose entries of ten bytes."""
        for content in contents:
            self.members[me].propose(content, 10)
        if deliver:
            self.settle()
        else:
            self.carry_out(me)

    def lose(self, me):
        """Drop a member with all messages from and to it."""
        del self.members[me]
        self.lost.add(me)
        for waiting in self.waiting.values():
            kept = [each for each in waiting if each[0] != me]
            waiting.clear()
            waiting.extend(kept)
        self.waiting[me].clear()
        for member in self.members.values():
            member.link_lost(me)

    def change(self, *, to=None, **changes):
        """Change the record in the map, and let some members learn of it; all by default."""
        version = self.record.changed + 1
        self.record = msgspec.structs.replace(self.record, **changes, changed=version)
        for me in list(self.members) if to is None else to:
            self.members[me].record_changed(self.record)
            self.carry_out(me)

    def accept(self, me):
        """Let the last proposal of a member take effect; the others do not know it yet."""
        proposal = self.proposals(me)[-1]
        assert proposal.expected == self.record.changed
        new = proposal.record
        self.change(to=(me,), generation=new.generation, in_sync=new.in_sync, joining=new.joining)

    def proposals(self, me):
        return [effect for effect in self.events[me] if isinstance(effect, ProposeRecord)]

    def saw(self, me, kind):
        return any(isinstance(effect, kind) for effect in self.events[me])

    def settle(self):
        """Deliver all messages, also those that follow from them."""
        for me in self.members:
            self.carry_out(me)
        while any(self.waiting.values()):
            for me, waiting in list(self.waiting.items()):
                while waiting:
                    sender, message, content = waiting.popleft()
                    if me in self.members:
                        self.members[me].received(sender, message, content)
                        self.carry_out(me)

    def carry_out(self, me):
        member = self.members[me]
        while True:
            effects = member.take_effects()
            if not effects:
                member.report()
                effects = member.take_effects()
            if not effects:
                return
            for effect in effects:
                self.carry_out_one(me, effect)

    def carry_out_one(self, me, effect):
        match effect:
            case Send():
                if effect.to not in self.lost:
                    self.waiting[effect.to].append((me, effect.message, effect.content))
                return
            case Apply() if self.applies:
                for entry in effect.entries:
                    if self.members[me].applies_to(0, entry.position):
                        self.applied[me].append(entry.content)
                    self.members[me].applied(entry.position)
            case CopyPiece():
                member = self.members[me]
                member.primary.piece_copied(effect, member.log.applied, tuple(self.applied[me]), 10)
            case TakePiece():
                self.applied[me] = list(effect.content)
            case StartAnew():
                self.applied[me] = []
        self.events[me].append(effect)

    def primaries(self):
        """Members that have become primary."""
        return [me for me in self.members if self.saw(me, BecamePrimary)]
