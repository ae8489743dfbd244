"""Bad calls: each is one error that names array, value and cure, and it harms no other client."""

import asyncio
import copy
import math
import pickle
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from adam_async import (
    Adagrad,
    Adam,
    AdamW,
    ArraySpec,
    ConfigError,
    DeadlineExceeded,
    Factors,
    ParameterStore,
    Sgd,
    StoreError,
    Waits,
    sync,
)
from adam_async.controller import records
from adam_async.errors import RoleUnreachable
from adam_async.model import kernels
from adam_async.parameter_server import store_host
from adam_async.parameter_server.store_host import kernels_of
from adam_async.run.store_record import BundleRecord
from adam_async.run.token_file import derived_text
from adam_async.store import joining
from tests.adam_async.cluster_maps import store_record
from tests.adam_async.runs import until
from tests.adam_async.store.servers import SHORT, servers, store_servers
from transport import HandshakeRejected


class Refusing:
    """An object that NumPy cannot take, as a tensor of another device is one."""

    def __array__(self, *args: object, **options: object) -> NoReturn:
        raise RuntimeError("it is elsewhere")


TOKEN = "a token that nobody guesses"
W = np.ones((2, 3), np.float32)

BAD_PUSHES: list[tuple[dict[Any, Any], str]] = [
    ({"w": W.T}, r"gradient of 'w' has shape \(3, 2\), the array \(2, 3\)"),
    ({"w": W[0]}, r"gradient of 'w' has shape \(3,\)"),
    ({"w": W.astype(float)}, r"gradient of 'w' has values of type float64.*\.astype\('float32'\)"),
    ({"w": W.astype(int)}, "values of type int64"),
    ({"w": W.astype(complex)}, "values of type complex128"),
    ({"w": W.astype(object)}, "values of type object"),
    ({"w": W.astype(">f4")}, "values of type >f4"),
    ({"w": [[1.0], [1.0, 2.0]]}, "gradient of 'w' is no array: .*; give a NumPy array of float32"),
    ({"w": None}, "gradient of 'w' is None: leave its name out"),
    ({"w": "ones"}, "gradient of 'w' has values of type <U4.*: give a NumPy array of float32"),
    ({"w": 1.0}, r"type float64, the array float32: convert it with np\.asarray\(x, 'float32'\)"),
    ({"w": Factors([[1.0] * 3], W[:1, :2])}, r"activations .*: convert it with np\.asarray\(x, 'float32'\)"),
    ({"w": np.ma.masked_array(W, W > 0)}, r"gradient of 'w' is a masked array.*: use array\.filled\(0\)"),
    ({"w": Refusing()}, r"gradient of 'w' is no array: it is elsewhere; give a NumPy array of float32"),
    ({"w": Factors(Refusing(), W[:, :2])}, "activations of 'w' is no array: it is elsewhere"),
    ({"w": np.zeros((2, 3), [("x", "f4")])}, "values of type"),
    ({"w": [[1.0] * 3] * 2}, r"type float64, the array float32: convert it with np\.asarray\(x, 'float32'\)"),
    ({"w": W * np.float32(math.nan)}, "gradient of 'w' has the value nan at index 0"),
    ({"w": W * np.float32(math.inf)}, "gradient of 'w' has the value inf at index 0"),
    ({"v": W}, "the store has no array 'v'; it has 2: 'b', 'w'"),
    ({7: W}, "the store has no array '7'"),
    ({"x" * 10_000: W}, "the store has no array 'x+'; it has 2"),
    ({"w": Factors(W, W)}, r"errors of 'w' have shape \(2, 3\); \(K, 2\) is needed"),
    ({"w": Factors(W.astype(">f4"), W[:, :2])}, "activations of 'w' have type >f4"),
    ({"w": Factors(W, W[:1, :2])}, "activations of 'w' have 2 rows, errors 1"),
    ({"w": Factors(W[:0], W[:0, :2])}, "K >= 1"),
    ({"w": Factors(W * np.float32(math.nan), W[:, :2])}, "activations of 'w' has the value nan"),
    ({"b": Factors(W, W)}, r"'b' has shape \(2,\); Factors need a matrix"),
]


