"""A group of cores in a world of one seed: its network, disks, clocks, crashes, clients, and those who check.

First anything may fail. Then what a group needs is mended, and it must get on with its work: either all of
it works, where a leader may be cut off from one of many, or a majority does and the rest only speaks or only
hears.

Everything that can happen is drawn from the seed, the options as well. Violations raise `Wrong`.
"""

import heapq
import random
from collections import Counter
from zlib import crc32

import msgspec

from adam_async.controller.consensus import core, events, membership, messages, records, violations

HEARTBEAT_S, ELECTION_S = 0.25, 0.6
CALM_S = 4.0
"""How long nothing may change once a mended group works."""
PATIENCE_S = 40.0
"""How long a mended group may take until it works."""
KEYS = ("x", "y")


class Wrong(AssertionError):
    """A promise was broken."""


class Options:
    """Random settings of one world."""

    def __init__(self, seed):
        dice = random.Random(f"{seed}/options")
        self.founders = dice.choice((1, 3, 3, 3, 3, 5))
        self.chaos_s = dice.choice((10, 20, 40))
        self.loss = dice.choice((0, 0.02, 0.1, 0.3))
        self.twice = dice.choice((0, 0.05, 0.3))
        self.delay_s = dice.choice((0.01, 0.03, 0.1))
        self.drift = dice.choice((0, 0.05, 0.2))
        self.sync_s = dice.choice((0.001, 0.02, 0.1))
        self.fault_every_s = dice.choice((0.5, 1, 2))
        self.faults = dice.sample(
            ("crash", "crash", "crash leader", "crash all", "cut", "cut", "freeze", "slow disk"),
            dice.randint(2, 6),
        )
        self.reigns_are_short = dice.choice((0, 0.5, 0.9))
        self.changes = dice.random() < 0.5
        self.disks_are_lost = dice.random() < 0.35
        self.transfers = dice.random() < 0.3
        self.ops_per_s = dice.choice((3, 10, 30))
        self.snapshot_every = dice.choice((3, 10, 40, 10**6))
        self.settings = {
            "heartbeat_s": HEARTBEAT_S,
            "election_s": ELECTION_S,
            "command_bytes": 64,
            "message_bytes": dice.choice((1, 100, 10_000)),
            "chunk_bytes": dice.choice((7, 30, 1000)),
            "window": dice.choice((1, 4, 64)),
            "backlog": dice.choice((4, 50)),
            "catch_up": dice.choice((1, 5)),
        }

    def __repr__(self):
        return f"Options({vars(self)})"


class Node:
    """One place: its disk, its clock, and the core that lives there now."""

    def __init__(self, name, dice, drift):
        self.name = name
        self.me = ""
        self.life = 0
        self.core = None
        self.rate = 1 + drift * dice.uniform(-1, 1)
        self.offset = dice.uniform(0, 1000)
        self.frozen_until = 0.0
        self.slow_until = 0.0
        self.begin_disk(b"")

    def begin_disk(self, data):
        self.disk = bytearray(data)
        self.durable = len(data)
        self.frames = []
        """Those not durable: (begin, end, number)."""
        self.syncing = False

    def local(self, now):
        return self.offset + self.rate * now

    def reset(self, snapshot):
        self.applied = snapshot.index
        self.values = {}
        self.digest = 0
        if snapshot.state:
            self.applied, self.digest, self.values = msgspec.json.decode(snapshot.state)
        return self


