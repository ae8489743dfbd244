"""The commands `simulate` and `drill`: their code is in `tests/` of a checkout, which a wheel lacks."""

import sys
from pathlib import Path

from cyclopts import App

import adam_async
from adam_async.errors import ConfigError

SIMULATE = "Run the shipped code in simulated clusters with faults, seed by seed; needs a checkout."

DRILL = """Kill, freeze and cut off parameter servers under a workload, and check that no push is lost or
doubled; needs a checkout.

Exit codes: 0 all claims hold, 1 a claim failed, 2 an option is wrong, 3 a kind of fault cannot be injected
and --require is set.
"""

COMMANDS = {
    "simulate": ("tests.simulation.command:simulate", SIMULATE),
    "drill": ("tests.drill.command:drill", DRILL),
}
"""Function and help of each command. cyclopts imports a module when its command runs, or for its options."""

PACKAGES = Path(adam_async.__file__).parents[1]
"""Folder of the packages: a checkout's root, or a folder of installed packages."""


def add_commands(app: App, packages: Path = PACKAGES) -> None:
    """Add the commands if the packages are in a checkout; otherwise `check_command` refuses them."""
    if not (packages / "tests" / "simulation").is_dir():
        return
    if str(packages) not in sys.path:
        sys.path.append(str(packages))
    for name, (function, about) in COMMANDS.items():
        app.command(function, name=name, help=about)


def check_command(word: str, packages: Path = PACKAGES) -> None:
    """Check a word that is no command of this installation.

    Raises:
        ConfigError: The word is a command of a checkout only; the error has the cure.
    """
    if word in COMMANDS:
        raise ConfigError(
            f"{word} needs a checkout of the project: its code is in tests/, and {packages} has none. "
            f"Install the checkout with `pip install -e .`, and run {word} again"
        )
