"""The command `role --from-env`: run the roles that the variables of a batch job give to this process.

One role runs in this process, like its own command. Several roles run as child processes; this process
restarts a lost role if the cluster still has its state. `launch torchrun` and `launch slurm` run a rank's
roles in the same way (`launch_ranks.py`).
"""

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from adam_async.cli.files import is_file, read_file
from adam_async.cli.options import FromEnvironmentOptions
from adam_async.cli.terminal import Terminal, printable
from adam_async.data_server.transforms.steps import read_steps
from adam_async.errors import ConfigError, first_cause
from adam_async.launch.environment import Assignment, Layout, assigned_roles, cores_of_rank
from adam_async.run.config import Config, Waits
from adam_async.run.image_size import image_size_text
from adam_async.run.option_sources import (
    COMMAND_LINE,
    ENVIRONMENT,
    for_children,
    from_environment,
    from_toml,
    make_config,
    role_words,
)
from adam_async.run.user_code import allowed_words, transform_words
from adam_async.run.user_rules import rule_words
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import usable_cores

if TYPE_CHECKING:
    from adam_async.cluster.supervision import Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The roles of this process.

    Attributes:
        config: Options of the run.
        assignment: Roles, and addresses of the controllers.
        arguments: Options of each role's command, by node id, without the address and the options of the run.
        threads: Compute threads of each worker.
    """

    config: Config
    assignment: Assignment
    arguments: Mapping[str, tuple[str, ...]]
    threads: int

    def words_of_run(self, role: str, node: str) -> tuple[str, ...]:
        """Return the options of the run for the command of a role, except its threads."""
        # The write interval in the run's file has no effect on a server in memory.
        idle = () if role != "ps" or "--dir" in self.arguments[node] else ("flush_s",)
        return role_words(self.config, role, without=("threads", *idle))

    def command(self, options: FromEnvironmentOptions) -> list[str]:
        """Return the words of the only role's command."""
        ((role, node),) = self.assignment.roles
        words = [role, *(("--id", node) if node else ()), *self.arguments[node]]
        words += self.words_of_run(role, node)
        if role == "controller":
            named = self.assignment.bind_of(node)
            words += ["--bind", self.assignment.pod or named, "--advertise", named]
        else:
            words += ["--wait", f"{options.wait.total_seconds():.3f}s"]
            words += ["--bind", self.assignment.pod] if self.assignment.pod else []
        if role == "worker":
            words += ["--threads", str(self.threads)]
        if options.health is not None:
            words += ["--health", options.health, *(["--metrics"] if options.metrics else [])]
        if options.token_file is not None:
            words += ["--token-file", str(options.token_file)]
        return words


async def find_roles(
    options: FromEnvironmentOptions,
    environment: Mapping[str, str],
    given: Mapping[str, Any] | None = None,
    store: Path | None = None,
) -> Found:
    """Return the roles of this process.

    Args:
        given: A run's options on a launch's command line, with files relative to the working folder as for
            `train`; None: only `options.config` has options, with files relative to its folder.
        store: Folder that has one folder for each server that keeps its shards on disk; None: only in memory.

    Raises:
        ConfigError: The file of options is wrong, or a variable is wrong or missing (see `assigned_roles`).
    """
    if not options.from_env:
        raise ConfigError("role needs --from-env; a role by name is a command: adam-async ps --help")
    layers, sources = [from_environment(environment), given or {}], [ENVIRONMENT, COMMAND_LINE]
    folder = options.config.parent if options.config is not None and given is None else Path()
    async with Disk() as disk:
        if options.config is not None:
            text = await read_file(options.config, "--config", disk)
            layers.insert(0, from_toml(text, source=str(options.config)))
            sources.insert(0, str(options.config))
        config = make_config(*layers, sources=sources)
        model = None
        if is_file(config.model) and (options.config is not None or given is not None):
            model = await read_file(folder / config.model, "model", disk)
        assignment = assigned_roles(environment, Layout.of(config))
        functions: tuple[str, ...] = ()
        if any(role == "data" for role, _ in assignment.roles):
            functions = await _function_words(options, folder, config, disk)
    if options.health is not None and len(assignment.roles) > 1:
        raise ConfigError(
            f"--health is for one role, and this process has {len(assignment.roles)}: leave it out, or start "
            "as many ranks as roles"
        )
    # The variables and the file are right: only now import the modules of a cluster, which takes longer.
    from adam_async.run.model_selection import image_size

    size = image_size_text(image_size(config.size, config.model, text=model))
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
            words = (*words, *functions)
        if role == "ps":
            rules = (*([config.rule] if config.has_user_rule else []), *options.allow_rule)
            words = (*words, *rule_words(rules, options.step_path))
        if role == "ps" and store is not None:
            words = (*words, "--dir", str(store / node))
        if role == "worker":
            words = (*words, *allowed_words(options.allow_step, options.layers, options.step_path))
        arguments[node] = words
    workers = sum(role == "worker" for role, _ in assignment.roles)
    share = cores_of_rank(environment, usable_cores()) // max(1, workers)
    threads = 1 if config.record else config.threads or max(1, share)
    config = msgspec.structs.replace(config, size=size)
    return Found(config=config, assignment=assignment, arguments=arguments, threads=threads)


