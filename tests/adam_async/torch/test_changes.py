"""Values that a program changes between two steps: the store takes them, or an error names the parameter."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from adam_async import Adam, Sgd, StoreError, Waits, sync
from adam_async.model.rules import Rule
from adam_async.runtime.loop_thread import Call
from adam_async.torch import RemoteOptimizer, changes, gradients, parameter_arrays
from adam_async.torch.changes import COLUMNS, checksum, device_checksum
from tests.adam_async.store.servers import cluster, faulty_clients
from tests.adam_async.torch.modules import X, ones, steps
from tests.transport.testing import Faults


class Net(nn.Module):
    """An embedding whose rows a forward pass may renormalise, and a linear layer."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, max_norm=max_norm)
        self.head = nn.Linear(4, 2)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.embed(tokens))
        return found


TOKENS, LABELS = torch.arange(10), torch.arange(10) % 2


def network(max_norm: float | None = None) -> Net:
    torch.manual_seed(1)
    return Net(max_norm)


def clamp_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def clamp(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.1, 0.1)


def load(module: nn.Module) -> None:
    torch.manual_seed(5)
    module.load_state_dict(Net().state_dict())


def new_memory(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


def reverse(module: nn.Module) -> None:
    module.embed.weight.data = module.embed.weight.data.flip(0)


def transpose(module: nn.Module) -> None:
    """Exchange the axes of a matrix in its own memory."""
    module.embed.weight.data[:4] = module.embed.weight.data[:4].T.clone()


def through_a_vector(module: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, module.parameters())


def through_numpy(module: nn.Module) -> None:
    module.head.weight.detach().numpy()[0, 0] = 0.25


def reset(module: nn.Module) -> None:
    torch.manual_seed(6)
    module.head.reset_parameters()


def normalise(module: nn.Module) -> None:
    module.head.weight.data /= module.head.weight.data.norm(dim=1, keepdim=True)


def negate(module: nn.Module) -> None:
    module.embed.weight.data.neg_()


def another_optimizer(module: nn.Module) -> None:
    torch.optim.SGD(module.parameters(), lr=0.01).step()


CHANGES = [
    clamp_data, clamp, load, new_memory, reverse, transpose, through_a_vector, through_numpy, reset,
    normalise, negate, another_optimizer,
]  # fmt: skip


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 4,
    *,
    after_step: Callable[[nn.Module], object] = lambda module: None,
    after_backward: Callable[[nn.Module], object] = lambda module: None,
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(TOKENS), LABELS).backward()
        after_backward(module)
        optimizer.step()
        after_step(module)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-12, err_msg=name)


def compare(module: Net, rule: Rule, when: dict[str, Callable[[nn.Module], object]], **options: Any) -> None:
    """Train with a store and with PyTorch, and compare the module, the store and PyTorch's module."""
    reference = copy.deepcopy(module)
    kind = torch.optim.Adam if isinstance(rule, Adam) else torch.optim.SGD
    constants = {"lr": rule.rate} | ({"momentum": rule.momentum} if isinstance(rule, Sgd) else {})
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=rule) as store:
        optimizer = RemoteOptimizer(module, store, **options)
        train(module, optimizer, **when)
        optimizer.flush()
        found = dict(store.pull())
    train(reference, kind(reference.parameters(), **constants), **when)
    assert_same(found, parameter_arrays(reference))
    assert_same(parameter_arrays(module), parameter_arrays(reference))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["after_step", "after_backward"])
