"""Several clients of one store: threads (Hogwild), clocks, and children that a data loader forks."""

import asyncio
import copy
import os
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adam_async import DeadlineExceeded, Sgd, StoreError, Waits, sync
from adam_async.run.arrays import Factors
from adam_async.runtime.loop_thread import Call
from adam_async.torch import RemoteOptimizer, gradients, parameter_arrays
from adam_async.torch.exchanges import Exchange
from tests.adam_async.torch.modules import X, ones, steps

THREADS, STEPS = 3, 10


def sharing_memory(module: nn.Module) -> nn.Module:
    """Return a module with the same memory and gradients of its own."""
    twin = copy.deepcopy(module)
    for mine, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        mine.data = theirs.data
    return twin


@pytest.mark.parametrize("options", [{}, {"max_staleness": 2}, {"pull_every": 3}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("shares", [False, True], ids=["a module each", "one memory"])
def test_threads_of_one_process_lose_no_push(shares, options) -> None:
    first = ones()
    with sync.ParameterStore.open("local", parameter_arrays(first), rule=Sgd(rate=1.0)) as store:

        def train(_: int) -> None:
            module = sharing_memory(first) if shares else ones()
            with RemoteOptimizer(module, store, **options) as optimizer:
                steps(module, optimizer, STEPS)

        with ThreadPoolExecutor(THREADS) as executor:
            list(executor.map(train, range(THREADS)))
        np.testing.assert_array_equal(store.pull()["weight"], np.full((4, 8), -THREADS * STEPS))


@pytest.mark.parametrize("options", [{}, {"max_staleness": 2}, {"pull_every": 3}, {"overlap": True}], ids=str)
def test_the_last_writes_of_another_client_in_one_memory_are_no_change_of_the_program(options) -> None:
    first = ones()
    with sync.ParameterStore.open("local", parameter_arrays(first), rule=Sgd(rate=1.0)) as store:
        with RemoteOptimizer(first, store, **options) as optimizer:
            steps(first, optimizer, STEPS)
            twin = sharing_memory(first)
            with RemoteOptimizer(twin, store, **options) as other:
                steps(twin, other, STEPS)
            store.push({"weight": np.ones((4, 8))})
            steps(first, optimizer, STEPS)
        np.testing.assert_array_equal(store.pull()["weight"], np.full((4, 8), -3 * STEPS - 1))


def lockstep(module: nn.Module) -> sync.ParameterStore:
    return sync.ParameterStore.open(
        "local", parameter_arrays(module), name="model", rule=Sgd(rate=1.0), consistency="bsp", replicas=2
    )


@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}, {"overlap": True}], ids=str)
def test_in_lockstep_clients_step_by_the_mean_of_their_gradients(options, monkeypatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)  # a bucket is pushed before its step ends

    def gradient_of(client: int, module: nn.Module) -> None:
        (module(X).sum() * (client + 1)).backward()

    def train(client: int) -> list[np.ndarray]:
        module = ones()
        with lockstep(module) as store, RemoteOptimizer(module, store, **options) as optimizer:
            found = []
            for _ in range(4):
                optimizer.zero_grad()
                gradient_of(client, module)
                optimizer.step()
                found.append(module.weight.detach().numpy().copy())
            optimizer.flush()
            return [*found, module.weight.detach().numpy().copy()]

    with ThreadPoolExecutor(2) as executor:
        found = list(executor.map(train, range(2)))
    for mine in found:
        assert [float(each[0, 0]) for each in mine[-1:]] == [-1.5 * 4]
        if "max_staleness" not in options:
            assert [float(each[0, 0]) for each in mine[:4]] == [-1.5, -3.0, -4.5, -6.0]


@pytest.mark.parametrize("most", [0, 1])
def test_in_lockstep_a_push_has_the_mean_of_its_steps(most) -> None:
    def train(client: int) -> np.ndarray:
        module = ones()
        with (
            lockstep(module) as store,
            RemoteOptimizer(module, store, push_every=2, max_staleness=most) as optimizer,
        ):
            for number in range(5):  # the last one is pushed alone, by `close`
                optimizer.zero_grad()
                (module(X).sum() * (client + 1) * (number + 1)).backward()
                optimizer.step()
        return parameter_arrays(module)["weight"]

    with ThreadPoolExecutor(2) as executor:
        found = list(executor.map(train, range(2)))
    # Means of two steps and of one (1.5 + 3.5 + 5), and of two clients (1.5).
    for weight in found:
        np.testing.assert_array_equal(weight, np.full((4, 8), -1.5 * (1.5 + 3.5 + 5)))


