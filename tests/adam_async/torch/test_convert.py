"""Networks become modules, and modules networks, with the same values, outputs and gradients."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

from torch import nn

from adam_async import Config, sync
from adam_async.checkpoint.trained_model import Model
from adam_async.errors import ConfigError, SpecError
from adam_async.model import BUILTIN_LAYERS, LayerSpec, ModelSpec, Network, mlp, named_model
from adam_async.model.keyed_random import Dice
from adam_async.model.layers import MeanSquaredError
from adam_async.torch.convert import SOFTMAX_LOSS, LayerGraph, LocallyConnected, from_module, to_module
from tests.adam_async.cluster.test_sync import bars
from tests.adam_async.model.parts import EVERYTHING, group_of, networks, run_whole, weights_of
from tests.adam_async.own_layer import OWN_LAYERS

of = LayerSpec.of


def without_mirrors(spec):
    """Put a layer that keeps the shape in the place of each layer of a user."""
    kept = (replace(layer, kind="tanh") if layer.kind == "mirror" else layer for layer in spec.layers)
    return replace(spec, layers=tuple(kept))


ALL_KINDS = without_mirrors(EVERYTHING)


def model_of(spec, dtype=np.float64, layers=BUILTIN_LAYERS):
    network = Network(spec, dtype, layers=layers)
    return Model(network, weights_of(network))


def images_of(model, count=4):
    return (
        Dice(3)
        .uniform("images", count=count * int(np.prod(model.input_shape)), dtype=model.network.dtype)
        .reshape(count, *model.input_shape)
    )


def outputs_of(module, images):
    with torch.no_grad():
        return module(torch.from_numpy(images)).numpy()


def assert_equal_outputs(module, model, rtol):
    images = images_of(model)
    expected, found = model.network.scores(model.weights, images), outputs_of(module, images)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=rtol * max(1.0, np.abs(expected).max()))


def assert_equal_gradients(module, model):
    """Compare all gradients of a group's mean loss with those of PyTorch's automatic differentiation."""
    images, labels = group_of(model.network, 3)
    expected = run_whole(model.network, model.weights, images, labels)
    scores, targets = module(torch.from_numpy(images)), torch.from_numpy(labels)
    if model.network.layers[-1].spec.kind == "softmax_cross_entropy":
        loss = nn.functional.cross_entropy(scores, targets)
    else:
        loss = nn.functional.mse_loss(scores, targets)
    loss.backward()
    assert loss.item() == pytest.approx(expected.loss, rel=1e-12)
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert {name for name, gradient in found.items() if gradient is not None} <= expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        # PyTorch has no gradient for a tensor that does not reach the loss; ours is 0.
        value = np.zeros_like(gradient) if found[name] is None else found[name].numpy()
        limit = 1e-9 * max(np.abs(gradient).max(), 1e-3)
        np.testing.assert_allclose(value, gradient, rtol=0, atol=limit, err_msg=name)


def without_dropping(spec):
    """Let dropout keep all values, because the draws of both sides differ."""
    kept = (
        replace(layer, options=(("rate", 0.0),)) if layer.kind == "dropout" else layer
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(kept))


def assert_same_model(found, model):
    assert found.weights.keys() == model.weights.keys()
    for name, value in model.weights.items():
        assert found.weights[name].dtype == value.dtype
        assert found.weights[name].tobytes() == value.tobytes(), name
    assert [parameter.frozen for parameter in found.network.parameters] == [
        parameter.frozen for parameter in model.network.parameters
    ]
    for ours, theirs in zip(found.network.layers, model.network.layers, strict=True):
        assert (ours.spec.name, ours.spec.kind, ours.spec.inputs, ours.output_shape) == (
            theirs.spec.name,
            theirs.spec.kind,
            theirs.spec.inputs,
            theirs.output_shape,
        )


class ScaledLoss(MeanSquaredError):
    """A loss of a user with a parameter."""

    def __init__(self, spec, input_shapes):
        super().__init__(spec, input_shapes)
        self.parameters = (self.tensor("scale", (1,)),)


class TwoInputs(MeanSquaredError):
    """A loss of a user that reads two layers."""

    NUM_INPUTS = None


class TestToModule:
    def test_every_kind_of_layer_but_the_losses_is_in_the_network_of_these_tests(self):
        losses = {"softmax_cross_entropy", "mean_squared_error"}
        assert {layer.kind for layer in ALL_KINDS.layers} | losses == set(BUILTIN_LAYERS)

    @pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-12), (np.float32, 1e-6)])
    @pytest.mark.parametrize("spec", [ALL_KINDS, named_model("digits")], ids=lambda spec: spec.name)
    def test_a_module_has_the_outputs_of_its_network(self, spec, dtype, rtol):
        model = model_of(spec, dtype)
        assert_equal_outputs(to_module(model), model, rtol)

    @settings(max_examples=20, deadline=None)
    @given(spec=networks().map(without_mirrors))
    def test_a_module_of_any_network_has_its_outputs_and_gradients(self, spec):
        model = model_of(spec)
        assert_equal_outputs(to_module(model), model, 1e-12)
        still = model_of(without_dropping(spec))
        assert_equal_gradients(to_module(still), still)

    def test_the_gradients_of_all_kinds_of_layers_are_those_of_autograd(self):
        spec = replace(
            without_dropping(ALL_KINDS),
            layers=tuple(
                replace(layer, name="halved")
                if layer.name == "half"
                else replace(
                    layer, inputs=tuple("halved" if source == "half" else source for source in layer.inputs)
                )
                for layer in without_dropping(ALL_KINDS).layers
            ),
        )
        model = model_of(spec)
        assert_equal_gradients(to_module(model), model)

    def test_compiled_kernels_change_nothing(self):
        pytest.importorskip("numba", reason="compiled kernels need numba")
        model = model_of(ALL_KINDS)
        compiled = Model(Network(ALL_KINDS, np.float64, kernels="numba"), model.weights)
        found, expected = to_module(compiled), to_module(model)
        assert str(found) == str(expected)
        assert torch.equal(*(it(torch.from_numpy(images_of(model))) for it in (found, expected)))

    def test_parameters_of_a_loss_are_left_out(self):
        kinds = {**BUILTIN_LAYERS, "scaled": ScaledLoss}
        spec = ModelSpec(
            name="it", input_shape=(4,), layers=(of("d", "dense", outputs=2), of("loss", "scaled"))
        )
        model = model_of(spec, layers=kinds)
        assert set(model.weights) == {"d.weight", "d.bias", "loss.scale"}
        assert list(to_module(model).state_dict()) == ["d.weight", "d.bias"]

    def test_a_loss_of_two_inputs_is_refused(self):
        layers = (of("d", "dense", outputs=2), of("loss", "two", inputs=("d", "input")))
        model = model_of(
            ModelSpec(name="it", input_shape=(4,), layers=layers), layers={**BUILTIN_LAYERS, "two": TwoInputs}
        )
        with pytest.raises(
            ConfigError, match=r"layer 'loss' \(two\): reads d, input, but a module returns one"
        ):
            to_module(model)

    def test_a_chain_becomes_a_sequential_with_the_names_of_the_weights(self):
        model = model_of(named_model("digits"), np.float32)
        module = to_module(model)
        assert type(module) is nn.Sequential
        assert list(module.state_dict()) == list(model.weights)
        assert not module.training

    def test_another_network_becomes_a_graph(self):
        assert type(to_module(model_of(ALL_KINDS))) is LayerGraph

    def test_parameters_of_frozen_layers_require_no_gradient(self):
        module = to_module(model_of(ALL_KINDS))
        assert {path for path, it in module.named_parameters() if not it.requires_grad} == {
            "fixed.weight",
            "fixed.bias",
        }

    def test_dropout_drops_its_share_in_training_only(self):
        spec = ModelSpec(
            name="it", input_shape=(4000,), layers=(of("drop", "dropout", rate=0.25), SOFTMAX_LOSS)
        )
        module, ones = to_module(model_of(spec)), torch.ones(1, 4000)
        assert torch.equal(module(ones), ones)
        assert float((module.train()(ones) == 0).float().mean()) == pytest.approx(0.25, abs=0.05)

    def test_a_module_shares_no_memory_with_the_model_and_draws_nothing(self):
        model = model_of(mlp((4, 3, 2), input_shape=(4,)), np.float32)
        before = {name: value.copy() for name, value in model.weights.items()}
        state = torch.get_rng_state()
        with torch.no_grad():
            for parameter in to_module(model).parameters():
                parameter.fill_(7)
        assert torch.equal(torch.get_rng_state(), state)
        for name, value in before.items():
            assert np.array_equal(model.weights[name], value)

    def test_a_dot_in_a_name_is_a_path(self):
        layers = (of("body.0", "dense", outputs=3), of("body.1", "relu"), of("head", "dense", outputs=2))
        model = model_of(ModelSpec(name="it", input_shape=(4,), layers=(*layers, SOFTMAX_LOSS)))
        module = to_module(model)
        assert [type(it) for it in module] == [nn.Sequential, nn.Linear]
        assert_equal_outputs(module, model, 1e-12)
        assert_same_model(from_module(module, (4,)), model)

    def test_layers_of_one_prefix_that_are_apart_keep_their_order(self):
        layers = (of("a.x", "dense", outputs=3), of("b", "tanh"), of("a.y", "dense", outputs=2))
        model = model_of(ModelSpec(name="it", input_shape=(4,), layers=(*layers, SOFTMAX_LOSS)))
        module = to_module(model)
        assert type(module) is LayerGraph
        assert_equal_outputs(module, model, 1e-12)
        assert_same_model(from_module(module, (4,)), model)

    def test_a_layer_with_the_name_of_an_attribute_gets_an_underscore(self):
        layers = (of("half", "dense", outputs=3), of("train", "relu"), of("float", "dense", outputs=2))
        model = model_of(ModelSpec(name="it", input_shape=(4,), layers=(*layers, SOFTMAX_LOSS)))
        module = to_module(model)
        assert [name for name, _ in module.named_children()] == ["half_", "train_", "float_"]
        assert_equal_outputs(module, model, 1e-12)

    @pytest.mark.parametrize(
        "names", [("a", "a.b"), ("a.b", "a"), ("half", "half_"), ("a..b", "c"), ("a.", "c")]
    )
    def test_names_that_are_no_paths_are_refused(self, names):
        layers = [of(name, "dense", outputs=2) for name in names]
        model = model_of(ModelSpec(name="it", input_shape=(4,), layers=(*layers, SOFTMAX_LOSS)))
        with pytest.raises(ConfigError, match=r"cannot have this path in PyTorch: .* rename the layer"):
            to_module(model)

    def test_a_layer_of_a_user_is_refused_with_its_name_kind_and_position(self):
        spec = ModelSpec(
            name="it",
            input_shape=(4,),
            layers=(of("d", "dense", outputs=2), of("x", "doubled"), SOFTMAX_LOSS),
        )
        with pytest.raises(
            ConfigError, match=r"layer 'x' \(doubled\), number 1 of the network, has no equal"
        ):
            to_module(model_of(spec, layers=OWN_LAYERS))

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_weights_that_are_not_finite_are_refused(self, value):
        model = model_of(mlp((4, 2), input_shape=(4,)))
        model.weights["fc1.weight"][1, 2] = value
        with pytest.raises(ConfigError, match=r"1 of 8 values of 'fc1.weight' are not finite"):
            to_module(model)

    def test_weights_that_do_not_fit_are_refused(self):
        model = model_of(mlp((4, 2), input_shape=(4,)))
        with pytest.raises(ConfigError, match=r"'fc1.weight' is of shape \[2, 3\], but the network needs"):
            to_module(Model(model.network, {**model.weights, "fc1.weight": np.zeros((2, 3))}))
        with pytest.raises(ConfigError, match=r"'fc1.bias' is missing, but the network needs \[2\]"):
            to_module(Model(model.network, {"fc1.weight": model.weights["fc1.weight"]}))


def drawn(module, dtype=torch.float64):
    """Give a module values that depend on no other draws."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            values = Dice(number).uniform("values", count=parameter.numel(), dtype=np.float64) - 0.5
            parameter.copy_(torch.from_numpy(values).reshape(parameter.shape))
    return module.to(dtype).eval()


