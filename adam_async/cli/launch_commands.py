"""The commands of `adam-async launch`.

Like `commands.py`, this file imports only the modules that `--help` needs.
"""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from adam_async.cli.launch_options import RayOptions, SlurmOptions
from adam_async.cli.options import TrainOptions, to_read
from adam_async.cli.running import run_driver
from adam_async.cli.terminal import Terminal
from adam_async.launch.environment import check_slurm, torchrun_variables

RunFile = Annotated[
    Path, to_read("--config"), Parameter(help="TOML file with options, as for `train --config`.")
]

launch_commands = App(name="launch", help="Train with roles on other machines.")


@launch_commands.command(name="ssh")
def launch_ssh(
    hosts: Annotated[Path, to_read("the file of hosts")],
    file: RunFile | None = None,
    /,
    options: TrainOptions = TrainOptions(),  # noqa: B008 - frozen
) -> int:
    """Train with the roles on hosts, over SSH, and the driver in this process; needs the extra `ssh`.

    Parameters
    ----------
    hosts
        TOML file with the hosts (docs/how-to/launch-ssh.md).
    """

    async def work(terminal: Terminal) -> int:
        from adam_async.cli.launch import launch_over_ssh

        return await launch_over_ssh(hosts, file, options, os.environ, terminal)

    return run_driver(work, options, file)


@launch_commands.command(name="torchrun")
def launch_torchrun(
    file: RunFile | None = None,
    /,
    *,
    port: int = 0,
    options: TrainOptions = TrainOptions(),  # noqa: B008 - frozen
) -> int:
    """Train in the ranks that torchrun starts (docs/how-to/launch-torchrun.md); rank 0 is the driver.

    Parameters
    ----------
    port
        Port of the only controller, in rank 0; by default from 20000 to 29999, by MASTER_PORT.
    """

    async def work(terminal: Terminal) -> int:
        from adam_async.cli.launch import launched

        launched(options, file)
        environment = torchrun_variables(os.environ, port)
        from adam_async.cli.launch_ranks import launch_in_rank

        return await launch_in_rank(file, options, environment, terminal)

    return run_driver(work, options, file)


@launch_commands.command(name="ray")
def launch_ray(
    file: RunFile | None = None,
    /,
    ray: RayOptions = RayOptions(),  # noqa: B008 - frozen
    options: TrainOptions = TrainOptions(),  # noqa: B008 - frozen
) -> int:
    """Train with the roles as actors of Ray, and the driver in this process; needs the extra `ray`."""

    async def work(terminal: Terminal) -> int:
        ray.settings()
        from adam_async.cli.launch import launch_on_ray

        return await launch_on_ray(ray, file, options, os.environ, terminal)

    return run_driver(work, options, file)


@launch_commands.command(name="slurm")
def launch_slurm(
    file: RunFile | None = None,
    /,
    slurm: SlurmOptions = SlurmOptions(),  # noqa: B008 - frozen
    options: TrainOptions = TrainOptions(),  # noqa: B008 - frozen
) -> int:
    """Print or submit the script of a Slurm job that trains on its nodes (docs/how-to/launch-slurm.md)."""

    async def work(terminal: Terminal) -> int:
        from adam_async.cli.launch import launched

        launched(options, file)
        slurm.job()
        if not slurm.here:
            from adam_async.cli.launch import prepare_slurm_job

            return await prepare_slurm_job(file, options, slurm, os.environ, terminal)
        check_slurm(os.environ)
        from adam_async.cli.launch_ranks import launch_in_rank

        return await launch_in_rank(file, options, os.environ, terminal)

    return run_driver(work, options, file)
