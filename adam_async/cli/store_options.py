"""The options of `store`, and their checks."""

from pathlib import Path
from typing import Annotated, Literal

from adam_async.cli.files import check_folder, check_regular
from adam_async.cli.options import ONLY_ON, WAIT, LoopName, Wait, addresses_of, options, to_read
from adam_async.errors import ConfigError

Action = Literal["list", "show", "save", "delete"]
"""Action of the command, its first argument."""


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


def check_words(action: Action, name: str | None, file: Path | None, options: StoreOptions) -> None:
    """Check the words of `store`. Raises ConfigError: one is missing or superfluous, or is no file."""
    if action == "list" and name is not None:
        raise ConfigError(f"store list takes no name; show it with: adam-async store show {name}")
    if action != "list" and name is None:
        raise ConfigError(f"store {action} needs the name of a store; adam-async store list shows them")
    if action == "save" and file is None:
        raise ConfigError(f"store save needs a file: adam-async store save {name} FILE.safetensors")
    if action != "save" and file is not None:
        raise ConfigError(f"store {action} takes no file: leave {file} out")
    if action != "delete" and options.yes:
        raise ConfigError("--yes belongs to store delete: leave it out")
    if file is not None:
        check_regular(file, "store save")
        check_folder(file.parent, "store save")
