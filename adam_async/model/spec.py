"""Pure: the specification of a network, as plain frozen values.

A `ModelSpec` lists named layers, each after its inputs. A layer without `inputs` reads the previous layer
(the first layer reads ``"input"``); named inputs make any acyclic graph. The last layer is the loss.

In TOML:

    name = "two-ways"
    input = [1, 28, 28]                 # channels, height, width; or [features]

    [[layers]]
    name = "conv1"
    kind = "conv2d"
    filters = 10                        # every key but name, kind and inputs is an option of the layer
    kernel = 5

    [[layers]]
    name = "loss"
    kind = "softmax_cross_entropy"

Building a `Network` checks kinds and options, because users add kinds of layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from adam_async.errors import ConfigError, SpecError
from adam_async.model.toml_text import read_toml

OptionValue = int | float | str | bool | tuple[float, ...]
"""Types of an option's value; in TOML and on the wire the tuple is a list of numbers."""

Shape = tuple[int, ...]

INPUT = "input"
"""Name of the images as an input of a layer."""

_MODEL_KEYS = ("name", "input", "layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: its name, its kind, the layers that it reads, and its options as sorted pairs."""

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    options: tuple[tuple[str, OptionValue], ...] = ()

    @classmethod
    def of(cls, name: str, kind: str, *, inputs: tuple[str, ...] = (), **options: OptionValue) -> "LayerSpec":
        """Make a layer in one line: ``LayerSpec.of("conv1", "conv2d", filters=10, kernel=5)``."""
        return cls(name=name, kind=kind, inputs=inputs, options=tuple(sorted(options.items())))

    def to_dict(self) -> dict[str, Any]:
        """Return the layer as plain builtins, in the form of a TOML table."""
        options = {key: list(value) if isinstance(value, tuple) else value for key, value in self.options}
        return {"name": self.name, "kind": self.kind, "inputs": list(self.inputs), **options}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "LayerSpec":
        """Read one layer table.

        Raises:
            SpecError: A name or kind is missing, or the type of a value is not in `OptionValue`.
        """
        name, kind = table.get("name"), table.get("kind")
        if not isinstance(name, str) or not isinstance(kind, str):
            raise SpecError(f"a layer needs a name and a kind, both text, but one has {dict(table)!r}")
        inputs = table.get("inputs", [])
        if not isinstance(inputs, list | tuple) or not all(isinstance(item, str) for item in inputs):
            raise SpecError(f"layer {name!r}: inputs must be a list of layer names, not {inputs!r}")
        options: dict[str, OptionValue] = {}
        for key, value in table.items():
            if key in ("name", "kind", "inputs"):
                continue
            if isinstance(value, list | tuple) and all(type(item) in (int, float) for item in value):
                options[key] = tuple(value)
            elif isinstance(value, int | float | str):
                options[key] = value
            else:
                raise SpecError(
                    f"layer {name!r}: option {key!r} must be a number, text, boolean "
                    f"or list of numbers, not {value!r}"
                )
        return cls(name=name, kind=kind, inputs=tuple(inputs), options=tuple(sorted(options.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole network. After construction every layer's `inputs` are explicit.

    Raises:
        SpecError: The input, a layer's name or a layer's inputs are invalid, or the list is empty.
    """

    name: str
    input_shape: Shape
    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        if len(self.input_shape) not in (1, 3) or not all(
            type(size) is int and size > 0 for size in self.input_shape
        ):
            raise SpecError(
                f"model {self.name!r}: input must be [features] or [channels, height, width], all positive, "
                f"not {list(self.input_shape)}"
            )
        if not self.layers:
            raise SpecError(f"model {self.name!r} has no layers")
        previous, seen, explicit = INPUT, [INPUT], []
        for layer in self.layers:
            if not layer.name or layer.name in seen:
                raise SpecError(f"model {self.name!r}: layer name {layer.name!r} is empty or taken twice")
            inputs = layer.inputs or (previous,)
            for source in inputs:
                if source not in seen:
                    raise SpecError(
                        f"layer {layer.name!r} reads {source!r}, which is not a layer before it; "
                        f"known there: {', '.join(seen)}"
                    )
            explicit.append(replace(layer, inputs=inputs))
            seen.append(layer.name)
            previous = layer.name
        object.__setattr__(self, "layers", tuple(explicit))

    def to_dict(self) -> dict[str, Any]:
        """Return the model as plain builtins, to send to another process or to write as TOML."""
        return {
            "name": self.name,
            "input": list(self.input_shape),
            "layers": [layer.to_dict() for layer in self.layers],
        }

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "ModelSpec":
        """Read a result of `to_dict`.

        Raises:
            SpecError: A key is unknown or missing, or has the wrong type.
        """
        for key in table:
            if key not in _MODEL_KEYS:
                raise SpecError(f"unknown key {key!r} in a model; known keys: {', '.join(_MODEL_KEYS)}")
        for key in _MODEL_KEYS:
            if key not in table:
                raise SpecError(f"a model needs the key {key!r}; it has: {', '.join(table) or 'none'}")
        name, shape, layers = (table[key] for key in _MODEL_KEYS)
        if not isinstance(name, str):
            raise SpecError(f"a model's name must be text, not {name!r}")
        if not isinstance(shape, list | tuple):
            raise SpecError(f"model {name!r}: input must be a list of sizes, not {shape!r}")
        if not isinstance(layers, list | tuple) or not all(isinstance(item, Mapping) for item in layers):
            raise SpecError(f"model {name!r}: layers must be a list of tables, not {layers!r}")
        return cls(
            name=name, input_shape=tuple(shape), layers=tuple(LayerSpec.from_dict(item) for item in layers)
        )

    @classmethod
    def from_toml(cls, text: str) -> "ModelSpec":
        """Read a model from the text of a TOML file.

        Raises:
            SpecError: `read_toml` cannot read the text, or the text does not describe a model.
        """
        try:
            table = read_toml(text, "the model file")
        except ConfigError as error:
            raise SpecError(str(error)) from error
        return cls.from_dict(table)