@pytest.mark.parametrize(("gradients", "claim"), BAD_PUSHES, ids=lambda value: str(value)[:40])
async def test_a_bad_gradient_is_refused_whole(gradients: dict[Any, Any], claim: str) -> None:
    async with (
        ParameterStore.open(
            "local", {"w": np.zeros((2, 3), np.float32), "b": np.zeros(2)}, name="model"
        ) as store,
        ParameterStore.open("local", name="model") as other,
    ):
        with pytest.raises(StoreError, match=claim):
            await store.push({"b": np.ones(2), **gradients})
        assert not (await store.pull())["b"].any()
        assert (await store.push({"b": np.ones(2)})).versions == {"b": 1}
        assert (await other.push({"b": np.ones(2)})).versions == {"b": 2}


ODD_MEMORY: dict[str, NDArray[np.float32]] = {
    "column of a matrix": np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1],
    "every second": np.arange(6, dtype=np.float32)[::2],
    "backwards": np.arange(3, dtype=np.float32)[::-1],
    "one value for all": np.broadcast_to(np.float32(2), (3, 4)),
    "one row for all": np.broadcast_to(np.arange(4, dtype=np.float32), (3, 4)),
    "real part": (np.arange(3) + 1j).astype(np.complex64).real,
    "field": np.ones(3, [("a", "f4"), ("b", "i4")])["a"],
    "diagonal": np.diagonal(np.arange(9, dtype=np.float32).reshape(3, 3)),
}


@pytest.mark.parametrize("gradient", ODD_MEMORY.values(), ids=ODD_MEMORY)
async def test_an_array_in_any_memory_is_taken(gradient: NDArray[np.float32]) -> None:
    async with ParameterStore.open("local", {"w": np.zeros_like(gradient)}, rule=Sgd(rate=1)) as store:
        values = await store.push_pull({"w": gradient})
        np.testing.assert_array_equal(values["w"], -gradient)
        await store.assign({"w": gradient})
        np.testing.assert_array_equal((await store.pull())["w"], gradient)
    async with ParameterStore.open("local", {"w": gradient}) as store:
        np.testing.assert_array_equal((await store.pull())["w"], gradient)


@pytest.mark.parametrize("rate", [math.inf, -math.inf, math.nan, -1.0, 1e13, "0.1", 1j])
async def test_a_rate_is_a_finite_number(rate: Any) -> None:
    async with ParameterStore.open("local", {"b": np.zeros(2)}) as store:
        with pytest.raises(StoreError, match=r"rate is a number from 0 to 1e\+12, not "):
            await store.push({"b": np.ones(2)}, rate=rate)
        with pytest.raises(StoreError, match="weight is a whole number"):
            await store.push({"b": np.ones(2)}, weight=0)
        assert not (await store.pull())["b"].any()
    for rule in (Sgd, Adagrad, Adam):
        with pytest.raises(
            ConfigError, match=f"{rule.__name__}: rate must be (within 0 and 1e.12|a number), not"
        ):
            rule(rate=rate)


BAD_ARRAYS: list[tuple[Any, str]] = [
    ({}, "1 to 10000 arrays, not 0"),
    ([W], "arrays is a mapping of names to arrays, not list"),
    ({3: W}, "the name of an array is text, not 3"),
    ({b"w": W}, "the name of an array is text, not b'w'"),
    ({"x" * 10_240: W}, "its name has 10240 bytes, 1024 are the most"),
    ({"a\ud800": W}, "lone surrogate"),
    ({"w": W.astype(int)}, "array 'w' has values of type int64; convert it to float32 or float64"),
    ({"w": W.astype(complex)}, "type complex128"),
    ({"w": W.astype(object)}, "type object"),
    ({"w": W.astype(">f8")}, "type >f8"),
    ({"w": W.astype(np.float16)}, "type float16"),
    ({"w": [1.0]}, r"array 'w' is list, .*: convert it with np\.asarray\(x, 'float32'\); an ArraySpec"),
    ({"w": "text"}, "type <U4"),
    ({"w": np.ma.masked_array([1.0, 2.0])}, r"array 'w' is MaskedArray, .*: use array\.filled\(0\)"),
    ({"w": np.array([0.0, math.nan])}, "array 'w' has the value nan at index 1"),
    ({"w": np.array([-math.inf])}, "array 'w' has the value -inf at index 0"),
    ({"w": ArraySpec((-1,))}, "the negative length -1"),
    ({"w": ArraySpec((1 << 30, 1 << 30))}, "values, 1099511627776 are the most"),
    ({f"a{number}": np.zeros(0) for number in range(10_001)}, "1 to 10000 arrays, not 10001"),
]


