"""The options of `status`, `logs`, `scale`, `stop` and `store`."""

from pathlib import Path
from typing import Annotated, Literal

from adam_async.cli.files import check_readable_folder, check_result
from adam_async.cli.options import (
    ONLY_ON,
    WAIT,
    JsonOptions,
    Wait,
    addresses_of,
    options,
    page_address,
    to_read,
)
from adam_async.errors import ConfigError


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


@options
class StatusOptions(OperatorOptions, JsonOptions):
    """Options of `status`. The keys of role reader suffice for the cluster map alone."""

    all: Annotated[bool, ONLY_ON] = False
    """Show roles that have left or were lost, too."""
    check: Annotated[bool, ONLY_ON] = False
    """End with code 10 if copies, roles or replicas are lacking, and 11 if the run or a store has failed."""
    watch: Annotated[bool, ONLY_ON] = False
    """Show the state again every second, until Ctrl-C."""

    def __post_init__(self) -> None:
        if self.check and self.watch:
            raise ConfigError("--check ends with a code, and --watch does not end: leave one of them out")


@options
class DashboardOptions(OperatorOptions):
    """Options of `dashboard`."""

    controller: Annotated[str | None, addresses_of("--controller")] = None  # type: ignore[assignment]
    """tcp://HOST:PORT of the controller, or of several with commas between them, of a cluster that runs."""
    runs: Annotated[Path | None, to_read("--runs", check_readable_folder)] = None
    """Folder with reports of train --report, and files of train --events, of past runs."""
    bind: Annotated[str, page_address("--bind")] = "127.0.0.1:0"
    """HOST:PORT of the page; port 0 is any free port."""
    dashboard_token_file: Annotated[Path | None, to_read("--dashboard-token-file")] = None
    """File with the token of the page's visitors; without one the printed address has a random token."""
    allow_operations: Annotated[bool, ONLY_ON] = False
    """Let visitors kill, freeze and add roles, if the driver of the run permits it, too."""


Action = Literal["list", "show", "save", "delete"]
"""Action of the command, its first argument."""


@options
class StoreOptions(OperatorOptions, JsonOptions):
    """Options of `store`."""

    token_file: Annotated[Path | None, to_read("--token-file")] = None
    """File with the cluster's token, or the keys of role reader (of role client for delete); by default
    ADAM_TOKEN."""
    yes: Annotated[bool, ONLY_ON] = False
    """Confirm that delete removes the store for all its clients."""


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
        check_result(file, "store save")