class FuzzedGroup:
    """One seed."""

    def __init__(self, seed):
        self.seed = seed
        self.options = Options(seed)
        self.net = random.Random(f"{seed}/net")
        self.faults = random.Random(f"{seed}/faults")
        self.load = random.Random(f"{seed}/load")
        self.dice = random.Random(f"{seed}/dice")
        self.settings = membership.Settings(**self.options.settings)
        self.wire = msgspec.msgpack.Decoder(messages.Message)
        self.now = 0.0
        self.queue = []
        self.count = 0
        self.cut = Counter()
        self.calm = False
        self.marks = Counter()
        self.reference = {}
        """By index, the entry that was applied there, by whoever was first."""
        self.committed_by = {}
        """By index, a term by which it was committed."""
        self.digests = {}
        self.last = 0
        self.group = None
        """Membership of the last entry applied anywhere."""
        self.leaders = {}
        self.invoked = {}
        """By operation: key, kind, when."""
        self.completed = []
        self.versions = {}
        """By operation, the version that its write made."""
        self.writes = Counter()
        self.lost = set()
        spares = 2 if self.options.changes or self.options.disks_are_lost else 0
        self.nodes = {
            f"n{i}": Node(f"n{i}", self.faults, self.options.drift)
            for i in range(self.options.founders + spares)
        }
        self.by_id = {}
        for node in self.nodes.values():
            self.name(node)
        founders = [node.me for node in list(self.nodes.values())[: self.options.founders]]
        for node in self.nodes.values():
            saved = (
                records.bootstrapped(node.me, founders) if node.me in founders else records.Saved(me=node.me)
            )
            node.begin_disk(records.Writer().frame(saved.records()))
            self.start(node)
        self.group = self.nodes["n0"].core.members

    # --- the world --------------------------------------------------------------------------

    def at(self, delay, action, *args):
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay, self.count, action, args))

    def run_until(self, end):
        while self.queue and self.queue[0][0] <= end:
            self.now, _, action, args = heapq.heappop(self.queue)
            action(*args)
        self.now = end

    def name(self, node):
        node.me = membership.identity(node.name, self.faults.getrandbits(32))
        self.by_id[node.me] = node

    def start(self, node):
        saved, end = records.recover(bytes(node.disk), origin=node.name)
        if end < len(node.disk):
            self.marks["torn tail"] += 1
        node.begin_disk(node.disk[:end])
        node.writer = records.Writer(end)
        if self.faults.random() < 0.2:
            node.writer = records.Writer()
            node.begin_disk(node.writer.frame(saved.records()))
            node.writer.durable(node.durable)
        node.life += 1
        node.core = core.Core(saved, self.settings, draw=self.dice.random, now=node.local(self.now))
        node.reset(saved.snapshot)
        self.arm(node)

    def crash(self, node, down_s):
        if node.core is None:
            return
        self.marks["crash"] += 1
        node.core = None
        node.life += 1
        kind = self.faults.choice(("gone", "torn", "holes"))
        for begin, end, _ in node.frames:
            if kind == "holes" and self.faults.random() < 0.5:
                node.disk[begin:end] = bytes(end - begin)
        if kind == "gone":
            del node.disk[node.durable :]
        elif kind == "torn" and node.frames:
            del node.disk[self.faults.randint(node.durable, len(node.disk)) :]
        self.at(down_s, self.restart, node, node.life)

    def restart(self, node, life):
        if node.core is None and node.life == life:
            self.start(node)

    def arm(self, node):
        deadline = node.core.next_deadline()
        if deadline != getattr(node, "armed", None) or node.armed_life != node.life:
            node.armed, node.armed_life = deadline, node.life
            delay = max(0.0, (deadline - node.local(self.now)) / node.rate)
            self.at(delay + 1e-6, self.ring, node, node.life, deadline)

    def ring(self, node, life, deadline):
        if node.life == life and node.core is not None and node.armed == deadline:
            if self.now < node.frozen_until:
                self.at(self.thaw_s(node), self.ring, node, life, deadline)
            else:
                node.armed = None
                self.give(node, events.Tick())

    def send(self, node, message):
        to = message.to.partition("/")[0]
        options = self.options
        if self.cut[node.name, to] or (not self.calm and self.net.random() < options.loss):
            return
        if self.net.random() < 0.02:
            message = self.wire.decode(msgspec.msgpack.encode(message))
        copies = 2 if not self.calm and self.net.random() < options.twice else 1
        for _ in range(copies):
            delay = (
                self.net.expovariate(1 / options.delay_s) if not self.calm else self.net.uniform(0.001, 0.03)
            )
            self.at(min(delay, 1.0), self.deliver, to, message)

    def deliver(self, to, message):
        node = self.nodes[to]
        if node.core is None:
            return
        if self.now < node.frozen_until:
            self.at(self.thaw_s(node), self.deliver, to, message)
        else:
            self.give(node, events.Received(message))

    def thaw_s(self, node):
        """Return a time after the freeze; waiting messages arrive in another order."""
        return node.frozen_until - self.now + self.net.uniform(0, 0.05)

    def write(self, node, number, what):
        begin = len(node.disk)
        node.disk += node.writer.frame(what)
        node.frames.append((begin, len(node.disk), number))
        self.sync(node)

    def sync(self, node):
        if node.syncing or not node.frames:
            return
        node.syncing = True
        latency = self.faults.expovariate(1 / (0.005 if self.calm else self.options.sync_s))
        if self.now < node.slow_until:
            latency += self.faults.uniform(0, 1)
        self.at(latency, self.synced, node, node.life, len(node.frames))

    def synced(self, node, life, count):
        if node.life != life or node.core is None:
            return
        done, node.frames = node.frames[:count], node.frames[count:]
        node.durable = done[-1][1]
        node.writer.durable(node.durable)
        node.syncing = False
        self.sync(node)
        self.give(node, events.Persisted(done[-1][2]))

    # --- one event --------------------------------------------------------------------------

    def give(self, node, event):
        core = node.core
        before = core.log.last_index
        try:
            effects = core.handle(event, now=node.local(self.now))
        except violations.Violation as error:
            raise Wrong(f"{node.name} was told what no sound node says: {error}") from error
        if core.log.last_index < before:
            self.marks["cut off"] += 1
        for effect in effects:
            match type(effect).__name__:
                case "Send":
                    self.send(node, effect.message)
                case "Persist":
                    self.write(node, effect.number, effect.records)
                case "Apply":
                    for entry in effect.entries:
                        self.apply(node, entry)
                case "Restore":
                    self.marks["snapshot received"] += 1
                    node.reset(effect.snapshot)
                    self.check_state(node)
                case "Done":
                    self.done(node, effect)
                case "ReadReady":
                    self.complete(effect.tag, node.values.get(self.invoked[effect.tag][0], (0, 0))[0])
                    self.marks["read"] += 1
                case _:
                    assert isinstance(effect, (events.Refused, events.Unknown, events.Led)), effect
        core.check_invariants()
        if core.role.value == "leader" and self.leaders.get(core.term) != core.me:
            self.check_leader(core)
        self.arm(node)
        if node.applied >= core.log.snapshot.index + self.options.snapshot_every:
            self.marks["snapshot"] += 1
            state = msgspec.json.encode((node.applied, node.digest, node.values))
            self.give(node, events.Snapshotted(node.applied, state))

    def apply(self, node, entry):
        if entry.index != node.applied + 1:
            raise Wrong(f"{node.me} applied {entry.index} after {node.applied}")
        node.applied = entry.index
        known = self.reference.setdefault(entry.index, entry)
        self.committed_by.setdefault(entry.index, node.core.term)
        if (known.term, known.command, known.members) != (entry.term, entry.command, entry.members):
            raise Wrong(f"{node.me} applied {entry}, where {known} was committed")
        if entry.command is not None:
            op, key = entry.command.decode().split()
            version = node.values.get(key, (0, 0))[0] + 1
            node.values[key] = (version, int(op))
            if self.versions.setdefault(int(op), version) != version:
                raise Wrong(f"write {op} made version {self.versions[int(op)]}, and {version}")
        node.digest = crc32(b"%d " % entry.term + (entry.command or b""), node.digest)
        self.check_state(node)
        if entry.index > self.last:
            self.last = entry.index
            if entry.members is not None:
                self.marks["membership"] += 1
                self.group = entry.members

    def check_state(self, node):
        if self.digests.setdefault(node.applied, node.digest) != node.digest:
            raise Wrong(f"the state of {node.me} at {node.applied} is not that of others")

    def check_leader(self, core):
        other = self.leaders.setdefault(core.term, core.me)
        if other != core.me:
            raise Wrong(f"{core.me} and {other} lead in term {core.term}")
        self.marks["election"] += 1
        if not self.calm and self.faults.random() < self.options.reigns_are_short:
            node = self.by_id[core.me]
            if self.options.changes and self.faults.random() < 0.5:
                self.at(self.faults.choice((0, 0.05)), self.step, node)
            self.at(self.faults.uniform(0, 0.3), self.end_reign, node)
        for index in range(core.log.snapshot.index + 1, self.last + 1):
            late = self.committed_by[index] >= core.term  # then one who was elected late may lack it
            if not late and core.log.term_at(index) != self.reference[index].term:
                raise Wrong(f"{core.me} leads in term {core.term} without the committed entry {index}")

    def check_logs(self):
        """Two logs that have an entry in common are the same up to it."""
        logs = [node.core.log for node in self.nodes.values() if node.core is not None]
        for position, one in enumerate(logs):
            for two in logs[:position]:
                low = max(one.snapshot.index, two.snapshot.index)
                same = False
                for index in range(min(one.last_index, two.last_index), low, -1):
                    (a,), (b,) = one.run(index, index), two.run(index, index)
                    if a.term == b.term:
                        same = True
                        if a != b:
                            raise Wrong(f"two logs differ in {a}")
                    elif same:
                        raise Wrong(f"two logs differ at {index}, before an entry that they share")

    # --- clients ----------------------------------------------------------------------------

    def leading(self):
        return [n for n in self.nodes.values() if n.core is not None and n.core.role.value == "leader"]

    def pick(self, dice):
        able = [node for node in self.nodes.values() if node.core is not None]
        leaders = [node for node in able if node.core.role.value == "leader"]
        if leaders and dice.random() < 0.9:
            return dice.choice(leaders)
        return dice.choice(able) if able else None

    def operate(self):
        if self.calm:
            return
        self.at(self.load.expovariate(self.options.ops_per_s), self.operate)
        self.invoke(self.pick(self.load), self.load.choice(KEYS), self.load.random() < 0.6)

    def invoke(self, node, key, is_write):
        if node is None:
            return None
        self.count += 1
        tag = self.count
        self.invoked[tag] = (key, is_write, self.count)
        question = events.Propose(tag, f"{tag} {key}".encode()) if is_write else events.Read(tag)
        self.ask(node, node.life, question)
        return tag

    def ask(self, node, life, question):
        if node.life == life and self.now < node.frozen_until:
            self.at(self.thaw_s(node), self.ask, node, life, question)
        elif node.life == life:
            self.give(node, question)

    def done(self, node, effect):
        if effect.tag in self.invoked:
            if effect.tag not in self.versions:
                raise Wrong(f"write {effect.tag} is said to be done, but was not applied")
            self.complete(effect.tag, self.versions[effect.tag])
            self.marks["write"] += 1
        elif effect.index == 0:
            self.marks["transfer"] += 1

    def complete(self, tag, version):
        key, is_write, begun = self.invoked[tag]
        self.count += 1
        self.completed.append((key, is_write, begun, self.count, version))

    def check_history(self):
        """Versions are unique and rise: an operation sees at least what was complete when it began."""
        for key in KEYS:
            operations = [operation for operation in self.completed if operation[0] == key]
            ends = sorted((end, version) for _, _, _, end, version in operations)
            seen = position = 0
            for _, is_write, begun, _, version in sorted(operations, key=lambda operation: operation[2]):
                while position < len(ends) and ends[position][0] < begun:
                    seen = max(seen, ends[position][1])
                    position += 1
                if version < seen + is_write:
                    raise Wrong(f"an operation on {key} saw version {version} after {seen} had been seen")

    # --- faults -----------------------------------------------------------------------------

    def harm(self):
        if self.calm:
            return
        self.at(self.faults.expovariate(1 / self.options.fault_every_s), self.harm)
        leaders = self.leading()
        nodes = list(self.nodes.values())
        node = self.faults.choice(leaders if leaders and self.faults.random() < 0.5 else nodes)
        down_s = self.faults.choice((0.01, 0.3, 1.5))
        match self.faults.choice(self.options.faults):
            case "crash":
                self.crash(node, down_s)
            case "crash leader":
                for leader in leaders:
                    self.crash(leader, down_s)
            case "crash all":
                for each in nodes:
                    self.crash(each, down_s * self.faults.random())
            case "freeze":
                node.frozen_until = self.now + self.faults.choice((0.3, 2))
            case "slow disk":
                node.slow_until = self.now + 3
            case "cut":
                self.part(node, [each.name for each in nodes])

    def part(self, node, names):
        kind = self.faults.choice(("alone", "deaf", "mute", "split", "link"))
        others = [name for name in names if name != node.name]
        if not others:
            return
        if kind == "split":
            side = set(self.faults.sample(names, len(names) // 2))
            pairs = [(a, b) for a in names for b in names if (a in side) != (b in side)]
        elif kind == "link":
            pairs = [(node.name, self.faults.choice(others))]
        else:
            pairs = [(node.name, other) for other in others] if kind != "deaf" else []
            pairs += [(other, node.name) for other in others] if kind != "mute" else []
        self.cut.update(pairs)
        self.at(self.faults.uniform(0.2, 4), self.mend, pairs)

    def mend(self, pairs):
        if not self.calm:
            self.cut.subtract(pairs)

    def end_reign(self, node):
        if not self.calm:
            if self.faults.random() < 0.5:
                self.crash(node, self.faults.choice((0.05, 1, 2)))
            else:
                self.part(node, list(self.nodes))

    def change(self):
        if self.calm:
            return
        self.at(self.faults.expovariate(1.5), self.change)
        leaders = self.leading()
        if leaders:
            self.step(self.faults.choice(leaders))

    def step(self, node):
        """Ask for a change that the group can do with, whatever became of those before it."""
        if self.calm or node.core is None:
            return
        members = node.core.members
        if self.options.transfers and self.faults.random() < 0.2:
            to = self.faults.choice(members.voters)
            self.give(node, events.Transfer("transfer", to))
            return
        gone = [name for name in members.all if name in self.lost]
        strangers = [each.me for each in self.nodes.values() if each.me not in members.all]
        steps = [("add", name) for name in strangers]
        steps += [("promote", name) for name in members.learners if name not in self.lost]
        steps += [("remove", name) for name in (gone or members.all)]
        if len(members.voters) <= 1 or (gone and len(members.voters) - 1 <= len(gone)):
            steps = [step for step in steps if step[0] != "remove"]
        if steps and (self.options.changes or gone or self.lost):
            self.give(node, events.Change("change", membership.Step(*self.faults.choice(steps))))

    def lose(self):
        """A disk is lost, if all groups that may be in force can do without it."""
        if self.calm:
            return
        self.at(self.faults.expovariate(0.5), self.lose)
        nodes = list(self.nodes.values())
        if any(node.core is None for node in nodes):
            return
        groups = [self.group]
        for node in nodes:
            log = node.core.log
            groups += [entry.members for entry in log.entries if entry.members is not None] + [
                log.snapshot.members
            ]
        if any(name in self.lost for group in groups for name in group.all):
            return
        node = self.faults.choice(nodes)
        if any(len(set(group.voters) - {node.me}) < group.quorum for group in groups if group.voters):
            return
        self.marks["disk lost"] += 1
        old = node.me
        self.crash(node, 0.1)
        self.name(node)
        if node.me != old:
            self.lost.add(old)
        node.begin_disk(records.Writer().frame(records.Saved(me=node.me).records()))

    # --- the whole --------------------------------------------------------------------------

    def run(self):
        self.operate()
        self.harm()
        if self.options.changes or self.options.disks_are_lost or self.options.transfers:
            self.change()
        if self.options.disks_are_lost:
            self.lose()
        for second in range(self.options.chaos_s):
            self.run_until(second + 1.0)
            self.check_logs()
        self.recover()
        self.check_logs()
        self.check_history()
        return self.marks

    def recover(self):
        """Mend what a group needs; then it must work, and be calm."""
        for node in self.nodes.values():
            node.frozen_until = node.slow_until = 0.0
            if node.core is None:
                self.start(node)
        outside = self.mend_most()
        self.calm = True
        self.run_until(self.now + (3.1 if outside else 0.5))  # until all that was under way has come
        deaf = {name: self.nodes[name].core.term for name in outside if self.is_deaf(name)}
        deadline = self.now + PATIENCE_S
        while not self.works(outside):
            if self.now > deadline:
                cores = [node.core for node in self.nodes.values()]
                raise Wrong(f"mended, but it did not work within {PATIENCE_S} s: {cores}")
        required = self.required(outside)
        terms = {node.core.term for node in required}
        leader = next(node for node in required if node.core.role.value == "leader")
        voters = [node for node in required if node.me in leader.core.members.voters and node is not leader]
        can_spare = len(voters) >= leader.core.members.quorum
        if not outside and can_spare and self.faults.random() < 0.7:
            self.marks["link cut"] += 1
            other = self.faults.choice(voters)
            self.cut.update([(leader.name, other.name), (other.name, leader.name)])
        self.run_until(self.now + CALM_S)
        if {node.core.term for node in required} != terms:
            raise Wrong(f"terms {terms} rose in a group that worked: {[n.core for n in self.nodes.values()]}")
        for name, term in deaf.items():
            if self.nodes[name].core.term != term:
                raise Wrong(f"{name} raised term {term} though it heard nobody")

    def is_deaf(self, name):
        return all(self.cut[other, name] for other in self.nodes if other != name)

    def mend_most(self):
        """Choose which links stay cut; return the nodes that the group must do without."""
        self.cut.clear()
        is_settled = all(node.core.log.members_index <= self.last for node in self.nodes.values())
        voters = [self.by_id[me].name for me in self.group.voters if self.by_id[me].me == me]
        kind = self.faults.choice(("all", "majority"))
        if kind == "all" or not is_settled or len(voters) < max(3, len(self.group.voters)):
            return []
        outside = self.faults.sample(voters, len(voters) - self.group.quorum)
        leaders = [node.name for node in self.leading() if node.name in voters]
        if leaders and leaders[0] not in outside:
            outside[0] = leaders[0]
        for name in outside:
            way = self.faults.choice(("deaf", "mute", "alone"))
            for other in self.nodes:
                self.cut[name, other] += way != "deaf"
                self.cut[other, name] += way != "mute"
        self.marks["majority only"] += 1
        return outside

    def required(self, outside):
        """Those who must have all: the members, without those outside and those who are lost."""
        leaders = sorted(self.leading(), key=lambda node: node.core.term)
        names = leaders[-1].core.members.all if leaders else ()
        nodes = [self.by_id[name] for name in names if self.by_id[name].me == name]
        return [node for node in nodes if node.name not in outside]

    def works(self, outside):
        """Try a write; whether it is done, and everybody who must has it."""
        leaders = sorted(self.leading(), key=lambda node: node.core.term)
        tags = [self.invoke(node, "x", True) for node in leaders]
        reads = [self.invoke(node, "x", False) for node in leaders]
        self.run_until(self.now + 0.6)
        finished = {begun for _, _, begun, _, _ in self.completed[-20:]}
        if not any(self.invoked[tag][2] in finished for tag in tags):
            return False
        if not any(self.invoked[tag][2] in finished for tag in reads):
            return False
        required = self.required(outside)
        indices = {node.applied for node in required}
        return len(required) > 0 and indices == {self.last} and len({n.core.term for n in required}) == 1


def run_seed(seed):
    """Run one world. Returns the marks of what happened in it."""
    return FuzzedGroup(seed).run()
