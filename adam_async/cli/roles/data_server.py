"""The command `data`."""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from adam_async.cli.data import load_data
from adam_async.cli.options import DataServerOptions
from adam_async.cli.roles.serving import serve, serve_member
from adam_async.cluster.networks import LOOPBACK
from adam_async.cluster.roles.data_server import data_host, data_server
from adam_async.cluster.roles.place import Place, Role
from adam_async.data_server.damage import Policy
from adam_async.run.cache_size import cache_limits
from adam_async.run.image_size import read_image_size
from adam_async.run.user_code import allow_functions
from adam_async.runtime.disk import Disk
from adam_async.runtime.health import Health
from adam_async.runtime.machine import available_bytes


async def serve_data(
    options: DataServerOptions,
    data: str,
    damaged: Policy,
    environment: Mapping[str, str],
    health: Health,
    *,
    size: str = "",
) -> int:
    """Load the data, then run a data server until cancelled; without a controller a data host."""
    functions = allow_functions(options.allow_transform)
    async with Disk() as disk:
        cache = cache_limits(options.cache, options.spill, available_bytes=available_bytes())
        wanted = read_image_size(size)
        dataset = await load_data(data, disk, environment, damaged=damaged, cache=cache, size=wanted)
    if options.controller is None:
        bind = options.bind or LOOPBACK

        def open_host(place: Place) -> AbstractAsyncContextManager[Role]:
            return data_host(dataclasses.replace(place, functions=functions), dataset)

        return await serve("data-host", options, "", bind, environment, health, open_host)

    def open_server(place: Place) -> AbstractAsyncContextManager[Role]:
        return data_server(dataclasses.replace(place, functions=functions), dataset)

    return await serve_member("data", options, environment, health, open_server)