def convolutional():
    return drawn(
        nn.Sequential(
            nn.Sequential(
                nn.Conv2d(2, 4, 3, padding="same"),
                nn.ReLU(inplace=True),
                nn.LocalResponseNorm(3, alpha=0.2, k=2),
                nn.MaxPool2d((3, 3), stride=2),
            ),
            nn.Identity(),
            nn.Conv2d(4, 3, (2, 2), stride=(1, 1), padding="valid"),
            nn.Sequential(nn.Tanh(), nn.Sequential(nn.AvgPool2d(2, 1))),
            nn.Conv2d(3, 5, 3, stride=2, padding=1),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(10, 6),
            nn.Sigmoid(),
            nn.Linear(6, 3),
        )
    )


IMAGE = (2, 13, 9)


class TestFromModule:
    @settings(max_examples=40, deadline=None)
    @given(spec=networks().map(without_mirrors), dtype=st.sampled_from([np.float32, np.float64]))
    def test_a_network_comes_back_from_its_module_with_the_same_bits(self, spec, dtype):
        model = model_of(spec, dtype)
        assert_same_model(from_module(to_module(model), spec.input_shape, loss=spec.layers[-1]), model)

    def test_a_network_has_the_outputs_and_gradients_of_its_module(self):
        module = convolutional()
        model = from_module(module, IMAGE)
        assert_equal_outputs(module, model, 1e-12)
        still = nn.Sequential(*(it for it in module if type(it) is not nn.Dropout))
        assert_equal_gradients(still, from_module(still, IMAGE))

    def test_layers_have_the_names_of_their_paths_and_identities_are_left_out(self):
        model = from_module(convolutional(), IMAGE, name="mine")
        names = ["0.0", "0.1", "0.2", "0.3", "2", "3.0", "3.1.0", "4", "5", "6", "7", "8", "9", "loss"]
        assert [layer.name for layer in model.network.layers] == names
        assert model.network.spec.name == "mine"

    def test_the_module_and_the_model_share_no_memory(self):
        module = convolutional()
        model = from_module(module, IMAGE)
        before = outputs_of(module, images_of(model))
        for value in model.weights.values():
            value.fill(0)
        assert np.array_equal(outputs_of(module, images_of(model)), before)

    def test_layers_without_gradients_are_frozen(self):
        module = convolutional()
        module[0].requires_grad_(False)
        assert from_module(module, IMAGE).network.frozen == {"0.0.weight", "0.0.bias"}

    def test_the_same_activation_may_stand_in_a_chain_twice(self):
        bend = nn.Tanh()
        module = drawn(nn.Sequential(nn.Linear(4, 3), bend, nn.Linear(3, 3), bend, nn.Linear(3, 2)))
        model = from_module(module, (4,))
        assert len(model.network.layers) == 6
        assert_equal_outputs(module, model, 1e-12)

    def test_another_loss_trains_values(self):
        loss = of("error", "mean_squared_error")
        model = from_module(drawn(nn.Sequential(nn.Conv2d(1, 2, 3))), (1, 5, 5), loss=loss)
        assert model.network.layers[-1].spec.kind == "mean_squared_error"

    def test_a_cluster_trains_a_module(self):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(bars().image_shape)), 4))
        config = Config(epochs=12, threads=1, kernels="numpy")
        with sync.LocalCluster(
            config, dataset=bars(), init=from_module(module, bars().image_shape)
        ) as cluster:
            result = cluster.train()
        assert result.test_accuracy > 0.9
        trained = to_module(Model.of(result))
        images = bars().test_images
        classes = outputs_of(trained, images.astype(np.float32) / 255).argmax(axis=1)
        assert np.array_equal(classes, Model.of(result).predict(images).numbers)

    def test_a_saved_module_comes_back_from_its_file(self, tmp_path):
        module = convolutional()
        from_module(module, IMAGE).save(tmp_path)
        again = to_module(Model.load(tmp_path))
        for name, value in again.state_dict().items():
            assert torch.equal(value, module.state_dict()[name])


