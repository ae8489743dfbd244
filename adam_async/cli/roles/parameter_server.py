"""The command `ps`."""

from collections.abc import Mapping
from functools import partial

from adam_async.cli.options import ServerOptions
from adam_async.cli.roles.serving import serve_member
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.run.user_rules import allow_rules
from adam_async.runtime.health import Health


async def serve_ps(options: ServerOptions, environment: Mapping[str, str], health: Health) -> int:
    """Run a parameter server until cancelled."""
    rules = allow_rules(options.allow_rule)
    return await serve_member(
        "ps",
        options,
        environment,
        health,
        partial(parameter_server, folder=options.dir, flush_s=options.config().flush_s, rules=rules),
    )
