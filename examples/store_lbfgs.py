"""Logistic regression by L-BFGS: parameters, history and gradients stay on the servers, here three of them.

adam-async controller --bind tcp://127.0.0.1:7000
adam-async ps --controller tcp://127.0.0.1:7000        # in three shells
python examples/store_lbfgs.py tcp://127.0.0.1:7000    # or local, on one server in this process
"""

import asyncio
import sys

import numpy as np

from adam_async import LBFGS, Disk, ParameterStore, load_dataset

DECAY = 1.0


def loss_and_gradient(values: dict[str, np.ndarray], batch: tuple) -> tuple[float, dict[str, np.ndarray]]:
    """Return the summed loss of a batch, with its share of the decay, and its gradient."""
    x, y, share = batch
    scores = x @ values["w"] + values["b"]
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(y))
    loss = share * DECAY / 2 * np.sum(values["w"] ** 2) - scores[rows, y].sum()
    errors = np.exp(scores)
    errors[rows, y] -= 1
    return loss, {"w": x.T @ errors + share * DECAY * values["w"], "b": errors.sum(axis=0)}


def reference(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Return the weights of scikit-learn, if it is installed."""
    try:
        from sklearn.linear_model import LogisticRegression
    except ModuleNotFoundError:
        return None
    return LogisticRegression(C=1 / DECAY, tol=1e-8, max_iter=2000).fit(x, y).coef_.T


async def main(where: str = "local", *, pieces: int = 16) -> float:
    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    x, y = digits.train_images.reshape(-1, 64) / 255.0, digits.train_labels
    cut = np.array_split(np.arange(len(x)), pieces)
    batches = [(x[rows], y[rows], len(rows) / len(x)) for rows in cut]
    arrays = {"w": np.zeros((64, 10)), "b": np.zeros(10)}
    async with ParameterStore.open(where, arrays, name="lbfgs-digits") as store:
        result = await LBFGS(store, loss_and_gradient, batches, workers=2).minimise(300)
        values = await store.pull()
        print(f"{result.number} iterations: loss {result.value:.6f}, {result.reason}")
    if (theirs := reference(x, y)) is not None:
        print(f"largest difference from scikit-learn's weights: {np.abs(values['w'] - theirs).max():.1e}")
    return result.value


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
