"""The command `ps`."""

from collections.abc import Mapping
from functools import partial

from adam_async.cli.options import ServerOptions
from adam_async.cli.roles.serving import serve_member
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.errors import ConfigError
from adam_async.run.addresses import check_address
from adam_async.run.config import MOST
from adam_async.runtime.health import Health

LEAST_FLUSH_S = 0.01
"""Minimum of `--flush-s`, in seconds."""


async def serve_ps(options: ServerOptions, environment: Mapping[str, str], health: Health) -> int:
    """Run a parameter server until cancelled."""
    if not LEAST_FLUSH_S <= options.flush_s <= MOST["flush_s"]:
        raise ConfigError(
            f"--flush-s must be within {LEAST_FLUSH_S} and {MOST['flush_s']:g} seconds, not {options.flush_s}"
        )
    if options.copies_bind:
        check_address(options.copies_bind, "--copies-bind")
    return await serve_member(
        "ps",
        options,
        environment,
        health,
        partial(parameter_server, folder=options.dir, flush_s=options.flush_s),
    )
