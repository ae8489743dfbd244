"""The interface of launchers to the command line: `adam-async launch NAME`.

A launcher has a description and a function. The description is a struct derived from `LauncherSettings`. The
struct's fields are the command's options, with types, bounds and texts like those of `run.config.Config`. The
function `train` of the launcher's file trains with the description:

    class PodmanSettings(LauncherSettings, frozen=True, kw_only=True):
        \"\"\"Train with the roles as containers of Podman.

        Args:
            image: Image with the package.
        \"\"\"

        image: str = "adam-async"

    async def train(settings: PodmanSettings, training: Training) -> int:
        async with PodmanLauncher(settings) as launcher:
            return await training.on(launcher)

The table `LAUNCHERS` of `cli/launch_commands.py` names both. The file of a description imports only the
modules that `--help` needs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from adam_async.errors import ConfigError
from adam_async.option_types import check_types
from adam_async.run.config import Config

if TYPE_CHECKING:
    from adam_async.cluster.launcher import Launcher


@dataclass(frozen=True, slots=True, eq=False)
class Typed:
    """An option has another name, or another type, on the command line than in a program.

    Attributes:
        name: Field of the command line, with underscores.
        kind: Type there; a number of seconds is a time with its unit, such as 60s.
        default: Default there.
        read: Makes the field's value from the command line's. Raises ConfigError.
        shown: Default in the help; empty for none.
    """

    name: str
    kind: Any
    default: Any
    read: Callable[[Any], Any]
    shown: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class FileArgument:
    """The command reads the value of a field from the file that its first argument names.

    Attributes:
        what: Name of the file in errors.
        read: Makes the value from the text of the file. Raises ConfigError.
    """

    what: str
    read: Callable[[str, str], Any]


class LauncherSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a launcher; see the text above.

    Raises:
        ConfigError: A value has another type than its field, or lies outside its bounds.
    """

    def __post_init__(self) -> None:
        check_types(self)


class Training(Protocol):
    """A training with the options of the command `train`, which a launcher runs."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of this process."""

    @property
    def words(self) -> Sequence[str]:
        """Words of the command line after `adam-async`."""

    @property
    def checkpoints(self) -> Path | None:
        """Folder for the run's checkpoints; None without checkpoints."""

    async def config(self, command: str) -> Config:
        """Return the options of the run, for a command whose ranks may start again.

        Raises:
            AdamError: An option is wrong, or would not suit a second start.
        """

    async def on(self, launcher: "AbstractAsyncContextManager[Launcher]") -> int:
        """Train with the roles on the machines of a launcher; return the exit code."""

    async def in_rank(self, environment: Mapping[str, str]) -> int:
        """Run the roles of this rank of a job, according to these variables, and in rank 0 the driver.

        Returns:
            The exit code.
        """

    def notice(self, text: str) -> None:
        """Print a line for the user."""


def check_variables_of_roles(name: str, variables: Mapping[str, str]) -> None:
    """Check variables that a launcher sets for its roles. Raises ConfigError: one is the token."""
    if "ADAM_TOKEN" in variables:
        raise ConfigError(
            f"other users could read the variables of roles: leave ADAM_TOKEN out of {name} and set it here "
            "only; each role gets its own keys"
        )
