"""A loop with `RemoteOptimizer` is the loop with PyTorch's own optimizer, in float64, over three servers."""

import asyncio
import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import Tensor, nn

from adam_async import Adagrad, Adam, AdamW, Sgd, sync
from adam_async.model.rules import Rule
from adam_async.torch import RemoteOptimizer, gradients, parameter_arrays
from adam_async.torch.buffers import arrays_with_buffers
from adam_async.torch.exchanges import Exchange
from adam_async.torch.factors import LEAST_REST
from tests.adam_async.rules import Means, apply_means
from tests.adam_async.store.servers import StoreServers, cluster

STEPS = 8
SHARD_BYTES = 16 << 10
RULES: list[tuple[Rule, Callable[..., torch.optim.Optimizer], dict[str, object]]] = [
    (Sgd(rate=0.1), torch.optim.SGD, {"lr": 0.1}),
    (Sgd(rate=0.1, momentum=0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (
        Sgd(rate=0.1, momentum=0.9, nesterov=True),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    (
        Sgd(rate=0.1, momentum=0.9, weight_decay=0.01),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    ),
    (Adam(rate=0.01), torch.optim.Adam, {"lr": 0.01}),
    (Adam(rate=0.01, weight_decay=0.01), torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    (AdamW(rate=0.01, weight_decay=0.1), torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (Adam(rate=0.01, betas=(0.9, 0.95)), torch.optim.Adam, {"lr": 0.01, "betas": (0.9, 0.95)}),
    (Adagrad(rate=0.05), torch.optim.Adagrad, {"lr": 0.05}),
    (Adagrad(rate=0.05, weight_decay=0.01), torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.01}),
]
IDS = [f"{rule}".replace(" ", "") for rule, _, _ in RULES]


@pytest.fixture(scope="module")
def servers() -> Iterator[StoreServers]:
    with cluster() as running:
        yield running


def network(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(100, 64), nn.Tanh(), nn.Linear(64, 10)).double()


def batches(number: int = STEPS, seed: int = 2) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(16, 100, dtype=torch.float64, generator=dice),
            torch.randint(0, 10, (16,), generator=dice),
        )
        for _ in range(number)
    ]


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[tuple[Tensor, Tensor]],
    after_backward: Callable[[nn.Module], object] = lambda module: None,
) -> list[dict[str, np.ndarray]]:
    """The loop of the reference; returns the parameters after each step."""
    found = []
    for x, y in data:
        loss = nn.functional.cross_entropy(module(x), y)
        optimizer.zero_grad()
        loss.backward()
        after_backward(module)
        optimizer.step()
        found.append(parameter_arrays(module))
    return found


def assert_same(found: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]]) -> None:
    assert len(found) == len(expected)
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in theirs:
            np.testing.assert_allclose(
                mine[name], theirs[name], rtol=1e-9, atol=1e-9, err_msg=f"{name} after step {step}"
            )


@pytest.mark.parametrize("factors", [False, True], ids=["dense", "factors"])
@pytest.mark.parametrize("number", range(len(RULES)), ids=IDS)
def test_one_client_equals_the_optimizer_of_pytorch_step_by_step(servers, number, factors):
    rule, kind, options = RULES[number]
    module = network()
    reference = copy.deepcopy(module)
    with sync.ParameterStore.open(
        servers.address,
        parameter_arrays(module),
        name=f"store-{number}-{factors}",
        rule=rule,
        shard_bytes=SHARD_BYTES,
    ) as store:
        used = [state for state in servers.states() if state.shards]
        assert len(used) >= 3
        with RemoteOptimizer(module, store, factors=factors) as optimizer:
            found = train(module, optimizer, batches())
            is_dense = bool(module[0].weight.grad.abs().max() > LEAST_REST)
        store.delete()
    assert is_dense is not factors
    assert_same(found, train(reference, kind(reference.parameters(), **options), batches()))


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"push_every": 1, "pull_every": 3},
        {"push_every": 1, "pull_every": 3, "max_staleness": 0},
        {"push_every": 1, "pull_every": 3, "max_staleness": 3},
        {"push_every": 2, "pull_every": 2},
        {"factors": True, "pull_every": 3},
    ],
    ids=str,
)
def test_one_client_with_plain_sgd_equals_pytorch_in_every_mode_that_takes_local_steps(options):
    module = network()
    reference = copy.deepcopy(module)
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        with RemoteOptimizer(module, store, **options) as optimizer:
            found = train(module, optimizer, batches())
        final = store.pull()
    expected = train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), batches())
    assert_same(found, expected)
    assert_same([dict(final)], expected[-1:])


