"""Pure: what can be wrong with a model.

ModelError
    SpecError              a model that cannot be: unknown layer, option or input, shapes that do not fit
    GradientMismatchError    a layer whose gradient is not that of its output
"""

from adam_async.errors import AdamError, ConfigError


class ModelError(AdamError, ValueError):
    """Something about a model or the arrays given to it does not fit."""


class SpecError(ModelError, ConfigError):
    """A model specification that cannot be built; the message names the layer and what to change."""


class GradientMismatchError(ModelError):
    """A gradient differs from its finite difference."""
