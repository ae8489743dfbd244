"""Two clients factorise one matrix, each with half of its known entries; neither is over 4 steps ahead (ssp).

Both clients run in one loop here. Two separate programs would open the same `tcp://CONTROLLER`.

python examples/store_matrix_factorisation.py [local | tcp://CONTROLLER]
"""

import asyncio
import sys
from collections.abc import Mapping

import numpy as np

from adam_async import Adagrad, ParameterStore

ROWS, COLUMNS, RANK, CLIENTS = 60, 40, 3, 2
Entries = tuple[np.ndarray, np.ndarray, np.ndarray]


def gradients_of(values: Mapping[str, np.ndarray], entries: Entries) -> tuple[dict[str, np.ndarray], float]:
    """Return the gradients of the mean squared error over entries (rows, columns, values), and the error."""
    rows, columns, known = entries
    left, right = values["left"], values["right"]
    wrong = (left[rows] * right[columns]).sum(axis=1) - known
    gradients = {"left": np.zeros_like(left), "right": np.zeros_like(right)}
    np.add.at(gradients["left"], rows, wrong[:, None] * right[columns] / len(known))
    np.add.at(gradients["right"], columns, wrong[:, None] * left[rows] / len(known))
    return gradients, float(np.mean(wrong**2))


async def client(where: str, first: dict[str, np.ndarray], entries: Entries, steps: int) -> float:
    opening = ParameterStore.open(
        where, first, name="factors", rule=Adagrad(rate=0.3), consistency="ssp:4", replicas=CLIENTS
    )
    async with opening as store:
        for _ in range(steps):
            values = await store.pull()  # waits while this client is more than 4 steps ahead
            gradients, error = gradients_of(values, entries)
            await store.push(gradients, read=values)
            await store.tick()
    return error


async def main(where: str = "local", *, steps: int = 200) -> list[float]:
    dice = np.random.default_rng(2)
    matrix = dice.normal(size=(ROWS, RANK)) @ dice.normal(size=(COLUMNS, RANK)).T
    places = dice.permutation(ROWS * COLUMNS)[: ROWS * COLUMNS // 2]  # every second entry is known
    first = {"left": dice.normal(size=(ROWS, RANK)), "right": dice.normal(size=(COLUMNS, RANK))}
    shares = [np.divmod(share, COLUMNS) for share in np.array_split(places, CLIENTS)]
    work = [client(where, first, (rows, columns, matrix[rows, columns]), steps) for rows, columns in shares]
    errors = await asyncio.gather(*work)
    print("mean squared error of each client's entries:", *(f"{error:.4f}" for error in errors))
    return errors


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
