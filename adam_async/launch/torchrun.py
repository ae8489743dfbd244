"""Pure: the ranks of torchrun, each of which starts ``adam-async launch torchrun``."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from adam_async.errors import ConfigError
from adam_async.launch.environment import address_at, number_in
from adam_async.launch.hosts import PORTS
from adam_async.launch.settings import LauncherSettings, Training

EXAMPLE = "torchrun --nnodes 2 --nproc-per-node 1 ... --no-python adam-async launch torchrun adam.toml"
"""Example of a command line, for error texts."""


class TorchrunSettings(LauncherSettings, frozen=True, kw_only=True):
    """Train in the ranks that torchrun starts (docs/how-to/launch-torchrun.md); rank 0 is the driver.

    Args:
        port: Port of the only controller, in rank 0; by default from 20000 to 29999, by MASTER_PORT.
    """

    port: Annotated[int, Meta(ge=0, le=65535)] = 0


async def train(settings: TorchrunSettings, training: Training) -> int:
    """Run the roles of this rank. See `Training.in_rank`."""
    return await training.in_rank(variables_of_rank(training.environment, settings.port))


def variables_of_rank(environment: Mapping[str, str], port: int) -> Mapping[str, str]:
    """Return the variables of a rank, with a MASTER_PORT before a port of `PORTS`.

    Args:
        port: Port of the only controller, in rank 0; 0: the port after MASTER_PORT, unless ADAM_CONTROLLER
            names the controllers.

    Raises:
        ConfigError: A variable is missing.
    """
    if "RANK" not in environment or not environment.get("MASTER_ADDR"):
        raise ConfigError(f"torchrun sets RANK and MASTER_ADDR, and one is missing: start with {EXAMPLE}")
    if not port:
        # Outgoing connections get ports above `PORTS`, and torchrun may choose a MASTER_PORT among them.
        after = PORTS[(number_in(environment, "MASTER_PORT", 1, 65535) + 1) % len(PORTS)]
        return {**environment, "MASTER_PORT": str(after - 1)}
    return {**environment, "ADAM_CONTROLLER": address_at(environment["MASTER_ADDR"], port)}
