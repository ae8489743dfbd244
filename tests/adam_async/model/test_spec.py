"""Specs are checked when they are read, and errors name the wrong value."""

import pytest

from adam_async.model import NAMED_MODELS, LayerSpec, ModelSpec, Network, SpecError, mlp, named_model

TOML = """
name = "small"
input = [1, 6, 6]

[[layers]]
name = "conv"
kind = "conv2d"
filters = 2
kernel = 3

[[layers]]
name = "flat"
kind = "flatten"

[[layers]]
name = "out"
kind = "dense"
outputs = 3

[[layers]]
name = "loss"
kind = "softmax_cross_entropy"
"""


def test_mnist_adam_has_the_counts_of_the_paper():
    network = Network(named_model("mnist-adam"))

    assert network.num_parameters == 298_090
    assert network.multiply_adds == 756_000
    # The first layer, of 144,000, has no backward.
    assert network.operations == 6 * 756_000 - 2 * 144_000


@pytest.mark.parametrize("name", sorted(NAMED_MODELS))
def test_named_models_survive_the_way_through_builtins(name):
    spec = named_model(name)

    assert ModelSpec.from_dict(spec.to_dict()) == spec
    assert Network(spec).spec.name == name


def test_cifar_conv_has_the_counts_its_description_gives():
    network = Network(named_model("cifar-conv"))

    assert network.num_parameters == 145_578
    assert network.multiply_adds == 12_354_176


def test_a_list_of_numbers_is_an_option_and_survives_the_way_through_builtins():
    spec = ModelSpec.from_toml(TOML + "class_weights = [1, 0.5, 2.0]")

    assert spec.layers[-1].options == (("class_weights", (1, 0.5, 2.0)),)
    assert spec.to_dict()["layers"][-1]["class_weights"] == [1, 0.5, 2.0]
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    assert Network(spec).layers[-1].class_weights == (1.0, 0.5, 2.0)


def test_a_model_is_read_from_toml_as_a_chain():
    spec = ModelSpec.from_toml(TOML)

    assert spec.input_shape == (1, 6, 6)
    assert [layer.inputs for layer in spec.layers] == [("input",), ("conv",), ("flat",), ("out",)]
    assert Network(spec).num_parameters == 2 * 9 + 2 + 32 * 3 + 3


def test_mlp_takes_any_sizes():
    assert Network(mlp((784, 2048, 2048, 10))).num_parameters == 5_824_522
    assert Network(mlp((6, 3), input_shape=(6,))).num_parameters == 21
    with pytest.raises(SpecError, match=r"784 values.*but sizes\[0\] is 700"):
        mlp((700, 10))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "small"', 'colour = "red"\nname = "small"', "unknown key 'colour'.*known keys: name, input"),
        ("input = [1, 6, 6]", "", "needs the key 'input'"),
        ("input = [1, 6, 6]", "input = [6, 6]", r"input must be .* not \[6, 6\]"),
        ("input = [1, 6, 6]", "input = 6", "must be a list of sizes, not 6"),
        ('name = "small"', "name = 5", "must be text, not 5"),
        ("kernel = 3", "kernal = 3", "'conv'.*unknown option 'kernal'.*known options: filters, kernel"),
        ("kernel = 3", "", "'conv'.*option 'kernel' is missing"),
        ("kernel = 3", "kernel = 0", "'conv'.*'kernel' must be a whole number of at least 1, not 0"),
        ("kernel = 3", "kernel = true", "whole number of at least 1, not True"),
        (
            "kernel = 3",
            "kernel = ['3']",
            r"'conv': option 'kernel' must be a number, text, boolean or list of numbers, not \['3'\]",
        ),
        ("kernel = 3", "kernel = 9", "'conv'.*a kernel of 9 does not fit an input of 6x6"),
        ('kind = "conv2d"', 'kind = "conv3d"', "'conv': unknown kind 'conv3d'; known kinds: conv2d"),
        ('kind = "flatten"', 'kind = "relu"', r"'out'.*needs a flat input, not \[2, 4, 4\]; put a flatten"),
        ("outputs = 3", 'outputs = 3\ninit = "big"', "'init' must be one of he, lecun, zero, not 'big'"),
        (
            "outputs = 3",
            'outputs = 3\ninputs = ["nose"]',
            "'out' reads 'nose'.*known there: input, conv, flat",
        ),
        ("outputs = 3", "outputs = 3\ninputs = 4", "'out': inputs must be a list of layer names, not 4"),
        ("outputs = 3", 'outputs = 3\ninputs = ["flat", "flat"]', "'out'.*needs 1 input, but reads 2"),
        ('name = "out"', 'name = "conv"', "name 'conv' is empty or taken twice"),
        ('name = "out"', "", "needs a name and a kind"),
        (
            'kind = "softmax_cross_entropy"',
            'kind = "relu"',
            "last layer must be a loss, but 'loss' is a relu",
        ),
        (
            'kind = "dense"\noutputs = 3',
            'kind = "mean_squared_error"',
            "'out' is a loss, which must be the last",
        ),
        (
            'name = "loss"',
            'name = "side"\nkind = "relu"\n[[layers]]\ninputs = ["out"]\nname = "loss"',
            "'side' is read by no other layer",
        ),
        ("[[layers]]", "[layers", "is not TOML"),
    ],
)
def test_the_refusal_of_a_wrong_model_names_the_wrong_value(old, new, message):
    assert old in TOML
    with pytest.raises(SpecError, match=message):
        Network(ModelSpec.from_toml(TOML.replace(old, new, 1)))


def test_a_model_without_layers_is_refused():
    with pytest.raises(SpecError, match="has no layers"):
        ModelSpec(name="empty", input_shape=(4,), layers=())
    with pytest.raises(SpecError, match="layers must be a list of tables"):
        ModelSpec.from_dict({"name": "x", "input": [4], "layers": "many"})


def test_an_unknown_model_name_lists_the_known_ones():
    with pytest.raises(SpecError, match="no model is named 'resnet'; known names: mnist-adam, mlp, digits"):
        named_model("resnet")


def test_specs_are_hashable_and_do_not_depend_on_the_order_of_options():
    one = LayerSpec.of("c", "conv2d", filters=1, kernel=2)
    two = LayerSpec.of("c", "conv2d", kernel=2, filters=1)

    assert one == two
    assert hash(one) == hash(two)


def test_networks_refuse_unknown_kernels_and_dtypes():
    spec = named_model("digits")
    with pytest.raises(SpecError, match="unknown kernels 'cuda'; known: numpy"):
        Network(spec, kernels="cuda")
    with pytest.raises(SpecError, match="float32 or float64, not int64"):
        Network(spec, int)