async def _function_words(
    options: FromEnvironmentOptions, folder: Path, config: Config, disk: Disk
) -> tuple[str, ...]:
    """Return the options that let a data server call the functions in the user's options and transforms."""
    steps = None
    if config.augment and config.transforms:
        text = await read_file(folder / config.transforms, "transforms", disk)
        steps = read_steps(text, config.transforms)
    return transform_words(steps, options.step_path, options.allow_transform)


def show(found: Found) -> int:
    """Print role, node id and options of each role in this process; return 0."""
    for role, node in found.assignment.roles:
        words = (*found.arguments[node], *found.words_of_run(role, node))
        sys.stdout.write(f"{printable(shlex.join((role, node or '-', *words)))}\n")
    return 0


async def supervise(
    found: Found, options: FromEnvironmentOptions, environment: Mapping[str, str], terminal: Terminal
) -> int:
    """Run several roles as child processes until cancelled.

    Raises:
        RoleDied: A role could not start, or a role with the only copy of some state died.
    """
    from adam_async.cli.token import read_token

    token = await read_token(options.token_file, environment) or ""
    try:
        async with running_roles(found, token, found.config.waits, environment, terminal) as roles:
            for node, process in roles.processes.items():
                sys.stdout.write(f"{printable(f'{node} listens on {await process.address}')}\n")
                sys.stdout.flush()
            await roles.needed_one_died()
    except ExceptionGroup as errors:
        raise first_cause(errors) from None
    return 0


@asynccontextmanager
async def running_roles(
    found: Found,
    token: str,
    waits: Waits,
    environment: Mapping[str, str],
    terminal: Terminal,
    *,
    ignores_sigterm: bool = False,
) -> AsyncIterator["Supervisor"]:
    """Run the roles of this process as child processes during the block, once all have an address.

    Args:
        token: Token of the cluster; empty without one.
        waits: Deadlines of the roles.
        ignores_sigterm: See `Orders`.

    Raises:
        RoleDied: A role could not start.
        DeadlineExceeded: A role did not report its address in time.
    """
    from adam_async.cluster.launcher import LocalLauncher
    from adam_async.cluster.networks import address_towards
    from adam_async.cluster.processes import orders_for
    from adam_async.cluster.supervision import Supervisor

    kept = for_children(environment)
    # A role may wait for a controller before it reports its address.
    patient = msgspec.structs.replace(waits, prepare_s=waits.prepare_s + waits.start_s)
    config = msgspec.structs.replace(found.config, waits=patient)
    launcher = LocalLauncher(kept)
    roles = Supervisor(config, launcher, environment=kept, on_line=terminal.notice)
    assignment = found.assignment
    towards = await address_towards(",".join(assignment.controllers))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
        state = ""
        if config.controllers > 1:
            state = await stack.enter_async_context(launcher.state_folder(system_entropy(8).hex()))
        orders = orders_for(token, waits, profile_events=0, ignores_sigterm=ignores_sigterm)
        roles.begin(group, orders)
        try:
            for role, node in assignment.roles:
                words = found.arguments[node]
                if role == "controller" and state and "--dir" not in words:
                    words = (*words, "--dir", f"{state}/{node}")
                bind = assignment.bind_of(node) if role == "controller" else towards
                roles.start(role, node, *words, bind=bind, threads=found.threads)
            for _, node in assignment.roles:
                await roles.serves(node)
            yield roles
        finally:
            await roles.stop()
