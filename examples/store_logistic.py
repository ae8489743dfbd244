"""Logistic regression in NumPy on a parameter store, whose servers apply the rule.

python examples/store_logistic.py [local | tcp://CONTROLLER]
"""

import asyncio
import sys

import numpy as np

from adam_async import Disk, ParameterStore, Sgd, load_dataset


async def main(where: str = "local", *, steps: int = 300) -> float:
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    x, y = (digits.train_images.reshape(-1, 64) / 255).astype(np.float32), digits.train_labels
    arrays = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    batches = np.random.default_rng(1)
    async with ParameterStore.open(where, arrays, rule=Sgd(rate=0.5), name="logistic") as store:
        values = await store.pull()
        for _ in range(steps):
            batch = batches.integers(len(x), size=64)
            scores = x[batch] @ values["w"] + values["b"]
            errors = np.exp(scores - scores.max(axis=1, keepdims=True))
            errors /= errors.sum(axis=1, keepdims=True)
            errors[np.arange(64), y[batch]] -= 1
            gradients = {"w": x[batch].T @ errors / 64, "b": errors.mean(axis=0)}
            values = await store.push_pull(gradients, read=values)
    images = digits.test_images.reshape(-1, 64) / 255
    accuracy = float(np.mean((images @ values["w"] + values["b"]).argmax(axis=1) == digits.test_labels))
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
