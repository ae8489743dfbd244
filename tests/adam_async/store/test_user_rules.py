"""Stores with a rule of the user: numbers, refusals, copies and disks, and which servers run it."""

import asyncio
import sys

import msgspec
import numpy as np
import pytest

from adam_async.errors import ConfigError, StoreError
from adam_async.model.rules import ImportedRule, Sgd, UserRule
from adam_async.run.user_rules import RuleSource, record_of
from adam_async.store.store import ParameterStore
from tests.adam_async.rules import MISTAKES, SAID, Means, Picky, Wrong, apply_means
from tests.adam_async.store.fleets import fleet
from tests.adam_async.store.servers import SHORT, store_servers

W = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
GRADIENTS = [np.full((2, 3), size, np.float32) for size in (0.25, -0.5, 0.75)]
BAD = np.full((2, 3), 1.5, np.float32)


def wanted(gradients=GRADIENTS, rate=0.125):
    return apply_means(W, gradients, rate=rate)[0]


async def test_a_local_store_applies_the_rule_of_its_call():
    rule = {"w": Means(rate=0.125), "b": Sgd(rate=1.0)}
    async with ParameterStore.open("local", {"w": W, "b": np.zeros(2)}, rule=rule) as store:
        for gradient in GRADIENTS:
            await store.push({"w": gradient, "b": np.ones(2)})
        values = await store.pull()
        np.testing.assert_array_equal(values["w"], wanted())
        np.testing.assert_array_equal(values["b"], [-3, -3])
        assert store.rules["w"] == record_of(Means(rate=0.125))


async def test_a_client_has_its_own_rate_and_each_push_may_have_another():
    async with ParameterStore.open("local", {"w": W}, name="m", rule=Means(rate=0.125)) as store:
        async with ParameterStore.open("local", {"w": W}, name="m", rule=Means(rate=0.5)) as other:
            await store.push({"w": GRADIENTS[0]}, rate=0.25)
            await other.push({"w": GRADIENTS[1]})
            values, mean = apply_means(W, GRADIENTS[:1], rate=0.25)
            mean = 0.9 * mean + (1.0 - 0.9) * GRADIENTS[1]
            np.testing.assert_array_equal((await other.pull())["w"], values - 0.5 * np.tanh(mean))


@pytest.mark.parametrize("how", MISTAKES)
async def test_a_mistake_costs_its_push_and_the_server_serves_on(how, caplog):
    async with ParameterStore.open("local", {"w": np.zeros(5, np.float32)}, rule=Wrong(how=how)) as store:
        (refused,) = (await store.push({"w": np.ones(5, np.float32)})).refused
        assert (refused.name, refused.start, refused.stop) == ("w", 0, 5)
        assert not (await store.pull())["w"].any()
        assert not (await store.push({"w": -np.ones(5, np.float32)}, rate=0.5)).refused
        assert (await store.pull())["w"].tolist() == [0.5] * 5
    assert f"rule tests.adam_async.rules:Wrong refused a push on w: {SAID[how]}" in caplog.text


async def test_a_client_whose_pushes_are_all_refused_does_not_fill_the_log(caplog):
    async with ParameterStore.open("local", {"w": W}, rule=Picky()) as store:
        for _ in range(20):
            assert (await store.push({"w": BAD})).refused
    lines = [each for each in caplog.records if "refused a push" in each.getMessage()]
    assert len([each for each in lines if each.levelname == "WARNING"]) == 1


async def test_a_store_needs_the_rule_on_each_server_and_the_error_names_both_and_the_option():
    async with store_servers(1) as running:
        with pytest.raises(StoreError) as refused:
            await ParameterStore.open(running.address, {"w": W}, name="m", rule=Means(), waits=SHORT)
        said = str(refused.value)
        assert "ps-0 cannot hold its shards of store 'm': this server does not allow rule tests" in said
        assert "start it with --allow-rule tests.adam_async.rules:Means, and --step-path DIR" in said
        async with ParameterStore.open(running.address, {"w": W}, name="other") as store:
            await store.push({"w": W})


