"""The command `data`; with `--stage` it copies a shared source with other servers, and serves the copy."""

import os
import platform
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from adam_async.cli.data import load_data
from adam_async.cli.options import DataServerOptions, StageOptions
from adam_async.cli.roles.serving import serve, serve_member
from adam_async.cli.terminal import Terminal
from adam_async.cli.token import read_token
from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.cluster.roles.place import Place, listening
from adam_async.controller.role import Role
from adam_async.data_server.service import DataServer
from adam_async.data_server.staging.peer import Patience
from adam_async.data_server.staging.service import staging
from adam_async.data_server.standalone import DataHost
from adam_async.errors import ConfigError
from adam_async.run.image_size import read_image_size
from adam_async.run.memory_sizes import cache_limits
from adam_async.run.user_code import allow_functions
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.health import Health
from adam_async.runtime.machine import available_bytes
from transport import BufferPool, Identity

HANGS_S = 1.0
"""Maximum wait in seconds for earlier calls when a disk that reads the source closes; the command abandons
calls that hang."""


async def _serve_data(
    options: DataServerOptions, data: str, environment: Mapping[str, str], health: Health
) -> int:
    """Load the data, then run a data server until cancelled; without a controller, a data host."""
    functions, config = allow_functions(options.allow_transform), options.config()
    async with Disk() as disk:
        cache = cache_limits(config.cache, config.spill, available_bytes=available_bytes())
        wanted = read_image_size(config.size)
        dataset = await load_data(data, disk, environment, damaged=config.damaged, cache=cache, size=wanted)
    if options.controller is None:
        bind = options.bind or LOOPBACK

        def open_host(place: Place) -> AbstractAsyncContextManager[Role]:
            settings, entropy = place.settings("data"), place.entropy
            return listening(DataHost(settings, dataset, entropy=entropy, functions=functions), place)

        return await serve("data-host", options, "", bind, environment, health, open_host)

    def open_server(place: Place) -> AbstractAsyncContextManager[Role]:
        return listening(DataServer(place.settings("data"), dataset, functions=functions), place)

    return await serve_member("data", options, environment, health, open_server)


async def serve_staged(
    options: DataServerOptions,
    stage: StageOptions,
    environment: Mapping[str, str],
    terminal: Terminal,
    health: Health,
) -> int:
    """Copy the data if `--stage` is given, then run a data server until cancelled.

    The server answers other servers of the staging as long as it runs.

    Raises:
        ConfigError: The options contradict one another.
        DataError: The source cannot be staged.
        BindFailed: No address of the list belongs to this machine and is free.
    """
    data = options.config().data
    peers = _checked(stage, data)
    if stage.stage is None:
        return await _serve_data(options, data, environment, health)
    token = await read_token(options.token_file, environment, role="data")
    identity = Identity(
        role="data",
        node=options.id or f"data-{platform.node()[:40]}-{os.getpid()}",
        incarnation=int.from_bytes(system_entropy(7), "little"),
    )
    async with (
        Disk(name="copy") as disk,
        staging(
            Path(data),
            stage.stage,
            peers=peers,
            network=cluster_network(token, entropy=system_entropy, buffers=BufferPool()),
            identity=identity,
            disk=disk,
            open_disk=lambda name: Disk(name=name, close_timeout_s=HANGS_S),
            patience=Patience(join_s=stage.stage_wait),
        ) as stager,
    ):
        await stager.staged()
        terminal.notice(stager.summary())
        return await _serve_data(options, str(stager.data), environment, health)


def _checked(stage: StageOptions, data: str) -> list[str]:
    """Return the addresses of all servers; by default only this server's."""
    if stage.stage is None:
        return []
    if data == "auto":
        raise ConfigError("--stage copies a folder or a file; name it with --data")
    if not stage.stage_peers:
        return [LOOPBACK]
    peers = [peer.strip() for peer in stage.stage_peers.split(",")]
    twice = next((peer for peer in peers if peers.count(peer) > 1), None)
    if twice is not None:
        raise ConfigError(f"--stage-peers names {twice} more than once; each server has one address")
    return peers
