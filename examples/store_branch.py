"""Train, pin the values and the momentum, and try several rates from the pin.

python examples/store_branch.py [FOLDER]
"""

import sys
from tempfile import TemporaryDirectory

import numpy as np

from adam_async import Sgd
from adam_async.sync import ParameterStore

RULE = Sgd(rate=0.05, momentum=0.9)


def train(store: ParameterStore, steps: int, rate: float) -> float:
    """Fit a line to points, and return the mean squared error."""
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 3))
    y = x @ np.array([1.0, -2.0, 3.0]) + random.standard_normal(200) / 10
    values = store.pull()
    for _ in range(steps):
        errors = x @ values["w"] - y
        values = store.push_pull({"w": x.T @ errors / 200}, read=values, rate=rate)
    return float(np.mean((x @ values["w"] - y) ** 2))


def main(folder: str) -> dict[float, float]:
    with ParameterStore.open("local", {"w": np.zeros(3)}, rule=RULE, name="line", dir=folder) as store:
        print(f"error {train(store, 10, 0.05):.4f} at the pin")
        store.pin("start")
        errors = {}
        for rate in (0.01, 0.05, 0.2):
            name = f"line-{rate}"
            with ParameterStore.open("local", name=name, pin="line/start", dir=folder) as branch:
                errors[rate] = train(branch, 30, rate)
                branch.delete()
            print(f"error {errors[rate]:.4f} after 30 steps at rate {rate}")
    return errors


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with TemporaryDirectory() as scratch:
            main(scratch)
