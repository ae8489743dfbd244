"""Simulated TCP: order, back-pressure, cuts, crashes, resets, and connections that are not to be had."""

import asyncio

import pytest

from tests.simulation.scenario import simulate
from tests.simulation.wire import Conditions

PORT = 700


class Talk(asyncio.Protocol):
    """Records the events of a connection; on the listening side, in a list of connections."""

    def __init__(self, made=None):
        self.received, self.lost, self.paused, self.hung_up = bytearray(), None, [], False
        self.is_lost = False
        if made is not None:
            made.append(self)

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received += data

    def eof_received(self):
        self.hung_up = True

    def connection_lost(self, error):
        self.lost, self.is_lost = error, True

    def pause_writing(self):
        self.paused.append(True)

    def resume_writing(self):
        self.paused.append(False)


class Pair:
    """A server and a client, and their connection."""

    def __init__(self, world):
        self.world = world
        self.accepted = []
        self.a, self.b = world.node("a"), world.node("b")
        self.outcome = None

    async def serve(self, node):
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(lambda: Talk(self.accepted), "b", PORT)
        await asyncio.Event().wait()

    async def dial(self, node):
        loop = asyncio.get_running_loop()
        try:
            _, self.client = await loop.create_connection(Talk, "b", PORT)
            self.outcome = "connected"
        except OSError as error:
            self.outcome = error
        await asyncio.Event().wait()

    async def connect(self):
        self.b.start(self.serve)
        await asyncio.sleep(0.1)
        self.a.start(self.dial)
        await asyncio.sleep(1.0)
        return self

    @property
    def accepted_one(self):
        (talk,) = self.accepted
        return talk


def on(node, function, *args):
    """Call something on a node, as its own code would."""
    return node.host.context.copy().run(function, *args)


def pairs(scenario, *, seed=1, conditions=None, **options):
    async def run(world):
        return await scenario(await Pair(world).connect())

    return simulate(run, seed=seed, conditions=conditions, **options)


ROUGH = Conditions(ragged=True, segment_bytes=100, window_bytes=1000, jitter_s=0.01)


@pytest.mark.parametrize("shuffled", [False, True])
def test_bytes_arrive_whole_and_in_order_however_they_are_cut_up(shuffled):
    sent = bytes(range(256)) * 40

    async def scenario(pair):
        for start in range(0, len(sent), 512):
            on(pair.a, pair.client.transport.write, sent[start : start + 512])
        on(pair.a, pair.client.transport.close)
        await asyncio.sleep(60.0)
        talk = pair.accepted_one
        return bytes(talk.received), talk.hung_up, talk.lost, pair.client.lost, talk.is_lost

    for seed in range(5):
        outcome = pairs(scenario, seed=seed, conditions=ROUGH, shuffled=shuffled)
        assert outcome.result == (sent, True, None, None, True)


def test_latency_and_width_take_their_time():
    async def scenario(pair):
        on(pair.a, pair.client.transport.write, b"x" * 100_000)
        await asyncio.sleep(1.15)
        early = len(pair.accepted_one.received)
        await asyncio.sleep(0.1)
        return early, len(pair.accepted_one.received)

    conditions = Conditions(delay_s=0.2, jitter_s=0.0, bytes_per_s=100_000)

    assert pairs(scenario, conditions=conditions).result == (65536, 100_000)


def test_a_writer_is_paused_while_the_other_side_does_not_read_and_goes_on_when_it_does():
    async def scenario(pair):
        on(pair.b, pair.accepted_one.transport.pause_reading)
        on(pair.a, pair.client.transport.write, b"x" * 500_000)
        await asyncio.sleep(10.0)
        unsent = pair.client.transport.get_write_buffer_size()
        before = list(pair.client.paused), len(pair.accepted_one.received)
        on(pair.b, pair.accepted_one.transport.resume_reading)
        await asyncio.sleep(10.0)
        return unsent, before, pair.client.paused, len(pair.accepted_one.received)

    unsent, before, after, received = pairs(scenario, conditions=Conditions(window_bytes=100_000)).result

    assert unsent == 400_000
    assert before == ([True], 0)
    assert after == [True, False]
    assert received == 500_000


def test_a_frozen_machine_receives_as_much_as_its_kernel_has_room_for():
    async def scenario(pair):
        pair.b.freeze()
        on(pair.a, pair.client.transport.write, b"x" * 200_000)
        await asyncio.sleep(10.0)
        unsent = pair.client.transport.get_write_buffer_size()
        pair.b.thaw()
        await asyncio.sleep(10.0)
        return unsent, len(pair.accepted_one.received)

    assert pairs(scenario, conditions=Conditions(window_bytes=100_000)).result == (100_000, 200_000)


@pytest.mark.parametrize("reset", [False, True])
def test_data_sent_into_a_cut_arrives_after_it_or_is_lost_with_the_connection(reset):
    async def scenario(pair):
        pair.world.network.cut("a", "b", both=False)
        on(pair.a, pair.client.transport.write, b"to b")
        on(pair.b, pair.accepted_one.transport.write, b"to a")
        await asyncio.sleep(10.0)
        during = bytes(pair.accepted_one.received), bytes(pair.client.received)
        pair.world.network.heal("a", "b", reset=reset)
        await asyncio.sleep(10.0)
        return during, bytes(pair.accepted_one.received), type(pair.client.lost)

    during, after, lost = pairs(scenario).result

    assert during == (b"", b"to a")
    assert (after, lost) == ((b"", ConnectionResetError) if reset else (b"to b", type(None)))


