"""A server or client that holds the token and lies costs an optimizer a named error, and no parameter.

The servers are real; a lie replaces their answers to pulls and pushes after these are made.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import encode

from tests.adam_async.store.servers import cluster
from tests.simulation.scenarios.valid_messages import fields_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import nn

from adam_async import Sgd, StoreError, Waits, sync
from adam_async.errors import ShardUnavailable
from adam_async.messages import Pull, Push
from adam_async.parameter_server.service import ParameterServer
from adam_async.store import calls
from adam_async.torch import RemoteOptimizer, parameter_arrays
from tests.processes.commands import until
from transport import Message, Request

TOKEN = "a token that a hostile server holds"
WAITS = Waits(dial_s=5.0, answer_s=0.2, patience_s=0.25)
X = torch.ones(1, 3)
HUGE = 32 << 20

Lie = Callable[[Message], Message]


class LyingRequest(Request):
    """A request of a client to a server whose answers are replaced."""

    def __init__(self, inner: Request, lie: Lie) -> None:
        self.message = inner.message
        self._inner = inner
        self._lie = lie

    @property
    def link(self):
        return self._inner.link

    def charge(self, nbytes, then):
        self._inner.charge(nbytes + HUGE, then)

    def reply(self, message, *, lent=False):
        self._inner.charge(HUGE, lambda: self._inner.reply(self._lie(message)))

    def fail(self, code, text):
        self._inner.fail(code, text)


def with_tensors(change: Callable[[np.ndarray], list[np.ndarray]]) -> Lie:
    """A lie about the tensors of an answer."""
    return lambda message: Message(
        type=message.type, meta=message.meta, tensors=change(np.array(message.tensors[0]))
    )


def with_meta(**changes: Callable[[Any], Any]) -> Lie:
    """A lie about the fields of an answer."""

    def lie(message: Message) -> Message:
        fields = fields_of(message)
        changed = {name: change(fields.get(name)) for name, change in changes.items()}
        return Message(type=message.type, meta=encode({**fields, **changed}), tensors=message.tensors)

    return lie


def with_value(value: float, index: int) -> Lie:
    """A lie about one value."""

    def change(flat: np.ndarray) -> list[np.ndarray]:
        flat[index] = value
        return [flat]

    return with_tensors(change)


MALFORMED = {
    "too few values": with_tensors(lambda flat: [flat[:-1]]),
    "too many values": with_tensors(lambda flat: [np.concatenate([flat, flat])]),
    "no values": with_tensors(lambda flat: [flat[:0]]),
    "a matrix": with_tensors(lambda flat: [flat.reshape(1, -1)]),
    "float64": with_tensors(lambda flat: [flat.astype(np.float64)]),
    "whole numbers": with_tensors(lambda flat: [flat.view(np.int32)]),
    "float64 of as many bytes": with_tensors(lambda flat: [flat[: len(flat) // 2 * 2].view(np.float64)]),
    "two tensors": with_tensors(lambda flat: [flat, flat]),
    "no tensor": with_tensors(lambda flat: []),
    "a further version": with_meta(versions=lambda version: [version] * 99),
    "a missing version": with_meta(versions=lambda version: [version]),
    "no version": with_meta(versions=lambda _: []),
    "a version out of bounds": with_meta(versions=lambda _: 1 << 62),
    "a negative version": with_meta(versions=lambda _: -1),
    "versions of text": with_meta(versions=lambda _: "1"),
    "a clock out of bounds": with_meta(clock=lambda clock: 1 << 62),
}
"""Answers that do not fit their question."""

NOT_FINITE = {
    "nan": with_value(np.nan, 0),
    "the last value nan": with_value(np.nan, -1),
    "inf": with_value(np.inf, 1),
    "-inf": with_value(-np.inf, 1),
    "all nan": with_tensors(lambda flat: [np.full_like(flat, np.nan)]),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[SimpleNamespace]:
    """Servers that answer pulls and pushes by `lie`, and tell the truth without one."""
    found = SimpleNamespace(lie=None, to=(Pull, Push), address="")
    honest = ParameterServer._answer

    def answer(server, request, body):
        lies = found.lie is not None and isinstance(body, found.to)
        honest(server, LyingRequest(request, found.lie) if lies else request, body)

    with pytest.MonkeyPatch.context() as patch, cluster(2, token=TOKEN) as running:
        patch.setattr(ParameterServer, "_answer", answer)
        found.address = running.address
        yield found


@pytest.fixture(autouse=True)
def truth(servers) -> Iterator[None]:
    """Servers tell the truth before and after a test, and have closed the links of its clients."""
    servers.lie, servers.to = None, (Pull, Push)
    before = sockets()
    yield
    servers.lie = None
    until(lambda: sockets() <= before, "the servers to close the links of the clients")


def sockets() -> int:
    """Return the number of open sockets of this process."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(descriptor).startswith("socket:")
    return found


