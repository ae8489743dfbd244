"""The commands `launch ssh` and `launch ray`, and jobs of Slurm: `train`, with roles on other machines."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from adam_async.cli.files import read_file
from adam_async.cli.options import TrainOptions
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError
from adam_async.launch.hosts import read_hosts
from adam_async.launch.ray_resources import RaySettings
from adam_async.launch.slurm import Job
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.kernel_cache import user_cache


async def launch_over_ssh(
    hosts: Path, file: Path | None, options: TrainOptions, environment: Mapping[str, str], terminal: Terminal
) -> int:
    """Train with the roles on the hosts of a file. See `run_training`.

    Raises:
        ConfigError: The file is wrong, a host cannot be used, or an option is not for this command.
        RoleUnreachable: A host does not answer.
    """
    options = launched(options, file)
    async with Disk() as disk:
        found = read_hosts(await read_file(hosts, "the file of hosts", disk), source=str(hosts))
    # The file is right: only now import the modules of a training, which takes longer.
    from adam_async.cli.train import run_training
    from adam_async.launch.ssh import SshLauncher

    records = records_folder(environment)
    async with SshLauncher(found, records=records, entropy=system_entropy) as launcher:
        return await run_training(options, environment, terminal, launcher)


async def launch_on_ray(
    ray: RaySettings,
    file: Path | None,
    options: TrainOptions,
    environment: Mapping[str, str],
    terminal: Terminal,
) -> int:
    """Train with the roles as actors of a Ray cluster. See `run_training`.

    Raises:
        ConfigError: An option is not for this command, or Ray or a node cannot be used.
        RoleUnreachable: The Ray cluster does not answer.
        DeadlineExceeded: Ray has no room for the roles.
    """
    options = launched(options, file)
    from adam_async.cli.train import run_training
    from adam_async.launch.ray import RayLauncher

    async with RayLauncher(ray, entropy=system_entropy) as launcher:
        return await run_training(options, environment, terminal, launcher)


async def prepare_slurm_job(
    file: Path | None,
    options: TrainOptions,
    job: Job,
    environment: Mapping[str, str],
    terminal: Terminal,
    *,
    submits: bool,
) -> int:
    """Print the script of a job, or submit it.

    Raises:
        ConfigError: An option is wrong, or Slurm refuses the job.
    """
    options = launched(options, file)
    from adam_async.checkpoint.files import check_resumes_newest, written_folder
    from adam_async.cli.train import configure
    from adam_async.launch.slurm import job_script, memory_of_node, submit
    from adam_async.runtime.child_process import COMMAND

    check_resumes_newest(options.resume, "launch slurm")
    async with Disk() as disk:
        config = await configure(options, environment, disk, launched=True)
    words = [word for word in sys.argv[1:] if word not in ("--submit", "--no-submit")]
    job = dataclasses.replace(job, memory_bytes=memory_of_node(config, job.nodes))
    folder = written_folder(options.checkpoint, options.resume)
    script = job_script(job, COMMAND, [*words, "--here"], str(folder or ""))
    if not submits:
        sys.stdout.write(script)
        return 0
    number = await submit(script, environment)
    terminal.print(f"submitted job {number}; its output is in {job.name}-{number}.out")
    return 0


def records_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder with the records of launches, in the user's cache."""
    return user_cache(environment) / "launches"


def launched(options: TrainOptions, file: Path | None) -> TrainOptions:
    """Return the options of `train` for roles that a launcher starts.

    Raises:
        ConfigError: An option is not for a launch, or there are two files of options.
    """
    if file is not None and options.config is not None:
        raise ConfigError(f"{file} and --config {options.config} are both the file of options: give one")
    for option in ("controller", "replay"):
        if getattr(options, option) is not None:
            raise ConfigError(f"--{option} has no force with launch, which starts the roles: leave it out")
    if options.processes is False:
        raise ConfigError("--no-processes has no force with launch, whose roles are processes: leave it out")
    return dataclasses.replace(options, config=file or options.config, processes=True)
