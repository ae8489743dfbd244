"""Runs a data server, of a cluster or standalone."""

from contextlib import AbstractAsyncContextManager

from adam_async.cluster.roles.place import Place, listening
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.service import DataServer
from adam_async.data_server.standalone import DataHost


def data_server(place: Place, dataset: Dataset) -> AbstractAsyncContextManager[DataServer]:
    """Run a data server of a data set; for errors see `listening`."""
    return listening(DataServer(place.settings("data"), dataset, functions=place.functions), place)


def data_host(place: Place, dataset: Dataset) -> AbstractAsyncContextManager[DataHost]:
    """Run a standalone data server, which clusters invite; for errors see `listening`."""
    role = DataHost(place.settings("data"), dataset, entropy=place.entropy, functions=place.functions)
    return listening(role, place)