def module_of(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def opened(servers, arrays=None, **options) -> sync.ParameterStore:
    return sync.ParameterStore.open(servers.address, arrays, token=TOKEN, waits=WAITS, **options)


def state_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: np.array(tensor.numpy()) for name, tensor in module.state_dict().items()}


def assert_state(module: nn.Module, expected: dict[str, np.ndarray]) -> None:
    for name, array in state_of(module).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.fixture
def store(servers, request) -> Iterator[str]:
    """The name of a store with the parameters of a module, whose creator stays."""
    name = request.node.name[-60:].replace("/", "-")
    with opened(servers, parameter_arrays(module_of(seed=2)), name=name, rule=Sgd(rate=0.1)) as creator:
        yield name
        servers.lie = None
        creator.delete()


@pytest.mark.parametrize("lie", MALFORMED.values(), ids=MALFORMED)
def test_an_answer_that_does_not_fit_a_pull_ends_the_join_with_its_cause(servers, store, lie) -> None:
    module = module_of()
    before = state_of(module)
    with opened(servers, name=store) as joined:
        servers.lie = lie
        with pytest.raises(
            ShardUnavailable, match=r"primary of bundle ps-\d; its last answer is (?!internal)"
        ):
            RemoteOptimizer(module, joined)
        assert_state(module, before)
    servers.lie = None
    with opened(servers, name=store) as honest:  # the lie harmed this client only
        RemoteOptimizer(module, honest)
        assert_state(module, {**state_of(module_of(seed=2))})


@pytest.mark.parametrize("places", [["x" * 8000], [-1]], ids=["text", "negative"])
def test_late_clients_that_are_no_places_end_the_join(servers, store, places) -> None:
    with opened(servers, name=store) as joined:
        servers.lie = with_meta(behind=lambda behind: places)
        with pytest.raises(ShardUnavailable, match=r"its last answer is (?!internal)"):
            RemoteOptimizer(module_of(), joined)


@pytest.mark.parametrize("to", [Pull, Push], ids=["pull", "push"])
def test_an_answer_of_32_mib_is_a_named_error(servers, store, to) -> None:
    module = module_of()
    with opened(servers, name=store) as joined:
        optimizer = RemoteOptimizer(module, joined)
        before = parameter_arrays(module)
        servers.lie = with_tensors(lambda flat: [np.zeros(HUGE // 4, np.float32)])
        servers.to = (to,)
        module(torch.cat([X, -X])).square().sum().backward()
        with pytest.raises(ShardUnavailable, match="the primary of bundle ps-"):
            (optimizer.pull if to is Pull else optimizer.step)()
        for name, array in parameter_arrays(module).items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)


@pytest.mark.parametrize("lie", NOT_FINITE.values(), ids=NOT_FINITE)
def test_values_that_are_not_finite_end_the_join_and_reach_no_parameter(servers, store, lie) -> None:
    module = module_of()
    before = state_of(module)
    with opened(servers, name=store) as joined:
        servers.lie = lie
        with pytest.raises(
            StoreError,
            match=r"array '\S+' of store '.*' has the value -?(nan|inf) at index \d.*: the training",
        ):
            RemoteOptimizer(module, joined)
        assert_state(module, before)
        servers.lie = None
        optimizer = RemoteOptimizer(module, joined)  # the client itself goes on
        servers.lie = lie
        kept = state_of(module)
        for call in (optimizer.pull, optimizer.flush):
            with pytest.raises(StoreError, match="at index"):
                call()
            assert_state(module, kept)


@pytest.mark.parametrize("lie", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="in place"),
        pytest.param({"max_staleness": 1}, id="staged", marks=pytest.mark.thorough),
    ],
)
def test_an_answer_that_does_not_fit_a_push_ends_the_step_with_a_named_error(
    servers, store, lie, options
) -> None:
    module = module_of()
    with opened(servers, name=store) as joined:
        optimizer = RemoteOptimizer(module, joined, **options)
        before = parameter_arrays(module)
        servers.lie, servers.to = lie, (Push,)
        with pytest.raises(ShardUnavailable, match=r"its last answer is (?!internal)"):
            for _ in range(2):
                optimizer.zero_grad()
                module(torch.cat([X, -X])).square().sum().backward()
                optimizer.step()
        for name, array in parameter_arrays(module).items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)