@pytest.mark.parametrize(("arrays", "claim"), BAD_ARRAYS, ids=lambda value: str(value)[:40])
def test_bad_arrays_are_refused_before_a_message(arrays: Any, claim: str) -> None:
    with pytest.raises(ConfigError, match=claim):
        ParameterStore.open("local", arrays)


FAR = "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "claim"),
    [
        ({"name": ""}, "a store's name has 1 to 128 bytes of printable characters"),
        ({"name": "a/b"}, "no slash"),
        ({"name": "x" * 10_240}, "1 to 128"),
        ({"name": 5}, "name must be text, not 5"),
        ({"where": "10.0.0.1:7000"}, "where: address '10.0.0.1:7000' is not of the form tcp"),
        ({"where": "tcp://host"}, "'tcp://host' is not of the form"),
        ({"where": "http://127.0.0.1:1"}, "is not of the form"),
        ({"where": None}, "where must be text, not None"),
        ({"create": "maybe"}, "create must be one of auto, new, never, not 'maybe'"),
        ({"create": "new", "reader": True}, "create='new' needs the arrays"),
        (
            {"consistency": "ssp"},
            "consistency must be asp, ssp:S with a whole number S .*, or bsp, not 'ssp'",
        ),
        ({"consistency": "ssp:-1"}, "not 'ssp:-1'"),
        ({"consistency": "ssp:1048577"}, "whole number S of steps up to 1048576, or bsp, not 'ssp:1048577'"),
        ({"consistency": None}, "consistency must be text, not None"),
        ({"consistency": "bsp", "create": "new"}, "consistency='bsp' needs replicas=N"),
        ({"replicas": True}, "replicas must be a whole number, not True"),
        ({"reader": "no"}, "reader must be true or false, not 'no'"),
        ({"durable": 1}, "durable must be true or false, not 1"),
        ({"durable": True}, "durable is True, and the server of 'local' has no folder: add dir=FOLDER"),
        ({"servers": "2"}, "servers must be a whole number, not '2'"),
        ({"waits": None}, "waits must be a table of seconds, not None"),
        ({"copies": 2}, "copies=2 excludes where=local: local has one server; leave copies out, or open"),
        ({"where": FAR, "copies": 0}, "copies must be within 1 and 8, not 0"),
        ({"where": FAR, "copies": 9}, "copies must be within 1 and 8, not 9"),
        ({"where": FAR, "min_in_sync": -1}, "min_in_sync must be within 0 and 8, not -1"),
        ({"where": FAR, "copies": 2, "min_in_sync": 3}, "min_in_sync is 3, and copies 2: raise copies, or"),
        ({"replicas": -1}, "replicas must be within 0 and 1048576, not -1"),
        ({"servers": 3}, "servers=3 excludes where=local: local has one server; leave servers out, or open"),
        ({"where": "locl"}, "'locl' is not of the form .*; 'local' stands for a server in this loop"),
        ({"servers": 1.5}, "servers must be a whole number, not 1.5"),
        ({"where": FAR}, "name is missing, and where is 'tcp.*'.* Add name='model', in each client"),
        (
            {"where": FAR, "name": "model", "dir": "shards"},
            "dir=shards has no effect with where=tcp.*, only with where=local, because .* folders",
        ),
        ({"where": FAR, "reader": True}, "name is missing, and where is 'tcp"),
        ({"dir": "shards"}, "name is missing, and dir is '.*shards'"),
        ({"arrays": None}, "name is missing, and arrays is None"),
        ({"create": "never"}, "name is missing, and create is 'never'"),
        ({"reader": True}, "name is missing, and reader is True"),
        ({"consistency": "bsp", "replicas": 2}, "name is missing, and replicas is 2"),
        ({"shard_bytes": 0}, "shard_bytes must be within 8 and 1099511627776, not 0"),
        (
            {"arrays": {"w": ArraySpec((1 << 25,))}, "shard_bytes": 1 << 27},
            "array 'w' has a shard of 134217728 bytes, .* holds 67043328: set shard_bytes to at most",
        ),
        (
            {"arrays": {"w": ArraySpec((1 << 24,), split=False)}},
            "array 'w' has a shard of 67108864 bytes, and a message holds 67043328: leave split=False out",
        ),
        ({"rule": {"v": Sgd()}}, "rule names 'v', which are not in arrays"),
        ({"rule": {}}, "rule names no rule for array 'w'"),
        ({"rule": "sgd"}, "the rule of array 'w' is 'sgd'; use Sgd, Adagrad, Adam, AdamW or a UserRule"),
        ({"token": "short"}, "token"),
        ({"token": derived_text(TOKEN, "worker")}, "holds the keys of role worker, and this is a client"),
        ({"token": derived_text(TOKEN, "client"), "reader": True}, "of role client, and this is a reader"),
    ],
)
def test_bad_arguments_are_refused_before_a_message(arguments: dict[str, Any], claim: str) -> None:
    with pytest.raises(ConfigError, match=claim):
        ParameterStore.open(**{"where": "local", "arrays": {"w": W}, **arguments})


