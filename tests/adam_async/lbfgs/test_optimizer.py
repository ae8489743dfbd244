"""L-BFGS on real servers: the written-out iterates, the same bits after any loss, no vectors on links."""

import asyncio
import threading
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import numpy as np
import pytest

from adam_async import LBFGS, sync
from adam_async.errors import ConfigError, DeadlineExceeded, StoreError
from adam_async.lbfgs import dealer
from adam_async.parameter_server import members_watch
from adam_async.run.config import Waits
from adam_async.runtime.channel import Channel
from adam_async.store.store import ParameterStore
from tests.adam_async.lbfgs import problems
from tests.adam_async.lbfgs.written_out import minimise
from tests.adam_async.store.fleets import fleet
from tests.adam_async.store.servers import servers
from transport import Request

SHARD_BYTES = 16 << 10
PROBLEMS = {"logistic": problems.wide_logistic, "network": problems.wide_network}


def collect(store, points, names):
    async def take(iteration):
        values = await store.pull()
        points.append(np.concatenate([values[name].ravel() for name in names]))

    return take


async def run(where, problem, *, workers=1, iterations=50, tolerance=1e-7, name="lbfgs", **options):
    """Minimise; return the points after each step, and the result."""
    arrays, function, batches = problem()
    points = []
    async with ParameterStore.open(where, arrays, name=name, shard_bytes=SHARD_BYTES) as store:
        optimizer = LBFGS(store, function, batches, workers=workers, tolerance=tolerance, **options)
        result = await optimizer.minimise(iterations, collect(store, points, arrays))
    return points, result


def check_iterates(points, problem):
    """Compare points with the written-out method."""
    expected = minimise(*problems.whole(*problem()))
    assert len(points) == len(expected)
    assert max(np.abs(a - b).max() for a, b in zip(points, expected, strict=True)) < 1e-9


async def test_iterates_are_those_of_the_written_out_method():
    points, result = await run("local", problems.logistic)

    check_iterates(points, problems.logistic)
    assert "the gradient's norm is" in result.reason


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
async def test_any_number_of_servers_and_workers_gives_the_same_bits(problem):
    one, _ = await run("local", PROBLEMS[problem])
    four, _ = await run("local", PROBLEMS[problem], workers=4, name="four")
    async with servers(3) as address:
        three, result = await run(address, PROBLEMS[problem], workers=4)

    check_iterates(one, PROBLEMS[problem])
    assert np.array_equal(one, four)
    assert np.array_equal(one, three)
    assert "the gradient's norm is" in result.reason or result.number == 50


class Stopped(Exception):
    """The end of a worker or a coordinator that a test chooses."""


@asynccontextmanager
async def assistant(open_store, function, batches):
    """Run a worker of another program; yields its task."""

    async def work():
        async with open_store() as store:
            await LBFGS.assist(store, function, batches)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(work())
        try:
            yield task
        finally:
            task.cancel()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("network", "problem"), [("tcp", "logistic"), ("tcp", "network"), ("local", "network")]
)
async def test_losses_of_a_worker_and_a_server_change_no_bit(monkeypatch, network, problem):
    monkeypatch.setattr(members_watch, "INVITE_S", 0.3)
    problem = PROBLEMS[problem]
    expected, _ = await run("local", problem)
    arrays, function, batches = problem()
    options = {"copies": 3, "shard_bytes": SHARD_BYTES}
    points = []
    async with (
        fleet(monkeypatch, "ps-0", "ps-1", "ps-2", network=network) as running,
        AsyncExitStack() as stack,
    ):

        def open_store():
            return running.open(arrays, **options)

        store = await stack.enter_async_context(open_store())
        helper = await stack.enter_async_context(assistant(open_store, function, batches))
        other = await stack.enter_async_context(assistant(open_store, function, batches))
        take = collect(store, points, arrays)

        async def lose(iteration):
            await take(iteration)
            if iteration.number == 10:
                helper.cancel()
            if iteration.number == 20:
                await running.end("ps-1")

        result = await LBFGS(store, function, batches, workers=0, tolerance=1e-7).minimise(50, lose)
        assert not other.cancelled()

    assert "the gradient's norm is" in result.reason or result.number == 50
    assert result.number > 20
    assert np.array_equal(points, expected)
    check_iterates(points, problem)


