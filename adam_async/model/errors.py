"""Pure: errors of a model.

ModelError
    SpecError                a spec cannot be built: unknown layer, option or input, shapes that do not fit
    LayerFailed              a step of a layer raised; `__cause__` is its error
    GradientMismatchError    a gradient of a layer is not that of its output
"""

from adam_async.errors import AdamError, ConfigError


class ModelError(AdamError, ValueError):
    """A model, or an array given to it, does not fit."""


class SpecError(ModelError, ConfigError):
    """A model specification that cannot be built; the message names the layer and the change to make."""


class LayerFailed(ModelError):
    """A method of a layer raised; the message names layer, kind and method, `__cause__` is the error."""

    def __init__(self, layer: str, kind: str, method: str, cause: Exception) -> None:
        text = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        super().__init__(f"layer {layer!r} ({kind}) failed in {method}: {text}")
        self.layer = layer


class GradientMismatchError(ModelError):
    """A gradient differs from its finite difference."""