def test_a_crash_is_silent_until_the_machine_is_back_and_hears_of_its_old_connection():
    async def scenario(pair):
        pair.b.crash()
        on(pair.a, pair.client.transport.write, b"anybody there?")
        await asyncio.sleep(100.0)
        silent = not pair.client.is_lost
        pair.b.restart()
        await asyncio.sleep(30.0)
        return silent, type(pair.client.lost)

    assert pairs(scenario).result == (True, ConnectionResetError)


def test_the_kernel_of_a_killed_program_closes_its_connections_and_refuses_new_ones():
    async def scenario(pair):
        pair.b.kill()
        await asyncio.sleep(1.0)
        hung_up = pair.client.hung_up
        pair.a.crash()
        pair.a.restart()
        await asyncio.sleep(1.0)
        return hung_up, type(pair.outcome)

    assert pairs(scenario).result == (True, ConnectionRefusedError)


def test_hanging_up_on_unread_bytes_resets_the_connection():
    async def scenario(pair):
        on(pair.b, pair.accepted_one.transport.pause_reading)
        on(pair.a, pair.client.transport.write, b"unread")
        await asyncio.sleep(1.0)
        on(pair.b, pair.accepted_one.transport.close)
        await asyncio.sleep(1.0)
        return type(pair.client.lost)

    assert pairs(scenario).result is ConnectionResetError


def test_a_connection_can_be_reset_after_so_many_bytes():
    async def scenario(pair):
        on(pair.a, pair.client.transport.write, b"x" * 999)
        await asyncio.sleep(1.0)
        whole = pair.client.is_lost
        on(pair.a, pair.client.transport.write, b"xx")
        await asyncio.sleep(1.0)
        return whole, type(pair.client.lost), type(pair.accepted_one.lost)

    conditions = Conditions(reset_after_bytes=1000)
    assert pairs(scenario, conditions=conditions).result == (
        False,
        ConnectionResetError,
        ConnectionResetError,
    )


def test_a_connection_may_be_refused_or_seen_twice():
    async def outcome(pair):
        return pair.outcome, len(pair.accepted)

    refused, accepted = pairs(outcome, conditions=Conditions(refuse=1.0)).result
    assert isinstance(refused, ConnectionRefusedError)
    assert accepted == 0
    assert pairs(outcome, conditions=Conditions(duplicate=1.0)).result == ("connected", 2)


def test_a_connection_attempt_to_a_machine_without_power_waits_or_times_out():
    async def scenario(world):
        pair = Pair(world)
        pair.a.start(pair.dial)
        await asyncio.sleep(100.0)
        waiting = pair.outcome
        pair.b.start(pair.serve)
        await asyncio.sleep(2.0)
        connected = pair.outcome
        pair.b.crash()
        pair.a.crash()
        pair.a.restart()
        await asyncio.sleep(130.0)
        return waiting, connected, type(pair.outcome)

    assert simulate(scenario, seed=1).result == (None, "connected", TimeoutError)


def test_an_attempt_that_is_cancelled_leaves_no_connection():
    async def scenario(world):
        pair = Pair(world)
        pair.b.start(pair.serve)

        async def impatient(node):
            for wait_s in (0.0001, 0.0012, 0.0018, 0.0022, 0.003):
                task = asyncio.get_running_loop().create_task(
                    asyncio.get_running_loop().create_connection(Talk, "b", PORT)
                )
                await asyncio.sleep(wait_s)
                task.cancel()
                try:
                    transport, _ = await task
                    transport.abort()
                except asyncio.CancelledError:
                    pass

        world.node("a").start(impatient)
        await asyncio.sleep(5.0)
        return [talk.is_lost for talk in pair.accepted], list(world.network._ends)

    for seed in range(20):
        lost, ends = simulate(scenario, seed=seed).result
        assert all(lost)
        assert ends == []


def test_names_and_ports_are_checked():
    async def scenario(world):
        async def program(node):
            loop = asyncio.get_running_loop()
            await loop.create_server(Talk, "127.0.0.1", PORT)
            with pytest.raises(OSError, match="taken"):
                await loop.create_server(Talk, "a", PORT)
            with pytest.raises(OSError, match="cannot listen as b"):
                await loop.create_server(Talk, "b", PORT)
            with pytest.raises(OSError, match="no host is called nowhere"):
                await loop.create_connection(Talk, "nowhere", PORT)
            transport, _ = await loop.create_connection(Talk, "127.0.0.1", PORT)
            transport.close()

        async def stranger(node):
            with pytest.raises(ConnectionRefusedError):
                await asyncio.get_running_loop().create_connection(Talk, "a", PORT)

        world.node("a").start(program)
        world.node("b")
        await asyncio.sleep(1.0)
        world.node("c").start(stranger)
        await asyncio.sleep(1.0)

    simulate(scenario, seed=1)
