"""The command `role --from-env`: run the roles that the variables of a batch job give to this process.

One role runs in this process, like its own command. Several roles run as child processes; this process
restarts a lost one if the cluster still has its state.
"""

import asyncio
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adam_async.cli.files import is_file, read_file
from adam_async.cli.options import FromEnvironmentOptions
from adam_async.cli.printable import printable
from adam_async.cli.terminal import Terminal
from adam_async.data_server.transforms.steps import read_steps
from adam_async.errors import ConfigError, first_cause
from adam_async.launch.environment import Assignment, Layout, assigned_roles
from adam_async.run.config import Config
from adam_async.run.option_sources import (
    ENVIRONMENT,
    for_children,
    from_environment,
    from_toml,
    make_config,
)
from adam_async.run.user_code import allowed_words, transform_words
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The roles of this process.

    Attributes:
        config: Options of the run.
        assignment: Roles, and addresses of the controllers.
        arguments: Options of each role's command, by node id, without the address, the threads and the
            options that all roles have.
    """

    config: Config
    assignment: Assignment
    arguments: Mapping[str, tuple[str, ...]]

    def command(self, options: FromEnvironmentOptions) -> list[str]:
        """Return the words of the command of the only role."""
        ((role, node),) = self.assignment.roles
        words = [role, *(("--id", node) if node else ()), *self.arguments[node]]
        words += ["--memory-budget", self.config.memory_budget, "--checksum", self.config.checksum]
        if role == "controller":
            named = self.assignment.bind_of(node)
            words += ["--bind", self.assignment.pod or named, "--advertise", named]
        else:
            words += ["--wait", f"{options.wait.total_seconds():.3f}s"]
            words += ["--bind", self.assignment.pod] if self.assignment.pod else []
        if role == "ps" and self.config.copies_bind:
            words += ["--copies-bind", self.config.copies_bind]
        if role == "worker":
            words += ["--threads", str(self.config.threads)]
        if options.health is not None:
            words += ["--health", options.health]
        if options.token_file is not None:
            words += ["--token-file", str(options.token_file)]
        return words


async def find_roles(options: FromEnvironmentOptions, environment: Mapping[str, str]) -> Found:
    """Return the roles of this process.

    Raises:
        ConfigError: The file of options is wrong, or a variable is wrong or missing (see `assigned_roles`).
    """
    if not options.from_env:
        raise ConfigError("role needs --from-env; a role by name is a command: adam-async ps --help")
    layers, sources = [from_environment(environment)], [ENVIRONMENT]
    async with Disk() as disk:
        if options.config is not None:
            text = await read_file(options.config, "--config", disk)
            layers.insert(0, from_toml(text, source=str(options.config)))
            sources.insert(0, str(options.config))
        config = make_config(*layers, sources=sources)
        model = (
            await read_file(options.config.parent / config.model, "model", disk)
            if (options.config is not None and is_file(config.model))
            else None
        )
        assignment = assigned_roles(environment, Layout.of(config))
        functions: tuple[str, ...] = ()
        if any(role == "data" for role, _ in assignment.roles):
            functions = await _function_words(options, config, disk)
    if options.health is not None and len(assignment.roles) > 1:
        raise ConfigError(
            f"--health is for one role, and this process has {len(assignment.roles)}: leave it out, or start "
            "as many ranks as roles"
        )
    # The variables and the file are right: only now import the modules of a cluster, which takes longer.
    from adam_async.cluster.launcher import data_words
    from adam_async.run.model_selection import image_size

    size = image_size(config.size, config.model, text=model)
    controllers = ",".join(assignment.controllers)
    arguments = {}
    for role, node in assignment.roles:
        words: tuple[str, ...] = ()
        if role != "controller":
            words = (*words, "--controller", controllers)
        elif config.controllers > 1:
            peers = ",".join(f"{number}={one}" for number, one in enumerate(assignment.controllers, 1))
            words = (*words, "--peers", peers)
        if role == "controller" and options.dir is not None:
            words = (*words, "--dir", str(options.dir / node))
        if role == "data":
            words = (*words, *data_words(config, cache=config.cache, size=size))
            words = (*words, *functions)
        if role == "worker":
            words = (*words, "--in-flight", str(config.in_flight))
            words = (*words, *allowed_words(options.allow_step, options.layers, options.step_path))
        arguments[node] = words
    return Found(config=config, assignment=assignment, arguments=arguments)


async def _function_words(options: FromEnvironmentOptions, config: Config, disk: Disk) -> tuple[str, ...]:
    """Return the options that let a data server call the functions in the user's options and transforms."""
    steps = None
    if config.augment and config.transforms:
        folder = options.config.parent if options.config is not None else Path()
        text = await read_file(folder / config.transforms, "transforms", disk)
        steps = read_steps(text, config.transforms)
    return transform_words(steps, options.step_path, options.allow_transform)


def show(found: Found) -> int:
    """Print role, node id and options of each role of this process; returns 0."""
    for role, node in found.assignment.roles:
        sys.stdout.write(f"{printable(shlex.join((role, node or '-', *found.arguments[node])))}\n")
    return 0


async def supervise(
    found: Found, options: FromEnvironmentOptions, environment: Mapping[str, str], terminal: Terminal
) -> int:
    """Run several roles as child processes until cancelled.

    Raises:
        RoleDied: A role could not start, or a role with the only copy of some state died.
    """
    from adam_async.cli.token import read_token
    from adam_async.cluster.local_launcher import LocalLauncher
    from adam_async.cluster.networks import address_towards
    from adam_async.cluster.processes import orders_for
    from adam_async.cluster.supervision import Supervisor

    token = await read_token(options.token_file, environment)
    kept = for_children(environment)
    launcher = LocalLauncher(kept)
    roles = Supervisor(found.config, launcher, environment=kept, on_line=terminal.notice)
    assigned = found.assignment.roles
    workers = sum(role == "worker" for role, _ in assigned)
    threads = found.config.threads or max(1, usable_cores() // max(1, workers))
    towards = await address_towards(",".join(found.assignment.controllers))
    try:
        async with asyncio.TaskGroup() as group:
            roles.begin(group, orders_for(token or "", found.config.waits, profile_events=0))
            try:
                started = []
                for role, node in assigned:
                    bind = found.assignment.bind_of(node) if role == "controller" else towards
                    started.append(
                        roles.start(role, node, *found.arguments[node], bind=bind, threads=threads)
                    )
                for process in started:
                    address = await roles.address_of(process)
                    sys.stdout.write(f"{printable(f'{process.node} listens on {address}')}\n")
                    sys.stdout.flush()
                await roles.needed_one_died()
            finally:
                await roles.stop()
    except ExceptionGroup as errors:
        raise first_cause(errors) from None
    return 0
