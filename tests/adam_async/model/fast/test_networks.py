"""Whole networks: both sets of kernels agree, fused or layer by layer, with a user's own layers too."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

pytest.importorskip("numba", reason="compiled kernels need numba")

from adam_async.model import (
    InPlaceStep,
    LayerSpec,
    ModelError,
    ModelSpec,
    Network,
    Sgd,
    SpecError,
    mlp,
    named_model,
    new_rule_state,
)
from adam_async.model.fast import program
from adam_async.model.fast.tape import Compiled
from adam_async.model.keyed_random import Dice
from tests.adam_async.model.passes import gradients_of, output_of
from tests.adam_async.own_layer import OWN_LAYERS

of = LayerSpec.of

BRANCHES = ModelSpec(
    name="branches",
    input_shape=(2, 8, 8),
    layers=(
        of("a", "conv2d", filters=3, kernel=3, padding=1),
        of("ra", "relu"),
        of("b", "conv2d", filters=3, kernel=3, padding=1, inputs=("ra",)),
        of("c", "conv2d", filters=3, kernel=1, inputs=("ra",)),
        of("sum", "add", inputs=("b", "c", "ra")),
        of("rs", "relu"),
        of("p", "max_pool", kernel=3, stride=2),
        of("both", "concatenate", inputs=("p", "p")),
        of("t", "tanh"),
        of("mean", "average_pool", kernel=2, stride=1),
        of("n", "local_response_norm", size=3),
        of("own", "locally_connected", filters=4, kernel=2),
        of("s", "sigmoid"),
        of("flat", "flatten"),
        of("fc", "dense", outputs=10),
        of("loss", "softmax_cross_entropy"),
    ),
)
SPECS = [named_model("mnist-adam"), named_model("digits"), mlp(), BRANCHES]


def group(network, images, dtype=np.float64):
    shape = (images, *network.spec.input_shape)
    x = Dice(1).normal("x", count=int(np.prod(shape)), dtype=dtype).reshape(shape)
    return x, Dice(1).permutation("labels", images) % 10


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("dtype", "close"), [(np.float64, 1e-11), (np.float32, 2e-5)])
def test_both_sets_of_kernels_agree_on_loss_and_gradients(spec, dtype, close):
    plain, fast = (Network(spec, dtype, kernels=kernels) for kernels in ("numpy", "numba"))
    weights = plain.initial_weights(Dice(1))
    contexts = [network.context(17) for network in (plain, fast)]
    for images in (17, 1, 6, 17):  # smaller groups lie in the same memory
        losses, found = [], []
        for network, context in zip((plain, fast), contexts, strict=True):
            context.load(*group(network, images))
            losses.append(network.forward(weights, context))
            network.backward(weights, context)
            found.append(gradients_of(network, context))

        assert losses[1] == pytest.approx(losses[0], rel=10 * close)
        for name, gradient in found[0].items():
            np.testing.assert_allclose(
                found[1][name], gradient, rtol=0, atol=close * np.abs(gradient).max(), err_msg=name
            )


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_layer_by_layer_is_the_same_as_all_at_once(spec):
    network = Network(spec, kernels="numba")
    weights = network.initial_weights(Dice(1))
    whole, pieces = network.context(5), network.context(5)
    for context in (whole, pieces):
        context.load(*group(network, 5))
    network.forward(weights, whole)
    network.backward(weights, whole)
    for number in range(len(network.layers)):
        network.forward_layers(weights, pieces, range(number, number + 1))
    for number in reversed(range(len(network.layers))):
        network.backward_layers(weights, pieces, range(number, number + 1))

    found, expected = (gradients_of(network, context) for context in (pieces, whole))
    for name, gradient in expected.items():
        np.testing.assert_array_equal(found[name], gradient, err_msg=name)
    for layer in network.layers:
        found, expected = (output_of(network, context, layer.name) for context in (pieces, whole))
        np.testing.assert_array_equal(found, expected)


def test_weights_may_come_in_other_arrays_every_time():
    network = Network(named_model("digits"), kernels="numba")
    context = network.context(3)
    context.load(*group(network, 3))
    first, second = network.initial_weights(Dice(1)), network.initial_weights(Dice(2))
    losses = [network.forward(weights, context) for weights in (first, second, first, dict(first))]

    assert losses[0] == losses[2] == losses[3] != losses[1]


def test_predictions_agree():
    images = Dice(4).normal("x", count=70 * 784).reshape(70, 1, 28, 28).clip(0, 1)
    plain, fast = (Network(named_model("mnist-adam"), kernels=kernels) for kernels in ("numpy", "numba"))
    weights = plain.initial_weights(Dice(1))

    np.testing.assert_allclose(fast.scores(weights, images), plain.scores(weights, images), atol=1e-4)


def test_a_users_layer_runs_its_own_steps():
    spec = ModelSpec(
        name="own",
        input_shape=(8,),
        layers=(
            of("fc1", "dense", outputs=6),
            of("x2", "doubled"),
            of("fc2", "dense", outputs=10),
            of("loss", "softmax_cross_entropy"),
        ),
    )
    plain, fast = (Network(spec, np.float64, kernels=k, layers=OWN_LAYERS) for k in ("numpy", "numba"))
    weights, found = plain.initial_weights(Dice(1)), []
    for network in (plain, fast):
        context = network.context(4)
        context.load(*group(network, 4))
        network.forward(weights, context)
        network.backward(weights, context)
        found.append(gradients_of(network, context))

    assert [isinstance(layer, Compiled) for layer in fast.layers] == [True, False, True, True]
    for name, gradient in found[0].items():
        np.testing.assert_allclose(found[1][name], gradient, rtol=1e-10)


@pytest.mark.parametrize(
    "rule",
    [Sgd(weight_decay=0.01), *[Sgd(momentum=0.9, nesterov=n, weight_decay=0.01) for n in (False, True)]],
    ids=repr,
)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_both_sets_of_kernels_train_alike_in_place(spec, rule):
    trained = []
    for kernels in ("numpy", "numba"):
        network = Network(spec, np.float64, kernels=kernels)
        weights, state = network.initial_weights(Dice(1)), new_rule_state(network, rule)
        step, context = InPlaceStep(network, rule), network.context(6)
        scratch = step.new_scratch()
        for images in (6, 1, 6):
            context.load(*group(network, images))
            losses = step.train(weights, state, context, scratch, rate=0.01).loss
        trained.append((losses, weights))

    assert trained[1][0] == pytest.approx(trained[0][0], rel=1e-9)
    for name, value in trained[0][1].items():
        np.testing.assert_allclose(trained[1][1][name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_read_only_weights_are_not_trained_in_place():
    network = Network(named_model("digits"), kernels="numba")
    weights = network.initial_weights(Dice(1))
    weights["fc1.weight"].flags.writeable = False
    step, context = InPlaceStep(network, Sgd()), network.context(2)
    context.load(*group(network, 2))

    with pytest.raises(ModelError, match=r"'fc1\.weight' changes in place, but .* read-only"):
        step.train(weights, new_rule_state(network, Sgd()), context, step.new_scratch(), rate=0.1)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_network_names_all_kernels_that_it_runs(spec, monkeypatch):
    used, address = set(), program.address

    def noted(code, dtype):
        used.add(code)
        return address(code, dtype)

    monkeypatch.setattr(program, "address", noted)
    network, rule = Network(spec, np.float32, kernels="numba"), Sgd(momentum=0.9)
    weights, state = network.initial_weights(Dice(1)), new_rule_state(network, rule)
    step, context = InPlaceStep(network, rule), network.context(3)
    for images in (3, 1):
        x, labels = group(network, images, np.float32)
        context.load(x, labels)
        step.train(weights, state, context, step.new_scratch(), rate=0.01)
        network.forward(weights, context)
        network.backward(weights, context)
        gradients_of(network, context)

    assert used - {program.MEAN} <= network.engine.kernels
    assert used > {program.MEAN}


def test_a_group_keeps_the_kernels_that_it_was_loaded_with(monkeypatch):
    ready = []
    monkeypatch.setattr(program, "are_ready", lambda codes, dtype: bool(ready))
    network = Network(named_model("mnist-adam"), np.float64, kernels="auto")
    network.use_ready()
    assert network.kernels == "numpy"
    weights, context = network.initial_weights(Dice(1)), network.context(6)
    images, labels = group(network, 6)

    def trained():
        loss = network.forward(weights, context)
        network.backward(weights, context)
        return loss, gradients_of(network, context)

    context.load(images, labels)
    ready.append(True)
    network.use_ready()
    early = trained()
    assert (network.kernels, context.kernel_set.kernels) == ("numba", "numpy")

    context.load(images, labels)
    late = trained()

    assert context.kernel_set.kernels == "numba"
    assert late[0] == pytest.approx(early[0], rel=1e-12)
    assert any((late[1][name] != gradient).any() for name, gradient in early[1].items())
    for name, gradient in early[1].items():
        np.testing.assert_allclose(late[1][name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_kernels_that_the_user_chose_do_not_change(kernels, monkeypatch):
    monkeypatch.setattr(program, "are_ready", lambda codes, dtype: kernels == "numpy")
    network = Network(named_model("digits"), kernels=kernels)
    before = network.kernel_set
    network.use_ready()
    assert network.kernel_set is before


@pytest.mark.slow
def test_warming_up_reports_its_progress():
    told = []
    Network(named_model("digits"), kernels="numba").warm_up(lambda done, total: told.append((done, total)))
    total = told[0][1]

    assert told == [(done, total) for done in range(total + 1)]
    assert total > 1


def test_numpys_kernels_need_no_warming_up():
    Network(named_model("digits")).warm_up(lambda done, total: pytest.fail("nothing is compiled"))


def test_auto_takes_the_compiled_kernels():
    assert Network(mlp(), kernels="auto").kernels == "numba"


def test_without_numba_auto_is_numpy_and_asking_for_it_names_the_extra(monkeypatch):
    monkeypatch.setattr("adam_async.model.kernels.find_spec", lambda name: None)

    assert Network(mlp(), kernels="auto").kernels == "numpy"
    with pytest.raises(SpecError, match=r"pip install .*\[fast\]"):
        Network(mlp(), kernels="numba")


def test_numba_is_loaded_only_when_it_is_asked_for():
    code = (
        "import sys; from adam_async.model import Network, mlp; Network(mlp()); "
        "assert 'numba' not in sys.modules; Network(mlp(), kernels='numba'); assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_gradients_of_all_layers_with_kernels_take_one_call(monkeypatch):
    network = Network(BRANCHES, kernels="numba")
    context = network.context(8)
    context.load(*group(network, 8, np.float32))
    weights = network.initial_weights(Dice(1))
    network.forward(weights, context)
    network.backward(weights, context)
    alone = {p.name: np.empty(p.shape, network.dtype) for p in network.parameters}
    for name, gradient in alone.items():
        network.deltas(context, {name: gradient})

    calls, run = [], program.run
    monkeypatch.setattr(program, "run", lambda *arguments: calls.append(1) or run(*arguments))
    together = {name: np.empty_like(gradient) for name, gradient in alone.items()}
    network.deltas(context, together)
    assert len(calls) == 1
    for name, gradient in together.items():
        np.testing.assert_array_equal(gradient, alone[name], err_msg=name)


def test_steady_training_allocates_nothing():
    network = Network(named_model("digits"), kernels="numba")
    weights, context = network.initial_weights(Dice(1)), network.context(8)
    out = {p.name: np.empty(p.shape, network.dtype) for p in network.parameters}
    context.load(*group(network, 8, np.float32))

    def steps(count):
        for _ in range(count):
            network.forward(weights, context)
            network.backward(weights, context)
            network.deltas(context, out)

    steps(3)
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    steps(50)
    grown = sum(
        entry.size_diff
        for entry in tracemalloc.take_snapshot().compare_to(before, "filename")
        if "adam_async" in entry.traceback[0].filename
    )
    tracemalloc.stop()

    assert grown < 1024