def test_with_one_client_the_store_takes_each_change_and_trains_as_pytorch(change, when) -> None:
    compare(network(), Sgd(rate=0.1, momentum=0.9), {when: change})


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"factors": True}], ids=str)
def test_rows_that_the_forward_pass_renormalises_train_as_with_pytorch(options, monkeypatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    compare(network(max_norm=0.5), Adam(rate=0.1), {}, **options)


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("change", [clamp_data, load, new_memory])
def test_between_pulls_a_change_keeps_the_local_steps(change, most) -> None:
    compare(network(), Sgd(rate=0.1), {"after_step": change}, pull_every=3, max_staleness=most)


def test_a_change_in_an_unpushed_sum_counts_no_gradient_twice() -> None:
    def change_odd(module: nn.Module) -> None:
        nonlocal done
        done += 1
        if done % 2:
            clamp_data(module)

    done = 0
    compare(network(), Sgd(rate=0.1), {"after_step": change_odd}, push_every=2, pull_every=2)


MODES = [
    {}, {"overlap": True}, {"push_every": 2}, {"max_staleness": 1}, {"max_staleness": 2}, {"pull_every": 3},
    {"pull_every": 3, "max_staleness": 0}, {"push_every": 2, "pull_every": 2}, {"factors": True},
]  # fmt: skip


@pytest.mark.parametrize("rule", [Sgd(rate=1.0), Adam(rate=1.0)], ids=["sgd", "adam"])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_checkpoint_loaded_in_training_is_trained_from_in_every_mode(options, rule, monkeypatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    module = ones()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=rule) as store:
        with RemoteOptimizer(module, store, **options) as optimizer:
            steps(module, optimizer, 4)
            module.load_state_dict({"weight": torch.full((4, 8), 100.0)})
            steps(module, optimizer, 4)
        found = store.pull()["weight"]
        np.testing.assert_allclose(
            found,
            np.full((4, 8), 98.0 if "push_every" in options and isinstance(rule, Adam) else 96.0),
            rtol=1e-6,
        )
        np.testing.assert_array_equal(module.weight.detach().numpy(), found)


@pytest.mark.parametrize("consistency", ["asp", "ssp:1", "bsp"])
@pytest.mark.parametrize("most", [0, 1])
def test_one_client_with_clocks_has_its_changes(consistency, most) -> None:
    module = ones()
    with sync.ParameterStore.open(
        "local", parameter_arrays(module), rule=Sgd(rate=1.0), consistency=consistency, replicas=1
    ) as store:
        optimizer = RemoteOptimizer(module, store, max_staleness=most)
        module.weight.data.fill_(50.0)
        steps(module, optimizer, 3)
        module.weight.data = torch.full((4, 8), 100.0, dtype=torch.float64)
        steps(module, optimizer, 3)
        optimizer.flush()
        np.testing.assert_array_equal(store.pull()["weight"], np.full((4, 8), 97.0))


def test_changes_of_every_step_that_would_cost_gradients_are_refused_by_name() -> None:
    module = network()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Adam(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store, pull_every=3, max_staleness=0)
        with pytest.raises(
            StoreError, match=r"'embed.weight' was changed .* twice within .* max_staleness=0"
        ):
            train(module, optimizer, after_step=normalise_rows)
        assert store.pull().read.of_shards.max() == 3  # two pushes and one assignment


def test_a_change_after_the_push_of_its_gradient_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    module = network()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=1.0)) as store:
        optimizer = RemoteOptimizer(module, store, overlap=True)
        train(module, optimizer, 2)
        with pytest.raises(StoreError, match=r"'embed.weight' was changed after backward\(\) had pushed"):
            train(module, optimizer, 1, after_backward=normalise_rows)


def normalise_rows(module: nn.Module) -> None:
    module.embed.weight.data /= 2.0


@pytest.fixture
def two_clients() -> Iterator[tuple[nn.Module, sync.ParameterStore, sync.ParameterStore]]:
    module = ones()
    with (
        sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=1.0), name="two") as store,
        sync.ParameterStore.open("local", name="two") as other,
    ):
        yield module, store, other


@pytest.mark.parametrize("options", MODES, ids=str)
def test_with_several_clients_a_change_is_an_error_with_the_cures(two_clients, options) -> None:
    module, store, _ = two_clients
    optimizer = RemoteOptimizer(module, store, **options)
    steps(module, optimizer, 2)
    module.weight.data[0, 0] = 7.0
    before = module.weight.detach().clone()
    cures = r"'weight' was changed .* 2 clients.*optimizer.push_values\(\).*store.assign\(\{'weight'.*discard"
    for call in (lambda: steps(module, optimizer, 2), optimizer.flush, optimizer.pull, optimizer.close):
        with pytest.raises(StoreError, match=cures):
            call()
    assert torch.equal(module.weight, before)
    optimizer.push_values()
    optimizer.flush()
    assert module.weight[0, 0] == 7.0 - (options == {"push_every": 2})
    steps(module, optimizer, 2)
    optimizer.flush()
    np.testing.assert_array_equal(store.pull()["weight"], module.weight.detach().numpy())


def test_a_change_is_dropped_or_given_to_the_store_on_request(two_clients) -> None:
    module, store, other = two_clients
    optimizer = RemoteOptimizer(module, store)
    module.weight.data.fill_(3.0)
    optimizer.pull(discard=True)
    assert not module.weight.any()
    other.assign({"weight": np.full((4, 8), 5.0)})
    module.weight.data.fill_(5.0)  # the store's values
    steps(module, optimizer)
    np.testing.assert_array_equal(module.weight.detach().numpy(), np.full((4, 8), 4.0))
    module.weight.data.fill_(9.0)
    store.assign({"weight": np.full((4, 8), 9.0)})
    steps(module, optimizer)
    module.weight.data.fill_(1.0)
    for names in ("weight", ["weight"], module.weight, None):
        optimizer.push_values(names)
    np.testing.assert_array_equal(other.pull()["weight"], np.full((4, 8), 1.0))
    with pytest.raises(ValueError, match="'bias' is not of the module"):
        optimizer.push_values(["bias"])