@pytest.mark.parametrize(
    "options",
    [
        {"pull_every": 2},
        {"pull_every": 3, "max_staleness": 3},
        {"push_every": 2, "pull_every": 2},
        {"pull_every": 2, "factors": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("begins_frozen", [True, False], ids=["unfrozen", "frozen"])
def test_a_layer_frozen_or_unfrozen_during_a_pull_takes_each_local_step_once(
    options, begins_frozen, monkeypatch
):
    run, next_push = Exchange.run, asyncio.Event()

    async def until_the_next_push(exchange, store):
        await run(exchange, store)
        if exchange.names is None:
            next_push.set()
        else:
            async with asyncio.timeout(20):
                await next_push.wait()

    monkeypatch.setattr(Exchange, "run", until_the_next_push)
    module = network()
    module[0].requires_grad_(not begins_frozen)
    reference = copy.deepcopy(module)
    before = options["pull_every"] * options.get("push_every", 1)
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store, **options)
        found = train(module, optimizer, batches(before))
        module[0].requires_grad_(begins_frozen)
        optimizer.zero_grad()
        found += train(module, optimizer, batches(4))
        next_push.set()
        optimizer.flush()
        found.append(parameter_arrays(module))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    expected = train(reference, theirs, batches(before))
    reference[0].requires_grad_(begins_frozen)
    theirs.zero_grad()
    expected += train(reference, theirs, batches(4))
    assert_same(found, [*expected, expected[-1]])


@pytest.mark.parametrize("rule", [Adam(rate=0.01), Sgd(rate=0.1, momentum=0.9)], ids=str)
def test_overlap_pushes_buckets_during_the_backward_pass(monkeypatch, rule):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)  # each gradient is a bucket, and none is left to step()
    module = network()
    reference = copy.deepcopy(module)
    in_flight = []
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=rule) as store:
        with RemoteOptimizer(module, store, overlap=True) as optimizer:
            found = train(
                module, optimizer, batches(), lambda _: in_flight.append(len([*optimizer._exchanges]))
            )
    assert in_flight == [0] + [4] * (STEPS - 1)
    theirs = (
        torch.optim.Adam(reference.parameters(), lr=0.01)
        if isinstance(rule, Adam)
        else torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    )
    assert_same(found, train(reference, theirs, batches()))


@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}], ids=str)
def test_push_every_sums_the_gradients_of_its_steps(options):
    module = network()
    reference = copy.deepcopy(module)
    data = batches()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Adam(rate=0.01)) as store:
        with RemoteOptimizer(module, store, push_every=8, **options) as optimizer:
            train(module, optimizer, data)
            found = parameter_arrays(module)
        theirs = torch.optim.Adam(reference.parameters(), lr=0.01)
        for x, y in data:
            nn.functional.cross_entropy(reference(x), y).backward()
        theirs.step()
        if not options:
            assert_same([found], [parameter_arrays(reference)])
        assert_same([parameter_arrays(module)], [parameter_arrays(reference)])


