"""The checks of conftest.py can fail: each kind of leak, made on purpose, is reported by name."""

import asyncio
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest_plugins = ["pytester"]

LEAKY_TESTS = """
import asyncio
import os
import socket
import threading

kept = []

async def test_task():
    task = asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="forgotten-task")
    kept.append(task)
    await asyncio.sleep(0)

async def test_generator():
    async def endless():
        while True:
            yield 1
    generator = endless()
    kept.append(generator)
    await anext(generator)

def test_thread():
    thread = threading.Thread(target=threading.Event().wait, name="forgotten-thread", daemon=True)
    thread.start()

def test_socket():
    kept.append(socket.socket())

def test_file():
    kept.append(os.open(os.devnull, os.O_RDONLY))

async def test_clean():
    await asyncio.sleep(0)
    with socket.socket():
        pass
"""


async def test_async_tests_run_on_the_loop_their_name_says(request: pytest.FixtureRequest) -> None:
    kind = type(asyncio.get_running_loop()).__module__.partition(".")[0]

    assert kind in {"asyncio", "uvloop"}
    if "[" in request.node.name:
        assert f"[{kind}]" in request.node.name


@given(st.integers())
async def test_properties_of_coroutines_can_be_tested(number: int) -> None:
    await asyncio.sleep(0)
    assert number == number


@pytest.mark.slow
def test_every_kind_of_leak_fails_the_test_that_made_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAM_TEST_LOOPS", "asyncio,uvloop")
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(LEAKY_TESTS)

    output = "\n".join(pytester.run(sys.executable, "-m", "pytest", "-rE", "-p", "no:cacheprovider").outlines)

    assert "forgotten-task" in output
    assert "asynchronous generator" in output
    assert "forgotten-thread" in output
    assert "socket:[" in output
    assert "/dev/null" in output
    blamed = {line.split("::")[1].split(" ")[0] for line in output.splitlines() if line.startswith("ERROR ")}
    assert blamed == {
        "test_task[asyncio]",
        "test_task[uvloop]",
        "test_generator[asyncio]",
        "test_thread",
        "test_socket",
        "test_file",
    }
