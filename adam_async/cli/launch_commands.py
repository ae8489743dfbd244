"""The commands of `adam-async launch`, one per launcher, made from its description.

Like `commands.py`, this file imports only the modules that `--help` needs.
"""

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import partial
from importlib import import_module
from inspect import Parameter as Argument
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from adam_async.cli.files import read_file
from adam_async.cli.options import TrainOptions, of_field, options, to_read
from adam_async.cli.running import run_driver
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError, listed
from adam_async.launch.hosts import SshSettings
from adam_async.launch.ray_resources import RaySettings
from adam_async.launch.settings import FileArgument, LauncherSettings, Typed
from adam_async.launch.slurm import SlurmSettings
from adam_async.launch.torchrun import TorchrunSettings
from adam_async.option_types import SECONDS, dashed, options_of, read_option
from adam_async.run.config import Config
from adam_async.runtime.disk import Disk

if TYPE_CHECKING:
    from adam_async.cluster.launcher import Launcher


class Launch:
    """A training that a launcher runs, see `launch.settings.Training`.

    Args:
        options: Options of `train`.
        file: TOML file with options; None without one.
        environment: Variables of this process.
        terminal: The terminal of the command.

    Raises:
        ConfigError: An option is not for a launch, or there are two files of options.
    """

    def __init__(
        self, options: TrainOptions, file: Path | None, environment: Mapping[str, str], terminal: Terminal
    ) -> None:
        if file is not None and options.config is not None:
            raise ConfigError(f"{file} and --config {options.config} are both the file of options: give one")
        given = [f"--{option}" for option in ("controller", "replay") if getattr(options, option) is not None]
        given += ["--no-processes"] * (options.processes is False)
        if given:
            why = "which starts the roles as processes"
            raise ConfigError(f"{listed(given)} has no effect with launch, {why}: leave it out")
        self._options = dataclasses.replace(options, config=file or options.config, processes=True)
        self._terminal = terminal
        self.environment = environment

    @property
    def words(self) -> Sequence[str]:
        return sys.argv[1:]

    @property
    def checkpoints(self) -> Path | None:
        """Folder for the run's checkpoints; None without checkpoints."""
        from adam_async.checkpoint.files import written_folder

        return written_folder(self._options.checkpoint, self._options.resume)

    async def config(self, command: str) -> Config:
        """Return the options of the run. See `launch.settings.Training`."""
        from adam_async.checkpoint.files import check_resumes_newest
        from adam_async.cli.train import configure

        check_resumes_newest(self._options.resume, command)
        async with Disk() as disk:
            return await configure(self._options, self.environment, disk, launched=True)

    async def on(self, launcher: "AbstractAsyncContextManager[Launcher]") -> int:
        """Train with the roles on the machines of a launcher. See `cli.train.run_training`."""
        from adam_async.cli.train import run_training

        async with launcher as entered:
            return await run_training(self._options, self.environment, self._terminal, entered)

    async def in_rank(self, environment: Mapping[str, str]) -> int:
        """Run the roles of this rank. See `cli.launch_ranks.launch_in_rank`."""
        from adam_async.cli.launch_ranks import launch_in_rank

        return await launch_in_rank(self._options, environment, self._terminal)

    def notice(self, text: str) -> None:
        """Print a line for the user."""
        self._terminal.print(text)


LAUNCHERS: Mapping[str, tuple[type[LauncherSettings], str]] = {
    "ssh": (SshSettings, "ssh"),
    "torchrun": (TorchrunSettings, "torchrun"),
    "ray": (RaySettings, "ray"),
    "slurm": (SlurmSettings, "slurm"),
}
"""Description of each launcher, and the file in `adam_async/launch/` that has its function `train`."""

RunFile = Annotated[
    Path, to_read("--config"), Parameter(help="TOML file with options, as for `train --config`.")
]

launch_commands = App(name="launch", help="Train with roles on other machines.")


def _command_of(kind: type[LauncherSettings], home: str) -> Callable[..., int]:
    """Return a launcher's command, with its options and those of `train`."""
    made = _options_class(kind)
    read_first = [
        (name, fact) for name, option in options_of(kind).items() for fact in option.all(FileArgument)
    ]
    plain = TrainOptions()

    def command(*files: Path | None, settings: Any = None, options: TrainOptions = plain) -> int:
        given = _values(kind, made() if settings is None else settings)
        paths, file = files[: len(read_first)], next(iter(files[len(read_first) :]), None)

        async def work(terminal: Terminal) -> int:

            launch = Launch(options, file, os.environ, terminal)
            for path, (name, fact) in zip(paths, read_first, strict=True):
                assert path is not None, "the argument has no default"
                async with Disk() as disk:
                    given[name] = fact.read(await read_file(path, fact.what, disk), str(path))
            described = kind(**given)
            # The options are right: only now import the modules of the launcher, which may take longer.
            return int(await import_module(f"adam_async.launch.{home}").train(described, launch))

        return run_driver(work, options, file)

    words = [
        Argument(name, Argument.POSITIONAL_ONLY, annotation=Annotated[Path, to_read(fact.what)])
        for name, fact in read_first
    ]
    words.append(Argument("file", Argument.POSITIONAL_ONLY, default=None, annotation=RunFile | None))
    if dataclasses.fields(made):
        words.append(Argument("settings", Argument.KEYWORD_ONLY, default=made(), annotation=made))
    words.append(Argument("options", Argument.KEYWORD_ONLY, default=plain, annotation=TrainOptions))
    command.__signature__ = inspect.Signature(words, return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in words}
    text = inspect.getdoc(kind) or ""
    command.__doc__ = text if read_first else text.partition("\n\n")[0]
    return command


def _options_class(kind: type[LauncherSettings]) -> Any:
    """Return the class of a command's options, from the fields of a description."""
    text, kinds = kind.__doc__ or "", {}
    namespace: dict[str, Any] = {}
    for name, option in options_of(kind).items():
        if option.all(FileArgument):
            continue
        parameter, of = Parameter(negative=""), option.kind
        namespace[name] = option.default
        for typed in option.all(Typed):
            del namespace[name]
            text = re.sub(rf"(?m)^(\s+){name}: ", rf"\1{typed.name}: ", text)
            if typed.shown:
                parameter = Parameter(negative="", show_default=partial(_shown, typed.shown))
            name, of, namespace[typed.name] = typed.name, typed.kind, typed.default
            if option.has(SECONDS):
                of, namespace[typed.name] = timedelta, timedelta(seconds=typed.default)
        checks = () if option.all(Typed) else (of_field(option),)
        kinds[name] = Annotated[of, parameter, *checks]
    namespace |= {"__annotations__": kinds, "__doc__": text, "__module__": __name__}
    return options(type(f"{kind.__name__}Options", (), namespace))


def _shown(text: str, _: Any) -> str:
    return text


def _values(kind: type[LauncherSettings], given: Any) -> dict[str, Any]:
    """Return the fields of a description from the options of a command line.

    Raises:
        ConfigError: An option has a wrong value.
    """
    found = {}
    for name, option in options_of(kind).items():
        if option.all(FileArgument):
            continue
        found[name] = getattr(given, name, option.default)
        for typed in option.all(Typed):
            value = getattr(given, typed.name)
            read = typed.read(value.total_seconds() if option.has(SECONDS) else value)
            found[name] = read_option(option, read, dashed(typed.name))
    return found


for _name, (_kind, _home) in LAUNCHERS.items():
    launch_commands.command(_command_of(_kind, _home), name=_name)