def test_a_specification_of_an_array_is_checked() -> None:
    for shape in (3, (1.5,), "ab"):
        with pytest.raises(ConfigError, match="shape is a tuple of whole numbers"):
            ArraySpec(shape)  # type: ignore[arg-type]
    for dtype in ("int32", "nothing", "complex64"):
        with pytest.raises(ConfigError, match=f"dtype is float32 or float64, not '{dtype}'"):
            ArraySpec((1,), dtype)
    with pytest.raises(ConfigError, match="split is True or False, not 2"):
        ArraySpec((4,), split=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"nesterov must be true or false, not 0\.9"):
        Sgd(rate=0.1, momentum=0.9, nesterov=0.9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "claim"),
    [
        (
            {"arrays": {"w": np.zeros(3)}},
            r"array 'w' is float64\(2,\) in store 'model', and float64\(3,\) here: .* under another name",
        ),
        (
            {"arrays": {"w": np.zeros(2, np.float32)}},
            r"float64\(2,\) in store 'model', and float32\(2,\) here",
        ),
        ({"arrays": {"v": np.zeros(2)}}, "store 'model' has no array 'v'; it has 1 array: give the arrays"),
        ({"arrays": {"w": np.zeros(2), "v": np.zeros(2)}}, "has no array 'v'"),
        ({"rule": Adagrad()}, r"array 'w' has rule Sgd\(\) in store 'model', and Adagrad\(\) here: .* name"),
        ({"rule": Sgd(rate=0.1, momentum=0.5)}, r"has rule Sgd\(\) in .* and Sgd\(momentum=0\.5\) here"),
        ({"rule": AdamW(weight_decay=0.0)}, r"and AdamW\(weight_decay=0\.0\) here"),
        ({"consistency": "ssp:1"}, "has consistency asp, not ssp:1: open it with 'asp', or open another"),
        ({"create": "new"}, "store 'model' exists: choose another name"),
    ],
)
async def test_a_second_open_that_disagrees_names_the_difference(
    arguments: dict[str, Any], claim: str
) -> None:
    plain: dict[str, Any] = {"arrays": {"w": np.zeros(2)}, "rule": Sgd(rate=1.0), "name": "model"}
    async with ParameterStore.open("local", **plain) as store:
        with pytest.raises(StoreError, match=claim):
            await ParameterStore.open("local", **{**plain, **arguments})
        async with ParameterStore.open(
            "local", {"w": np.ones(2)}, name="model", rule=Sgd(rate=0.25)
        ) as other:
            await other.push({"w": np.ones(2)})
        np.testing.assert_array_equal((await store.pull())["w"], np.full(2, -0.25))