async def test_a_worker_that_is_lost_in_its_turn_is_replaced(monkeypatch):
    problem = problems.logistic
    expected, _ = await run("local", problem, iterations=6)
    arrays, function, batches = problem()
    points, pushes = [], Counter()
    async with servers(1) as address, AsyncExitStack() as stack:

        def open_store():
            return ParameterStore.open(address, arrays, name="lbfgs", shard_bytes=SHARD_BYTES)

        store = await stack.enter_async_context(open_store())
        push = ParameterStore.push

        async def push_once(self, *args, **options):
            outcome = await push(self, *args, **options)
            pushes[self] += 1
            if self is not store and pushes[self] == 5:
                helper.cancel()  # the servers have the piece, and the coordinator does not know it
                await asyncio.sleep(0)
            return outcome

        monkeypatch.setattr(ParameterStore, "push", push_once)
        helper = await stack.enter_async_context(assistant(open_store, function, batches))
        await LBFGS(store, function, batches, workers=1).minimise(6, collect(store, points, arrays))

    assert np.array_equal(points, expected)


@pytest.mark.parametrize("stop_at", [1, 4, 9, 12])
async def test_a_coordinator_goes_on_where_a_lost_one_was(stop_at):
    problem = problems.logistic
    expected, _ = await run("local", problem, iterations=12)
    arrays, function, batches = problem()
    points, calls = [], Counter()

    def failing(values, batch):
        calls["all"] += 1
        if calls["all"] == stop_at * len(batches) - 3:
            raise Stopped
        return function(values, batch)

    async with servers(1) as address:
        options = {"name": "lbfgs", "shard_bytes": SHARD_BYTES}
        async with ParameterStore.open(address, arrays, **options) as store:
            with pytest.raises(Stopped):
                await LBFGS(store, failing, batches, tolerance=1e-7).minimise(
                    12, collect(store, points, arrays)
                )
        async with ParameterStore.open(address, name="lbfgs") as store:
            again = LBFGS(store, function, batches, tolerance=1e-7)
            result = await again.minimise(12 - len(points), collect(store, points, arrays))

    assert result.number == 12
    assert np.array_equal(points, expected)


@pytest.mark.parametrize("is_made", [True, False])
@pytest.mark.parametrize(("stop_at", "phase"), [(1, "first"), (9, "search"), (10, "pair"), (11, "turn")])
async def test_a_coordinator_goes_on_from_each_phase(monkeypatch, stop_at, phase, is_made):
    expected, _ = await run("local", problems.logistic, iterations=5)
    arrays, function, batches = problems.logistic()
    points, calls, make = [], Counter(), ParameterStore.step

    async def lost(store, *args, **named):
        calls["all"] += 1
        if calls["all"] != stop_at:
            return await make(store, *args, **named)
        if is_made:
            await make(store, *args, **named)
        raise Stopped

    async with ParameterStore.open("local", arrays, name="lbfgs", shard_bytes=SHARD_BYTES) as store:
        take = collect(store, points, arrays)
        first = LBFGS(store, function, batches, tolerance=1e-7)
        with monkeypatch.context() as context, pytest.raises(Stopped):
            context.setattr(ParameterStore, "step", lost)
            await first.minimise(5, take)
        assert first._now.minimiser.phase == phase
        await LBFGS(store, function, batches, tolerance=1e-7).minimise(5 - len(points), take)

    assert np.array_equal(points, expected)


def steep(values, batch):
    """Return a value whose search without tolerance ends at a gradient of rounding errors."""
    x = values["x"]
    return float((np.cosh(x) + 0.3 * x).sum()), {"x": np.sinh(x) + 0.3}


