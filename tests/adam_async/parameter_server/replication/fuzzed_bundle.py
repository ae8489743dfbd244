"""A bundle of one seed: its members, the controllers' map, links that break, and clients that push.

First anything may fail. Then everything is mended, and all that is pending must end. Everything that can
happen is drawn from the seed, the options as well. Violations of a promise raise `Wrong`.
"""

import heapq
import random
from collections import Counter

import msgspec

from adam_async.messages.replication import PieceCopy
from adam_async.parameter_server.replication.local_copy import (
    Apply,
    BecamePrimary,
    Bundle,
    CopyPiece,
    ProposeRecord,
    Removed,
    Send,
    StartAnew,
    Stopped,
    TakePiece,
    Violation,
)
from adam_async.parameter_server.replication.member import BundleMember
from adam_async.run.store_record import BundleRecord
from tests.adam_async.parameter_server.replication.bundle_checkers import BundleCheckers
from tests.adam_async.parameter_server.replication.bundle_parts import Link, Options, Piece, Server, Wrong

TICK_S = 0.1
PATIENCE_S = 60.0
"""How long a mended bundle may take until nothing is pending."""
WINDOW = 4
"""Number of pushes that a client has under way at most."""


class FuzzedBundle(BundleCheckers):
    """One seed."""

    def __init__(self, seed):
        super().__init__()
        self.options = options = Options(seed)
        self.net = random.Random(f"{seed}/net")
        self.faults = random.Random(f"{seed}/faults")
        self.load = random.Random(f"{seed}/load")
        self.now = 0.0
        self.calm = False
        self.queue = []
        self.count = 0
        self.marks = Counter()
        self.bundle = Bundle(store="s", home="ps0", pieces=options.pieces, min_in_sync=options.min_in_sync)
        self.cut = set()
        """Pairs of servers without a network between them."""
        self.deaf = set()
        """Servers without a network to the controllers."""
        self.links = {}
        self.servers = {f"ps{i}": Server(f"ps{i}") for i in range(options.servers)}
        self.lost = set()
        """Members that the controllers know to be lost."""
        self.heard = {}
        """By client, the last push that the client knows to be acknowledged."""
        self.sent = dict.fromkeys(range(options.clients), 0)
        self.clients_see = None
        names = list(self.servers)[: options.copies]
        self.record = BundleRecord(store="s", in_sync=tuple((name, 1) for name in names), changed=1)
        for server in self.servers.values():
            self.start(server)
        self.clients_see = self.record.primary

    # --- the world --------------------------------------------------------------------------

    def at(self, delay, action, *args):
        self.at_time(self.now + delay, action, *args)

    def at_time(self, time, action, *args):
        self.count += 1
        heapq.heappush(self.queue, (time, self.count, action, args))

    def run_until(self, end):
        while self.queue and self.queue[0][0] <= end:
            self.now, _, action, args = heapq.heappop(self.queue)
            action(*args)
        self.now = end

    def on(self, server, delay, action, *args):
        """Run an action in a process, later if it is frozen then, and never after its end."""
        self.at(delay, self.run_in, server, server.incarnation, action, args)

    def run_in(self, server, incarnation, action, args):
        if not server.alive or server.incarnation != incarnation:
            return
        if self.now < server.frozen_until:
            server.backlog.append((action, args))
            return
        action(server, *args)
        if server.alive and server.incarnation == incarnation:
            self.carry_out(server, reports=action != self.report)

    def thaw(self, server, incarnation):
        if server.incarnation != incarnation or self.now < server.frozen_until:
            return
        backlog, server.backlog = server.backlog, []
        # A process that was late itself counts no other as silent.
        server.heard = dict.fromkeys(server.heard, self.now)
        for action, args in backlog:
            self.run_in(server, incarnation, action, args)

    def start(self, server):
        server.incarnation += 1
        server.frozen_until, server.backlog = 0.0, []
        core = BundleMember(server.me, self.bundle, self.record)
        first = server.me in self.record.in_sync
        state = {piece: Piece() for piece in range(self.options.pieces)} if first else {}
        server.start(core, state, self.now)
        self.on(server, self.net.uniform(0, TICK_S), self.tick)
        self.carry_out(server)
        for other in self.servers.values():
            if other is not server:
                self.at(self.net.uniform(0, 0.1), self.connect, server.name, other.name)

    def delay(self, mean):
        return min(self.net.expovariate(1 / mean), 20 * mean)

    # --- links ------------------------------------------------------------------------------

    def pair(self, one, two):
        return (min(one, two), max(one, two))

    def connect(self, one, two):
        pair = self.pair(one, two)
        a, b = self.servers[one], self.servers[two]
        link = self.links.get(pair)
        if link is not None and not link.broken:
            return
        if a.alive and b.alive and pair not in self.cut:
            link = self.links[pair] = Link(a, b)
            for server, other in ((a, b), (b, a)):
                self.deliver(server, link, other.name, self.open, server.name)
        else:
            self.at(0.2, self.connect, one, two)

    def open(self, server, link, sender, name):
        if not link.broken:
            link.open[name] = True
            server.core.link_up(link.ends[sender])

    def deliver(self, server, link, sender, action, *args, lane=""):
        """Run an action at one end of a link, after all earlier ones of its lane."""
        time = max(link.last[server.name, lane], self.now + self.delay(self.options.delay_s))
        link.last[server.name, lane] = time
        if link.ends[server.name] == server.me:
            self.at_time(time, self.run_in, server, server.incarnation, action, (link, sender, *args))

    def sever(self, pair):
        link = self.links.get(pair)
        if link is None or link.broken:
            return
        link.broken = True
        link.arrives_late = self.net.random() < self.options.late_messages
        for name, other in (pair, pair[::-1]):
            server = self.servers[name]
            if server.alive and server.me == link.ends[name]:
                self.on(server, self.delay(0.01), self.lose_link, link, other)
        self.at(self.net.uniform(0.02, 0.3), self.connect, *pair)

    def lose_link(self, server, link, other):
        if self.links[self.pair(server.name, other)] is link or not self.is_open(server, other):
            server.core.link_lost(link.ends[other])

    def is_open(self, server, other):
        link = self.links.get(self.pair(server.name, other))
        return link is not None and link.open[server.name]

    def send(self, server, effect):
        name = effect.to[0]
        link = self.links.get(self.pair(server.name, name))
        usable = link is not None and not link.broken and link.open[server.name]
        if usable and link.ends[name] == effect.to and link.ends[server.name] == server.me:
            args = (effect.message, effect.content)
            is_apart = self.options.pieces_apart and isinstance(effect.message, PieceCopy)
            lane = "pieces" if is_apart else ""
            self.deliver(self.servers[name], link, server.name, self.receive, *args, lane=lane)

    def receive(self, server, link, sender, message, content):
        if link.broken and not link.arrives_late:
            return
        try:
            server.core.received(link.ends[sender], message, content)
        except Violation as error:
            raise Wrong(f"{server.me} got {message} from {sender}: {error}; {server.core}") from error

    # --- the controllers --------------------------------------------------------------------

    def propose(self, server, effect, attempt):
        if server.name in self.deaf or self.is_unlucky():
            # The request may be lost, or arrive although no outcome comes back.
            if self.net.random() < 0.5:
                self.at(self.delay(0.5), self.compare_and_set, server.me, effect)
            self.on(server, self.net.uniform(0.2, 1), self.repeat, attempt)
            self.marks["outcome unknown"] += 1
        else:
            self.at(self.delay(self.options.map_delay_s), self.decide, server, server.incarnation, effect)

    def is_unlucky(self):
        return not self.calm and self.net.random() < self.options.lost_outcomes

    def repeat(self, server, attempt):
        if server.proposals == attempt:
            server.core.repeat_proposal()

    def decide(self, server, incarnation, effect):
        self.compare_and_set((server.name, incarnation), effect)
        if server.incarnation == incarnation and server.alive:
            self.on(server, self.delay(self.options.map_delay_s), self.learn, self.record)

    def learn(self, server, record):
        before = server.core.record
        server.core.record_changed(record)
        if server.core.record.generation < before.generation or server.core.record.changed < before.changed:
            raise Wrong(f"{server.me} went from {before} back to {server.core.record}")

    def compare_and_set(self, member, effect):
        old, new = self.record, effect.record
        if effect.expected not in (None, old.changed):
            self.marks["conflict"] += 1
            return
        self.check_change(member, old, new)
        if new.generation > old.generation and member == old.primary:
            self.marks["handover"] += 1
            core = self.servers[member[0]].core
            if core.me == member and core.log.committed < core.log.last:
                raise Wrong(f"{core} handed over before its entries were committed")
        elif new.generation > old.generation:
            self.marks["takeover"] += 1
        elif len(new.in_sync) > len(old.in_sync):
            self.marks["joined"] += 1
        self.set_record(new)

    def check_change(self, member, old, new):
        """Refuse a change that the rules of the map forbid."""
        within = set(new.in_sync) <= {*old.in_sync, *old.joining}
        if new.generation == old.generation:
            right = member == old.primary == new.primary
        elif member == old.primary:
            right = new.generation == old.generation + 1 and new.primary in old.in_sync
        else:
            right = member == new.primary and member in old.in_sync and old.primary not in new.in_sync
            right = right and new.generation == old.generation + 1
        if not (right and within):
            raise Wrong(f"{member} changed {old} to {new}")

    def set_record(self, record):
        """Apply the rules of the controllers: strike out lost members, and let the first live one follow."""
        in_sync = tuple(member for member in record.in_sync if member not in self.lost)
        joining = tuple(member for member in record.joining if member not in self.lost)
        generation = record.generation + (in_sync[:1] != record.in_sync[:1])
        self.record = msgspec.structs.replace(
            record, in_sync=in_sync, joining=joining, generation=generation, changed=self.record.changed + 1
        )
        if not in_sync:
            self.marks["failed"] += 1
        self.check_members(self.last)
        for server in self.servers.values():
            self.at(self.delay(self.options.map_delay_s), self.watch, server, server.incarnation)
        self.at(self.delay(self.options.map_delay_s), self.clients_watch)

    def clients_watch(self):
        self.clients_see = self.record.primary

    def watch(self, server, incarnation):
        if server.incarnation != incarnation or not server.alive:
            return
        if server.name in self.deaf:
            self.at(0.2, self.watch, server, incarnation)
        else:
            self.on(server, 0, self.learn, self.record)

    def lose(self, member):
        if member not in self.lost:
            self.lost.add(member)
            if member in self.record.members:
                self.set_record(self.record)
            server = self.servers[member[0]]
            if server.alive and server.me == member:
                # A process that the controllers count as lost ends once it learns that.
                self.at(self.faults.uniform(0.1, 3), self.end, server, member)

    # --- a server ---------------------------------------------------------------------------

    def carry_out(self, server, *, reports=True):
        core = server.core
        self.check_log(core)
        while effects := core.take_effects():
            for effect in effects:
                self.carry_out_one(server, effect)
        if reports and not server.reporting:
            server.reporting = True
            self.on(server, self.options.report_s, self.report)
        if server.queue and not server.applying:
            server.applying = True
            self.on(server, self.delay(self.options.apply_s), self.apply, server.copy)

    def carry_out_one(self, server, effect):
        match effect:
            case Send():
                self.send(server, effect)
            case Apply():
                for entry in effect.entries:
                    self.commit(server, entry)
                server.queue.extend(effect.entries)
            case ProposeRecord():
                server.proposals += 1
                self.propose(server, effect, server.proposals)
            case BecamePrimary():
                self.become_primary(server, server.core.record.generation)
            case Stopped():
                server.front = None
            case Removed() | StartAnew():
                server.state, server.front = {}, None
                server.queue.clear()
                server.rounds = 0
                server.copy += 1
                server.applying = False
                self.marks["anew"] += isinstance(effect, StartAnew)
            case CopyPiece():
                self.on(server, self.delay(self.options.piece_s), self.copy_piece, effect)
            case TakePiece():
                self.take_piece(server, effect)

    def report(self, server):
        server.reporting = False
        server.core.report()

    def apply(self, server, copy):
        """Apply one entry to one piece: an entry takes several rounds."""
        if copy != server.copy:
            return
        server.applying = False
        entry = server.queue[0]
        piece = server.rounds
        if server.core.applies_to(piece, entry.position):
            if piece not in server.state:
                raise Wrong(f"{server.me} applies {entry} to piece {piece}, which it lacks")
            server.state[piece].apply(entry)
            self.check_piece(server, piece)
        server.rounds += 1
        if server.rounds < self.options.pieces:
            return
        server.rounds = 0
        server.queue.popleft()
        server.core.applied(entry.position)
        if server.front is not None:
            server.front.applied.update(entry.content)
            for client, number in entry.content:
                self.acknowledge(server, client, number)

    def copy_piece(self, server, asked):
        if asked.piece in server.state:
            piece = server.state[asked.piece].copy()
            if server.queue:
                self.marks["copied under load"] += 1
            if server.core.primary is not None:
                server.core.primary.piece_copied(asked, piece.position, piece, 10)

    def take_piece(self, server, effect):
        piece = effect.content.copy()
        if piece.position > effect.position:
            raise Wrong(f"piece {effect.piece} has {piece.position}, and was sent with {effect.position}")
        server.state[effect.piece] = piece
        self.check_piece(server, effect.piece)

    def tick(self, server):
        """Send beats, and decide which members are silent."""
        self.on(server, TICK_S, self.tick)
        for other in self.servers.values():
            if other is not server and other.alive and self.pair(server.name, other.name) not in self.cut:
                self.on(other, self.delay(self.options.delay_s), self.hear, server.me)
        if server.core.is_primary:
            self.lead(server)
        else:
            self.follow(server)

    def hear(self, server, member):
        server.heard[member] = self.now

    def is_silent(self, server, member, patience):
        return self.now - server.heard.get(member, server.started) > patience

    def follow(self, server):
        core = server.core
        primary, members = core.record.primary, core.record.members
        if primary is None or server.me not in members:
            return
        patience = self.options.patience_s * (1.3 + 0.2 * members.index(server.me))
        unfounded = not self.calm and self.faults.random() < self.options.impatience
        if unfounded or self.is_silent(server, primary, patience):
            core.take_over()

    def lead(self, server):
        core, options, record = server.core, self.options, server.core.record
        others = [member for member in record.members if member != server.me]
        waits = {*core.primary.waits_for(), *record.joining}
        server.waits_since = {member: server.waits_since.get(member, self.now) for member in waits}
        for member in others:
            slow = self.now - server.waits_since.get(member, self.now) > (
                8 if member in record.joining else 3
            )
            newer = (
                self.servers[member[0]].incarnation > member[1] and self.servers[member[0]].me in server.heard
            )
            if self.is_silent(server, member, options.patience_s) or slow or newer:
                core.primary.strike_out(member)
                server.waits_since.pop(member, None)
        for member in core.primary.laggards(options.budget):
            self.marks["laggard"] += 1
            if self.faults.random() < 0.1:
                core.primary.strike_out(member)
        if len(record.members) < options.copies:
            nodes = {node for node, _ in record.members}
            spares = [
                member
                for member in server.heard
                if member[0] not in nodes and not self.is_silent(server, member, options.patience_s)
            ]
            if spares and self.faults.random() < 0.3:
                core.primary.invite(self.faults.choice(spares))
        self.maybe_hand_over(server)

    def maybe_hand_over(self, server):
        core = server.core
        if server.handing_over_since is None:
            others = core.record.in_sync[1:]
            if not self.calm and others and self.faults.random() < self.options.handovers:
                server.handing_over_since = self.now
                core.primary.hand_over(self.faults.choice(others))
        elif self.now - server.handing_over_since > 2:
            server.handing_over_since = None
            core.primary.cancel_hand_over()

    # --- clients ----------------------------------------------------------------------------

    def client(self, client):
        self.at(0.05, self.client, client)
        acked = self.heard.get(client, 0)
        if self.load.random() < 0.7 and self.sent[client] - acked < WINDOW and not self.calm:
            self.sent[client] += 1
        open_numbers = tuple(range(acked + 1, self.sent[client] + 1))
        if open_numbers and self.clients_see is not None:
            server = self.servers[self.clients_see[0]]
            if server.alive:
                self.on(server, self.delay(self.options.delay_s), self.take_pushes, client, open_numbers)

    def client_hears(self, client, number):
        self.heard[client] = max(self.heard.get(client, 0), number)

    def take_pushes(self, server, client, numbers):
        front = server.front
        if front is None:
            return
        batch = []
        for number in numbers:
            if number <= front.applied.get(client, 0):
                self.acknowledge(server, client, number)
            elif number == front.ordered.get(client, 0) + 1 and server.core.is_ordering:
                front.ordered[client] = number
                batch.append((client, number))
                if self.load.random() < 0.5:
                    server.core.propose(tuple(batch), 100 * len(batch))
                    batch = []
        if batch:
            server.core.propose(tuple(batch), 100 * len(batch))

    # --- faults -----------------------------------------------------------------------------

    def harm(self):
        if self.calm:
            return
        self.at(self.faults.expovariate(1 / self.options.fault_every_s), self.harm)
        primary = self.record.primary
        server = self.servers[self.faults.choice(list(self.servers))]
        first = self.servers[primary[0]] if primary is not None else server
        match self.faults.choice(self.options.faults):
            case "kill":
                self.kill(server)
            case "kill primary":
                self.kill(first)
            case "kill two":
                self.kill(first)
                self.at(self.faults.uniform(0, 1.5), self.kill_primary)
            case "freeze":
                self.freeze(server)
            case "freeze primary":
                self.freeze(first)
            case "link":
                pairs = list(self.links)
                if pairs:
                    self.sever(self.faults.choice(pairs))
            case "cut":
                others = [name for name in self.servers if name != server.name]
                for other in self.faults.sample(others, self.faults.randint(0, len(others))):
                    self.cut.add(self.pair(server.name, other))
                    self.sever(self.pair(server.name, other))
                self.at(self.faults.uniform(0.2, 3), self.mend, server.name)
            case "deaf":
                self.deaf.add(server.name)
                self.at(self.faults.uniform(0.2, 3), self.deaf.discard, server.name)

    def mend(self, name):
        self.cut = {pair for pair in self.cut if name not in pair}

    def freeze(self, server):
        if server.alive:
            duration = self.faults.choice((0.3, 1, 3))
            server.frozen_until = max(server.frozen_until, self.now + duration)
            self.at(server.frozen_until - self.now, self.thaw, server, server.incarnation)
            if self.faults.random() < 0.2:
                self.at(duration / 2, self.lose, server.me)

    def kill_primary(self):
        if self.record.primary is not None and not self.calm:
            self.marks["two losses"] += 1
            self.kill(self.servers[self.record.primary[0]])

    def kill(self, server):
        live = [name for name, n in self.record.in_sync if self.servers[name].me == (name, n)]
        live = [name for name in live if self.servers[name].alive]
        if not server.alive or (live == [server.name] and self.faults.random() < 0.97):
            return
        self.marks["kill"] += 1
        self.end(server, server.me)
        self.at(self.faults.choice((0.05, 0.5, 2)), self.lose, server.me)

    def end(self, server, member):
        if not server.alive or server.me != member:
            return
        server.alive = False
        for pair in list(self.links):
            if server.name in pair:
                self.sever(pair)
        self.at(self.faults.choice((0.1, 1, 4)), self.restart, server)

    def restart(self, server):
        if not server.alive:
            # A process may be back before the controllers know that its predecessor is lost.
            self.at(self.faults.choice((0, 0.3, 1)), self.lose, server.me)
            self.start(server)

    # --- the whole --------------------------------------------------------------------------

    def run(self):
        for client in self.sent:
            self.client(client)
        self.at(self.faults.uniform(0.2, 1), self.harm)
        while self.now < self.options.chaos_s and self.record.in_sync:
            self.run_until(self.now + 0.5)
        self.recover()
        return self.marks

    def recover(self):
        """Mend everything; then all that is pending must end."""
        self.calm = True
        self.cut.clear()
        self.deaf.clear()
        for server in self.servers.values():
            server.frozen_until = min(server.frozen_until, self.now)
            if server.alive:
                self.thaw(server, server.incarnation)
            else:
                self.restart(server)
        deadline = self.now + PATIENCE_S
        while self.record.in_sync and not self.is_finished():
            if self.now > deadline:
                raise Wrong(f"pending after {PATIENCE_S} s: {self.pending()}")
            self.run_until(self.now + 0.5)
        self.marks["finished"] += bool(self.record.in_sync)

    def pending(self):
        cores = [server.core for server in self.servers.values()]
        why = [core.primary.why_not_committing() for core in cores if core.primary is not None]
        return f"{self.record}, sent {self.sent}, acknowledged {self.heard}, {cores}, {why}"

    def is_finished(self):
        """Whether all pushes are acknowledged, all copies are there, and their states are equal."""
        if any(self.heard.get(client, 0) < number for client, number in self.sent.items()):
            return False
        if len(self.record.in_sync) < self.options.copies:
            return False
        servers = [self.servers[name] for name, _ in self.record.in_sync]
        states = [[server.state.get(piece) for piece in range(self.options.pieces)] for server in servers]
        logs = [server.core.log for server in servers]
        return all(state == states[0] for state in states) and all(
            log.start == log.applied == log.last for log in logs
        )


def run_seed(seed):
    """Run one world. Returns the marks of what happened in it."""
    return FuzzedBundle(seed).run()
