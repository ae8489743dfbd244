"""Layers of a user, by import path: ``package.module:Class``.

A class cannot travel to another process, but its import path can: the process that receives it imports the
module.
"""

from collections.abc import Mapping

from adam_async.errors import ConfigError
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.run.user_code import import_named


def import_layers(names: Mapping[str, str]) -> Mapping[str, type[Layer]]:
    """Return all kinds of layers: those of this package, and the named ones.

    Args:
        names: Kind of layer in specs to its import path, ``package.module:Class``.

    Raises:
        ConfigError: A path cannot be imported, or is not a layer; names the kind.
    """
    found: dict[str, type[Layer]] = {}
    for kind, name in names.items():
        layer = import_named(name, f"layer {kind!r}")
        if not (isinstance(layer, type) and issubclass(layer, Layer)):
            raise ConfigError(f"layer {kind!r} ({name}): expected a class that derives from Layer")
        found[kind] = layer
    return {**BUILTIN_LAYERS, **found}
