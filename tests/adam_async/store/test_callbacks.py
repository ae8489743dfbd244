"""A store tells its callbacks what its client counts and what happens to its servers."""

import numpy as np
import pytest

from adam_async import Callback, ParameterStore
from adam_async.errors import ConfigError
from adam_async.run.events import AnyEvent, ClientCounted, Noted, StepsTaken, text_of

ARRAYS = {"w": np.zeros(4, np.float32)}


class Kept(Callback):
    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.closed = False

    def on_event(self, event: AnyEvent) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


async def test_the_last_counts_of_a_client_come_before_the_close_of_its_callback() -> None:
    kept = Kept()
    async with ParameterStore.open("local", ARRAYS, name="watched", callbacks=[kept]) as store:
        for _ in range(3):
            await store.push({"w": np.ones(4, np.float32)})
        store.publish(Noted(text="a word of the program"))
    assert kept.closed
    counts = [each for each in kept.events if isinstance(each, ClientCounted)]
    assert (counts[-1].store, counts[-1].counts.acknowledged) == ("watched", 3)
    assert "a word of the program" in map(text_of, kept.events)


async def test_a_callback_that_fails_leaves_the_store_as_it_is() -> None:
    class Fails(Callback):
        def on_event(self, event: AnyEvent) -> None:
            raise OSError("full")

    async with ParameterStore.open("local", ARRAYS, callbacks=[Fails()]) as store:
        store.publish(Noted(text="one"))
        await store.push({"w": np.ones(4, np.float32)})
        assert (await store.pull())["w"].any()


async def test_other_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match="subclasses of Callback"):
        ParameterStore.open("local", ARRAYS, callbacks=[print])


def test_an_optimizer_tells_its_steps_and_its_loss() -> None:
    torch = pytest.importorskip("torch")
    from adam_async import sync
    from adam_async.torch import RemoteOptimizer, parameter_arrays

    kept, module = Kept(), torch.nn.Linear(2, 1)
    with sync.ParameterStore.open("local", parameter_arrays(module), callbacks=[kept]) as store:
        optimizer = RemoteOptimizer(module, store)

        def closure() -> object:
            optimizer.zero_grad()
            loss = module(torch.ones(1, 2)).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        optimizer.close()
    (steps,) = [each for each in kept.events if isinstance(each, StepsTaken)]
    assert (steps.steps, steps.pushes) == (1, 1), "once in a second"
    assert steps.loss is not None
