"""The command `controller`."""

import dataclasses
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack

from adam_async.cli.options import ControllerOptions
from adam_async.cli.roles.serving import serve
from adam_async.cluster.roles.controller import controller
from adam_async.controller import status_log
from adam_async.controller.log_file import LogFile
from adam_async.run.addresses import own_peer, read_peers
from adam_async.runtime.disk import Disk
from adam_async.runtime.health import Health

DEFAULT_BIND = "tcp://127.0.0.1:7070"


async def serve_controller(options: ControllerOptions, environment: Mapping[str, str], health: Health) -> int:
    """Run a controller until cancelled: alone, or as one of `--peers`."""
    peers: dict[str, str] = {}
    bind = options.bind or DEFAULT_BIND
    if options.peers:
        peers = read_peers(options.peers)
        node = own_peer(peers, options.id)
        bind = options.bind or peers[node]
        options = dataclasses.replace(options, id=node, advertise=options.advertise or peers[node])
    elif options.dir is not None and options.id is None:
        # The files in the folder name their node: the next process must have the same name.
        options = dataclasses.replace(options, id="controller")
    if not options.supervised:
        # A person watches the controller, and needs to know the changes of its group.
        status_log.logger.setLevel(logging.INFO)
    async with AsyncExitStack() as stack:
        file = None
        if options.dir is not None:
            disk = await stack.enter_async_context(Disk(name="controller", private=True))
            file = LogFile(disk, options.dir)
        return await serve(
            "controller",
            options,
            ",".join(peers.values()),
            bind,
            environment,
            health,
            # A supervised controller is the first of its run, which ends with it.
            lambda place: controller(place, peers=peers, file=file, learns=not options.supervised),
            is_cut_off=lambda running: running.group.is_cut_off,
        )