def with_hook():
    module = nn.Linear(4, 2)
    module.register_forward_hook(lambda module, given, found: found * 2)
    return module


def with_own_forward():
    module = nn.Linear(4, 2)
    module.forward = lambda x: x
    return module


def partly_frozen():
    module = nn.Linear(4, 2)
    module.bias.requires_grad_(False)
    return module


class Residual(nn.Module):
    def forward(self, x):
        return x + 1


class WiderLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (
            nn.BatchNorm2d(2),
            r"'body.0' \(BatchNorm2d\) has no equal layer; known: .*TorchStep trains any module",
        ),
        (Residual(), r"'body.0' \(Residual\) has no equal layer"),
        (WiderLinear(4, 2), r"\(WiderLinear\) has no equal layer"),
        (nn.ModuleList([nn.ReLU()]), r"\(ModuleList\) has no equal layer"),
        (None, r"\(NoneType\) has no equal layer"),
        (nn.Softmax(dim=1), r"\(Softmax\) belongs to the loss layer, .* leave it out"),
        (nn.Linear(4, 2, bias=False), r"\(Linear\) has no bias, .* give it one of zeros"),
        (nn.Conv2d(2, 2, (2, 3)), r"\(Conv2d\) has kernel_size=\(2, 3\), which is not square"),
        (nn.Conv2d(2, 2, 3, stride=(1, 2)), r"has stride=\(1, 2\), which is not square"),
        (nn.Conv2d(2, 2, 3, padding=(1, 2)), r"has padding=\(1, 2\), which is not square"),
        (nn.Conv2d(2, 2, 2, padding="same"), "pads one side by more than the other"),
        (nn.Conv2d(2, 2, 3, dilation=2), r"has dilation=\(2, 2\); a layer here has 1"),
        (nn.Conv2d(2, 2, 3, groups=2), "has groups=2; a layer here has 1"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "has padding_mode='reflect'"),
        (nn.MaxPool2d(2, padding=1), "has padding=1; a layer here has 0"),
        (nn.MaxPool2d(2, ceil_mode=True), "has ceil_mode=True"),
        (nn.MaxPool2d(2, return_indices=True), "has return_indices=True"),
        (nn.AvgPool2d(2, divisor_override=3), "has divisor_override=3; a layer here has None"),
        (nn.Flatten(2), "has start_dim=2; a layer here has 1"),
        (with_hook(), r"\(Linear\) has hooks \(_forward_hooks\)"),
        (with_own_forward(), r"\(Linear\) has a `forward` of its own"),
        (partly_frozen(), "trains only some of its parameters"),
        (nn.Linear(4, 2).half(), r"'body.0.weight' has dtype torch.float16, expected"),
        (nn.Linear(4, 2, device="meta"), r"'body.0.weight' is on the device meta"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_module_without_an_equal_is_refused_with_its_path_type_and_remedy(inner, message):
    module = nn.Sequential()
    module.add_module("body", nn.Sequential(inner))
    with pytest.raises(ConfigError, match=message):
        from_module(module, (2, 9, 9))


def test_a_module_that_is_no_chain_is_refused():
    with pytest.raises(
        ConfigError, match=r"the module \(Residual\) is no nn.Sequential; put .*; .*TorchStep"
    ):
        from_module(Residual(), (4,))


def test_a_hook_of_a_chain_is_refused():
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 2)))
    module[0].register_forward_pre_hook(lambda module, given: given)
    with pytest.raises(ConfigError, match=r"submodule '0' \(Sequential\) has hooks \(_forward_pre_hooks\)"):
        from_module(module, (4,))


