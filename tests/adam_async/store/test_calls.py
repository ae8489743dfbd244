"""The open calls of one client, and their end."""

import asyncio
from typing import Any

import numpy as np
import pytest

from adam_async import ParameterStore, StoreError
from adam_async.store.calls import Call


class Freed(Call, kw_only=True, eq=False):
    """A push whose last tensor is freed while its caller gets the error, as in a garbage collection."""

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.calls.ended(self)


async def test_a_failure_ends_all_calls_also_if_some_end_meanwhile() -> None:
    loop = asyncio.get_running_loop()
    async with ParameterStore.open("local", {"w": np.zeros(2)}) as store:
        calls: Any = store._calls
        open_calls = [Freed(calls=calls, done=loop.create_future()) for _ in range(3)]
        calls._open.update(dict.fromkeys(open_calls))
        calls.fail(StoreError("all is lost"))
        for call in open_calls:
            with pytest.raises(StoreError, match="all is lost"):
                await call.done
        assert not calls._open