def test_a_client_that_is_left_alone_has_its_changes_again(two_clients) -> None:
    module, store, other = two_clients
    optimizer = RemoteOptimizer(module, store)
    module.weight.data.fill_(3.0)
    with pytest.raises(StoreError, match="2 clients"):
        steps(module, optimizer)
    other.close()
    while store.clients > 1:
        store.settled()
    steps(module, optimizer)
    np.testing.assert_array_equal(store.pull()["weight"], np.full((4, 8), 2.0))


def test_values_that_are_taken_back_are_no_change(two_clients) -> None:
    module, store, _ = two_clients
    optimizer = RemoteOptimizer(module, store)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    average = copy.deepcopy(module)
    for _ in range(3):
        steps(module, optimizer)
        schedule.step()
        kept = copy.deepcopy(module.state_dict())
        module.load_state_dict(average.state_dict())
        module(X)
        module.load_state_dict(kept)
        module.weight.requires_grad_(False)
        module.weight.requires_grad_(True)
        module.weight.data = module.weight.data.clone()
        module.weight.data = module.weight.data.T.contiguous().T
    assert store.pull().read.of_shards.tolist() == [3]


def test_another_optimizer_of_the_process_counts_as_a_client() -> None:
    module, twin = ones(), ones()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=1.0)) as store:
        optimizer, other = RemoteOptimizer(module, store), RemoteOptimizer(twin, store)
        module.weight.data.fill_(3.0)
        with pytest.raises(StoreError, match="has another optimizer in this process"):
            steps(module, optimizer)
        other.close()
        steps(module, optimizer)
        np.testing.assert_array_equal(store.pull()["weight"], np.full((4, 8), 2.0))


@pytest.mark.parametrize("end", ["error", "dropped"])
def test_an_optimizer_that_failed_or_was_dropped_counts_no_more(end) -> None:
    module, twin = ones(), ones()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=1.0)) as store:
        other: RemoteOptimizer | None = RemoteOptimizer(twin, store)
        if end == "error":
            with pytest.raises(KeyError), other:
                raise KeyError
        else:
            other = None
        optimizer = RemoteOptimizer(module, store)
        module.weight.data.fill_(3.0)
        steps(module, optimizer)
        np.testing.assert_array_equal(store.pull()["weight"], np.full((4, 8), 2.0))
        del other


def test_two_optimizers_of_one_module_see_no_change_in_the_values_of_each_other() -> None:
    module = network()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        first = RemoteOptimizer(module, store, ["head.weight", "head.bias"])
        second = RemoteOptimizer(module, store, ["embed.weight"])
        for _ in range(3):
            for optimizer in (first, second):
                train(module, optimizer, 1)
                optimizer.flush()
        assert store.pull().read.of_shards.tolist() == [3, 3, 3]


def test_stores_of_one_module_pass_its_values_on() -> None:
    module = ones()
    with (
        sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=1.0), name="a") as a,
        sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=10.0), name="b") as b,
    ):
        first, second = RemoteOptimizer(module, a), RemoteOptimizer(module, b)
        for _ in range(3):
            steps(module, first)
            steps(module, second)
    np.testing.assert_array_equal(module.weight.detach().numpy(), np.full((4, 8), -33.0))


def test_a_frozen_parameter_that_changes_reaches_the_store_before_a_pull() -> None:
    module = network()
    module.embed.requires_grad_(False)
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        with RemoteOptimizer(module, store) as optimizer:
            module.embed.weight.data.fill_(2.0)
            train(module, optimizer, 2)
            optimizer.flush()
            assert (store.pull()["embed.weight"] == 2.0).all()
            module.embed.weight.data.fill_(3.0)
        assert (store.pull()["embed.weight"] == 3.0).all()
    assert (module.embed.weight == 3.0).all()


def test_after_a_loss_that_is_not_finite_a_checkpoint_is_loaded() -> None:
    module = ones()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=1.0)) as store:
        optimizer = RemoteOptimizer(module, store)
        (module(X) * float("nan")).sum().backward()
        with pytest.raises(StoreError, match="has the value nan"):
            optimizer.step()
        module.weight.data.fill_(8.0)
        steps(module, optimizer)
        np.testing.assert_array_equal(store.pull()["weight"], np.full((4, 8), 7.0))


