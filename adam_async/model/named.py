"""Pure: the models that have a name, as ordinary specs."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from adam_async.errors import SpecError
from adam_async.model.spec import LayerSpec, ModelSpec, Shape

_layer = LayerSpec.of

PHOTO = "photo-conv"
"""Name of `photo_conv`'s model."""


def mnist_adam() -> ModelSpec:
    """Return the paper's network for MNIST: 298,090 parameters, 756,000 multiply-adds forward."""
    return ModelSpec(
        name="mnist-adam",
        input_shape=(1, 28, 28),
        layers=(
            _layer("conv1", "conv2d", filters=10, kernel=5),
            _layer("relu1", "relu"),
            _layer("pool1", "max_pool", kernel=2),
            _layer("conv2", "conv2d", filters=20, kernel=5),
            _layer("relu2", "relu"),
            _layer("pool2", "max_pool", kernel=2),
            _layer("flat", "flatten"),
            _layer("fc1", "dense", outputs=400),
            _layer("relu3", "relu"),
            _layer("fc2", "dense", outputs=400),
            _layer("relu4", "relu"),
            _layer("fc3", "dense", outputs=10, init="lecun"),
            _layer("loss", "softmax_cross_entropy"),
        ),
    )


def mlp(
    sizes: Sequence[int] = (784, 256, 128, 10), *, input_shape: Shape = (1, 28, 28), name: str = "mlp"
) -> ModelSpec:
    """Return a network of dense layers with ReLU between them; ``sizes[0]`` is the input's size.

    Args:
        sizes: Features of the input and of each hidden layer, and the number of classes.
        input_shape: Shape of one image with ``sizes[0]`` values.
        name: Name of the model.
    """
    layers = [_layer("flat", "flatten")]
    for number, outputs in enumerate(sizes[1:-1], start=1):
        layers.append(_layer(f"fc{number}", "dense", outputs=outputs))
        layers.append(_layer(f"relu{number}", "relu"))
    layers.append(_layer(f"fc{len(sizes) - 1}", "dense", outputs=sizes[-1], init="lecun"))
    layers.append(_layer("loss", "softmax_cross_entropy"))
    features = 1
    for size in input_shape:
        features *= size
    if features != sizes[0]:
        raise SpecError(
            f"model {name!r}: an input of {list(input_shape)} has {features} values, "
            f"but sizes[0] is {sizes[0]}"
        )
    return ModelSpec(name=name, input_shape=input_shape, layers=tuple(layers))


def digits() -> ModelSpec:
    """Return a small convolutional network for the embedded 8x8 digits."""
    return ModelSpec(
        name="digits",
        input_shape=(1, 8, 8),
        layers=(
            _layer("conv1", "conv2d", filters=16, kernel=3, padding=1),
            _layer("relu1", "relu"),
            _layer("pool1", "max_pool", kernel=2),
            _layer("flat", "flatten"),
            _layer("fc1", "dense", outputs=64),
            _layer("relu2", "relu"),
            _layer("fc2", "dense", outputs=10, init="lecun"),
            _layer("loss", "softmax_cross_entropy"),
        ),
    )


def cifar_conv() -> ModelSpec:
    """Return a small network for 32x32 colour images: 145,578 parameters, 12,354,176 multiply-adds forward.

    The network has three 5x5 convolutions that keep the size, each followed by pooling that halves it. The
    first pool takes maxima, the other two take means (after cuda-convnet's quick CIFAR-10 network).
    """
    layers: list[LayerSpec] = []
    for number, (filters, pool) in enumerate(
        ((32, "max_pool"), (32, "average_pool"), (64, "average_pool")), start=1
    ):
        layers += [
            _layer(f"conv{number}", "conv2d", filters=filters, kernel=5, padding=2),
            _layer(f"relu{number}", "relu"),
            _layer(f"pool{number}", pool, kernel=2),
        ]
    layers += [
        _layer("flat", "flatten"),
        _layer("fc1", "dense", outputs=64),
        _layer("relu4", "relu"),
        _layer("fc2", "dense", outputs=10, init="lecun"),
        _layer("loss", "softmax_cross_entropy"),
    ]
    return ModelSpec(name="cifar-conv", input_shape=(3, 32, 32), layers=tuple(layers))


def photo_conv(input_shape: Shape, classes: int) -> ModelSpec:
    """Return a small convolutional network for images of 8x8 or more pixels.

    The network has three convolutions with ReLU. The first convolution reads every second row and column;
    maxima over 2x2 pixels follow the other convolutions. One dense layer reads each filter's means over large
    squares, which overlap along the longer side. So the layer has few weights, and few photographs suffice to
    learn most of them.
    """
    layers: list[LayerSpec] = []
    _, *sides = input_shape
    for number, (filters, kernel) in enumerate(((16, 5), (32, 3), (64, 3)), start=1):
        stride = 2 if number == 1 else 1
        padding = kernel // 2
        layers += [
            _layer(f"conv{number}", "conv2d", filters=filters, kernel=kernel, stride=stride, padding=padding),
            _layer(f"relu{number}", "relu"),
        ]
        if number > 1:
            layers.append(_layer(f"pool{number}", "max_pool", kernel=2))
        sides = [-(-side // 2) if number == 1 else side // 2 for side in sides]
    side, longer = sorted(sides)
    squares = -(-longer // side)
    step = (longer - side) // (squares - 1) if squares > 1 else side
    layers += [
        _layer("means", "average_pool", kernel=side, stride=step),
        _layer("flat", "flatten"),
        _layer("fc1", "dense", outputs=classes, init="lecun"),
        _layer("loss", "softmax_cross_entropy"),
    ]
    return ModelSpec(name=PHOTO, input_shape=input_shape, layers=tuple(layers))


NAMED_MODELS: Mapping[str, Callable[[], ModelSpec]] = MappingProxyType(
    {"mnist-adam": mnist_adam, "mlp": mlp, "digits": digits, "cifar-conv": cifar_conv}
)
"""Models by their names."""


def check_model(model: str) -> None:
    """Check that a model is ``auto``, a named model, or the name of a TOML file. Raises SpecError if not."""
    if model != "auto" and model not in NAMED_MODELS and not model.endswith(".toml"):
        known = ", ".join(NAMED_MODELS)
        raise SpecError(f"unknown model {model!r}; known: auto, {known}, or a .toml file with a spec")


def named_model(name: str) -> ModelSpec:
    """Look a model up by its name.

    Raises:
        SpecError: The name is unknown; the message lists the known names.
    """
    try:
        return NAMED_MODELS[name]()
    except KeyError:
        raise SpecError(f"no model is named {name!r}; known names: {', '.join(NAMED_MODELS)}") from None
