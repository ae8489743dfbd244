"""The messages of a step: every shard once, the fewer bytes, the gradients of the model."""

from importlib.util import find_spec
from itertools import chain

import numpy as np
import pytest

from adam_async.model.keyed_random import Dice
from adam_async.model.named import digits, mlp
from adam_async.model.network import Network
from adam_async.run.partition import table_of
from adam_async.run.shard_table import assign_buckets
from adam_async.worker import push_plan
from adam_async.worker.push_plan import PushBuffer, choose_protocol, factorable_tensors, plan_pushes
from tests.adam_async.runs import with_frozen

GROUP = 4
WANTED = ["auto", "delta", "factors"]


class Layout:
    """A model, its shards, and their servers."""

    def __init__(self, *, shard_bytes=16 << 10, servers=3, spec=None, dtype=np.float64, kernels="numpy"):
        self.model = Network(spec or digits(), dtype, kernels=kernels)
        self.table = table_of(self.model, shard_bytes=shard_bytes)
        self.buckets = assign_buckets(self.table, [f"ps-{number}" for number in range(servers)])
        self.weights = self.model.initial_weights(Dice(1))

    def plan(self, wanted="auto", images=GROUP):
        return plan_pushes(self.model, self.table, self.buckets, images=images, wanted=wanted)

    def choose(self, tensor, **options):
        shape = self.model.parameter(tensor).shape
        return choose_protocol(self.table, self.buckets, tensor, shape, **{"rows": 1, **options})

    def trained(self, images=GROUP, number=0):
        """A context in which a group has gone forward and back."""
        context = self.model.context(GROUP)
        shape = (images, *self.model.spec.input_shape)
        pixels = Dice(2).normal("x", keys=(number,), count=int(np.prod(shape)), dtype=float).reshape(shape)
        context.load(pixels, np.arange(images) % 10)
        self.model.forward(self.weights, context)
        self.model.backward(self.weights, context)
        return context

    def gradient(self, context, tensor):
        out = np.empty(self.model.parameter(tensor).shape, self.model.dtype)
        self.model.deltas(context, {tensor: out})
        return out

    def received(self, plan, buffer):
        """The gradients in the messages of a step, as their servers read them: flat, by tensor."""
        found = {p.name: np.full(p.size, np.nan) for p in self.model.parameters}
        for index, message in enumerate(plan.messages):
            rest = iter(buffer.tensors(index))
            for part in message.parts:
                if part.factors:
                    inputs, errors = next(rest), next(rest)
                    flat = (errors @ inputs.T).reshape(-1)
                else:
                    flat = next(rest)
                at = 0
                for shard in part.shards:
                    found[shard.tensor][shard.start : shard.stop] = flat[at : at + shard.size]
                    at += shard.size
                assert at == flat.size
            assert next(rest, None) is None
        return found


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("images", [1, 16, 1000])
def test_the_fewer_bytes_win_and_both_counts_are_those_of_the_formula(images, rows, servers):
    layout = Layout(servers=servers)
    held = len({layout.buckets[shard.bucket] for shard in layout.table.by_tensor["fc1.weight"]})
    assert held == servers
    choice = layout.choose("fc1.weight", images=images, rows=rows)
    outputs, inputs = layout.model.parameter("fc1.weight").shape
    assert choice.delta_bytes == inputs * outputs * 8
    assert choice.factor_bytes == images * rows * (servers * inputs + outputs) * 8
    assert choice.chosen == ("factors" if choice.factor_bytes < choice.delta_bytes else "delta")


def test_one_protocol_can_be_forced_where_there_are_factors():
    layout = Layout()
    for wanted in ("delta", "factors"):
        assert layout.choose("fc1.weight", images=10**6, wanted=wanted).chosen == wanted
    without = layout.choose("fc1.weight", images=1, wanted="factors", rows=0)
    assert (without.chosen, without.factor_bytes) == ("delta", None)


def test_shards_that_are_pieces_of_rows_go_as_deltas():
    layout = Layout(shard_bytes=512)
    assert not all(shard.whole_rows for shard in layout.table.by_tensor["fc1.weight"])
    choice = layout.choose("fc1.weight", images=1, wanted="factors")
    assert (choice.chosen, choice.factor_bytes) == ("delta", None)


