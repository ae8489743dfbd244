"""`train --optimizer lbfgs`: a model, a report, servers of a cluster; idle and random options are refused."""

import asyncio
import json
import re
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from adam_async import Model
from adam_async.cli.options import WAITING, TrainOptions
from adam_async.cli.terminal import Terminal
from adam_async.cli.train import run_training
from adam_async.cluster.networks import cluster_network
from adam_async.errors import ConfigError, RoleUnreachable
from adam_async.report.report import Report, compare
from adam_async.run.config import Waits
from adam_async.runtime.clock import system_entropy
from adam_async.store.survey import join
from tests.adam_async.store.servers import servers
from transport import BufferPool

DIGITS = {"data": "digits", "model": "mlp", "optimizer": "lbfgs", "kernels": "numpy"}


async def train(**options):
    return await run_training(TrainOptions(**{**DIGITS, **options}), {}, Terminal(quiet=True))


async def test_a_network_is_minimised_and_its_model_and_report_are_written(tmp_path, capsys):
    assert await train(epochs=15, replicas=2, out=tmp_path, report=tmp_path / "report.json") == 0

    line = re.fullmatch(r"test accuracy (\d+\.\d+)% after 15 epochs, loss \d\.\d+\n", capsys.readouterr().out)
    assert float(line[1]) > 90
    report = json.loads((tmp_path / "report.json").read_text())
    assert [epoch["epoch"] for epoch in report["epochs"]] == [*range(1, 16)]
    assert report["totals"]["test_accuracy"] == pytest.approx(float(line[1]) / 100, abs=1e-4)
    losses = [epoch["train_loss"] for epoch in report["epochs"]]
    assert losses == sorted(losses, reverse=True)
    assert Model.load(tmp_path).network.spec.name == report["model"]["name"]


async def test_the_lines_name_the_data_the_model_each_epoch_and_the_file(tmp_path, capsys):
    options = TrainOptions(**DIGITS, epochs=1, out=tmp_path)
    assert await run_training(options, {}, Terminal()) == 0

    found = capsys.readouterr().out.splitlines()
    begins = ["data   digits: ", "model  mlp: ", "epoch 1: loss ", "test accuracy ", "saved  "]
    assert [line[: len(begin)] for line, begin in zip(found, begins, strict=True)] == begins
    assert " after 1 epoch, loss " in found[3]
    assert found[4] == f"saved  {tmp_path}/model.safetensors"


async def test_servers_of_a_cluster_and_this_process_give_the_same_line(capsys):
    await train(epochs=4)
    async with servers(2) as address:
        await train(epochs=4, controller=address, replicas=3)
        network = cluster_network(None, entropy=system_entropy, buffers=BufferPool())
        async with join(network, address, "reader", Waits()) as survey:
            assert survey.stores() == [], "the command leaves no store behind"

    first, second = capsys.readouterr().out.splitlines()
    assert first == second


async def test_an_interruption_keeps_the_weights_and_the_report_of_the_last_epoch(tmp_path, capsys):
    options = TrainOptions(**DIGITS, epochs=100_000, out=tmp_path, report=tmp_path / "report.json")
    terminal = Terminal()
    task = asyncio.ensure_future(run_training(options, {}, terminal))
    terminal.print = lambda line: task.cancel() if line.startswith("epoch 2:") else None
    with pytest.raises(asyncio.CancelledError):
        await task

    found = capsys.readouterr().err
    assert f"kept: the weights of epoch 2 in {tmp_path}/model.safetensors, the report in" in found
    assert Model.load(tmp_path).network.spec.name == "mlp"
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ended"], len(report["epochs"])) == ("interrupted", 2)


async def interrupted(epoch, **options):
    """Interrupt a command after an epoch; return its error lines."""
    terminal = Terminal()
    task = asyncio.ensure_future(run_training(TrainOptions(**{**DIGITS, **options}), {}, terminal))
    terminal.print = lambda line: task.cancel() if line.startswith(f"epoch {epoch}:") else None
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_report_names_no_rule_and_no_rate(tmp_path):
    await train(epochs=2, report=tmp_path / "report.json")

    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert (report.config["rule"], report.config["rate"]) == ("lbfgs", None)
    rows = dict(compare([report]))
    assert rows["rule"] == "lbfgs"
    assert "rate" not in rows