@pytest.mark.parametrize(("options", "rate"), [({}, 0.125), ({"lr": 0.5}, 0.5), ({"pull_every": 3}, 0.125)])
def test_a_rule_of_a_user_takes_each_gradient_with_the_rate_of_its_group(options, rate):
    module = nn.Linear(4, 3, bias=False)
    first, seen = module.weight.detach().numpy().copy(), []
    arrays, rules = arrays_with_buffers(module, Means(rate=0.125))
    with (
        sync.ParameterStore.open("local", arrays, rule=rules) as store,
        RemoteOptimizer(module, store, **options) as optimizer,
    ):
        for x in torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(3)):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            seen.append(module.weight.grad.numpy().copy())
            optimizer.step()
    values, _ = apply_means(first, seen, rate=rate)
    np.testing.assert_array_equal(module.weight.detach().numpy(), values)


def test_between_pulls_a_step_is_plain_also_with_momentum_and_other_rules_wait():
    module = network()
    before = parameter_arrays(module)
    rules = {name: Sgd(rate=0.1, momentum=0.9) if name < "2" else Adam(rate=0.01) for name in before}
    ones = [torch.ones_like(parameter) for parameter in module.parameters()]
    with sync.ParameterStore.open("local", before, rule=rules) as store:
        optimizer = RemoteOptimizer(module, store, pull_every=3, max_staleness=0)
        for number in (1, 2, 3):
            for parameter, gradient in zip(module.parameters(), ones, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            if number < 3:
                found = parameter_arrays(module)
                np.testing.assert_allclose(found["0.bias"], before["0.bias"] - 0.1 * number, rtol=1e-12)
                np.testing.assert_array_equal(found["2.bias"], before["2.bias"])
        values, found = store.pull(), parameter_arrays(module)
    for name in before:
        np.testing.assert_array_equal(found[name], values[name])
    # Momentum on the servers: 1 + 1.9 + 2.71.
    np.testing.assert_allclose(found["0.bias"], before["0.bias"] - 0.1 * 5.61, rtol=1e-12)
    assert (found["2.bias"] < before["2.bias"]).all()


def test_with_staleness_one_the_store_sums_the_gradients_at_the_values_of_each_step():
    module = network()
    mine = copy.deepcopy(module)
    data = batches()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store, max_staleness=1)
        used = []
        for x, y in data:
            used.append(parameter_arrays(module))
            loss = nn.functional.cross_entropy(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.flush()
        final = parameter_arrays(module)
    # Which pushes a step's values hold depends on the machine. Values that landed within a pass would show.
    total = {name: array.copy() for name, array in used[0].items()}
    for values, (x, y) in zip(used, data, strict=True):
        with torch.no_grad():
            for name, parameter in mine.named_parameters():
                parameter.copy_(torch.from_numpy(values[name]))
        mine.zero_grad()
        nn.functional.cross_entropy(mine(x), y).backward()
        for name, parameter in mine.named_parameters():
            total[name] -= 0.1 * parameter.grad.numpy()
    assert_same([final], [total])


def test_parameter_groups_have_rates_of_their_own_which_a_scheduler_changes():
    module = network()
    reference = copy.deepcopy(module)

    def groups(of: nn.Sequential) -> list[dict[str, object]]:
        return [{"params": of[0].parameters(), "lr": 0.2}, {"params": of[2].parameters()}]

    with sync.ParameterStore.open(
        "local", parameter_arrays(module), rule=Sgd(rate=0.05, momentum=0.9)
    ) as store:
        optimizer = RemoteOptimizer(module, store, groups(module))
        assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.05]
        theirs = torch.optim.SGD(groups(reference), lr=0.05, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, theirs)]
        for part in range(3):
            data = batches(3, seed=part)
            assert_same(train(module, optimizer, data), train(reference, theirs, data))
            for schedule in schedules:
                schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.00625])


def test_clipped_gradients_equal_those_of_pytorch():
    module = network()
    reference = copy.deepcopy(module)

    def clip(of: nn.Module) -> object:
        return nn.utils.clip_grad_norm_(of.parameters(), 0.1)

    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Adam(rate=0.01)) as store:
        found = train(module, RemoteOptimizer(module, store), batches(), clip)
    assert_same(found, train(reference, torch.optim.Adam(reference.parameters(), lr=0.01), batches(), clip))