async def test_a_peer_cannot_have_a_server_import_a_module_or_run_another_file(tmp_path, monkeypatch):
    (tmp_path / "a_trap.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    record = record_of(Means())
    forged = {
        "--allow-rule a_trap:Means": {"path": "a_trap:Means"},
        "--allow-rule os:system": {"path": "os:system"},
        "instead of 000000000000": {"digest": "0" * 64},
        "Means: share must be": {"constants": '{"share": 5}'},
        "has the state arrays": {"arrays": ()},
    }
    async with store_servers(1, rules=[Means]) as running:
        for number, (said, fields) in enumerate(forged.items()):
            rule = msgspec.structs.replace(record, **fields)
            with pytest.raises(StoreError, match=said):
                await ParameterStore.open(
                    running.address, {"w": W}, name=f"m{number}", rule=rule, waits=SHORT
                )
        assert "a_trap" not in sys.modules
        async with ParameterStore.open(running.address, {"w": W}, name="m", rule=Means(rate=0.125)) as store:
            for gradient in GRADIENTS:
                await store.push({"w": gradient})
            np.testing.assert_array_equal((await store.pull())["w"], wanted())


async def test_a_client_with_another_file_of_the_rule_does_not_join():
    other = msgspec.structs.replace(record_of(Means()), digest="0" * 64)
    async with ParameterStore.open("local", {"w": W}, name="m", rule=Means()):
        with pytest.raises(
            StoreError, match=r"\(file [0-9a-f]{12}\) in store 'm', and .* \(file 0{12}\) here"
        ):
            await ParameterStore.open("local", {"w": W}, name="m", rule=other)


class Beside(UserRule):
    def step(self, values, gradient, state, *, rate):
        return values - rate * gradient, state


@pytest.mark.parametrize(
    ("rule", "said"),
    [(Means, "use Sgd, Adagrad, Adam, AdamW or a UserRule"), ("lion:Lion", "use Sgd, Adagrad")],
)
async def test_what_is_no_rule_is_refused(rule, said):
    with pytest.raises(ConfigError, match=said):
        ParameterStore.open("local", {"w": W}, rule=rule)


@pytest.mark.parametrize("consistency", ["asp", "bsp"])
async def test_all_copies_have_the_bits_and_refuse_alike_also_after_a_loss(monkeypatch, consistency):
    async with fleet(monkeypatch, "ps-0", "ps-1", "ps-2") as servers:
        options = {"consistency": "bsp", "replicas": 1} if consistency == "bsp" else {}
        async with servers.open({"w": W}, copies=3, rule=Picky(rate=0.125), **options) as store:

            async def push(gradient):
                outcome = await store.push({"w": gradient})
                await store.tick()
                return outcome

            await push(GRADIENTS[0])
            await push(BAD)
            await push(GRADIENTS[1])
            np.testing.assert_array_equal((await store.pull())["w"], wanted(GRADIENTS[:2]))
            (home,) = {home for (home, _), served in servers.copies().items() if served.state.shards}
            (primary,) = servers.primaries(home)

            def content():
                shards = [
                    shard
                    for (each, _), served in servers.copies().items()
                    for shard in served.state.shards.values()
                    if each == home
                ]
                return {
                    (shard.values.tobytes(), shard.rule_state["mean"].tobytes(), shard.tables.refused)
                    for shard in shards
                }

            await servers.until(lambda: len(content()) == 1, "the copies differ")
            assert {refused for _, _, refused in content()} == {1}
            await servers.end(primary)
            assert bool((await push(BAD)).refused) == (consistency == "asp")
            await push(GRADIENTS[2])
            np.testing.assert_array_equal((await store.pull())["w"], wanted())


async def test_a_server_without_the_rule_does_not_join_the_copies_and_names_it(monkeypatch, caplog):
    async with fleet(monkeypatch, "ps-0", "ps-1") as servers:
        async with servers.open({"w": W}, copies=2, rule=Means(rate=0.125)) as store:
            await store.push({"w": GRADIENTS[0]})
            servers.rules["ps-2"] = ()
            (primary, *_) = {node for (home, node), served in servers.copies().items() if served.is_primary}
            await servers.start("ps-2")
            await servers.end(primary)
            await servers.until(
                lambda: "ps-2 does not join the shards" in caplog.text, "ps-2 was not invited"
            )
            assert "--allow-rule tests.adam_async.rules:Means" in caplog.text
            await servers.start("ps-3")
            for gradient in GRADIENTS[1:]:
                await store.push({"w": gradient})
            np.testing.assert_array_equal((await store.pull())["w"], wanted())


@pytest.mark.parametrize("durable", [False, True], ids=["pieces", "durable"])
async def test_a_store_on_disk_has_its_values_state_and_refusals_after_it_is_opened_again(tmp_path, durable):
    options = {"dir": tmp_path, "name": "m", "rule": Picky(rate=0.125), "durable": durable}
    async with ParameterStore.open("local", {"w": W}, **options) as store:
        for gradient in (*GRADIENTS[:2], BAD):
            await store.push({"w": gradient})
    async with ParameterStore.open("local", {"w": W}, **options) as store:
        assert not (await store.push({"w": GRADIENTS[2]})).refused
        np.testing.assert_array_equal((await store.pull())["w"], wanted())
        assert isinstance(store.rules["w"], ImportedRule)


async def test_a_pin_keeps_the_values_of_a_rule_of_the_user(tmp_path):
    async with ParameterStore.open(
        "local", {"w": W}, dir=tmp_path, name="m", rule=Means(rate=0.125)
    ) as store:
        await store.push({"w": GRADIENTS[0]})
        await store.pin("one")
        await store.push({"w": GRADIENTS[1]})
        np.testing.assert_array_equal((await store.read_pin("one"))["w"], wanted(GRADIENTS[:1]))


async def test_many_small_arrays_and_one_large_one_have_the_numbers_of_a_loop():
    random = np.random.default_rng(1)
    arrays = {f"a{number}": random.standard_normal(3) for number in range(40)}
    arrays["large"] = random.standard_normal(200_000)
    async with ParameterStore.open("local", arrays, rule=Means(rate=0.125)) as store:
        gradients = [{name: random.standard_normal(a.shape) for name, a in arrays.items()} for _ in range(3)]
        await asyncio.gather(*(store.push(gradient) for gradient in gradients))
        values = await store.pull()
    for name, array in arrays.items():
        mine, _ = apply_means(array, [gradient[name] for gradient in gradients], rate=0.125)
        np.testing.assert_array_equal(values[name], mine)


def test_a_rule_source_allows_nothing_by_itself():
    with pytest.raises(ConfigError, match="does not allow rule"):
        RuleSource().rule_for(record_of(Beside()))