@pytest.mark.parametrize("deleted", [1, 2, 5])
async def test_a_coordinator_that_is_lost_at_the_end_leaves_the_values_as_they_are(monkeypatch, deleted):
    delete, calls = ParameterStore.delete_vector, Counter()

    async def lost(store, name):
        calls[store.name] += 1
        if store.name == "end" and calls["end"] == deleted:
            raise Stopped
        await delete(store, name)

    async with ParameterStore.open("local", {"x": np.linspace(1, 2, 7)}, name="end") as store:
        with monkeypatch.context() as context, pytest.raises(Stopped):
            context.setattr(ParameterStore, "delete_vector", lost)
            await LBFGS(store, steep, [None], tolerance=0).minimise()
        before = await store.pull()
        assert np.allclose(np.sinh(before["x"]), -0.3)
        await LBFGS(store, steep, [None], tolerance=0).minimise(0)
        assert np.array_equal((await store.pull())["x"], before["x"])


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_minimisation_whose_vector_was_deleted_begins_anew_only(monkeypatch, is_lost):
    arrays, function, batches = problems.logistic()

    async with ParameterStore.open("local", arrays, name="gone") as store:
        optimizer, lost, make = LBFGS(store, function, batches), Counter(), ParameterStore.step

        async def stops(store, *args, **named):
            lost["steps"] += 1
            if lost["steps"] == 5:
                raise Stopped
            return await make(store, *args, **named)

        await optimizer.minimise(2)
        if is_lost:
            with monkeypatch.context() as context, pytest.raises(Stopped):
                context.setattr(ParameterStore, "step", stops)
                await LBFGS(store, function, batches).minimise(2)
        await store.delete_vector("lbfgs.x0")
        with pytest.raises(StoreError, match=r"without vector 'lbfgs.x0', which was deleted: begin anew"):
            await optimizer.minimise(2)
        assert (await optimizer.minimise(2, anew=True)).number == 2


async def test_late_pushes_of_a_coordinator_whose_record_is_forgotten_count_nothing():
    arrays, function, batches = problems.logistic()
    expected, _ = await run("local", problems.logistic, iterations=4)
    loop, points, late = asyncio.get_running_loop(), [], Counter()

    def failing(values, batch):
        raise Stopped

    async with asyncio.timeout(30), ParameterStore.open("local", arrays, name="late") as store:
        lost = LBFGS(store, failing, batches)
        with pytest.raises(Stopped):
            await lost.minimise(4)
        await lost.forget()
        named = (lost._now.evaluation, len(batches) - 1, len(batches))

        def with_late_push(values, batch):
            late["pieces"] += 1
            if batch[0] is batches[5][0] and not late["pushes"]:
                late["pushes"] += 1
                pushed = store.push(arrays | {"b": np.ones(3)}, vector="lbfgs.g", groups=named)
                asyncio.run_coroutine_threadsafe(pushed, loop).result()
            return function(values, batch)

        await LBFGS(store, with_late_push, batches).minimise(4, collect(store, points, arrays))

    assert late["pushes"] == 1
    assert np.array_equal(points, expected)


@pytest.mark.parametrize("durable", [True, False])
async def test_after_the_loss_of_all_servers_only_a_durable_store_goes_on(tmp_path, durable):
    arrays, function, batches = problems.logistic()
    expected, _ = await run("local", problems.logistic, iterations=8)
    points, calls = [], Counter()

    def failing(values, batch):
        calls["all"] += 1
        if calls["all"] == 5 * len(batches):
            raise Stopped
        return function(values, batch)

    disk = {"name": "disk", "dir": tmp_path}
    with pytest.raises(Stopped):
        async with ParameterStore.open("local", arrays, durable=durable, **disk) as store:
            await LBFGS(store, failing, batches).minimise(8, collect(store, points, arrays))
    async with ParameterStore.open("local", None, **disk) as store:
        again = LBFGS(store, function, batches)
        result = await again.minimise(8 - len(points), collect(store, points, arrays))

    assert np.array_equal(points, expected) == durable
    assert (result.number == 8) == durable


