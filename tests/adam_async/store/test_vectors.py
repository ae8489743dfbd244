"""Vectors on the servers: random programs equal NumPy to the bit, whatever fails; bad commands do no harm."""

import asyncio
import math

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from adam_async import sync
from adam_async.errors import StoreError
from adam_async.messages import Command, Commands, DotProduct
from adam_async.model.rules import Adam, Sgd
from adam_async.parameter_server.store_disk import StoreDisk
from adam_async.run.config import Waits
from adam_async.run.store_record import MOST_VECTORS, PARAMETERS
from adam_async.store.store import ParameterStore
from adam_async.store.vectors import Combine, StepCall
from tests.adam_async.store.fleets import fleet
from tests.adam_async.store.servers import faulty_clients, store_servers
from tests.simulation.checkers.vector_programs import SHARD_BYTES, Program, first_values
from tests.simulation.random_streams import RandomStream
from tests.transport.testing import Faults
from transport import Request

WAITS = msgspec.structs.replace(Waits(), answer_s=0.5, call_s=5.0)
FAULTS = Faults(drop=0.02, delay=0.01, cut=0.02, drop_reply=0.02, delay_s=0.005)
OPTIONS = {"rule": Sgd(rate=1.0), "shard_bytes": SHARD_BYTES}
NODES = ("ps-0", "ps-1", "ps-2")
FIRST = {"w": np.arange(12.0).reshape(3, 4), "b": np.ones(2)}


def local(arrays=FIRST, **options):
    return ParameterStore.open("local", arrays, **{"rule": Sgd(rate=1.0), **options})


# --- random programs -------------------------------------------------------------------------


async def test_a_random_program_equals_numpy():
    async with asyncio.timeout(50), local(first_values(), shard_bytes=SHARD_BYTES) as store:
        await Program(RandomStream("1")).run(store, 60)


async def run_over_failing_links(monkeypatch, servers, seed, calls):
    """Run a program over links that fail; return the dot products of each step."""
    networks = faulty_clients(monkeypatch)
    options = {"name": "model", "waits": WAITS, **OPTIONS}
    async with store_servers(servers, waits=WAITS) as cluster:
        async with ParameterStore.open(cluster.address, first_values(), **options) as store:
            networks[-1].faults = FAULTS
            program = Program(RandomStream(seed))
            await program.run(store, calls)
            networks[-1].faults = Faults()
            return program.results


async def test_a_program_over_failing_links_has_the_same_bits_on_one_server_and_on_three(monkeypatch):
    async with asyncio.timeout(120):
        one = await run_over_failing_links(monkeypatch, 1, "2", 25)
        assert one == await run_over_failing_links(monkeypatch, 3, "2", 25)
        assert sum(map(len, one)) > 20


async def test_a_program_over_links_in_shared_memory_equals_numpy():
    async with asyncio.timeout(50), store_servers(2) as cluster:
        options = {"name": "model", "link": "shared", **OPTIONS}
        async with ParameterStore.open(cluster.address, first_values(), **options) as store:
            await Program(RandomStream("5")).run(store, 40)


def check_copies(servers, store):
    """All copies in sync have the same bits of each vector, and keep the same dot products."""
    for home in {home for home, _ in servers.copies()}:
        several = [served for (each, _), served in servers.copies().items() if each == home]
        several = [
            each for each in several if each.copy._core.log.applied == several[0].copy._core.log.applied
        ]
        for number, shard in several[0].bundle.shards.items():
            for other in several[1:]:
                twin = other.bundle.shards[number]
                assert shard.rule_state.keys() == twin.rule_state.keys()
                assert all(
                    array.tobytes() == twin.rule_state[n].tobytes() for n, array in shard.rule_state.items()
                )
                assert shard.dots == twin.dots


async def test_lost_servers_change_nothing(monkeypatch):
    async with asyncio.timeout(100), fleet(monkeypatch, *NODES) as servers:
        async with servers.open(first_values(), copies=3, **OPTIONS) as store:
            program = Program(RandomStream("1"))
            await program.run(store, 20)
            await servers.end("ps-1")
            await program.run(store, 20)
            await servers.start("ps-3")
            await servers.until(
                lambda: all(len(servers.in_sync(home)) == 3 for home in {h for h, _ in servers.copies()}),
                "the new server has not joined",
            )
            await servers.end("ps-0")
            await program.run(store, 20)
            check_copies(servers, store)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_program_goes_on_from_the_disks_of_all_servers(monkeypatch, tmp_path, durable):
    if durable:  # the servers end without a last write, so the disks have the last steps as entries only
        monkeypatch.setattr(StoreDisk, "_flush", lambda disk: asyncio.sleep(0))
    program = Program(RandomStream("3"))
    async with asyncio.timeout(100), fleet(monkeypatch, "ps-0", "ps-1", disks=tmp_path) as servers:
        for _ in range(3):
            async with servers.open(first_values(), durable=durable, **OPTIONS) as store:
                await program.opened(store)
                await program.run(store, 20)
            for node in ("ps-0", "ps-1"):
                await servers.end(node)
            await servers.start("ps-0", "ps-1")


