"""Errors of `RemoteOptimizer` name the parameter and the remedy, and push nothing."""

import asyncio
import copy
import pickle
import re
import threading
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import nn

from adam_async import ConfigError, DeadlineExceeded, ParameterStore, Sgd, StoreError, sync
from adam_async.run.arrays import Factors
from adam_async.runtime.loop_thread import Call
from adam_async.torch import RemoteOptimizer, gradients, parameter_arrays


class Mixed(nn.Module):
    """Two layers, the second of which is used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, deep: bool = True) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if deep else x


@pytest.fixture
def module() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


@pytest.fixture
def store(module):
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        yield store


X = torch.ones(4, 3)


def versions(store: sync.ParameterStore) -> list[int]:
    return store.pull().read.of_shards.tolist()


def test_a_parameter_without_a_gradient_is_refused_or_left_out_on_request(module, store):
    module(X, deep=False).sum().backward()
    with pytest.raises(StoreError, match=r"'second.weight' has no gradient: .* allow_unused=True"):
        RemoteOptimizer(module, store).step()
    assert not any(versions(store))
    optimizer = RemoteOptimizer(module, store, allow_unused=True)
    optimizer.step()
    found = store.pull()
    np.testing.assert_array_equal(found["first.weight"], module.first.weight.detach().numpy())
    assert sorted(versions(store)) == [0, 0, 1, 1]


@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}, {"push_every": 2}], ids=str)
def test_a_loss_that_is_not_finite_is_refused_with_the_parameter_and_nothing_is_pushed(
    module, store, options
):
    optimizer = RemoteOptimizer(module, store, **options)
    with pytest.raises(
        StoreError, match=r"gradient of parameter 'first.weight' has the value nan at index 0 .*[Ll]ower"
    ):
        for _ in range(2):
            optimizer.zero_grad()
            (module(X) * float("nan")).sum().backward()
            optimizer.step()
        optimizer.flush()
    assert not any(versions(store))


def test_a_parameter_that_changes_its_shape_is_refused(module, store):
    optimizer = RemoteOptimizer(module, store)
    module.first.weight.data = torch.zeros(2, 5)
    module(torch.ones(4, 5)).sum().backward()
    with pytest.raises(StoreError, match=r"'first.weight' has shape \(2, 5\), .* \(2, 3\), .* another store"):
        optimizer.step()


def test_a_parameter_that_changes_its_type_is_refused(module, store):
    optimizer = RemoteOptimizer(module, store)
    module.double()(X.double()).sum().backward()
    with pytest.raises(StoreError, match=r"'first.weight' changed from torch.float32 to torch.float64: conv"):
        optimizer.step()


def test_a_sparse_gradient_is_refused(module, store):
    optimizer = RemoteOptimizer(module, store)
    module(X).sum().backward()
    module.first.weight.grad = module.first.weight.grad.to_sparse()
    with pytest.raises(StoreError, match=r"'first.weight' has a sparse gradient .*: .*sparse=False"):
        optimizer.step()
    assert not any(versions(store))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"push_every": 0}, "push_every is a whole number of at least 1, not 0"),
        ({"pull_every": 1.5}, "pull_every is a whole number of at least 1, not 1.5"),
        ({"max_staleness": -1}, "max_staleness is a whole number of at least 0, not -1"),
        ({"overlap": True, "push_every": 2}, "not push_every=2"),
        ({"overlap": True, "max_staleness": 1}, "and max_staleness=1"),
        ({"buffers": "shared"}, "buffers is one of local, averaged, push, pull, not 'shared'"),
        ({"params": []}, "params is empty"),
        ({"params": ["third.weight"]}, "'third.weight' is not of the module, which has 4 parameters, such"),
        ({"params": [nn.Parameter(torch.zeros(7))]}, r"of shape \(7,\) is not of the module"),
        ({"params": [3]}, "parameter 3 is not of the module"),
        ({"params": [{"params": ["first.weight"], "lr": float("nan")}]}, "lr is a number .* not nan"),
        ({"params": [{"params": ["first.weight"], "momentum": 0.9}]}, "momentum=0.9, a constant of the"),
        ({"params": [{"lr": 0.1}]}, "a parameter group has no 'params', only 'lr'"),
        ({"params": 0.1}, r"params is 0.1: .*lr=..., by its name"),
        ({"params": "first"}, "parameter 'first' is not of the module"),
        ({"factors": "first.weight"}, "factors is True or False, not 'first.weight'"),
        ({"overlap": 1}, "overlap is True or False, not 1"),
        ({"allow_unused": "no"}, "allow_unused is True or False, not 'no'"),
        ({"factors": None}, "factors is True or False, not None"),
        ({"lr": -1.0}, "lr is a number from 0 to 1e.12, not -1.0"),
        ({"lr": "0.1"}, "lr is a number from 0 to 1e.12, not '0.1'"),
        ({"lr": float("nan")}, "lr is a number from 0 to 1e.12, not nan"),
    ],
    ids=str,
)
def test_an_invalid_argument_is_refused_by_its_name(module, store, options, text):
    with pytest.raises(ConfigError, match=text):
        RemoteOptimizer(module, store, **options)


def test_one_parameter_or_one_name_is_trained_alone(module, store):
    for params in (module.first.weight, "first.weight"):
        (group,) = RemoteOptimizer(module, store, params).param_groups
        assert [id(each) for each in group["params"]] == [id(module.first.weight)]


def test_cadences_that_a_store_in_lockstep_excludes_are_refused(module):
    with sync.ParameterStore.open("local", parameter_arrays(module), consistency="bsp", replicas=1) as store:
        with pytest.raises(ConfigError, match="pull_every=2 does not fit a store with consistency bsp"):
            RemoteOptimizer(module, store, pull_every=2)
        with pytest.raises(ConfigError, match="max_staleness=2 does not fit a store with consistency bsp"):
            RemoteOptimizer(module, store, max_staleness=2)


async def test_an_asynchronous_store_is_refused(module):
    async with ParameterStore.open("local", parameter_arrays(module)) as store:
        with pytest.raises(
            ConfigError, match=re.escape("a adam_async.sync.ParameterStore".replace("a ", ""))
        ):
            RemoteOptimizer(module, store)


def test_a_group_without_a_rate_for_parameters_with_several_rates_is_refused(module):
    rules = {name: Sgd(rate=0.1 if "weight" in name else 0.2) for name in parameter_arrays(module)}
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=rules) as store:
        assert [group["lr"] for group in RemoteOptimizer(module, store).param_groups] == [0.1, 0.2]
        with pytest.raises(ConfigError, match=r"rates 0.1, 0.2: give it an lr, or make a group for each"):
            RemoteOptimizer(module, store, [{"params": module.parameters()}])
        group = {"params": module.parameters(), "lr": 0.5}
        assert RemoteOptimizer(module, store, [group]).param_groups[0]["lr"] == 0.5


def test_overlap_refuses_gradients_that_are_changed_or_accumulated(module, store):
    with RemoteOptimizer(module, store, overlap=True) as optimizer:
        module(X).sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        with pytest.raises(
            StoreError, match=r"parameter 'second.\w+' was changed after backward\(\), .*False"
        ):
            optimizer.step()
        module(X).sum().backward()
        with pytest.raises(
            ConfigError, match=r"'second.\w+' gets a second gradient before step\(\): .*push_"
        ):
            module(X).sum().backward()
    module(X).sum().backward()
    module(X).sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_overlap_takes_gradients_with_a_graph(module, store):
    with RemoteOptimizer(module, store, overlap=True) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            module(X).sum().backward(create_graph=True)
            optimizer.step()
    assert set(versions(store)) == {2}


@pytest.mark.parametrize("again", [True, False])
def test_factors_are_used_once_in_step(module, store, again):
    with RemoteOptimizer(module, store, factors=True) as optimizer:
        module(X).sum().backward()
        optimizer.step()
        with pytest.raises(
            StoreError, match=r"was not removed after the last step\(\), .* call zero_grad\(\)"
        ):
            module(X).sum().backward() if again else optimizer.step()
        optimizer.zero_grad()
        module(X).sum().backward()
        optimizer.step()
    assert set(versions(store)) == {2}


@pytest.mark.parametrize("most", [0, 1])
def test_a_pull_replaces_the_local_step_of_a_loss_that_is_not_finite(module, store, most):
    optimizer = RemoteOptimizer(module, store, pull_every=3, max_staleness=most)
    (module(X) * float("nan")).sum().backward()
    with pytest.raises(StoreError, match="has the value nan"):
        optimizer.step()
        optimizer.flush()
    optimizer.pull()
    for factor in range(3):
        optimizer.zero_grad()
        (module(X) * factor).sum().backward()
        optimizer.step()
    optimizer.flush()
    assert versions(store) == [3, 3, 3, 3]
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_after_a_loss_that_is_not_finite_overlap_continues_with_the_next_step(module, store, monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    with RemoteOptimizer(module, store, overlap=True) as optimizer:
        for factor in (1.0, float("nan"), 1.0, 1.0):
            optimizer.zero_grad()
            (module(X) * factor).sum().backward()
            if factor == 1.0:
                optimizer.step()
            else:
                with pytest.raises(StoreError, match="has the value nan"):
                    optimizer.step()
    assert versions(store) == [3, 3, 3, 3]


def test_after_an_interrupt_overlap_waits_for_no_bucket_and_the_next_step_counts(module, store, monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    ended = []

    def interrupted(call: Call[None]) -> None:
        ended.append(call)
        if len(ended) == 2:  # the second of four buckets
            raise KeyboardInterrupt
        call.result()

    with RemoteOptimizer(module, store, overlap=True) as optimizer:
        module(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        module(X).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(Call, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        assert not [*optimizer._exchanges]
        optimizer.zero_grad()
        module(X).sum().backward()
        optimizer.step()
    assert versions(store) == [3, 3, 3, 3]
    for name, array in store.pull().items():
        np.testing.assert_array_equal(module.get_parameter(name).detach().numpy(), array)


def test_a_closed_store_and_a_deadline_in_the_background_are_raised_by_the_next_step(module):
    with sync.ParameterStore.open("local", parameter_arrays(module), rule=Sgd(rate=0.1)) as store:
        optimizer = RemoteOptimizer(module, store, max_staleness=1)
        module(X).sum().backward()
        optimizer.step()
    with pytest.raises(StoreError, match="is closed: open it again"):
        optimizer.step()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("maximize", True),
        ("amsgrad", True),
        ("momentum", 0.9),
        ("betas", (0.9, 0.95)),
        ("learning_rate", 9.0),
        ("differentiable", True),
        ("Lr", 0.1),
        (3, 0.1),
    ],
)
def test_a_key_of_a_group_that_would_have_no_effect_is_refused_wherever_it_comes(module, store, key, value):
    group = {"params": list(module.first.parameters()), key: value}
    with pytest.raises(ConfigError, match=f"a parameter group has {key}="):
        RemoteOptimizer(module, store, [group])
    optimizer = RemoteOptimizer(module, store, list(module.second.parameters()))
    with pytest.raises(ConfigError, match=f"a parameter group has {key}="):
        optimizer.add_param_group(group)
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    with pytest.raises(ConfigError, match=f"a parameter group has {key}="):
        optimizer.load_state_dict(saved)
    assert key not in optimizer.param_groups[0]
    module(X).sum().backward()
    optimizer.step()
    pushed = versions(store)
    optimizer.param_groups[0][key] = value
    with pytest.raises(ConfigError, match=f"a parameter group has {key}="):
        optimizer.step()
    assert versions(store) == pushed


def test_keys_of_schedulers_and_of_equal_computations_are_accepted(module, store):
    group = {"params": list(module.parameters()), "name": "all", "foreach": True, "fused": False}
    optimizer = RemoteOptimizer(module, store, [group])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10, cycle_momentum=False)
    module(X).sum().backward()
    optimizer.step()
    schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


def test_what_is_no_group_or_no_rate_is_refused_by_name(module, store):
    optimizer = RemoteOptimizer(module, store, list(module.first.parameters()))
    for refused in (
        lambda: optimizer.add_param_group([module.second.weight]),
        lambda: RemoteOptimizer(module, store, [{"params": [module.first.weight]}, module.first.bias]),
    ):
        with pytest.raises(ConfigError, match="a parameter group is a mapping with params, lr and name, not"):
            refused()
    for rate in (torch.tensor([0.1, 0.2]), torch.tensor(1j)):
        with pytest.raises(ConfigError, match=r"lr is a number from 0 .* not tensor"):
            optimizer.add_param_group({"params": ["second.bias"], "lr": rate})
    with pytest.raises(ConfigError, match="the state_dict is of another optimizer"):
        optimizer.load_state_dict(None)
    with pytest.raises(ConfigError) as caught:
        RemoteOptimizer(module, store, [module.first.bias, {"params": list(module.parameters())}])
    assert len(str(caught.value)) < 300


def test_a_gradient_that_is_a_view_of_a_conjugate_trains(module, store):
    optimizer = RemoteOptimizer(module, store, ["first.weight"])
    module.first.weight.grad = torch.full((2, 3), 1j).conj().imag
    before = module.first.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(module.first.weight.detach(), before + 0.1)


def test_groups_changed_past_add_param_group_are_refused(module, store):
    optimizer = RemoteOptimizer(module, store, list(module.first.parameters()))
    module(X).sum().backward()
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ConfigError, match=r"lr is a number .* not nan"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.param_groups[0]["params"].append(module.second.weight)
    with pytest.raises(
        ConfigError, match=r"param_groups has other parameters, .*: add parameters by add_param_g"
    ):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [module.first.bias, module.first.weight]
    with pytest.raises(ConfigError, match="param_groups has other parameters, or another order"):
        optimizer.step()
    assert not any(versions(store))


def test_no_copy_or_pickle_of_an_optimizer_is_made(module, store, tmp_path):
    optimizer = RemoteOptimizer(module, store)
    for make in (
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda each: torch.save(each, tmp_path / "optimizer"),
        ForkingPickler.dumps,  # for processes that are spawned
    ):
        with pytest.raises(
            TypeError, match=r"cannot be copied or pickled, .*: make another over a copy of the"
        ):
            make(optimizer)


def test_a_group_that_meets_a_failed_exchange_is_added_by_a_second_call(module, store, monkeypatch):
    optimizer = RemoteOptimizer(module, store, ["first.weight", "first.bias"], max_staleness=2)
    goes_on = threading.Event()

    async def fails(store):
        await asyncio.to_thread(goes_on.wait)
        raise DeadlineExceeded("an answer of the test", 1.0)

    def step():
        optimizer.zero_grad()
        module(X).sum().backward()
        optimizer.step()

    step()
    with monkeypatch.context() as patch:
        begin = store.begin
        patch.setattr(store, "begin", lambda run: begin(fails))
        step()
    step()  # behind it, with memory for the first layer
    goes_on.set()
    group = {"params": ["second.weight", "second.bias"]}
    with pytest.raises(DeadlineExceeded, match="an answer of the test"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group(group)
    step()
    optimizer.flush()
    assert sorted(versions(store)) == [1, 1, 3, 3]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_layer_added_later_is_refused_with_the_way_to_train_it(module, store, by_name):
    optimizer = RemoteOptimizer(module, store)
    module.third = nn.Linear(2, 2)
    added = ["third.weight"] if by_name else module.third.parameters()
    claim = (
        "'third.weight' came to the module after .* no array for it.*open another store with parameter_arr"
    )
    with pytest.raises(ConfigError, match=claim):
        optimizer.add_param_group({"params": added})
    with pytest.raises(StoreError, match=r"no array for parameter 'third.weight'.*open another store"):
        RemoteOptimizer(module, store)
    module.first = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=r"'first.weight' came .* has that of an earlier one"):
        optimizer.add_param_group({"params": module.first.parameters()})
    arrays = parameter_arrays(module)
    with sync.ParameterStore.open("local", arrays, rule=Sgd(rate=0.1)) as grown:
        optimizer = RemoteOptimizer(module, grown)
        module.third(module(X)).sum().backward()
        optimizer.step()
        assert not np.array_equal(grown.pull()["third.weight"], arrays["third.weight"])


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.bfloat16(),
        lambda x: x.half(),
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: x.clone().requires_grad_(),
        lambda x: x.to("meta"),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: torch.nested.nested_tensor([x[0], x[1]]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_numpy_cannot_take_is_refused_by_the_name_of_its_array(module, store, make):
    tensor = make(torch.ones(2, 3))
    for call in (store.push, store.push_pull, store.assign):
        with pytest.raises(StoreError, match=r"'first\.weight'"):
            call({"first.weight": tensor})
    factors = Factors(np.ones((1, 3), np.float32), tensor)
    with pytest.raises(StoreError, match=r"'first\.weight'"):
        store.push({"first.weight": factors})
    with pytest.raises(StoreError, match=r"'first\.weight'"):
        store.pull(["first.weight"], out={"first.weight": tensor})
    with pytest.raises(
        ConfigError, match=r"array 'w' is .*Tensor, and no plain NumPy array: use tensor\.det"
    ):
        sync.ParameterStore.open("local", {"w": tensor})
    assert not any(versions(store))


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"push_every": 2}, {"pull_every": 2}], ids=str)
def test_a_step_after_the_close_is_refused_with_the_cure(module, store, options):
    with RemoteOptimizer(module, store, **options) as optimizer:
        module(X).sum().backward()
        optimizer.step()
    before, values = versions(store), parameter_arrays(module)
    module(X).sum().backward()
    with pytest.raises(
        StoreError, match=r"this optimizer was closed, .*: call close\(\) after the last step"
    ):
        optimizer.step()
    assert versions(store) == before
    assert all((values[name] == array).all() for name, array in parameter_arrays(module).items())
    optimizer.pull()  # reading stays possible


class WithWords(Mixed):
    """A module whose `state_dict` has more than tensors."""

    def get_extra_state(self) -> dict[str, list[str]]:
        return {"vocabulary": ["a", "b"]}

    def set_extra_state(self, state: object) -> None:
        pass


def test_a_state_dict_with_more_than_tensors_is_refused_with_a_call_that_saves_it(store, tmp_path):
    module = WithWords()
    optimizer = RemoteOptimizer(module, store)
    with pytest.raises(
        ConfigError, match=r"'_extra_state' .* is a dict, .*torch.save\(module.state_dict\(\), path\)"
    ):
        optimizer.save(tmp_path / "model")
    optimizer.flush()
    torch.save(module.state_dict(), tmp_path / "model")
    assert torch.load(tmp_path / "model")["_extra_state"] == {"vocabulary": ["a", "b"]}


@pytest.mark.parametrize("path", ["", "folder"])
def test_a_path_that_is_a_folder_is_refused_by_its_own_name(module, store, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for save in (RemoteOptimizer(module, store).save, store.save):
        with pytest.raises(IsADirectoryError, match=f"this is a folder: '{path or '.'}'"):
            save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_tensors_as_memory_of_a_pull_are_refused_with_the_call_that_works(module, store):
    weight = module.first.weight
    for tensor in (weight, weight.detach()):
        with pytest.raises(
            StoreError, match=r"out of 'first.weight' is .*: give tensor.detach\(\).numpy\(\)"
        ):
            store.pull(["first.weight"], out={"first.weight": tensor})
    store.assign({"first.weight": np.full((2, 3), 7.0, np.float32)})
    store.pull(["first.weight"], out={"first.weight": weight.detach().numpy()})
    assert (weight == 7).all()


def test_an_optimizer_over_a_reader_takes_values_and_steps_not(module, store):
    copied = copy.deepcopy(module)
    with sync.ParameterStore.open("local", name=store.name, reader=True) as reading:
        optimizer = RemoteOptimizer(copied, reading)
        store.assign({"first.weight": np.full((2, 3), 7.0, np.float32)})
        optimizer.pull()
        assert (copied.first.weight == 7).all()
        copied(X).sum().backward()
        with pytest.raises(StoreError, match="this client is a reader: open the store without reader=True"):
            optimizer.step()
        optimizer.close()
