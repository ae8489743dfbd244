"""The commands of `adam-async launch`.

Like `commands.py`, this file imports only the modules that `--help` needs.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from adam_async.cli.options import TrainOptions, options, to_read
from adam_async.cli.running import run_driver
from adam_async.cli.terminal import Terminal
from adam_async.launch.environment import check_slurm, torchrun_variables
from adam_async.launch.ray_resources import RaySettings, read_asks, read_variables
from adam_async.launch.slurm import Job

RunFile = Annotated[
    Path, to_read("--config"), Parameter(help="TOML file with options, as for `train --config`.")
]

launch_commands = App(name="launch", help="Train with roles on other machines.")


@options
class RayOptions:
    """Options of `launch ray`."""

    address: str = "auto"
    """HOST:PORT of the Ray cluster; auto, the cluster of RAY_ADDRESS or of this machine; or local, a cluster
    that the command starts on this machine."""
    ask: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Resources that each role of a kind asks of Ray, ROLE:RESOURCE=AMOUNT such as worker:CPU=4; roles are
    ps, data, worker and controller. By default servers and data servers ask for at most one CPU, and
    workers share the rest."""
    pack: Annotated[bool, Parameter(negative="")] = False
    """Place the workers on few nodes; by default they are spread over all."""
    room_wait: Annotated[timedelta, Parameter(show_default=lambda _: "60s")] = timedelta(seconds=60)
    """Maximum wait for room on Ray, such as 60s or 5m; an autoscaler needs time to start nodes."""
    env: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Variables of the roles, NAME=VALUE, such as ADAM_DATA_DIR=/data."""

    def settings(self) -> RaySettings:
        """Return the settings of the launcher.

        Raises:
            ConfigError: An option has a wrong value.
        """
        return RaySettings(
            address=self.address,
            asks=read_asks(self.ask),
            pack=self.pack,
            wait_s=self.room_wait.total_seconds(),
            environment=read_variables(self.env),
        )


@options
class SlurmOptions:
    """Options of a Slurm job."""

    submit: Annotated[bool, Parameter(negative="")] = False
    """Submit the job; by default the command prints its script."""
    here: Annotated[bool, Parameter(negative="")] = False
    """Train in this rank of a job: for `srun` in the script, or in a shell of salloc."""
    nodes: int = 1
    """Number of nodes."""
    cpus: int = 0
    """CPUs of each node; by default whole nodes."""
    time: str = ""
    """Time limit, such as 8:00:00; the job ends in order 120 s before, and returns into the queue if it has a
    new checkpoint."""
    partition: str = ""
    """Partition of the nodes."""
    job_name: str = "adam-async"
    """Name of the job, and beginning of the name of its output."""

    def job(self) -> Job:
        """Return the job without the memory of its nodes. Raises ConfigError: an option has a wrong value."""
        return Job(
            nodes=self.nodes,
            cpus=self.cpus,
            time=self.time,
            partition=self.partition,
            name=self.job_name,
        )


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
        """Prepare the job, or take the part of this rank in it."""
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
        settings = ray.settings()
        from adam_async.cli.launch import launch_on_ray

        return await launch_on_ray(settings, file, options, os.environ, terminal)

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
        job = slurm.job()
        if not slurm.here:
            from adam_async.cli.launch import prepare_slurm_job

            return await prepare_slurm_job(file, options, job, os.environ, terminal, submits=slurm.submit)
        check_slurm(os.environ)
        from adam_async.cli.launch_ranks import launch_in_rank

        return await launch_in_rank(file, options, os.environ, terminal)

    return run_driver(work, options, file)
