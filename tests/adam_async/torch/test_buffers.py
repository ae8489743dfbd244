"""Buffers of modules in a store: each policy moves them as it says, and whole numbers stay local."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import nn

from adam_async import Sgd, StoreError, sync
from adam_async.torch import RemoteOptimizer, arrays_with_buffers, parameter_arrays

BATCHES = [
    torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) + n for n in range(2)
]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()


def first_normalised() -> nn.Sequential:
    """A module whose statistics do not depend on its steps, because its normalisation comes first."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Identity(), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()


def opened(module: nn.Module, **options: object) -> sync.ParameterStore:
    arrays, rules = arrays_with_buffers(module, Sgd(rate=0.1))
    return sync.ParameterStore.open("local", arrays, name="model", rule=rules, **options)


def step(module: nn.Module, optimizer: RemoteOptimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()


def statistics(module: nn.Sequential) -> np.ndarray:
    return np.array([module[1].running_mean.numpy(), module[1].running_var.numpy()])


def of_store(store: sync.ParameterStore) -> np.ndarray:
    values = store.pull()
    return np.array([values["1.running_mean"], values["1.running_var"]])


def alone(batch: int) -> np.ndarray:
    """The statistics of a module that trains one batch."""
    module = network()
    module(BATCHES[batch])
    return statistics(module)


def test_only_floating_point_buffers_of_state_dict_are_arrays() -> None:
    module = network()
    module.register_buffer("scratch", torch.zeros(3), persistent=False)
    arrays, rules = arrays_with_buffers(module, Sgd(rate=0.1))
    assert list(arrays) == [*parameter_arrays(module), "1.running_mean", "1.running_var"]
    assert {rules["1.running_mean"], rules["0.weight"]} == {Sgd(rate=1.0), Sgd(rate=0.1)}


def test_averaged_buffers_of_one_client_are_its_own() -> None:
    module, reference = network(), network()
    with opened(module) as store:
        optimizer = RemoteOptimizer(module, store, buffers="averaged")
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
        for x in BATCHES * 2:
            step(module, optimizer, x)
            theirs.zero_grad()
            reference(x).square().sum().backward()
            theirs.step()
        np.testing.assert_allclose(statistics(module), statistics(reference), rtol=1e-9)
        np.testing.assert_allclose(of_store(store), statistics(reference), rtol=1e-9)
        assert module[1].num_batches_tracked == 4


@pytest.mark.parametrize("policy", ["averaged", "push"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_staleness": 1},
        {"max_staleness": 3},
        {"pull_every": 4},
        {"push_every": 2, "pull_every": 2, "max_staleness": 0},
    ],
    ids=str,
)
def test_one_client_pushes_each_change_of_its_buffers_once(options, policy) -> None:
    module, reference = first_normalised(), nn.BatchNorm1d(4).double()
    with opened(module) as store:
        optimizer = RemoteOptimizer(module, store, buffers=policy, **options)
        for x in BATCHES * 3:
            step(module, optimizer, x)
            reference(x)
        optimizer.flush()
        expected = np.array([reference.running_mean.numpy(), reference.running_var.numpy()])
        np.testing.assert_allclose(of_store(store), expected, rtol=1e-9)
        np.testing.assert_allclose(statistics(module), expected, rtol=1e-9)


def test_averaged_buffers_move_to_the_mean_of_two_clients() -> None:
    with ExitStack() as stack:
        modules = [network(), network()]
        stores = [stack.enter_context(opened(module)) for module in modules]
        optimizers = [
            RemoteOptimizer(module, store, buffers="averaged")
            for module, store in zip(modules, stores, strict=True)
        ]
        while stores[0].clients < 2:
            stores[0].pull()
        for module, optimizer, x in zip(modules, optimizers, BATCHES, strict=True):
            step(module, optimizer, x)
        # Both trained one batch on the first values.
        np.testing.assert_allclose(of_store(stores[0]), (alone(0) + alone(1)) / 2, rtol=1e-9)


def test_in_lockstep_averaged_buffers_are_the_mean_and_both_clients_have_them() -> None:
    modules = [network(), network()]

    def train(number: int) -> np.ndarray:
        with opened(modules[number], consistency="bsp", replicas=2) as store:
            with RemoteOptimizer(modules[number], store, buffers="averaged") as optimizer:
                step(modules[number], optimizer, BATCHES[number])
                return statistics(modules[number])

    with ThreadPoolExecutor(2) as executor:
        found = list(executor.map(train, range(2)))
    for each in found:
        np.testing.assert_allclose(each, (alone(0) + alone(1)) / 2, rtol=1e-9)


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("policies", [("averaged", "averaged"), ("push", "pull")], ids=str)
def test_in_lockstep_both_clients_have_the_shared_buffers_of_all_steps(policies, most) -> None:
    modules = [first_normalised(), first_normalised()]
    flushed = Barrier(2, timeout=30)

    def train(number: int) -> np.ndarray:
        module, policy = modules[number], policies[number]
        with opened(module, consistency="bsp", replicas=2) as store:
            with RemoteOptimizer(module, store, buffers=policy, max_staleness=most) as optimizer:
                for _ in range(4):
                    step(module, optimizer, BATCHES[number])
                optimizer.flush()
                flushed.wait()  # a client that leaves has no more part in the means
                return statistics(module)

    with ThreadPoolExecutor(2) as executor:
        found = list(executor.map(train, range(2)))
    expected = []
    for x in BATCHES:
        reference = nn.BatchNorm1d(4).double()
        for _ in range(4):
            reference(x)
        expected.append(np.array([reference.running_mean.numpy(), reference.running_var.numpy()]))
    wanted = expected[0] if policies[0] == "push" else (expected[0] + expected[1]) / 2
    for each in found:
        np.testing.assert_allclose(each, wanted, rtol=1e-9)


@pytest.mark.parametrize("consistency", ["asp", "ssp:4"])
def test_buffers_of_the_pushing_client_are_those_of_the_others(consistency) -> None:
    with ExitStack() as stack:
        modules = [network(), network()]
        stores = [stack.enter_context(opened(module, consistency=consistency)) for module in modules]
        pushing = RemoteOptimizer(modules[0], stores[0], buffers="push")
        pulling = RemoteOptimizer(modules[1], stores[1], buffers="pull")
        for _ in range(2):
            step(modules[0], pushing, BATCHES[0])
            step(modules[1], pulling, BATCHES[1])
        np.testing.assert_allclose(statistics(modules[1]), statistics(modules[0]), rtol=1e-12)
        np.testing.assert_array_equal(statistics(modules[1]), of_store(stores[0]))


def test_local_buffers_need_no_array() -> None:
    module = network()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        step(module, RemoteOptimizer(module, store), BATCHES[0])
        np.testing.assert_allclose(statistics(module), alone(0), rtol=1e-12)
        with pytest.raises(
            StoreError, match=r"no array for buffer '1.running_mean': open .* buffers='local'"
        ):
            RemoteOptimizer(module, store, buffers="averaged")


def test_buffers_with_another_rule_or_a_value_that_is_not_finite_are_refused() -> None:
    module = network()
    arrays, rules = arrays_with_buffers(module, Sgd(rate=0.1))
    with sync.ParameterStore.open("local", arrays, rule=Sgd(rate=0.1)) as store:
        with pytest.raises(StoreError, match=r"buffer '1.running_mean' has the rule Sgd\(rate=0.1"):
            RemoteOptimizer(module, store, buffers="averaged")
    with sync.ParameterStore.open("local", arrays, rule=rules) as store:
        optimizer = RemoteOptimizer(module, store, buffers="push")
        module(BATCHES[0]).square().sum().backward()
        module[1].running_var[0] = float("inf")
        with pytest.raises(StoreError, match=r"buffer '1.running_var' has the value inf at index 0"):
            optimizer.step()