async def test_a_vector_that_is_added_while_the_folder_opens_is_on_the_disk(monkeypatch, tmp_path):
    added, opened, changed = asyncio.Event(), StoreDisk._open, StoreDisk.record_changed

    async def late(disk):
        found = await opened(disk)
        await added.wait()
        return found

    def note(disk, record):
        changed(disk, record)
        added.set()

    async with asyncio.timeout(30):
        with monkeypatch.context() as context:
            context.setattr(StoreDisk, "_open", late)
            context.setattr(StoreDisk, "record_changed", note)
            async with local(name="disk", dir=tmp_path) as store:
                await store.add_vector("mean")
                await store.combine("mean", [(2.0, PARAMETERS)])
        async with ParameterStore.open("local", None, name="disk", dir=tmp_path) as store:
            assert np.array_equal((await store.pull(vector="mean"))["w"], 2 * FIRST["w"])


# --- modes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("consistency", ["asp", "ssp:1", "bsp"])
async def test_a_step_comes_between_the_pushes_before_it_and_behind_it(consistency):
    async with asyncio.timeout(50), local(consistency=consistency, replicas=1) as store:
        await store.add_vector("x")
        await store.push({name: np.ones_like(array) for name, array in FIRST.items()})
        await store.tick()
        assert await store.step([Combine("x", [(2.0, "*")])], [("x", "b")]) == [0.0]
        await store.push({name: np.ones_like(array) for name, array in FIRST.items()})
        await store.tick()
        x = await store.pull(vector="x")
        assert np.array_equal(x["w"], 2 * (FIRST["w"] - 1))
        assert store.clock == (0 if consistency == "asp" else 2)


async def test_a_step_is_charged_with_the_memory_of_its_sums(monkeypatch):
    charged, charge = [], Request.charge

    def note(request, nbytes, then):
        charged.append(nbytes)
        charge(request, nbytes, then)

    monkeypatch.setattr(Request, "charge", note)
    async with asyncio.timeout(20), store_servers(1) as cluster:
        async with ParameterStore.open(cluster.address, first_values(), name="model", **OPTIONS) as store:
            await store.add_vector("x")
            charged.clear()
            await store.step([Combine("x", ((1.0, "*"),)), Combine("*", ()), Combine("x", ())])
            largest = max(shard.nbytes for shard in store._calls.layout.table.shards)
            assert charged == [2 * largest]


async def test_groups_that_a_shard_has_in_part_are_an_error_at_once():
    async with asyncio.timeout(20), local() as store:
        await store.push({"w": FIRST["w"]}, groups=(1, 0, 2))
        with pytest.raises(StoreError, match=r"some of the groups \(1, 1, 3\), and lacks others"):
            await store.push({"w": FIRST["w"]}, groups=(1, 1, 3))


async def test_in_bsp_a_step_behind_a_push_and_a_push_to_a_vector_are_refused():
    async with asyncio.timeout(50), local(consistency="bsp", replicas=1) as store:
        await store.add_vector("x")
        with pytest.raises(StoreError, match="with bsp a push goes to the values"):
            await store.push(FIRST, vector="x")
        await store.push(FIRST)
        with pytest.raises(StoreError, match="was pushed before in this step"):
            await store.combine("x", [])


async def test_steps_and_pushes_of_several_tasks_keep_their_order():
    async with asyncio.timeout(50), local({"w": np.zeros(3)}) as store:
        await store.add_vector("n")
        await store.assign({"w": np.ones(3)})
        steps = [store.step([Combine("n", [(1.0, "n"), (1.0, "w")])], [("n", "n")]) for _ in range(30)]
        found = await asyncio.gather(*steps)
        assert found == [[3.0 * n * n] for n in range(1, 31)]


