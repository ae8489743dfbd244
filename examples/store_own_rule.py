"""Linear regression on a parameter store whose server applies a rule of the user: Lion, of own_rules.py.

python examples/store_own_rule.py [local | tcp://CONTROLLER]
"""

import asyncio
import sys

import numpy as np
from own_rules import Lion  # servers import it too, so it cannot be in this file

from adam_async import ParameterStore


async def main(where: str = "local", *, steps: int = 1000) -> float:
    random = np.random.default_rng(1)
    wanted = random.standard_normal(32).astype(np.float32)
    arrays = {"w": np.zeros(32, np.float32)}
    async with ParameterStore.open(where, arrays, rule=Lion(rate=0.01), name="regression") as store:
        values = await store.pull()
        for number in range(steps):
            x = random.standard_normal((64, 32)).astype(np.float32)
            gradient = x.T @ (x @ (values["w"] - wanted)) / 64
            rate = 0.01 * (1 - number / steps)  # steps of a sign have a fixed length
            values = await store.push_pull({"w": gradient}, read=values, rate=rate)
    distance = float(np.abs(values["w"] - wanted).max())
    print(f"largest distance to the wanted weights: {distance:.4f}")
    return distance


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
