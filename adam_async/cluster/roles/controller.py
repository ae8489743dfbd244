"""Runs a controller."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from adam_async.cluster.roles.place import Place, listening
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.log_file import LogFile
from adam_async.controller.service import Controller
from adam_async.runtime.clock import wall_clock


def controller(
    place: Place,
    *,
    peers: Mapping[str, str] = {},
    alone: bool = True,
    file: LogFile | None = None,
    learns: bool = False,
) -> AbstractAsyncContextManager[Controller]:
    """Run a controller.

    Args:
        place: Place of the controller.
        peers: Addresses of all controllers in the group, including this one, by node id.
        alone: Whether the controller is a group of one; a larger group without `peers` gets them from
            `Controller.group.set_addresses` when all controllers listen.
        file: Log file with the controller's state, read after a restart; None: only in memory.
        learns: Whether a single controller without a file learns its first map from an earlier controller's
            servers, for which it waits before it leads.

    Raises:
        BindFailed: The address is not available.
        BindRefused: Other machines can reach the address, and the role has no token.
    """
    role = Controller(
        replace(place, controller="").settings("controller"),  # a controller joins no other controller
        ConsensusSetup(entropy=place.entropy, file=file),
        peers=peers,
        alone=alone,
        learns=learns,
        wall=wall_clock,
    )
    return listening(role, place)