async def test_the_rule_and_its_state_know_no_vectors():
    async with asyncio.timeout(50), local(rule=Adam(rate=0.1)) as store, local(rule=Adam(rate=0.1)) as plain:
        await store.add_vector("x")
        await store.push(FIRST, vector="x")
        for each in (store, plain):
            await each.push(FIRST)
        mine, other = await store.pull(), await plain.pull()
        assert all(np.array_equal(mine[name], other[name]) for name in FIRST)


def test_scripts_have_vectors_too():
    with sync.ParameterStore.open("local", {"w": np.arange(4.0)}, rule=Sgd(rate=0.1)) as store:
        store.add_vector("mean")
        store.combine("mean", [(1.0, "w")])
        store.ema("mean", of="w", decay=0.5)
        assert store.dot([("mean", "w")]) == [14.0]
        assert store.norm("w") == math.sqrt(14.0)
        assert [*store.vectors] == ["mean"]
        store.delete_vector("mean")
        assert store.vectors == {}


# --- what lasts ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule_state", [True, False])
async def test_a_saved_file_has_the_vectors_that_are_not_temporary(tmp_path, rule_state):
    async with asyncio.timeout(50), local() as store:
        await store.add_vector("mean", like="w")
        await store.add_vector("gone", temporary=True)
        await store.step([Combine("mean", [(0.5, "w")]), Combine("gone", [(1.0, "*")])])
        path = await store.save(tmp_path / "model.safetensors", rule_state=rule_state)
        found = load_file(path)
        assert {*found} == {"w", "b", "vector/mean/w"}
        assert np.array_equal(found["vector/mean/w"], FIRST["w"] / 2)
        async with ParameterStore.open("local", init=path) as again:
            assert np.array_equal((await again.pull())["w"], FIRST["w"])
            assert np.array_equal((await again.pull(vector="mean"))["w"], FIRST["w"] / 2)
            assert [*again.vectors] == ["mean"]


async def test_a_pin_has_the_vectors_that_are_not_temporary(tmp_path):
    async with asyncio.timeout(50), local(name="model", dir=tmp_path) as store:
        await store.add_vector("mean", like="w")
        await store.add_vector("gone", temporary=True)
        await store.combine("mean", [(0.5, "w")])
        await store.pin("best")
        await store.combine("mean", [])
        assert np.array_equal((await store.read_pin("best", vector="mean"))["w"], FIRST["w"] / 2)
        assert np.array_equal((await store.read_pin("best"))["b"], FIRST["b"])
        with pytest.raises(StoreError, match="pin 'best' has no vector 'gone'"):
            await store.read_pin("best", vector="gone")


async def test_another_client_sees_vectors_and_a_deleted_one_refuses_its_commands():
    async with asyncio.timeout(50), local(name="model") as store, local(name="model") as other:
        await store.add_vector("x")
        await store.combine("x", [(1.0, "*")])
        assert np.array_equal((await other.pull(vector="x"))["w"], FIRST["w"])
        stale = other._vectors._operand("x")
        await store.delete_vector("x")
        commands = Commands((Command(0, ((2.0, stale.number),)),), (DotProduct(stale.number, 0),))
        with pytest.raises(StoreError, match="refused the step"):
            await send(other, commands)
        with pytest.raises(StoreError, match="another client has deleted the vector"):
            await other._calls.pull(["w"], None, stale.number)
        assert np.array_equal((await other.pull())["w"], FIRST["w"])


async def send(store, commands):
    """Send commands without the checks of the client."""
    calls = store._calls
    call = StepCall(
        calls=calls,
        done=calls.loop.create_future(),
        messages=(),
        commands=commands,
        shards=calls.layout.pushed_to,
    )
    calls.put(call)
    await call.done
    return call.results()


