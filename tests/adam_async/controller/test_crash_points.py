"""A controller's folder after a crash at any point: nothing promised is lost, and damage is refused."""

import asyncio
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from adam_async.controller.consensus import DamagedLog, Saved, recover
from adam_async.controller.consensus_node import ConsensusNode, ConsensusSetup
from adam_async.controller.log_file import NAME, LogFile
from adam_async.controller.replicated_state import Open, ReplicatedState, Set
from adam_async.messages import role_table
from adam_async.persistence.frames import HEAD_BYTES
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from tests.adam_async.controller.crash_points import Account, Witnessed
from tests.adam_async.crash_images import TracedDiskModel, crashed, disk_model_of
from tests.simulation.loop import SimulationFailed
from tests.simulation.scenario import simulate
from transport import Identity, TcpNetwork

FOLDER = Path("/home/controller")
FILE = FOLDER / NAME
OPERATIONS = 200
CLIENTS = 3
SNAPSHOT_ENTRIES = 25
KILLS = ("make_folder", "", "rename", "", "rename")
"""The process is killed so often, and goes on in another life: when something has a new name that is not
synced, or at any time."""


NOTHING = Saved(me="")


def on_disk(disk_model):
    try:
        return bytes(disk_model.file(FILE).data)
    except FileNotFoundError:
        return b""


class Alone:
    """A group of one on a machine."""

    def __init__(self, node, file):
        self.replicated_state = ReplicatedState()
        self._answers = {}
        self._led = asyncio.Event()
        identity = Identity(role="controller", node="controller", incarnation=node.incarnation)
        network = TcpNetwork(token=b"a token of tests", entropy=node.entropy, rules=role_table())
        self.group = ConsensusNode(
            ConsensusSetup(entropy=node.entropy, file=file, snapshot_entries=SNAPSHOT_ENTRIES),
            Endpoint(network, identity, Traffic("controller")),
            state=self.replicated_state,
            on_answer=lambda tag, answer: self._answers.pop(tag).set_result(answer),
            on_led=lambda: self._led.set() if self.group.leads else None,
            on_applied=lambda: None,
        )
        self.group.set_addresses({"controller": "tcp://controller:1"})

    async def leads(self):
        await self._led.wait()

    async def ask(self, ask):
        tag = object()
        answer = self._answers[tag] = asyncio.get_running_loop().create_future()
        ask(tag)
        answer = await answer
        assert not answer.refused
        assert not answer.unknown
        return answer.outcome

    async def read(self):
        await self.ask(self.group.read)
        return self.replicated_state.snapshot()


def value(dice, number):
    text = "x" * dice.randrange(1500)
    return json.dumps(
        {"role": "ps", "address": "local://x", "incarnation": 5, "info": {"n": number, "text": text}}
    ).encode()


@pytest.fixture(scope="module")
def trace():
    """200 operations of three clients, and kills in between: images of the drive, the account, the file's
    writer, and the state after each entry of the log."""
    account = Account()
    disk_model = TracedDiskModel(account.note)
    left = list(range(OPERATIONS))

    async def client(alone, dice):
        session = (await alone.ask(lambda tag: alone.group.propose(tag, Open()))).at
        expected, number, key = 0, 0, f"nodes/w{session}"
        while left:
            number += 1
            left.pop()
            command = Set(session, number, key, expected, value(dice, number))
            outcome = await alone.ask(lambda tag, command=command: alone.group.propose(tag, command))
            assert outcome.done
            expected = outcome.at
            account.answered = alone.group.statistics().commit
            await asyncio.sleep(dice.uniform(0.0, 0.01))

    async def program(node):
        alone = Alone(node, Witnessed(account, node.open_disk(), FOLDER))
        dice = random.Random(f"{node.incarnation}")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(alone.group.run())
            await alone.leads()
            async with asyncio.TaskGroup() as clients:
                for _ in range(CLIENTS):
                    clients.create_task(client(alone, dice))
            running.cancel()

    async def scenario(world):
        node = world.node("controller")
        node.disk_model = disk_model
        disk_model.make_folder(FOLDER.parent)
        disk_model.find(Path("/")).sync()
        node.start(program)
        for moment in KILLS:
            if moment:
                await disk_model.until(moment)
            else:
                await asyncio.sleep(world.dice.between(0.05, 0.1))
            node.kill()
            account.found(recover(on_disk(disk_model), origin=str(FILE))[0] or NOTHING)
            node.restart()
        await node.task
        disk_model.look()

    simulate(scenario, seed=3)
    return disk_model.images, account