async def test_the_end_comes_before_a_worker_has_the_values_for_a_backup(monkeypatch):
    arrays, function, batches = problems.logistic(batches=1)
    pull, save, end, pulls = ParameterStore.pull, LBFGS._save, asyncio.Event(), Counter()

    async def late(client):
        values = await pull(client)
        pulls[client.name] += 1
        if pulls["lbfgs"] == 2:
            await end.wait()
        return values

    async def saved(optimizer):
        await save(optimizer)
        if not optimizer._now.address:
            end.set()

    monkeypatch.setattr(ParameterStore, "pull", late)
    monkeypatch.setattr(LBFGS, "_save", saved)
    async with ParameterStore.open("local", arrays, name="lbfgs") as store:
        result = await LBFGS(store, function, batches, workers=2).minimise(0)

    assert result.evaluations == 1
    assert pulls["lbfgs"] == 2


async def test_a_trial_whose_gradient_is_not_finite_is_too_far():
    far = []

    def barrier(values, batch):
        x = float(values["x"][0])
        if x > 0:
            return 10 * (x - np.log(x)), {"x": np.array([10 * (1 - 1 / x)])}
        far.append(x)
        return np.nan, {"x": np.array([np.nan])}

    async with ParameterStore.open("local", {"x": np.full(1, 5.0)}, name="barrier") as store:
        result = await LBFGS(store, barrier, [None]).minimise(20)
        x = (await store.pull())["x"][0]

    assert far
    assert result.reason
    assert abs(x - 1) < 1e-4


async def test_trials_and_directions_beyond_the_numbers_of_the_vectors_are_too_far():
    def falling(values, batch):
        x = 1 + float(values["x"][0])
        return -1e35 * x**0.2, {"x": np.array([-0.2e35 * x**-0.8])}

    async with ParameterStore.open("local", {"x": np.zeros(1, np.float32)}, name="falling") as store:
        result = await LBFGS(store, falling, [None], tolerance=0).minimise(200)
        x = (await store.pull())["x"][0]

    assert "no step" in result.reason
    assert 3e38 < x < np.inf


async def test_the_vectors_are_deleted_at_the_end_and_stay_before_it():
    arrays, function, batches = problems.logistic()
    async with ParameterStore.open("local", arrays, name="vectors") as store:
        optimizer = LBFGS(store, function, batches, history=2)
        await optimizer.minimise(3)
        assert len(store.vectors) == 8
        result = await optimizer.minimise(200)
        assert store.vectors == {}
        assert await optimizer.minimise(5) == result

    assert "the gradient's norm is" in result.reason


async def test_a_second_call_goes_on_and_another_object_begins_anew():
    arrays, function, batches = problems.logistic()
    expected, _ = await run("local", problems.logistic, iterations=8)
    points = []
    async with ParameterStore.open("local", arrays, name="twice") as store:
        optimizer = LBFGS(store, function, batches)
        first = await optimizer.minimise(3, collect(store, points, arrays))
        second = await optimizer.minimise(5, collect(store, points, arrays))
        other = await LBFGS(store, function, batches).minimise(1)

    assert (first.number, second.number, other.number) == (3, 8, 1)
    assert np.array_equal(points, expected)
    assert other.value < second.value


async def test_a_call_after_one_of_another_object_begins_anew():
    arrays, function, batches = problems.logistic()
    async with ParameterStore.open("local", arrays, name="turns") as store:
        first, other = LBFGS(store, function, batches), LBFGS(store, function, batches)
        await first.minimise(3)
        before = await other.minimise(3)
        result = await first.minimise(2)

    assert result.number == 2
    assert result.value < before.value


