"""A training that a launcher runs: the options of `train`, with roles that the launcher starts."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from adam_async.cli.options import TrainOptions
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError, listed
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
        """Words of the command line."""
        return sys.argv[1:]

    @property
    def checkpoints(self) -> Path | None:
        """Folder for the checkpoints of the run; None without checkpoints."""
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
