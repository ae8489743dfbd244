"""Helpers for tests of data hosts: a host, a controller and an asker over real sockets in one loop."""

from contextlib import asynccontextmanager
from types import MappingProxyType

from adam_async.cluster.external_data import DataHosts
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server.standalone import DataHost
from tests.adam_async.runs import PATIENT, entropy_of, tiny_dataset
from transport import Identity

LOOPBACK = "tcp://127.0.0.1:0"
DATA = tiny_dataset()


def identity(role, node="", incarnation=7):
    return Identity(role=role, node=node or role, incarnation=incarnation)


def host_of(network, *, node="host", waits=PATIENT, dataset=DATA, functions=MappingProxyType({})):
    return DataHost(
        RoleSettings(network=network, address=LOOPBACK, identity=identity("data", node), waits=waits),
        dataset,
        entropy=entropy_of(node),
        functions=functions,
    )


def controller_of(network, *, waits=PATIENT):
    return Controller(
        RoleSettings(network=network, address=LOOPBACK, identity=identity("controller"), waits=waits)
    )


def asker_of(network, *hosts, waits=PATIENT, driver=None):
    addresses = [host if isinstance(host, str) else host.address for host in hosts]
    return DataHosts(addresses, network=network, identity=driver or identity("driver"), waits=waits)


@asynccontextmanager
async def asked_host(network, *, waits=PATIENT):
    """A host that serves a cluster: yields host, controller and asker."""
    async with (
        host_of(network, waits=waits) as host,
        controller_of(network) as controller,
        asker_of(network, host) as asker,
    ):
        await asker.serve(controller.address)
        yield host, controller, asker