async def test_bad_pulls_name_what_does_not_fit() -> None:
    async with ParameterStore.open("local", {"w": W, "b": np.zeros(2)}) as store:
        cases: list[tuple[Any, Any, str]] = [
            ("w", None, r"names is a sequence of names: \['w'\]"),
            (["v"], None, "the store has no array 'v'"),
            (["w"], {"b": np.zeros(2)}, "out names array 'b', which is not pulled"),
            (["w"], {"w": np.zeros((3, 2), np.float32)}, r"out of 'w' is float32\(3, 2\)"),
            (["w"], {"w": np.zeros((2, 3))}, r"out of 'w' is float64\(2, 3\)"),
            (["w"], {"w": np.asfortranarray(W)}, "must be C-contiguous"),
            (["w"], {"w": np.ma.masked_array(W.copy())}, "without a mask"),
            (["w"], {"w": W.astype(">f4")}, r"out of 'w' is >f4\(2, 3\)"),
            (
                ["w"],
                {"w": [1.0]},
                r"out of 'w' is list, .*\(2, 3\): give a NumPy array of that type and shape",
            ),
            (["w"], [W], "out is a mapping of names to arrays, not list"),
        ]
        for names, out, claim in cases:
            with pytest.raises(StoreError, match=claim):
                await store.pull(names, out=out)
        with pytest.raises(StoreError, match="read takes the values of a pull, or their versions, not dict"):
            await store.push({"b": np.ones(2)}, read={})  # type: ignore[arg-type]
        async with ParameterStore.open("local", {"b": np.zeros(2)}, name="other") as other:
            values = await other.pull()
            with pytest.raises(StoreError, match="read holds versions of another store"):
                await store.push({"b": np.ones(2)}, read=values)
        assert len(await store.pull()) == 2


async def test_a_reader_may_neither_push_nor_tick_nor_delete_and_waits_for_no_client_to_hear_it() -> None:
    waits = Waits(prepare_s=0.1)
    async with (
        ParameterStore.open(
            "local", {"b": np.ones(2)}, name="model", consistency="ssp:1", replicas=2
        ) as store,
        ParameterStore.open("local", name="model", reader=True, waits=waits) as reader,
    ):
        for call in (reader.push({"b": np.ones(2)}), reader.assign({"b": np.ones(2)}), reader.tick()):
            with pytest.raises(StoreError, match="this client is a reader"):
                await call
        with pytest.raises(StoreError, match="open the store without reader=True to delete it"):
            await reader.delete()
        for each in (store, reader):
            np.testing.assert_array_equal((await each.pull())["b"], np.ones(2))


async def test_a_closed_store_says_so_and_may_be_closed_again() -> None:
    store = await ParameterStore.open("local", {"b": np.zeros(2)}, name="model")
    await store.close()
    await store.close()
    for call in (
        store.push({"b": np.ones(2)}),
        store.pull(),
        store.tick(),
        store.settled(),
        store.delete(),
        store.assign({"b": np.ones(2)}),
    ):
        with pytest.raises(StoreError, match="store 'model' is closed: open it again"):
            await call


async def test_an_opening_opens_once() -> None:
    opening = ParameterStore.open("local", {"b": np.zeros(2)})
    async with opening:
        with pytest.raises(StoreError, match=r"was opened before: call ParameterStore\.open again"):
            await opening


async def test_the_use_of_a_store_that_is_not_open_names_how_to_open_it() -> None:
    opening: Any = ParameterStore.open("local", {"b": np.zeros(2)}, name="model")
    remedy = r"store 'model' is not open.*use `async with` or `await`; .* use adam_async\.sync"
    with pytest.raises(AttributeError, match=remedy):
        opening.pull()
    with pytest.raises(TypeError, match=remedy), opening:
        pass
    assert "use `async with` or `await`" in repr(opening)
    with pytest.raises(AttributeError, match="'Opening' object has no attribute 'pul'"):
        opening.pul()


async def test_a_deletion_ends_the_pushes_of_other_clients_with_an_error() -> None:
    async with servers(2) as where:
        one = await ParameterStore.open(where, {"b": np.zeros(2)}, name="model")
        async with ParameterStore.open(where, name="model") as other:

            async def push() -> None:
                while True:
                    await other.push({"b": np.ones(2)})

            async with asyncio.TaskGroup() as group:
                pushing = group.create_task(_error_of(push()))
                await other.push({"b": np.ones(2)})
                await one.delete()
            assert "store 'model' was deleted" in str(pushing.result())
        async with ParameterStore.open(where, {"b": np.zeros(3)}, name="model") as anew:
            assert anew.arrays["b"].shape == (3,)