def replace(module: Net) -> None:
    module.head.weight = nn.Parameter(torch.zeros(2, 4, dtype=torch.float64))


def replace_a_layer(module: Net) -> None:
    module.head = nn.Linear(4, 2).double()


def load_new_objects(module: Net) -> None:
    module.load_state_dict(Net().state_dict(), assign=True)


def parametrise(module: Net) -> None:
    nn.utils.parametrizations.weight_norm(module.head)


@pytest.mark.parametrize("change", [replace, replace_a_layer, load_new_objects, parametrise])
@pytest.mark.parametrize("options", [{}, {"push_every": 3}, {"allow_unused": True}], ids=str)
def test_a_parameter_that_is_replaced_is_refused_although_its_old_gradient_stays(change, options) -> None:
    module = network()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store, **options)
        train(module, optimizer, 1)
        before = store.pull().read.of_shards.tolist()
        change(module)
        module.zero_grad()
        nn.functional.cross_entropy(module(TOKENS), LABELS).backward()
        with pytest.raises(
            StoreError,
            match=r"was replaced .*: make RemoteOptimizer anew, .*assign\(parameter_arrays\(module\)\)",
        ):
            optimizer.step()
        assert store.pull().read.of_shards.tolist() == before


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(4, 4, bias=False).double()
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.middle.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.last(self.middle(self.embed(tokens))))
        return found


def test_a_second_name_of_a_tied_parameter_changes_it_or_is_refused_if_it_is_replaced() -> None:
    torch.manual_seed(1)
    module = Tied()
    compare(module, Sgd(rate=0.1), {"after_step": lambda module: module.last.weight.data.mul_(0.5)})
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store)
        module.last.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
        with pytest.raises(StoreError, match=r"'last.weight' was replaced"):
            train(module, optimizer)


def test_a_parameter_under_another_name_trains_on_and_a_removed_one_is_refused_by_the_step() -> None:
    module = network()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store)
        module.head = nn.Sequential(module.head, nn.Identity())
        train(module, optimizer, 2)
        weight = module.head[0].weight.detach().numpy()
        np.testing.assert_array_equal(store.pull()["head.weight"], weight)
        module.head = nn.Identity()
        optimizer.flush()
        nn.functional.cross_entropy(module(TOKENS), LABELS).backward()
        with pytest.raises(StoreError, match=r"'head.weight' was replaced or removed"):
            optimizer.step()


def test_threads_with_modules_of_their_own_name_a_change() -> None:
    first = ones()
    with sync.ParameterStore.open("local", parameter_arrays(first), rule=Sgd(rate=1.0)) as store:
        twins = [(module, RemoteOptimizer(module, store)) for module in (ones(), ones())]

        def work(number: int) -> None:
            module, optimizer = twins[number]
            steps(module, optimizer, 3)
            module.weight.data.fill_(1.0)
            with pytest.raises(StoreError, match="'weight' was changed"):
                steps(module, optimizer)

        with ThreadPoolExecutor(2) as executor:
            list(executor.map(work, range(2)))


def test_changes_reach_the_store_exactly_once_over_links_that_fail(monkeypatch) -> None:
    networks = faulty_clients(monkeypatch)
    waits = Waits(answer_s=0.2, call_s=2.0)
    module = ones()
    with (
        cluster(2, waits=waits) as servers,
        sync.ParameterStore.open(
            servers.address,
            parameter_arrays(module),
            name="failing-links",
            rule=Sgd(rate=1.0),
            shard_bytes=64,
            waits=waits,
        ) as store,
    ):
        optimizer = RemoteOptimizer(module, store)
        networks[0].faults = Faults(cut=0.15)
        for _ in range(12):
            module.weight.data += 10.0
            steps(module, optimizer)
        networks[0].faults = Faults()
        values = store.pull()
    assert len(networks[0].links) > 4, "links were dialled again"
    np.testing.assert_array_equal(values["weight"], np.full((4, 8), 12 * 9.0))
    assert values.read.of_shards.tolist() == [24] * 4


