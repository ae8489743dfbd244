"""Local links pass tensors by reference: a caller may still reuse its gradients after a push."""

import asyncio

import numpy as np
import pytest

from adam_async.model.rules import Sgd
from adam_async.store.store import ParameterStore


@pytest.mark.parametrize("consistency", ["asp", "ssp:1", "bsp"])
async def test_a_gradient_may_be_overwritten_as_soon_as_its_push_returns(consistency):
    async with asyncio.timeout(50):
        clients = [
            await ParameterStore.open(
                "local",
                {"w": np.zeros(1 << 16), "a": np.zeros(3), "b": np.zeros(2)},
                name="model",
                rule=Sgd(rate=1.0),
                consistency=consistency,
                replicas=2,
            )
            for _ in range(2)
        ]
        gradients = {"w": np.empty(1 << 16), "a": np.empty(3), "b": np.empty(2)}
        try:
            for _ in range(4):
                for (
                    client
                ) in clients:  # in bsp the first push returns before the second one completes the sum
                    for array in gradients.values():
                        array[:] = 1.0
                    await client.push(gradients)
                    for array in gradients.values():
                        array[:] = np.nan
                for client in clients:
                    await client.tick()
            values = await clients[0].pull()
        finally:
            for client in clients:
                await client.close()
    steps = 4 if consistency == "bsp" else 8
    for name, array in values.items():
        np.testing.assert_array_equal(array, -float(steps), err_msg=name)