async def _error_of(work: Any) -> StoreError:
    with pytest.raises(StoreError) as caught:
        await work
    return caught.value


async def test_a_store_larger_than_the_memory_of_the_servers_is_refused() -> None:
    async with servers(1) as where, ParameterStore.open(where, {"b": np.zeros(2)}, name="model") as small:
        with pytest.raises(StoreError, match=r"ps-0, which has [0-9]+ bytes free: "):
            await ParameterStore.open(
                where, {"huge": ArraySpec((1 << 38,))}, name="huge", shard_bytes=1 << 25
            )
        assert (await small.push({"b": np.ones(2)})).versions == {"b": 1}
        async with ParameterStore.open(where, {"b": np.ones(2)}, name="huge") as fits:
            np.testing.assert_array_equal((await fits.pull())["b"], np.ones(2))


async def test_without_servers_the_wait_is_named_early_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "NOTICE_S", 0.01)
    claim = "to open: it needs 1 server, and 0 are live; start one"
    async with servers(0) as where:
        with pytest.raises(DeadlineExceeded, match=claim):
            await ParameterStore.open(where, {"b": np.zeros(2)}, name="model", waits=SHORT)
    assert f"waits 1 s for store 'model' {claim}" in caplog.text


async def test_a_server_without_memory_is_named_at_once_and_others_are_not_harmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    async with servers(2) as where, ParameterStore.open(where, {"b": np.zeros(2)}, name="b") as other:
        with monkeypatch.context() as patch:
            patch.setattr(store_host, "own_shards", fail)
            error = await _error_of(ParameterStore.open(where, {"w": W}, name="model", servers=1))
        assert "'model' cannot be loaded" in str(error)
        assert "cannot hold its shards of store 'model': it has no memory for them" in str(error)
        assert (await other.push({"b": np.ones(2)})).versions == {"b": 1}
        async with ParameterStore.open(where, {"w": W}, name="model", servers=1) as store:
            np.testing.assert_array_equal((await store.pull())["w"], W)


async def test_without_a_controller_the_address_is_named() -> None:
    async with servers(0) as where:
        pass
    with pytest.raises(RoleUnreachable, match=f"cannot reach the controller at {where}"):
        await ParameterStore.open(where, {"b": np.zeros(2)}, name="model", waits=SHORT)
    for address in ("tcp://", "tcp://host", "http://127.0.0.1:1"):
        with pytest.raises(ConfigError, match=address):
            await ParameterStore.open(address, {"b": np.zeros(2)}, name="model", waits=SHORT)


async def test_a_token_that_may_not_join_is_refused_and_one_that_may_works() -> None:
    async with servers(1, token=TOKEN) as where:
        for token in (None, "another token of many bytes"):
            with pytest.raises(HandshakeRejected):
                await ParameterStore.open(where, {"b": np.zeros(2)}, name="model", token=token, waits=SHORT)
        async with ParameterStore.open(
            where, {"b": np.zeros(2)}, name="model", token=derived_text(TOKEN, "client")
        ) as store:
            await store.push({"b": np.ones(2)})
            keys = derived_text(TOKEN, "reader")
            async with ParameterStore.open(where, name="model", reader=True, token=keys) as reader:
                assert (await reader.pull())["b"].any()


async def test_an_array_of_a_reserved_name_is_not_saved() -> None:
    async with ParameterStore.open("local", {"__metadata__": np.zeros(2)}) as store:
        with pytest.raises(StoreError, match="'__metadata__' has a name that safetensors reserves"):
            await store.save("/nowhere/model.safetensors")


async def test_a_server_goes_on_beside_a_store_that_it_cannot_hold(caplog: pytest.LogCaptureFixture) -> None:
    async with store_servers(1) as running:
        (server,) = running.servers
        follow = server._membership.map
        bad = store_record("bad", buckets=("ps-0",) * 64, phase="loading", generation=7)
        bundle = BundleRecord(store="bad", in_sync=(server._me,))
        assert server._take_up("bad", bad, "ps-0", bundle, follow) is None
        assert "ps-0 cannot hold its shards of store 'bad': store bad lacks 1 pieces" in caplog.text
        async with ParameterStore.open(running.address, {"w": W}, name="model") as store:
            np.testing.assert_array_equal((await store.pull())["w"], W)