def test_frozen_parameters_are_pulled_at_the_start_and_never_pushed():
    first, second = network(1), network(2)
    first[0].requires_grad_(False)
    second[0].requires_grad_(False)
    with sync.ParameterStore.open("local", parameter_arrays(first), rule=Sgd(rate=0.1)) as store:
        frozen = parameter_arrays(first)["0.weight"]
        optimizer = RemoteOptimizer(second, store)
        np.testing.assert_array_equal(parameter_arrays(second)["0.weight"], frozen)
        train(second, optimizer, batches(2))
        assert store.push({"0.weight": np.zeros((64, 100))}).versions == {"0.weight": 1}
        second[0].requires_grad_(True)
        train(second, optimizer, batches(1))
        assert store.push({"0.weight": np.zeros((64, 100))}).versions == {"0.weight": 3}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)))


def test_tied_weights_train_as_one_array_and_a_saved_file_loads_strictly(tmp_path):
    from safetensors.torch import load_file

    torch.manual_seed(0)
    module = Tied().double()
    reference = copy.deepcopy(module)
    data = [(torch.arange(10), torch.arange(10).flip(0))] * 4
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store)
        found = train(module, optimizer, data)
        path = optimizer.save(tmp_path / "model.safetensors")
    assert_same(found, train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data))
    loaded = Tied().double()
    assert loaded.load_state_dict(load_file(path), strict=True)
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_bfloat16_autocast_trains_parameters_in_float32():
    module = network().float()
    reference = copy.deepcopy(module)
    data = [(x.float(), y) for x, y in batches()]

    def losses(of: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for x, y in data:
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(of(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        found = losses(module, RemoteOptimizer(module, store))
    assert found == pytest.approx(losses(reference, torch.optim.SGD(reference.parameters(), lr=0.1)))


def test_a_grad_scaler_skips_steps_that_are_not_finite():
    module = network().float()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        x, y = batches(1)[0]
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(module(x.float()), y) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state_dict()["adam_async"]["pushes"] == 2


def test_a_state_dict_restores_rates_and_counters():
    module = network()
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store, pull_every=2)
        train(module, optimizer, batches(3))
        optimizer.param_groups[0]["lr"] = 0.01
        state = optimizer.state_dict()
        optimizer.flush()
        again = RemoteOptimizer(module, store, pull_every=2)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert again.param_groups[0]["lr"] == 0.01
        own = {"push_every": 1, "pull_every": 2, "steps": 3, "pushes": 3}
        assert state["adam_async"] == {**own, "store": store.pull().read.store}
        with pytest.raises(ValueError, match=r"pull_every=2, and this optimizer pull_every=1"):
            RemoteOptimizer(module, store).load_state_dict(state)
        with pytest.raises(ValueError, match="the state_dict has pushes=None: take an undamaged one"):
            again.load_state_dict({**state, "adam_async": {"push_every": 1, "pull_every": 2, "steps": 3}})
        with pytest.raises(ValueError, match="of another optimizer"):
            again.load_state_dict(torch.optim.SGD(module.parameters()).state_dict())


def test_a_closure_computes_the_loss_of_the_step():
    module = network()
    x, y = batches(1)[0]
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(x), y)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


def test_values_land_in_the_modules_own_memory_and_an_older_graph_is_refused():
    module = network()
    x, y = batches(1)[0]
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store)
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers


def test_parameters_that_are_not_contiguous_are_trained():
    module = network()
    module[0].weight.data = module[0].weight.data.T.contiguous().T
    reference = copy.deepcopy(module)
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        found = train(module, RemoteOptimizer(module, store), batches())
    assert not module[0].weight.is_contiguous()
    assert_same(found, train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), batches()))