def test_after_an_interrupted_assignment_the_store_has_the_change(monkeypatch) -> None:
    module = ones()

    def interrupted(call: Call[None], timeout: float | None = None) -> None:
        wait([call])
        raise KeyboardInterrupt

    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=1.0)) as store:
        optimizer = RemoteOptimizer(module, store)
        module.weight.data.fill_(5.0)
        with monkeypatch.context() as patch:
            patch.setattr(Call, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                steps(module, optimizer)
        steps(module, optimizer)
        np.testing.assert_array_equal(store.pull()["weight"], np.full((4, 8), 4.0))


@pytest.mark.parametrize("options", MODES, ids=str)
def test_changes_on_a_device_are_found_by_checksums_of_the_device(options, monkeypatch) -> None:
    monkeypatch.setattr(changes, "_checksum", device_checksum)
    module = ones()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=1.0)) as store:
        with RemoteOptimizer(module, store, **options) as optimizer:
            steps(module, optimizer, 2)
            assert not optimizer._changes.found(["weight"])
            module.weight.data.fill_(100.0)
            steps(module, optimizer, 2)
        np.testing.assert_array_equal(store.pull()["weight"], np.full((4, 8), 98.0))


def test_a_store_with_a_folder_is_a_checkpoint_of_values_and_momentum(tmp_path, caplog) -> None:
    rule = Sgd(rate=0.1, momentum=0.9)
    reference = network()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), 8)
    state: dict[str, Any] = {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        module = Net()
        with sync.ParameterStore.open(
            "local", parameter_arrays(module), name="model", rule=rule, dir=tmp_path
        ) as store:
            optimizer = RemoteOptimizer(module, store)
            if state:
                optimizer.load_state_dict(state)
            train(module, optimizer, 4)
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
    assert_same(parameter_arrays(module), parameter_arrays(reference))
    assert state["state"] == {}
    assert state["adam_async"]["steps"] == 8
    (warning,) = [each.message for each in caplog.records if "state_dict" in each.message]
    assert "momentum and means are those of store 'model'" in warning


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1"])
@pytest.mark.parametrize("most", [0, 1])
def test_clients_with_clocks_train_on_from_values_that_one_of_them_pushes(consistency, most) -> None:
    together = Barrier(2, timeout=20.0)

    def work(client: int) -> np.ndarray:
        module = ones()
        with sync.ParameterStore.open(
            "local",
            parameter_arrays(module),
            rule=Sgd(rate=1.0),
            name="clocks",
            consistency=consistency,
            replicas=2,
        ) as store:
            optimizer = RemoteOptimizer(module, store, max_staleness=most)
            steps(module, optimizer, 2)
            optimizer.flush()
            together.wait()
            if client == 0:
                module.weight.data.fill_(50.0)
                with pytest.raises(StoreError, match="store 'clocks' has 2 clients"):
                    steps(module, optimizer)
                optimizer.push_values()
            together.wait()
            steps(module, optimizer, 2)
            optimizer.flush()
            together.wait()
            return store.pull()["weight"]

    with ThreadPoolExecutor(2) as executor:
        for weight in executor.map(work, range(2)):
            np.testing.assert_array_equal(weight, np.full((4, 8), 48.0 if consistency == "bsp" else 46.0))


SIZES = [0, 1, 7, COLUMNS * 2, COLUMNS * 6 + 5, COLUMNS * 40 + 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data(), size=st.sampled_from(SIZES))
def test_one_changed_bit_or_two_exchanged_values_change_a_checksum(dtype, data, size) -> None:
    values = np.random.default_rng(0).standard_normal(size).astype(dtype)
    before, on_device = checksum(values), device_checksum(torch.from_numpy(values))
    assert before == checksum(values.copy())
    if size:
        places = st.integers(0, size - 1)
        changed = values.copy()
        bits = changed.view(np.uint8)
        bits[data.draw(places) * changed.itemsize] ^= 1 << data.draw(st.integers(0, 7))
        assert checksum(changed) != before
        assert device_checksum(torch.from_numpy(changed)) != on_device
        one, two = data.draw(places), data.draw(places)
        changed = values.copy()
        changed[[one, two]] = changed[[two, one]]
        is_equal = one == two or (one - two) * values.itemsize % (COLUMNS * 8) == 0
        assert is_equal or checksum(changed) != before
        assert one == two or device_checksum(torch.from_numpy(changed)) != on_device


@pytest.mark.parametrize("shape", [(64, 64), (509, 32), (1018, 16), (256, 509), (2000,)])
@pytest.mark.parametrize(
    "change",
    [
        np.negative,
        np.flip,
        lambda array: np.roll(array, 1),
        lambda array: np.random.default_rng(1).permutation(array),
    ],
    ids=["negative", "flip", "roll", "permutation"],
)
def test_rearranged_or_negated_matrices_change_a_checksum(shape, change) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    changed = np.ascontiguousarray(change(values))
    assert checksum(changed) != checksum(values)
    assert device_checksum(torch.from_numpy(changed)) != device_checksum(torch.from_numpy(values))