@pytest.mark.parametrize("most", [0, 2])
def test_a_slow_client_is_named_by_the_step_that_waits_for_it(most) -> None:
    module = ones()
    waits = Waits(clock_s=0.3, answer_s=0.2)
    options = {"consistency": "ssp:1", "replicas": 2, "waits": waits}
    with (
        sync.ParameterStore.open("local", parameter_arrays(module), name="model", **options) as store,
        sync.ParameterStore.open("local", name="model"),
    ):
        optimizer = RemoteOptimizer(module, store, max_staleness=most)
        steps(module, optimizer, 1)
        with pytest.raises(DeadlineExceeded, match=r"waited 0.3 s for client \d .* to end step 1"):
            steps(module, optimizer, 2 + most)


@pytest.mark.parametrize("failure", [DeadlineExceeded, KeyboardInterrupt], ids=["deadline", "interrupt"])
def test_values_that_arrive_after_a_failed_step_change_no_parameter(failure, monkeypatch) -> None:
    module = ones()
    # The server answers as soon as the slow client has ended its step, also after the deadline.
    waits = Waits(clock_s=0.3 if failure is DeadlineExceeded else 20.0, answer_s=20.0)
    options = {"consistency": "ssp:1", "replicas": 2, "waits": waits}
    with (
        sync.ParameterStore.open(
            "local", parameter_arrays(module), name="model", rule=Sgd(rate=1.0), **options
        ) as store,
        sync.ParameterStore.open("local", name="model") as slow,
    ):
        optimizer = RemoteOptimizer(module, store)
        steps(module, optimizer, 1)
        if failure is KeyboardInterrupt:
            monkeypatch.setattr(Call, "result", interrupted)
        with pytest.raises(failure):
            steps(module, optimizer, 2)
        monkeypatch.undo()
        before = module.weight.detach().clone()
        slow.push({"weight": np.full((4, 8), 100.0)})
        for _ in range(3):
            slow.tick()
        # The answer to this pull comes after that of the failed one.
        values = store.pull()["weight"]
        assert (values < before.numpy() - 50).all()
        assert torch.equal(module.weight, before)

        steps(module, optimizer, 1)
        np.testing.assert_array_equal(module.weight.detach().numpy(), store.pull()["weight"])


def interrupted(call: Call[None], timeout: float | None = None) -> object:
    """Wait for a moment, and be interrupted as if by Ctrl-C."""
    wait([call], 0.3)
    raise KeyboardInterrupt


@pytest.mark.parametrize("factors", [False, True], ids=["dense", "factors"])
def test_a_push_that_outlives_its_interrupted_step_has_the_gradient_of_that_step(
    factors, monkeypatch
) -> None:
    handed: list[Exchange] = []

    def unanswered(exchange: Exchange, _: object) -> Coroutine[Any, Any, None]:
        handed.append(exchange)
        return asyncio.sleep(60.0)

    def interrupt(call: Call[None], timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    module, batch = nn.Linear(64, 64, bias=False), torch.ones(1, 64)
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=1.0)) as store:
        optimizer = RemoteOptimizer(module, store, factors=factors)
        module(batch).sum().backward()
        assert (module.weight.grad.abs().max() < 1e-20) == factors
        with monkeypatch.context() as patch:
            patch.setattr(Exchange, "run", unanswered)
            patch.setattr(Call, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        # The program goes on with its next batch, in the same memory.
        optimizer.zero_grad(set_to_none=False)
        batch.fill_(7.0)
    pushed = handed[0].gradients["weight"]
    assert isinstance(pushed, Factors) == factors
    dense = pushed.errors.T @ pushed.activations if isinstance(pushed, Factors) else pushed
    np.testing.assert_array_equal(dense, np.ones((64, 64)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_data_loader_forks_workers_while_the_store_is_open() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8).double(), torch.randn(48, 4).double())
    found = []
    for workers in (0, 2):
        module = ones()
        with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
            optimizer = RemoteOptimizer(module, store, max_staleness=1)
            for _ in range(2):
                for x, y in DataLoader(data, batch_size=8, num_workers=workers):
                    optimizer.zero_grad()
                    (module(x) - y).square().mean().backward()
                    optimizer.step()
                    optimizer.flush()
            found.append(parameter_arrays(module)["weight"])
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0].any()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_step_in_a_forked_child_is_refused() -> None:
    module = ones()
    with sync.ParameterStore.open("local", parameter_arrays(module)) as store:
        optimizer = RemoteOptimizer(module, store)
        module.weight.grad = torch.ones_like(module.weight)
        child = os.fork()
        if not child:
            code = 1
            try:
                optimizer.step()
            except StoreError as error:
                code = 0 if "was opened before this process was forked" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        optimizer.step()