def test_only_weights_of_dense_layers_have_factors():
    assert factorable_tensors(Network(digits())) == {"fc1.weight": 1, "fc2.weight": 1}


@pytest.mark.parametrize("shard_bytes", [512, 16 << 10, 1 << 20])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("wanted", WANTED)
def test_every_shard_is_in_one_message_to_its_primary(wanted, servers, shard_bytes):
    layout = Layout(servers=servers, shard_bytes=shard_bytes)
    plan = layout.plan(wanted)
    named = list(chain.from_iterable(message.shards for message in plan.messages))
    assert sorted(named) == [shard.id for shard in layout.table.shards]
    for message in plan.messages:
        assert {layout.buckets[shard.bucket] for shard in message.specs} == {message.server}
        assert message.shards == tuple(shard.id for shard in message.specs)
        assert sum(part.count for part in message.wire_parts) == len(message.shards)
        for part in message.parts:
            chosen = {plan.protocols[shard.tensor].chosen for shard in part.shards}
            assert chosen == {"factors" if part.factors else "delta"}


def test_large_tensors_are_cut_into_messages_and_factors_stay_together(monkeypatch):
    monkeypatch.setattr(push_plan, "MESSAGE_BYTES", 4 << 10)
    monkeypatch.setattr(push_plan, "MESSAGE_SHARDS", 5)
    layout = Layout(spec=mlp((64, 100, 10), input_shape=(1, 8, 8)), shard_bytes=1 << 10, servers=1)
    deltas = layout.plan("delta")
    for message in deltas.messages:
        assert len(message.shards) <= 5
        assert sum(shard.size for shard in message.specs) * 8 <= 4 << 10
        assert message.pulls
        split = {s.tensor for s in message.specs if len(layout.table.by_tensor[s.tensor]) > 1}
        assert not split or {shard.tensor for shard in message.specs} == split
    monkeypatch.setattr(push_plan, "MESSAGE_SHARDS", 256)
    (weights,) = [m for m in layout.plan("factors").messages if m.specs[0].tensor == "fc1.weight"]
    assert len(weights.shards) == len(layout.table.by_tensor["fc1.weight"])
    assert not weights.pulls, "its values are too many for the answer"


@pytest.mark.parametrize("images", [1, GROUP], ids=["short", "full"])
@pytest.mark.parametrize("shard_bytes", [512, 16 << 10, 1 << 20])
@pytest.mark.parametrize("wanted", WANTED)
def test_a_filled_buffer_has_the_gradients_of_the_model(wanted, shard_bytes, images):
    layout = Layout(shard_bytes=shard_bytes)
    plan, context = layout.plan(wanted), layout.trained(images)
    buffer = PushBuffer(layout.model, plan, GROUP)
    buffer.fill(layout.trained(GROUP, number=1))  # what was there before does not show
    buffer.fill(context)
    assert buffer.images == images
    for tensor, flat in layout.received(plan, buffer).items():
        expected = layout.gradient(context, tensor)
        np.testing.assert_allclose(flat, expected.reshape(-1), rtol=1e-12, atol=1e-15)
        delta = buffer.delta(tensor)
        if plan.protocols[tensor].chosen == "factors":
            assert delta is None
        else:
            np.testing.assert_array_equal(delta, expected)


