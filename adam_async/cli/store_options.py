"""The options of `store`."""

from pathlib import Path
from typing import Annotated

from adam_async.cli.options import ONLY_ON, WAIT, LoopName, Wait, addresses_of, options, to_read


@options
class StoreOptions:
    """Options of `store`."""

    controller: Annotated[str, addresses_of("--controller")]
    """tcp://HOST:PORT of the controller, or of several with commas between them."""
    token_file: Annotated[Path | None, to_read("--token-file")] = None
    """File with the cluster's token, or the keys of role reader (of role client for delete); by default
    ADAM_TOKEN."""
    wait: Wait = WAIT
    """Maximum wait for a controller, such as 60s or 5m."""
    yes: Annotated[bool, ONLY_ON] = False
    """Confirm that delete removes the store for all its clients."""
    json: Annotated[bool, ONLY_ON] = False
    """Print the result as one JSON object."""
    verbose: Annotated[bool, ONLY_ON] = False
    """Log the actions of the command."""
    loop: LoopName = "uvloop"
    """The event loop."""
