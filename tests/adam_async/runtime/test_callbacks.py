"""An error in a callback is logged with its place and ends its role, or the command."""

import asyncio
import logging

import pytest

from adam_async.cli.signals import Signals
from adam_async.cli.terminal import explain
from adam_async.parameter_server.apply import Applier
from adam_async.runtime.callbacks import Callbacks, ending_on_errors
from adam_async.runtime.clock import Timer
from tests.adam_async.runs import Call, local_network, servers_of, turns

DEADLINE_S = 60.0


def fail(*_args):
    raise LookupError("a shard is nowhere")


@pytest.mark.parametrize("ask", [Callbacks.call_soon, lambda each, callback: each.call_later(0.0, callback)])
async def test_a_callback_that_raises_ends_its_block_and_the_log_says_where(ask, caplog):
    callbacks = Callbacks("ps-0")
    ask(callbacks, fail)
    with pytest.raises(LookupError, match="a shard is nowhere"):
        await callbacks.failure()
    (record,) = caplog.records
    assert record.message.startswith("ps-0: a callback raised LookupError: a shard is nowhere (")
    assert "test_callbacks.py" in record.message
    assert record.message.endswith("in fail)")


async def test_a_timer_that_raises_ends_the_task_that_runs_it():
    with pytest.raises(LookupError):
        await Timer(lambda: 0.0, fail).run()


async def test_a_server_whose_arithmetic_raises_ends_with_that_error(monkeypatch, caplog):
    with pytest.raises(LookupError, match="a shard is nowhere"):
        async with asyncio.timeout(DEADLINE_S), servers_of(local_network()) as servers:
            client = servers.client()
            await client.pull()
            monkeypatch.setattr(Applier, "work_on", fail)
            client.push(1.0)
            await client.client.flush()
    assert "ps-0: a callback raised LookupError" in caplog.text


@pytest.mark.parametrize("kind", ["values", "freed", "nothing"])
async def test_a_worker_whose_answer_callback_raises_ends_with_that_error(kind, monkeypatch):
    with pytest.raises(LookupError, match="a shard is nowhere"):
        async with asyncio.timeout(DEADLINE_S), servers_of(local_network()) as servers:
            client = servers.client()
            await client.pull()
            if kind == "values":
                client.puller.pull(fail)
            elif kind == "freed":
                for connection in client.client.connections.values():
                    monkeypatch.setattr(connection, "push", freeing_badly(connection.push))
                client.push(1.0)
            else:
                client.client.answer_nothing(fail)
            await asyncio.Event().wait()


def freeing_badly(push):
    return lambda tensors, call, *other, **fields: push(tensors, Call(freed=fail), *other, **fields)


def soon(loop):
    loop.call_soon(fail)


def later(loop):
    loop.call_later(0.001, fail)


def settled(loop):
    future = loop.create_future()
    future.add_done_callback(fail)
    future.set_result(None)


def from_a_thread(loop):
    loop.run_in_executor(None, lambda: loop.call_soon_threadsafe(fail))


@pytest.mark.parametrize("raising", [soon, later, settled, from_a_thread])
def test_a_command_ends_with_what_a_callback_of_its_loop_raised(raising, caplog):
    async def role():
        raising(asyncio.get_running_loop())
        await asyncio.wait_for(asyncio.Event().wait(), DEADLINE_S)
        return 0

    with pytest.raises(LookupError) as failure:
        Signals().run(role)
    said = "unexpected LookupError: a shard is nowhere (ADAM_TRACEBACK=1 shows where)"
    assert explain(failure.value) == (1, said)
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "a shard is nowhere" in record.message
    assert record.message.endswith("in fail)")


async def test_errors_that_tasks_report_or_that_cost_a_connection_end_no_command(caplog):
    loop = asyncio.get_running_loop()
    caplog.set_level(logging.INFO)
    with ending_on_errors():
        for key in ("task", "future", "socket", "protocol"):
            loop.call_exception_handler({"message": key, "exception": LookupError(key), key: None})
        await turns(3)
    levels = {record.message.partition(":")[0]: record.levelno for record in caplog.records}
    assert levels == {
        "task": logging.INFO,
        "future": logging.INFO,
        "socket": logging.ERROR,
        "protocol": logging.ERROR,
    }


async def test_the_handler_of_the_loop_is_put_back():
    loop = asyncio.get_running_loop()
    with ending_on_errors():
        assert loop.get_exception_handler() is not None
    assert loop.get_exception_handler() is None