@pytest.mark.parametrize("known", [1, 2, 5, (1 << 32) - 100])
async def test_a_store_whose_shards_know_groups_of_any_epoch_is_minimised(known):
    arrays, function, batches = problems.logistic()
    expected, _ = await run("local", problems.logistic, iterations=4)
    points = []
    async with ParameterStore.open("local", arrays, name="used", shard_bytes=SHARD_BYTES) as store:
        for epoch in range(max(known - 3, 1), known + 1):
            await store.push(arrays, groups=(epoch, 0, 1000))
        await store.push({"b": arrays["b"]}, groups=(known + 1, 0, 1000))
        await LBFGS(store, function, batches).minimise(4, collect(store, points, arrays))

    assert np.array_equal(points, expected)


async def test_a_store_without_a_number_for_an_evaluation_is_refused():
    arrays, function, batches = problems.logistic()
    async with ParameterStore.open("local", arrays, name="full") as store:
        await store.push(arrays, groups=((1 << 32) - 1, 0, 1))
        with pytest.raises(StoreError, match="groups of epoch 4294967295, and no evaluation"):
            await LBFGS(store, function, batches).minimise(4)


async def test_groups_of_another_program_in_the_midst_are_named():
    arrays, function, batches = problems.logistic()
    loop = asyncio.get_running_loop()
    async with ParameterStore.open("local", arrays, name="mixed") as store:

        def mixed(values, batch):
            pushed = store.push(arrays, groups=(90, 0, 1))
            asyncio.run_coroutine_threadsafe(pushed, loop).result()
            return function(values, batch)

        with pytest.raises(StoreError, match="groups of epoch 90 after evaluation 1"):
            await LBFGS(store, mixed, batches).minimise(4)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_store_is_minimised_again_after_its_record_is_forgotten_and_from_its_disk(tmp_path, durable):
    arrays, function, batches = problems.logistic()
    expected, _ = await run("local", problems.logistic, iterations=6)
    points, disk = [], {"name": "disk", "dir": tmp_path}
    async with ParameterStore.open("local", arrays, durable=durable, **disk) as store:
        for _ in range(2):
            optimizer = LBFGS(store, function, batches)
            await optimizer.minimise(6)
            await optimizer.forget()
            await store.assign(arrays)
    async with ParameterStore.open("local", None, **disk) as store:
        await LBFGS(store, function, batches).minimise(6, collect(store, points, arrays))

    assert np.array_equal(points, expected)


# --- coordinators --------------------------------------------------------------------------------


async def test_a_second_coordinator_is_refused_by_the_name_of_the_first(caplog):
    arrays, function, batches = problems.logistic()
    options = {"name": "lbfgs", "waits": Waits(patience_s=0.3)}
    async with servers(1) as address, asyncio.timeout(30), AsyncExitStack() as stack:
        store, other = [
            await stack.enter_async_context(ParameterStore.open(address, arrays, **options)) for _ in range(2)
        ]
        first = store.link.endpoint.identity.node

        async def second(iteration):
            if iteration.number == 2:
                for each in (other, store):
                    with pytest.raises(StoreError, match=rf"another L-BFGS minimises .*\({first}\)"):
                        await LBFGS(each, function, batches).minimise()
                    assert f"another L-BFGS on store 'lbfgs' to end ({first})" in caplog.text
                    caplog.clear()

        assert (await LBFGS(store, function, batches).minimise(4, second)).number == 4
        assert (await LBFGS(other, function, batches).minimise(1)).number == 1
        async with ParameterStore.open(address, name="lbfgs.lbfgs") as records:
            assert records.vectors == {}


async def test_a_coordinator_whose_vector_another_one_deleted_is_told_so(monkeypatch):
    arrays, function, batches = problems.logistic()
    add = ParameterStore.add_vector

    async def lost(store, name, **options):
        await add(store, name, **options)
        if store.name == "lbfgs.lbfgs":
            await store.delete_vector(name)

    monkeypatch.setattr(ParameterStore, "add_vector", lost)
    async with ParameterStore.open("local", arrays, name="lbfgs") as store:
        with pytest.raises(StoreError, match="another L-BFGS took the place of this one"):
            await LBFGS(store, function, batches).minimise(1)


