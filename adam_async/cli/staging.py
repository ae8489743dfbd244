"""The option `data --stage`: copy a shared source together with other servers, and serve the copy."""

import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from adam_async.cli.options import Damaged, DataServerOptions, StageOptions
from adam_async.cli.roles.data_server import serve_data
from adam_async.cli.terminal import Terminal
from adam_async.cli.token import read_token
from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.data_server.staging.peer import Patience
from adam_async.data_server.staging.service import staging
from adam_async.errors import ConfigError
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.health import Health
from transport import BufferPool, Identity

HANGS_S = 1.0
"""Maximum wait for earlier calls at the close of a disk that reads the source, in seconds; the command
abandons calls that hang."""


async def serve_staged(
    options: DataServerOptions,
    stage: StageOptions,
    data: str,
    damaged: Damaged,
    environment: Mapping[str, str],
    terminal: Terminal,
    health: Health,
    *,
    size: str = "",
) -> int:
    """Copy the data if `--stage` is given, then run a data server until cancelled.

    The server answers other servers of the staging as long as it runs.

    Raises:
        ConfigError: The options contradict one another.
        DataError: The source cannot be staged.
        BindFailed: No address of the list belongs to this machine and is free.
    """
    peers = _checked(stage, data)
    if stage.stage is None:
        return await serve_data(options, data, damaged, environment, health, size=size)
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
        return await serve_data(options, str(stager.data), damaged, environment, health, size=size)


def _checked(stage: StageOptions, data: str) -> list[str]:
    """Return the addresses of all servers; by default only the address of this server."""
    if stage.stage is None:
        if stage.stage_peers:
            raise ConfigError(
                "--stage-peers names the servers that copy, but no folder for the copy; add --stage FOLDER"
            )
        return []
    if data == "auto":
        raise ConfigError("--stage copies a folder or a file; name it with --data")
    if not 0 < stage.stage_wait < math.inf:
        raise ConfigError(f"--stage-wait must be a positive number of seconds, not {stage.stage_wait}")
    if not stage.stage_peers:
        return [LOOPBACK]
    peers = [peer.strip() for peer in stage.stage_peers.split(",")]
    twice = next((peer for peer in peers if peers.count(peer) > 1), None)
    if twice is not None:
        raise ConfigError(f"--stage-peers names {twice} more than once; each server has one address")
    return peers