PUSHED = {
    "a further version": with_meta(versions=lambda version: [version] * 99),
    "a missing version": with_meta(versions=lambda version: [version]),
    "no version": with_meta(versions=lambda _: []),
    "a problem of another shard": with_meta(problems=lambda _: [[4000, 2, 0]]),
    "a gap without an end": with_meta(problems=lambda _: [[0, 3, 1]]),
}


@pytest.mark.parametrize("lie", PUSHED.values(), ids=PUSHED)
def test_an_answer_that_does_not_fit_a_push_without_a_pull_is_named(servers, store, lie) -> None:
    module = module_of()
    with opened(servers, name=store) as joined:
        servers.lie, servers.to = lie, (Push,)
        with pytest.raises(ShardUnavailable, match="primary of bundle"):
            joined.push(parameter_arrays(module))


def test_values_that_become_nan_in_a_step_end_the_next_step_by_name(servers, store) -> None:
    module = module_of()
    with opened(servers, name=store) as joined:
        optimizer = RemoteOptimizer(module, joined)
        module(torch.cat([X, -X])).square().sum().backward()
        servers.lie, servers.to = with_value(np.nan, 0), (Push,)
        optimizer.step()
        optimizer.zero_grad()
        module(torch.cat([X, -X])).square().sum().backward()
        with pytest.raises(StoreError, match=r"gradient of parameter '\S+' has the value nan"):
            optimizer.step()


OTHER_ARRAYS = {
    "a missing name": (
        lambda arrays: {name: array for name, array in arrays.items() if name != "2.bias"},
        "has no array for parameter '2.bias'",
    ),
    "a wrong shape": (
        lambda arrays: {**arrays, "0.weight": arrays["0.weight"].T},
        r"parameter '0.weight' is float32\[2, 3\], and its array .* is float32\[3, 2\]",
    ),
    "a wrong type": (
        lambda arrays: {**arrays, "0.weight": arrays["0.weight"].astype(float)},
        r"parameter '0.weight' is float32\[2, 3\], and its array .* is float64\[2, 3\]",
    ),
    "other names": (
        lambda arrays: {f"other.{name}": array for name, array in arrays.items()},
        "has no array for parameter '0.weight'; it has 6",
    ),
}


@pytest.mark.parametrize(("change", "said"), OTHER_ARRAYS.values(), ids=OTHER_ARRAYS)
def test_a_store_with_other_arrays_is_refused_before_a_pull(servers, change, said, request) -> None:
    module = module_of()
    before = state_of(module)
    name = f"other {request.node.callspec.id}"
    with opened(servers, change(parameter_arrays(module)), name=name) as store:
        with pytest.raises(StoreError, match=said):
            RemoteOptimizer(module, store)
        assert_state(module, before)


@pytest.mark.parametrize("consistency", ["asp", "ssp:1"])
def test_further_arrays_of_a_store_are_not_pulled_or_are_bounded_by_memory(
    servers, monkeypatch, consistency
) -> None:
    module = module_of()
    before = state_of(module)
    arrays = {**parameter_arrays(module), **{f"further {n}": np.ones(1000, np.float32) for n in range(50)}}
    name = f"further {consistency}"
    with opened(servers, arrays, name=name, consistency=consistency, replicas=1) as creator:
        monkeypatch.setattr(calls, "LARGE_BYTES", 0)
        monkeypatch.setattr(calls, "available_bytes", lambda: 100_000)
        if consistency == "asp":
            with opened(servers, name=name) as joined:
                RemoteOptimizer(module, joined)
                with pytest.raises(StoreError, match=r"has arrays of 0\.0 GB, and 0\.0 GB of memory are"):
                    joined.pull()
        else:  # with clocks a client pulls all arrays when it joins
            with pytest.raises(StoreError, match="of memory are available here"):
                opened(servers, name=name)
        assert_state(module, before)
        creator.delete()
