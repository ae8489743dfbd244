"""The synchronous interface, for scripts and notebooks.

    with sync.ParameterStore.open("local", {"w": np.zeros(784)}, rule=Sgd(rate=0.05)) as store:
        values = store.pull()
        store.push({"w": gradient(values["w"])}, read=values)

    with sync.LocalCluster(Config(epochs=3)) as cluster:
        cluster.train(print)

`store/sync.py` and `cluster/sync.py` have their threads.
"""

from adam_async.cluster.sync import LocalCluster, load_checkpoint
from adam_async.store.sync import ParameterStore

__all__ = ["LocalCluster", "ParameterStore", "load_checkpoint"]