def test_shared_parameters_are_refused():
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = layer.weight
    with pytest.raises(ConfigError, match=r"'1' \(Linear\) shares its weight with '0.weight'"):
        from_module(nn.Sequential(layer, other), (4,))
    with pytest.raises(ConfigError, match=r"'1' \(Linear\) shares its weight with '0.weight'"):
        from_module(nn.Sequential(layer, layer), (4,))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_refused(value):
    module = nn.Sequential(nn.Linear(4, 2))
    with torch.no_grad():
        module[0].bias[1] = value
    with pytest.raises(ConfigError, match=r"'0.bias' has values that are not finite"):
        from_module(module, (4,))


def test_two_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r"two dtypes, float32 and float64; call module.float\(\)"):
        from_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).double()), (4,))


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((5,), ConfigError, r"'0.weight' has shape \[3, 4\], .* for images of \[5\]; .* input_shape"),
        ((1, 2, 2), SpecError, "layer '0' .* needs a flat input"),
        ((4, 1), SpecError, "input must be"),
        ((0,), SpecError, "input must be"),
    ],
)
def test_an_input_shape_that_does_not_fit_is_refused(shape, error, message):
    with pytest.raises(error, match=message):
        from_module(nn.Sequential(nn.Linear(4, 3)), shape)


def test_a_layer_with_the_name_of_the_images_is_refused():
    module = nn.Sequential()
    module.add_module("input", nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="stands for the images; rename it"):
        from_module(module, (4,))


def test_a_locally_connected_module_prints_its_shapes():
    module = LocallyConnected((2, 5, 5), (3, 2, 2), kernel=3, stride=2, padding=0)
    assert str(module) == "LocallyConnected([3, 2, 2, 2, 3, 3], kernel=3, stride=2, padding=0)"