@pytest.mark.parametrize("options", [{}, {"max_staleness": 2}], ids=str)
def test_a_group_that_is_added_later_is_trained(options):
    module = network()
    reference = copy.deepcopy(module)
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store, ["0.weight", "0.bias"], **options)
        train(module, optimizer, batches(3))
        optimizer.flush()
        before = parameter_arrays(module)
        np.testing.assert_array_equal(before["2.weight"], parameter_arrays(reference)["2.weight"])
        optimizer.add_param_group({"params": module[2].parameters(), "lr": 0.5})
        train(module, optimizer, batches(3))
        optimizer.flush()
        assert not np.array_equal(parameter_arrays(module)["2.weight"], before["2.weight"])
        np.testing.assert_array_equal(store.pull()["2.weight"], parameter_arrays(module)["2.weight"])


class Edges(nn.Module):
    """A module with scalar parameters and parameters without values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hollow = nn.Linear(100, 10), nn.Linear(100, 0)
        self.behind = nn.Linear(0, 10, bias=False)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.behind(self.hollow(x)) + self.empty.sum()


MODES = [
    {},
    {"max_staleness": 2},
    {"pull_every": 2},
    {"push_every": 2, "pull_every": 2},
    {"overlap": True},
    {"factors": True, "pull_every": 2},
]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("rule", [Sgd(rate=0.1), AdamW(rate=0.1)], ids=["Sgd", "AdamW"])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_scalars_and_parameters_without_values_are_trained_in_every_mode(options, rule):
    torch.manual_seed(1)
    module = Edges().double()
    before = parameter_arrays(module)
    with sync.ParameterStore.open("local", before, rule=rule) as store:
        with RemoteOptimizer(module, store, **options) as optimizer:
            train(module, optimizer, batches(4))
        values = store.pull()
    for name, array in parameter_arrays(module).items():
        np.testing.assert_array_equal(values[name], array)
        assert not array.size or (array != before[name]).any(), name


@pytest.mark.parametrize("options", [each for each in MODES if "max_staleness" not in each], ids=str)
def test_the_default_device_and_type_of_the_program_change_no_step(options):
    module = network()
    reference = copy.deepcopy(module)
    found = []
    for each, device, dtype in ((reference, "cpu", torch.float32), (module, "meta", torch.bfloat16)):
        data = batches(6)
        with sync.ParameterStore.open("local", parameter_arrays(each), rule=Sgd(rate=0.1)) as store:
            torch.set_default_dtype(dtype)
            try:
                with torch.device(device), RemoteOptimizer(each, store, **options) as optimizer:
                    train(each, optimizer, data)
            finally:
                torch.set_default_dtype(torch.float32)
        found.append(parameter_arrays(each))
    for name in found[0]:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["all", "one frozen"])
def test_a_server_of_this_host_reads_staged_gradients_where_the_optimizer_writes_them(
    servers: StoreServers, is_frozen: bool
) -> None:
    module = nn.Linear(600, 600)
    module.bias.requires_grad_(not is_frozen)
    first = parameter_arrays(module)
    with sync.ParameterStore.open(
        servers.address, first, name=f"staged-{is_frozen}", rule=Sgd(rate=0.5), link="shared"
    ) as store:
        optimizer = RemoteOptimizer(module, store, max_staleness=1)
        total = torch.zeros(600, 600)
        for _ in range(6):
            optimizer.zero_grad()
            module(torch.randn(4, 600)).square().mean().backward()
            total += module.weight.grad
            optimizer.step()
        optimizer.close()
        links = [each.channel.link for each in store._store.link.calls.connections.values()]
        assert sum(len(link._outbound._kept) for link in links) > 0
        assert sum(link._outbound.held_bytes for link in links) == 0, "a payload was copied"
        store.delete()  # or the servers, which other tests use, keep the memory of its values
    np.testing.assert_allclose(
        module.weight.detach().numpy(), first["weight"] - 0.5 * total.numpy(), rtol=1e-5, atol=1e-6
    )