async def test_a_call_that_is_cancelled_while_its_vector_is_added_does_not_refuse_the_next(monkeypatch):
    arrays, function, batches = problems.logistic()
    add, added = ParameterStore.add_vector, asyncio.Event()

    async def never_returns(store, name, **options):
        await add(store, name, **options)
        added.set()
        await asyncio.Event().wait()

    async def not_yet_there(store, name):
        raise StoreError(f"the map of this client shows no vector {name!r} yet")

    options = {"name": "lbfgs", "waits": Waits(patience_s=1.0)}
    async with asyncio.timeout(30), ParameterStore.open("local", arrays, **options) as store:
        with monkeypatch.context() as context:
            context.setattr(ParameterStore, "add_vector", never_returns)
            context.setattr(ParameterStore, "delete_vector", not_yet_there)
            call = asyncio.ensure_future(LBFGS(store, function, batches).minimise(1))
            await added.wait()
            call.cancel()
            await asyncio.wait([call])
        assert (await LBFGS(store, function, batches).minimise(1)).number == 1


async def test_a_cancelled_coordinator_leads_until_its_last_step_is_answered(monkeypatch):
    arrays, function, batches = problems.logistic()
    charge, held, steps = Request.charge, [], Counter()
    comes = asyncio.Event()

    def hold(request, nbytes, then):
        steps[request.message.type] += 1  # of pushes only those with commands are charged
        if steps["Push"] != 4 or held:
            charge(request, nbytes, then)
            return
        held.append((request, nbytes, then))
        comes.set()

    async with servers(1) as address, asyncio.timeout(30), AsyncExitStack() as stack:
        store, other = [
            await stack.enter_async_context(ParameterStore.open(address, arrays, name="lbfgs"))
            for _ in range(2)
        ]
        monkeypatch.setattr(Request, "charge", hold)
        call = asyncio.ensure_future(LBFGS(store, function, batches).minimise(5))
        await comes.wait()
        call.cancel()
        next_one = asyncio.ensure_future(LBFGS(other, function, batches).minimise(1))
        records = await stack.enter_async_context(ParameterStore.open(address, name="lbfgs.lbfgs"))
        await records.link.membership.wait_for(lambda _: len(records.vectors) == 2, "two coordinators", 20)
        assert not call.done()
        charge(*held[0])
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await next_one).number == 1


async def test_of_coordinators_at_once_one_goes_on_and_the_others_follow_it():
    arrays, function, batches = problems.logistic()
    expected, _ = await run("local", problems.logistic, iterations=4)
    points = []
    async with servers(1) as address, asyncio.timeout(30), AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(ParameterStore.open(address, arrays, name="lbfgs"))
            for _ in range(3)
        ]

        async def minimised(store):
            await LBFGS(store, function, batches).minimise(4, collect(store, points, arrays))

        async with asyncio.TaskGroup() as group:
            for store in opened:
                group.create_task(minimised(store))

    assert np.array_equal(points[:4], expected)
    assert len(points) == 12


