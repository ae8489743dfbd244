"""Pure: the memory for the parameters of a run, and the error of a run that needs too much.

The factors come from peaks of resident memory, measured in one process over one epoch with 23 million
parameters: 4 times the size of the parameters in place with plain SGD, 6.8 times with one replica on a copy,
9.8 times with two.
"""

from adam_async.errors import ConfigError
from adam_async.model.rules import rule_of
from adam_async.run.config import Config
from adam_async.run.step_model import RunModel

COMMON = 4
"""Memory for values at the servers, gradients and copies of an evaluation, in multiples of all parameters."""

OF_STATE = 2
"""Memory for each elementwise array of the rule, and for its initialization, in multiples of all
parameters."""

OF_REPLICA = 3
"""Memory for a replica's copy, gradients, pushes and pulls, in multiples of all parameters."""


def parameter_bytes(model: RunModel, config: Config) -> int:
    """Estimate the part of a run's memory on one machine that grows with the parameters, in bytes.

    Args:
        config: Options of the run, with `weights` decided: ``copy`` or ``aliased``.
    """
    rule = rule_of(config)
    sizes = COMMON + OF_STATE * len(rule.state_names)
    if config.weights != "aliased":
        sizes += OF_REPLICA * config.replicas
    return sizes * model.num_parameters * model.dtype.itemsize


def check_memory(model: RunModel, config: Config, available_bytes: int) -> None:
    """Check that the parameters of a run fit the memory of the machine.

    Args:
        config: Options of the run, with `weights` decided: ``copy`` or ``aliased``.

    Raises:
        ConfigError: Less than `parameter_bytes` is available; the error has both sizes, and the remedy.
    """
    needed = parameter_bytes(model, config)
    if needed > available_bytes:
        raise ConfigError(
            f"model {model.spec.name!r} for images of {list(model.input_shape)} has {model.num_parameters:,} "
            f"parameters, and its run needs about {needed / 1e9:.1f} GB of memory, but "
            f"{available_bytes / 1e9:.1f} GB are available: take "
            "smaller images (--size ROWSxCOLUMNS), a smaller model, or fewer replicas"
        )