@pytest.mark.skipif(find_spec("numba") is None, reason="compiled kernels need numba")
@pytest.mark.parametrize("images", [1, GROUP], ids=["short", "full"])
@pytest.mark.parametrize("shard_bytes", [512, 16 << 10])
@pytest.mark.parametrize("wanted", WANTED)
def test_a_group_trained_in_one_call_has_the_bits_of_single_passes(wanted, shard_bytes, images, monkeypatch):
    layout = Layout(shard_bytes=shard_bytes, dtype=np.float32, kernels="numba")
    plan, model, context = layout.plan(wanted), layout.model, layout.model.context(GROUP)
    pixels = np.random.default_rng(3).integers(0, 256, (3, images, *model.input_shape), np.uint8)
    labels = np.arange(images) % 10
    single, whole = (PushBuffer(model, plan, GROUP) for _ in range(2))
    for group in pixels:
        context.load(group, labels)
        expected = model.forward(layout.weights, context)
        model.backward(layout.weights, context)
        single.fill(context)
        with monkeypatch.context() as calls:
            if images == GROUP:  # a short group takes the passes one by one
                calls.setattr(model, "forward", None)
            assert whole.train(layout.weights, context, group, labels) == expected
        for index in range(len(plan.messages)):
            for one, other in zip(single.tensors(index), whole.tensors(index), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("groups", [(GROUP, GROUP, GROUP), (GROUP, 1), (2, GROUP)], ids=str)
@pytest.mark.parametrize("wanted", WANTED)
def test_a_step_sums_the_gradients_of_its_groups(wanted, groups):
    layout = Layout()
    plan = layout.plan(wanted, images=3 * GROUP)
    contexts = [layout.trained(images, number) for number, images in enumerate(groups)]
    step, group = PushBuffer(layout.model, plan, plan.images), PushBuffer(layout.model, plan, GROUP)
    for _ in range(2):  # the second time over what the first left
        step.clear()
        for context in contexts:
            group.fill(context)
            step.add(group)
    assert step.images == sum(groups)
    for tensor, flat in layout.received(plan, step).items():
        expected = sum(layout.gradient(context, tensor).reshape(-1) for context in contexts)
        np.testing.assert_allclose(flat, expected, rtol=1e-12, atol=1e-15)


def test_tensors_of_a_full_buffer_are_its_own_memory():
    layout = Layout()
    buffer = PushBuffer(layout.model, layout.plan(), GROUP)
    buffer.fill(layout.trained())
    for index in range(len(layout.plan().messages)):
        for tensor, again in zip(buffer.tensors(index), buffer.tensors(index), strict=True):
            assert tensor is again
            assert tensor.flags.c_contiguous


def by_owner(plan):
    """Shards of a plan: pushed, named by ticks, and only read."""
    pushed = [shard for message in plan.messages for shard in message.shards]
    silent = [shard for _, shards in plan.silent for shard in shards]
    return pushed, silent, [spec.id for spec in plan.read_only]


@pytest.mark.parametrize("frozen", [(), ("conv2d",), ("dense",)], ids=str)
@pytest.mark.parametrize("wanted", WANTED)
def test_a_worker_pushes_what_it_owns_and_reads_what_others_push(wanted, frozen):
    spec = digits()
    for kind in frozen:
        spec = with_frozen(spec, kind)
    layout = Layout(spec=spec)
    names = {parameter.name for parameter in layout.model.parameters}
    for owned in ({"fc1.weight", "fc1.bias"}, {"conv1.weight", "conv1.bias"}, set(), names):
        plan = plan_pushes(
            layout.model, layout.table, layout.buckets, images=GROUP, wanted=wanted, owned=owned
        )
        pushed, silent, read_only = by_owner(plan)
        for shard in layout.table.shards:
            is_frozen = shard.tensor in layout.model.frozen
            assert (shard.id in pushed) == (shard.tensor in owned and not is_frozen)
            assert (shard.id in silent) == (shard.tensor in owned and is_frozen)
            assert (shard.id in read_only) == (shard.tensor not in owned and not is_frozen)
        assert set(plan.protocols) == owned - set(layout.model.frozen)


@pytest.mark.parametrize("shard_bytes", [512, 16 << 10, 1 << 20])
def test_partial_gradients_of_others_are_added_and_spread_over_the_messages(shard_bytes):
    layout = Layout(shard_bytes=shard_bytes)
    plan = layout.plan("delta")
    mine, others = layout.trained(number=0), [layout.trained(number=number) for number in (1, 2)]
    buffer = PushBuffer(layout.model, plan, GROUP)
    buffer.fill(mine)
    for context in others:
        for name in ("conv1.weight", "conv1.bias"):
            buffer.add_partial(name, layout.gradient(context, name).reshape(-1))
    buffer.spread()
    received = layout.received(plan, buffer)
    for parameter in layout.model.parameters:
        expected = layout.gradient(mine, parameter.name).reshape(-1)
        if parameter.layer == "conv1":
            for context in others:
                expected = expected + layout.gradient(context, parameter.name).reshape(-1)
        np.testing.assert_array_equal(received[parameter.name], expected, err_msg=parameter.name)