async def test_a_server_goes_on_if_its_record_is_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def value() -> Any:
        async with ParameterStore.open(running.address, {"w": W}, name="model") as store:
            return (await store.pull())["w"]

    async with store_servers(1) as running:
        monkeypatch.setattr(records, "MOST_SERVED", 0)
        opening = asyncio.create_task(value())
        await until(lambda: "ps-0 cannot report 1 store" in caplog.text)
        monkeypatch.undo()
        running.servers[0]._loaded.set()
        np.testing.assert_array_equal(await opening, W)


def test_a_store_with_kernels_that_a_server_lacks_is_served_without_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    store = store_record("s", kernels="numba")
    assert kernels_of(store) == "numpy"
    assert "NumPy applies the rules of store s: kernels 'numba' need the package numba" in caplog.text
    with pytest.raises(ConfigError, match="need the package numba"):
        kernels_of(msgspec.structs.replace(store, program="run"))


async def test_no_copy_or_pickle_of_a_client_is_made() -> None:
    opening = ParameterStore.open("local", {"w": np.ones(3)}, rule=Sgd(rate=1.0))
    with sync.ParameterStore.open("local", {"w": np.ones(3)}) as plain:
        async with opening as store:
            for client in (opening, store, plain):
                for make in (copy.copy, copy.deepcopy, pickle.dumps):
                    with pytest.raises(
                        TypeError, match=r"cannot be copied or pickled.*: pass its address and"
                    ):
                        make(client)
            values, pushed = await store.pull(), await store.push({"w": np.ones(3)})
    for make in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        np.testing.assert_array_equal(make(values)["w"], np.ones(3))
        np.testing.assert_array_equal(make(values).read.of_shards, values.read.of_shards)
        assert make(pushed) == pushed


@pytest.mark.parametrize("rule", [Adam(), Sgd(rate=0.5), {"w": Sgd()}])
async def test_a_rule_without_arrays_is_refused_because_the_store_has_its_own(rule: Any) -> None:
    async with ParameterStore.open("local", {"w": W}, name="model", rule=Adagrad()) as store:
        with pytest.raises(
            ConfigError, match=r"rule=.* without arrays, .*: give the arrays .*, or leave rule out"
        ):
            ParameterStore.open("local", name="model", rule=rule)
        async with ParameterStore.open("local", name="model") as joined:
            assert joined.rules == store.rules


@pytest.mark.parametrize(
    "given",
    [
        {"consistency": "ssp:1"},
        {"replicas": 2},
        {"copies": 2},
        {"min_in_sync": 1},
        {"servers": 1},
        {"shard_bytes": 64},
        {"durable": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("reader", [False, True])
def test_what_the_creator_decides_is_refused_without_arrays(given: dict[str, Any], reader: bool) -> None:
    (name,) = given
    with pytest.raises(
        ConfigError, match=rf"{name}=.* without arrays, .*: give the arrays .*, or leave {name} out"
    ):
        ParameterStore.open(FAR, name="model", reader=reader, **given)


@pytest.mark.parametrize(
    "groups",
    [
        (0, 0, 1),
        (1,),
        (1, 2),
        (1, 3, 3),
        (1, 5, 2),
        (1, 0, 1, 1, 2),
        (1, -1, 2),
        (1 << 32, 0, 1),
        (1, 0, 1 << 32),
        ("a", 0, 1),
        (1, 0.5, 2),
        7,
        (1, *range(1026)),
    ],
    ids=lambda groups: str(groups)[:20],
)
async def test_groups_that_no_server_takes_are_refused_and_the_client_goes_on(groups: Any) -> None:
    async with ParameterStore.open("local", {"w": np.zeros(2)}, rule=Sgd(rate=1.0)) as store:
        with pytest.raises(StoreError, match="groups"):
            await store.push({"w": np.ones(2)}, groups=groups)
        await store.push({"w": np.ones(2)}, groups=(1, 0, 1))
        assert (await store.pull())["w"].tolist() == [-1.0, -1.0]
