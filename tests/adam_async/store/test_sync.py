"""The synchronous store: one thread for all, no thread behind an interrupt, and none in a forked child."""

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adam_async import ConfigError, Factors, ParameterStore, Sgd, StoreError, sync
from adam_async.errors import RoleUnreachable
from adam_async.run.config import Waits
from tests.adam_async.store.servers import cluster

TOKEN = "a token that nobody guesses"
START = {"w": np.zeros((2, 3))}
ONES = {"w": np.ones((2, 3))}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("adam-")]


@contextmanager
def served(kind: str) -> Iterator[tuple[str, str | None]]:
    """Run servers, or none; yields their address and their token."""
    if kind == "local":
        yield "local", None
        return
    with cluster(2, token=TOKEN) as running:
        yield running.address, TOKEN


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_the_program_of_the_contract_runs_without_await(kind: str, tmp_path: Path) -> None:
    with (
        served(kind) as (where, token),
        sync.ParameterStore.open(where, START, rule=Sgd(rate=1.0), name="model-7", token=token) as store,
    ):
        values = store.pull()
        assert store.push(ONES, read=values).versions == {"w": 1}
        values = store.push_pull({"w": Factors(np.ones((4, 3)), np.ones((4, 2)))}, read=values.read)
        np.testing.assert_array_equal(values["w"], np.full((2, 3), -5.0))
        mine = np.zeros((2, 3))
        store.pull(["w"], out={"w": mine})
        store.tick()
        store.assign({"w": mine + 1})
        store.settled()
        np.testing.assert_array_equal(
            load_file(store.save(tmp_path / "a.safetensors"))["w"], np.full((2, 3), -4.0)
        )
        joined = sync.ParameterStore.open(where, name="model-7", reader=True, token=token)
        assert threads().count("adam-store") == 1
        np.testing.assert_array_equal(joined.pull()["w"], np.full((2, 3), -4.0))
        assert joined.arrays == store.arrays
        joined.close()
        joined.close()
        store.delete()
        assert store.closed
    assert threads() == []


def test_both_stores_have_the_same_methods_with_the_same_arguments() -> None:
    def signatures(store: type) -> dict[str, inspect.Signature]:
        methods = inspect.getmembers(store, callable)
        return {
            name: inspect.signature(method).replace(return_annotation=None)
            for name, method in methods
            if not name.startswith("_")
        }

    of_threads = signatures(sync.ParameterStore)
    del of_threads["begin"]
    assert of_threads == signatures(ParameterStore)


async def test_it_works_where_a_loop_already_runs() -> None:
    with sync.ParameterStore.open("local", START) as store:
        store.push(ONES)
    assert asyncio.get_running_loop().is_running()


def test_several_threads_call_one_store() -> None:
    with sync.ParameterStore.open("local", START, rule=Sgd(rate=1.0)) as store:
        with ThreadPoolExecutor(4) as executor:
            for _ in executor.map(lambda _: store.push(ONES), range(40)):
                pass
        np.testing.assert_array_equal(store.pull()["w"], np.full((2, 3), -40.0))


def test_errors_are_those_of_the_asynchronous_store_with_their_cause() -> None:
    with sync.ParameterStore.open("local", START, name="model") as store:
        with pytest.raises(StoreError, match="has shape"):
            store.push({"w": np.ones(3)})
        with pytest.raises(StoreError, match="exists: choose another name"):
            sync.ParameterStore.open("local", START, name="model", create="new")
    with pytest.raises(StoreError, match="is closed: open it again"):
        store.push(ONES)
    with pytest.raises(ConfigError, match="copies=2 excludes where=local"):
        sync.ParameterStore.open("local", START, name="model", copies=2)
    with pytest.raises(RoleUnreachable) as caught:
        sync.ParameterStore.open("tcp://127.0.0.1:9", START, name="model", waits=Waits(dial_s=0.2))
    assert caught.value.exit_code == 4
    assert threads() == []


def test_an_interrupt_cancels_the_call_and_the_block_leaves_no_thread() -> None:
    with (
        sync.ParameterStore.open("local", START, name="model", consistency="ssp:1", replicas=2) as ahead,
        sync.ParameterStore.open("local", name="model"),
    ):
        for _ in range(2):
            ahead.tick()
        with interrupted(), pytest.raises(KeyboardInterrupt):
            ahead.pull()  # waits for the other client
        assert ahead.clock == 2
    assert threads() == []


def test_an_interrupt_of_an_open_leaves_no_thread() -> None:
    with interrupted(), pytest.raises(KeyboardInterrupt):
        sync.ParameterStore.open("tcp://127.0.0.1:9", START, name="model", waits=Waits(dial_s=30.0))
    assert threads() == []


class interrupted:  # noqa: N801 - reads as a word
    """Send this process SIGINT from another thread as soon as the main one waits for the store's thread."""

    def __enter__(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        # A background job starts with SIGINT ignored.
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self._thread = threading.Thread(target=self._send, args=(main,))
        self._thread.start()

    def _send(self, main: int) -> None:
        while True:
            frame = sys._current_frames()[main]
            names = set()
            while frame is not None:
                names.add(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]
            if {"wait", "result"} <= names:
                signal.pthread_kill(main, signal.SIGINT)
                return
            os.sched_yield()

    def __exit__(self, *error: object) -> None:
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)


def test_a_forked_child_is_refused_and_may_open_a_store_of_its_own() -> None:
    with sync.ParameterStore.open("local", START) as store:
        child = os.fork()
        if not child:
            code = 1
            try:
                try:
                    store.pull()
                except StoreError as error:
                    refused = "was opened before this process was forked" in str(error)
                store.close()
                with sync.ParameterStore.open("local", START) as own:
                    own.push(ONES)
                code = 0 if refused else 3
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not store.pull()["w"].any()


def test_a_store_that_is_dropped_is_closed_and_its_thread_ends() -> None:
    store = sync.ParameterStore.open("local", START)
    (thread,) = [each for each in threading.enumerate() if each.name == "adam-store"]
    del store
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "import gc; gc.collect()"])
def test_a_program_with_an_unclosed_store_ends(end: str) -> None:
    program = f"""
import numpy as np
from adam_async import sync
store = sync.ParameterStore.open("local", {{"w": np.zeros(3)}})
store.push({{"w": np.ones(3)}})
print("pushed")
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "pushed\n", "")


def test_a_cancelled_call_ends_its_coroutine_and_no_other_store() -> None:
    with sync.ParameterStore.open("local", START, rule=Sgd(rate=1.0)) as store:
        began, ended = threading.Event(), threading.Event()

        async def wait(inner: ParameterStore) -> None:
            try:
                began.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        call = store.begin(wait)
        assert began.wait(30)
        assert call.cancel()
        with pytest.raises(CancelledError):
            call.result(30)
        assert ended.is_set()
        assert not call.cancel()
        store.push(ONES)
        np.testing.assert_array_equal(store.pull()["w"], START["w"] - ONES["w"])