# --- bad commands ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("commands", "dots", "why"),
    [
        ([Combine("y", [])], [], "no vector 'y'"),
        ([Combine("x", [(1.0, "nothing")])], [], "no vector 'nothing'"),
        ([Combine("x", [(1.0, "short")])], [], "'short' has no values for array 'b'"),
        ([Combine("*", [(1.0, "w")])], [], "'w' has no values for array 'b'"),
        ([Combine("x", [(math.nan, "w")])], [], "a finite number, not nan"),
        ([Combine("x", [("1", "x")])], [], "a finite number, not '1'"),
        ([Combine("x", [(1.0, "x")] * 10_000)], [], "at most 64, not 10000"),
        ([Combine("x", [])] * 64, [], "at most 64, not 65"),
        ([Combine("x", [(1.0, "x")] * 64)] * 63, [], "make several steps"),
        ([], [("x", "x")] * 65, "at most 64, not 65"),
        ([], [("short", "b")], "has no values"),
        ([Combine("x", ["*"])], [], "a term is \\(coefficient, name\\), not '\\*'"),
        ([Combine("x", [(1.0, 3)])], [], "the name of an operand is a text, not 3"),
        (["x"], [], "a command is Combine\\(into, terms\\), not 'x'"),
        ([], ["x"], "a dot product is of \\(name, name\\), not 'x'"),
    ],
)
async def test_a_bad_step_is_refused_and_changes_nothing(commands, dots, why):
    async with asyncio.timeout(50), local() as store:
        await store.add_vector("x")
        await store.add_vector("short", like="w")
        await store.combine("x", [(1.0, "*")])
        with pytest.raises(StoreError, match=why):
            await store.step([Combine("x", [(3.0, "x")]), *commands], dots)
        assert np.array_equal((await store.pull(vector="x"))["w"], FIRST["w"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_a_result_that_is_not_finite_leaves_the_shard_as_it_was(dtype):
    large = float(np.finfo(dtype).max)
    values = {"w": np.array([1.0, large], dtype)}
    async with asyncio.timeout(50), local(values) as store:
        await store.add_vector("x")
        await store.combine("x", [(1.0, "w")])
        for terms in ([(1.0, "x"), (1.0, "w")], [(1e300, "x")], [(2.0, "x"), (-2.0, "x")]):
            with pytest.raises(StoreError, match="not finite in 'w' between flat indices 0 and 2"):
                await store.step([Combine("*", [(0.5, "*")]), Combine("x", terms)])
        assert np.array_equal((await store.pull())["w"], values["w"])
        assert np.array_equal((await store.pull(vector="x"))["w"], values["w"])
        await store.combine("x", [(1.0, "x"), (-1.0, "w")])
        assert not (await store.pull(vector="x"))["w"].any()


async def test_a_dot_product_beyond_float64_is_nan():
    async with asyncio.timeout(50), local({"w": np.array([1e200, 1.0]), "b": np.ones(2)}) as store:
        found = await store.dot([("w", "w"), ("*", "*"), ("b", "b")])
        assert math.isnan(found[0])
        assert math.isnan(found[1])
        assert found[2] == 2.0
        await store.assign({"w": np.array([1.3e154, 1.0])})  # each square is finite, and their sum is not
        assert math.isfinite(await store.norm("w"))
        assert math.isnan(await store.norm(["w", "w"]))


@pytest.mark.parametrize(
    ("name", "like", "why"),
    [
        ("w", None, "a vector or an array 'w'"),
        ("x", None, "a vector or an array 'x'"),
        (PARAMETERS, None, "a vector or an array '\\*'"),
        ("", None, "1 to 64 printable bytes"),
        ("é" * 33, None, "1 to 64 printable bytes"),
        ("a\nb", None, "1 to 64 printable bytes"),
        ("a/b", None, "printable bytes, no slash, not 'a/b'"),
        (3, None, "the name of a vector is a text, not 3"),
        ("y", "nothing", "no array 'nothing' that is pushed to"),
        ("y", ("w", "w"), "names an array twice"),
    ],
)
async def test_a_bad_vector_is_refused(name, like, why):
    async with asyncio.timeout(50), local() as store:
        await store.add_vector("x")
        with pytest.raises(StoreError, match=why):
            await store.add_vector(name, like=like)
        assert [*store.vectors] == ["x"]


async def test_the_decay_of_an_average_is_a_share():
    async with asyncio.timeout(50), local() as store:
        await store.add_vector("x")
        with pytest.raises(StoreError, match=r"decay must be within 0 and 1, not 2\.0"):
            await store.ema("x", decay=2.0)


async def test_a_store_has_at_most_64_vectors():
    async with asyncio.timeout(100), local({"w": np.zeros(2)}) as store:
        for number in range(MOST_VECTORS):
            await store.add_vector(str(number))
        with pytest.raises(StoreError, match="at most 64 vectors"):
            await store.add_vector("64")
        await store.delete_vector("0")
        await store.add_vector("64")
        assert store.vectors["64"].number == 65


async def test_a_reader_neither_steps_nor_adds_vectors():
    async with asyncio.timeout(50), local(name="model") as store:
        await store.add_vector("x")
        async with ParameterStore.open("local", name="model", create="never", reader=True) as reader:
            assert np.array_equal((await reader.pull(vector="x"))["w"], np.zeros((3, 4)))
            for call in (reader.add_vector("y"), reader.delete_vector("x"), reader.combine("x", [])):
                with pytest.raises(StoreError, match="this client is a reader"):
                    await call