@pytest.mark.slow
async def test_the_minimum_is_that_of_scipy():
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra dev)")
    for problem in (problems.logistic, problems.wide_logistic):
        _, result = await run("local", problem, iterations=300, tolerance=1e-9, name=problem.__name__)
        function, start = problems.whole(*problem())
        found = optimize.minimize(
            function,
            start,
            jac=True,
            method="L-BFGS-B",
            options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 5000},
        )
        assert result.value == pytest.approx(found.fun, rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("history", [3, 10])
async def test_commands_have_the_same_bytes_for_every_number_of_parameters(history):
    sizes = [await bytes_per_iteration(values, history) for values in (10**4, 10**7)]

    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
    assert 0 < sizes[0] < 4_000


async def bytes_per_iteration(values, history):
    """Return the bytes between the coordinator and one of two servers in an iteration, heartbeats apart.

    With the default cut 10^4 values are one shard, and 10^7 are 20 shards on each server.
    """
    arrays, batches = {"x": np.ones(values, np.float32)}, [0.4, 0.6]
    weights = np.resize(np.arange(1, 14, dtype=np.float32), values)

    def function(values, share):
        x = values["x"]
        return share * float(weights @ np.cosh(x)), {"x": np.float32(share) * weights * np.sinh(x)}

    totals = []
    async with servers(2) as address, AsyncExitStack() as stack:

        def open_store():
            return ParameterStore.open(address, arrays, name="bytes")

        store = await stack.enter_async_context(open_store())
        await stack.enter_async_context(assistant(open_store, function, batches))

        def count(iteration):
            links = [link for link in store.link.endpoint.traffic.links if link.peer.role == "ps"]
            most = max(sum_of_bytes(link.statistics().by_type.values()) for link in links)
            totals.append((iteration.evaluations, most))

        await LBFGS(store, function, batches, workers=0, history=history, tolerance=0).minimise(
            history + 3, count
        )
    (before, first), (after, second) = totals[-2:]
    assert after == before + 1
    return second - first


def sum_of_bytes(by_type):
    return sum(
        each.frame_bytes_in + each.frame_bytes_out + each.payload_bytes_in + each.payload_bytes_out
        for each in by_type
    )


# --- refusals ------------------------------------------------------------------------------------


async def test_a_store_with_clocks_or_without_a_name_is_refused():
    arrays, function, batches = problems.logistic()
    async with ParameterStore.open("local", arrays) as store:
        with pytest.raises(ConfigError, match="a name, to find it again: open it with name="):
            LBFGS(store, function, batches)
    async with ParameterStore.open("local", arrays, name="clocks", consistency="ssp:1") as store:
        with pytest.raises(ConfigError, match="consistency 'asp', and this one has 'ssp:1'"):
            LBFGS(store, function, batches)
    async with ParameterStore.open("local", arrays, name="bounds") as store:
        with pytest.raises(ConfigError, match="history=0"):
            LBFGS(store, function, batches, history=0)
        with pytest.raises(ConfigError, match="at least one batch"):
            LBFGS(store, function, [])


async def test_an_answer_of_the_function_that_is_no_pair_is_refused_by_its_value():
    arrays, _, batches = problems.logistic()
    async with ParameterStore.open("local", arrays, name="pairs") as store:
        with pytest.raises(StoreError, match=r"\(loss, gradients by name\), not 7"):
            await LBFGS(store, lambda values, batch: 7, batches).minimise()


async def test_a_second_call_before_the_end_of_the_first_is_refused():
    arrays, function, batches = problems.logistic()
    async with asyncio.timeout(20), ParameterStore.open("local", arrays, name="lbfgs") as store:
        optimizer = LBFGS(store, function, batches)

        async def again(iteration):
            with pytest.raises(StoreError, match="minimises already"):
                await optimizer.minimise()

        assert (await optimizer.minimise(2, again)).number == 2


async def test_a_gradient_of_another_array_is_refused_by_name():
    arrays, function, batches = problems.logistic()

    def lacking(values, batch):
        loss, gradient = function(values, batch)
        return loss, {"w": gradient["w"]}

    async with ParameterStore.open("local", arrays, name="lacking") as store:
        with pytest.raises(
            StoreError, match=r"gradients of shapes {'w': .*}, and the arrays of the store have {.*'b'"
        ):
            await LBFGS(store, lacking, batches).minimise(3)


async def test_a_gradient_of_another_shape_is_refused_in_the_midst_of_a_piece():
    arrays, function, batches = problems.logistic()

    def narrow(values, batch):
        loss, gradient = function(values, batch)
        return loss, gradient if batch is batches[0] else {**gradient, "b": np.zeros(1)}

    async with ParameterStore.open("local", arrays, name="narrow") as store:
        with pytest.raises(StoreError, match=r"gradients of shapes .*'b': \(1,\)"):
            await LBFGS(store, narrow, batches, pieces=1).minimise(3)


@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_piece_is_pushed_once_and_its_bits_are_those_of_any_number_of_workers(monkeypatch, pieces):
    push, pushed = ParameterStore.push, []

    async def counted(store, gradients, **options):
        pushed.append(options["groups"])
        return await push(store, gradients, **options)

    monkeypatch.setattr(ParameterStore, "push", counted)
    several = {}
    for workers in (1, 4):
        pushed.clear()
        points, result = await run("local", problems.logistic, workers=workers, iterations=5, pieces=pieces)
        several[workers] = points
        batches = len(problems.logistic()[2])
        cuts = [piece * batches // pieces for piece in range(pieces + 1)]
        assert batches > pieces
        assert {group[1:] for group in pushed} == {*pairwise(cuts)}
        assert len({*pushed}) == pieces * result.evaluations
    assert np.array_equal(several[1], several[4])


async def test_a_function_that_never_returns_ends_at_a_deadline(monkeypatch):
    arrays, _, batches = problems.logistic()
    goes_on = threading.Event()

    class Late(DeadlineExceeded):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            goes_on.set()  # the pool of the worker waits for its thread

    monkeypatch.setattr(dealer, "PIECE_S", 0.01)
    monkeypatch.setattr(dealer, "DeadlineExceeded", Late)

    def stuck(values, batch):
        goes_on.wait()
        return 0.0, values

    async with ParameterStore.open("local", arrays, name="stuck") as store:
        with pytest.raises(DeadlineExceeded, match="one of 1 workers to compute a piece, behind 0 of"):
            await LBFGS(store, stuck, batches).minimise(3)


async def test_an_error_of_the_function_ends_the_worker_of_another_program_alone():
    arrays, function, batches = problems.logistic()

    def fails(values, batch):
        raise ZeroDivisionError("of the user")

    async with servers(1) as address, asyncio.TaskGroup() as group:

        async def others():
            async with ParameterStore.open(address, arrays, name="fails") as mine:
                with pytest.raises(ZeroDivisionError, match="of the user"):
                    await LBFGS.assist(mine, fails, batches)
                await LBFGS.assist(mine, function, batches)

        async with ParameterStore.open(address, arrays, name="fails") as store:
            ends = group.create_task(others())
            result = await LBFGS(store, function, batches, workers=0).minimise(5)
            await ends

    assert result.number == 5


async def test_a_worker_that_had_no_piece_for_long_ends_with_its_coordinator(monkeypatch):
    arrays, function, batches = problems.logistic()
    loop, passed = asyncio.get_running_loop(), Counter()
    monkeypatch.setattr(Channel, "_now", lambda channel: loop.time() + passed[channel.peer])
    async with servers(1) as address, AsyncExitStack() as stack:

        def open_store():
            return ParameterStore.open(address, arrays, name="lbfgs")

        def takes_long(iteration):
            passed["the coordinator"] += 1000

        store = await stack.enter_async_context(open_store())
        helper = await stack.enter_async_context(assistant(open_store, function, batches))
        result = await LBFGS(store, function, batches, workers=0).minimise(2, takes_long)
        await helper

    assert result.number == 2


def test_a_program_without_a_loop_minimises_on_the_thread_of_its_store():
    arrays, function, batches = problems.logistic()
    with sync.ParameterStore.open("local", arrays, name="sync") as store:
        result = store.begin(lambda inner: LBFGS(inner, function, batches).minimise(5)).wait()

    assert result.number == 5


async def test_without_any_worker_the_wait_ends_and_is_named():
    arrays, function, batches = problems.logistic()
    async with ParameterStore.open("local", arrays, name="alone", waits=Waits(prepare_s=0.2)) as store:
        with pytest.raises(DeadlineExceeded, match="a worker that computes gradients"):
            await LBFGS(store, function, batches, workers=0).minimise(3)