async def test_the_same_command_goes_on_from_the_disk_of_its_store(tmp_path, capsys):
    await train(epochs=6)
    await interrupted(4, epochs=6, store=tmp_path)
    await train(epochs=6, store=tmp_path, report=tmp_path / "report.json")

    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    epochs = json.loads((tmp_path / "report.json").read_text())["epochs"]
    assert 4 <= epochs[0]["epoch"] <= 5


async def test_a_command_takes_over_that_of_a_lost_one_or_replaces_it_as_told(capsys):
    await train(epochs=6)
    async with servers(2) as address:
        await interrupted(4, epochs=6, controller=address)
        with pytest.raises(ConfigError, match=r"--attach goes on with it .* and --replace begins anew"):
            await train(epochs=6, controller=address)
        await train(epochs=6, controller=address, attach=WAITING)
        await interrupted(2, epochs=3, controller=address)
        await train(epochs=4, controller=address, replace=True)

    first, second, third = capsys.readouterr().out.splitlines()
    assert first == second
    assert "after 4 epochs" in third


async def test_the_wait_for_a_controller_is_that_of_the_option():
    async with asyncio.timeout(5):
        with pytest.raises(RoleUnreachable, match=r"controller at tcp://127\.0\.0\.1:1"):
            await train(controller="tcp://127.0.0.1:1", wait=timedelta(seconds=0.2))


async def test_a_worker_of_another_process_helps_and_ends_with_the_command(capsys):
    await train(epochs=4)
    async with servers(2) as address, asyncio.TaskGroup() as group:
        worker = group.create_task(train(optimizer="lbfgs-worker", controller=address))
        assert await train(epochs=4, controller=address) == 0
        async with asyncio.timeout(10):
            assert await worker == 0

    first, second = capsys.readouterr().out.splitlines()
    assert first == second


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": "lbfgs-worker"}, "add --controller"),
        ({"augment": True}, "--augment changes images at random"),
        ({"momentum": 0.9}, "--momentum has no effect with --optimizer lbfgs: leave it out"),
        ({"rule": "sgd"}, "--rule has no effect"),
        ({"data": "tcp://127.0.0.1:1"}, "names data servers, and L-BFGS reads all images"),
        ({"controller": "tcp://127.0.0.1:1", "attach": "run-7"}, "--attach takes no RUN"),
        ({"optimizer": "lbfgs-worker", "controller": "tcp://127.0.0.1:1", "epochs": 3}, "--epochs has no"),
        ({"optimizer": "lbfgs-worker", "controller": "tcp://127.0.0.1:1", "out": Path("x")}, "--out has no"),
        ({"consistency": "bsp"}, "--consistency has no effect"),
        ({"processes": True}, "--processes has no effect"),
        ({"events": Path("file")}, "--events has no effect"),
        ({"record": Path("file")}, "--record has no effect"),
        ({"checkpoint": Path("folder")}, r"--checkpoint has no effect .* give --store, and the same command"),
    ],
)
async def test_random_and_idle_options_are_refused_by_name(options, text):
    with pytest.raises(ConfigError, match=text):
        await train(**options)


async def test_a_model_with_dropout_is_refused_by_the_name_of_its_layer(tmp_path):
    file = tmp_path / "model.toml"
    file.write_text(
        """name = "drops"
input = [1, 8, 8]

[[layers]]
name = "flat"
kind = "flatten"

[[layers]]
name = "drop"
kind = "dropout"

[[layers]]
name = "out"
kind = "dense"
outputs = 10

[[layers]]
name = "loss"
kind = "softmax_cross_entropy"
"""
    )
    with pytest.raises(ConfigError, match="layer 'drop' is dropout, which draws random numbers"):
        await train(model=str(file))
