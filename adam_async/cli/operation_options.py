"""The options of `status`, `logs`, `scale` and `stop`."""

from pathlib import Path
from typing import Annotated

from adam_async.cli.options import ONLY_ON, WAIT, LoopName, Wait, addresses_of, check_within, options, to_read
from adam_async.run.config import MOST_WORKERS


@options
class OperatorOptions:
    """Options of `logs`, `scale` and `stop`."""

    controller: Annotated[str, addresses_of("--controller")]
    """tcp://HOST:PORT of the controller, or of several with commas between them."""
    token_file: Annotated[Path | None, to_read("--token-file")] = None
    """File with the cluster's token, or the keys of role driver; by default ADAM_TOKEN."""
    wait: Wait = WAIT
    """Maximum wait for a controller, such as 60s or 5m."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the actions of the command."""
    loop: LoopName = "uvloop"
    """The event loop."""


def check_workers(workers: int) -> None:
    """Check the number of workers that an operator asks for. Raises ConfigError: it is out of range."""
    check_within("the number of workers", workers, 0, MOST_WORKERS)


@options
class StatusOptions(OperatorOptions):
    """Options of `status`. The keys of role reader suffice for the cluster map alone."""

    all: Annotated[bool, ONLY_ON] = False
    """Show roles that have left or were lost, too."""
    json: Annotated[bool, ONLY_ON] = False
    """Print the result as one JSON object."""