def state_after(saved):
    """The state after all that is in a log."""
    replicated_state = ReplicatedState()
    if saved.snapshot.index:
        replicated_state.restore(saved.snapshot.state)
    for entry in saved.entries:
        if entry.command is not None:
            replicated_state.apply(entry.index, entry.command)
    return replicated_state.snapshot()


def last_index(saved):
    return saved.entries[-1].index if saved.entries else saved.snapshot.index


def goes_on(disk_model):
    """Start a controller on a drive. Returns its state once it leads, and what is in its file then."""

    async def program(node):
        node.disk_model = disk_model
        alone = Alone(node, LogFile(node.open_disk(), FOLDER))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(alone.group.run())
            await alone.leads()
            state = await alone.read()
            running.cancel()
        return state

    async def scenario(world):
        node = world.node("controller")
        node.start(program)
        return await node.task

    return simulate(scenario, seed=1).result


def test_the_trace_has_all_that_matters(trace):
    images, account = trace
    assert len(images) > 2 * OPERATIONS
    assert account.answered > OPERATIONS
    assert account.states[-1].term == len(KILLS) + 1
    assert account.states[-1].snapshot.index > OPERATIONS - SNAPSHOT_ENTRIES


@pytest.mark.thorough
def test_after_a_crash_at_any_point_all_that_was_promised_is_there_and_a_controller_goes_on_with_it(trace):
    """A controller that is started on what is left has the state after some entry of the log, no earlier than
    what was durable and no later than what was written."""
    images, account = trace
    dice = random.Random(1)
    begun = {}
    crashes = cut_off = 0
    for image in images:
        allowed = account.states[image.noted.promised : image.noted.written + 1]
        for disk_model in crashed(image, dice):
            data = on_disk(disk_model)
            saved, end = recover(data, origin=str(FILE))
            crashes += 1
            cut_off += end < len(data)
            assert (saved or NOTHING) in allowed, image
            if image.noted.answered:
                assert last_index(saved) >= image.noted.answered, image
            if data not in begun:
                begun[data] = goes_on(disk_model)
                if saved is not None and last_index(saved):
                    assert begun[data] == state_after(saved), image

    assert crashes > 3 * len(images)
    assert cut_off > OPERATIONS
    assert len(begun) > 3 * OPERATIONS


def flipped(data, at, bit):
    damaged = bytearray(data)
    damaged[at] ^= 1 << bit
    return bytes(damaged)


def durable_of(data, begin):
    """Return the position up to which a frame states that its file is on disk."""
    return int.from_bytes(data[begin + 8 : begin + 16], "little")


def frames(data):
    """Where the frames of a file begin, and where the last ends."""
    begins = [0]
    while begins[-1] < len(data):
        size = int.from_bytes(data[begins[-1] + 4 : begins[-1] + 8], "little")
        begins.append(begins[-1] + HEAD_BYTES + size)
    return begins


def test_a_flipped_bit_in_any_record_but_the_last_is_refused_and_never_skipped(trace):
    images, _ = trace
    dice = random.Random(2)
    files = [on_disk(disk_model_of(image.root)) for image in images if not image.unsynced]
    longest = [one for one, other in pairwise(files) if len(other) < len(one)] + files[-1:]
    assert len(longest) >= OPERATIONS // SNAPSHOT_ENTRIES
    for data in longest:
        begins = frames(data)
        promised = [(begin, end) for begin, end in pairwise(begins) if end <= durable_of(data, begins[-2])]
        assert len(promised) >= len(begins) - 1 - CLIENTS
        for begin, end in promised:
            spots = [begin, begin + 4, begin + 8, begin + 16, begin + 20, begin + HEAD_BYTES, end - 1]
            for at in [*spots, dice.randrange(begin, end)]:
                with pytest.raises(DamagedLog, match=f"damaged at byte {begin}"):
                    recover(flipped(data, at, dice.randrange(8)), origin=str(FILE))


def test_a_controller_does_not_start_on_a_damaged_file_and_leaves_it_as_it_is(trace):
    images, _ = trace
    disk_model = disk_model_of(images[-1].root)
    file = disk_model.file(FILE)
    file.data[HEAD_BYTES] ^= 1
    damaged = bytes(file.data)
    with pytest.raises(SimulationFailed, match=r"DamagedLog.*damaged at byte 0"):
        goes_on(disk_model)
    assert file.data == damaged
