"""`adam_async.sync` is a module, and has the classes of the rooms that make them."""

import subprocess
import sys

import adam_async
from adam_async.cluster import sync as cluster
from adam_async.store import sync as store
from adam_async.sync import LocalCluster, ParameterStore, load_checkpoint


def test_its_names_can_be_imported_and_are_those_of_its_attribute() -> None:
    assert LocalCluster is adam_async.sync.LocalCluster is cluster.LocalCluster
    assert ParameterStore is adam_async.sync.ParameterStore is store.ParameterStore
    assert load_checkpoint is adam_async.sync.load_checkpoint is cluster.load_checkpoint


def test_each_way_to_import_it_works_as_the_first_one() -> None:
    for line in (
        "from adam_async.sync import ParameterStore",
        "import adam_async.sync; adam_async.sync.ParameterStore",
        "import adam_async; adam_async.sync.ParameterStore",
        "from adam_async import sync; sync.ParameterStore",
    ):
        subprocess.run([sys.executable, "-c", line], check=True, timeout=30)
