"""A cluster of child processes trains, survives the loss of a worker, and names a loss that ends the run."""

import os
import re
import signal
from pathlib import Path

import pytest

from adam_async.cluster.processes import ProcessCluster
from adam_async.errors import LOST_SHARDS, DeadlineExceeded, RoleDied, RoleFailed
from adam_async.model.spec import LayerSpec, ModelSpec
from adam_async.run.config import Waits
from adam_async.run.option_sources import make_config
from tests.adam_async.runs import tiny_dataset
from tests.processes.commands import PATIENCE_S, ROOT, Command, children_of, command_line, run, until, watched

pytestmark = pytest.mark.processes

TRAIN = ("train", "--data", "digits", "--processes", "--replicas", "2", "--servers", "2")


def test_child_processes_train_the_digits() -> None:
    output = run(*TRAIN, "--epochs", "4")
    # Chance is 10%; how far two that train at once get in four epochs depends on how they take turns.
    assert re.search(r"test accuracy [5-9]\d\.\d+% after 4 epochs", output), output
    assert "|" not in output, "no child had anything to complain about"
    assert "event" not in output


@pytest.mark.parametrize("how", ["raises", "loss"])
async def test_a_mistake_of_a_step_ends_the_run_of_processes_and_is_named(how: str) -> None:
    async with ProcessCluster(
        make_config({"epochs": 2, "replicas": 2}),
        dataset=tiny_dataset(),
        step="tests.adam_async.steps:wrong",
        step_args={"how": how},
        step_path=[ROOT],
    ) as cluster:
        with pytest.raises(
            RoleFailed, match=r"worker-. cannot train the run: step .*:wrong failed in step: "
        ):
            await cluster.train()


def test_no_process_imports_a_module_that_lies_in_the_working_directory(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("msgspec", "numpy"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').close()")

    with Command(*TRAIN, "--epochs", "1", folder=here) as command:
        command.ends(0)

    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("node", ["worker-1", "data-0"])
def test_a_killed_worker_is_named_and_replaced_and_no_image_is_lost(node: str) -> None:
    with Command(*TRAIN, "--epochs", "40") as command:
        command.wait_for("epoch 1/40")
        os.kill(command.child(node), signal.SIGKILL)
        command.wait_for(f"{node} died: killed by signal 9; starting it again")
        command.ends(0)

    epochs = re.findall(r"epoch \d+/40: .* (\S+) images in", command.output)
    assert epochs == ["1,437"] * 40, command.output
    assert re.search(rf"event  at \d+\.\d s: {node} died: killed by signal 9", command.output)
    assert "Traceback" not in command.output


def test_a_stopped_server_is_shown_while_it_is_silent_and_is_an_event_of_the_run() -> None:
    with Command(*TRAIN, "--epochs", "30") as command:
        command.wait_for("epoch 1/30")
        server = command.child("ps-1")
        os.kill(server, signal.SIGSTOP)
        command.wait_for("ps-1 has not answered for")
        os.kill(server, signal.SIGCONT)
        command.ends(0)

    assert re.search(r"event  at \d+\.\d s: ps-1 has not answered for \d+ s", command.output)
    assert re.search(r"event  at \d+\.\d s: ps-1 answers again, after \d+ s", command.output)


@pytest.mark.parametrize(
    ("node", "remedy"), [("ps-1", LOST_SHARDS), ("controller", "with --controllers 3 the others go on")]
)
def test_a_dead_role_that_holds_the_only_copy_ends_the_run_with_its_name(node: str, remedy: str) -> None:
    with Command(*TRAIN, "--epochs", "1000") as command:
        command.wait_for("epoch 1/1000")
        with watched(list(children_of(command.pid))) as all_end:
            os.kill(command.child(node), signal.SIGKILL)
            command.wait_for(f"{node} died: killed by signal 9")
            command.ends(4)
            all_end(1)

    assert command.output.rstrip().endswith(f"adam-async: {node} died: killed by signal 9; {remedy}")
    assert "Traceback" not in command.output


def test_a_worker_that_keeps_dying_is_started_again_five_times() -> None:
    with Command(*TRAIN, "--epochs", "5000") as command:
        command.wait_for("epoch 1/5000")
        for _ in range(5):
            until(lambda: "--id worker-0 " in " ".join(children_of(command.pid).values()), "worker-0")
            os.kill(command.child("worker-0"), signal.SIGKILL)
            command.wait_for("worker-0 died: killed by signal 9; starting it again")
        until(lambda: "--id worker-0 " in " ".join(children_of(command.pid).values()), "worker-0")
        os.kill(command.child("worker-0"), signal.SIGKILL)
        command.ends(4)

    assert "worker-0 died: killed by signal 9, after it had been started again 5 times" in command.output


async def test_a_program_trains_with_child_processes_in_its_own_loop() -> None:
    lines: list[str] = []
    config = make_config({"data": "digits", "epochs": 2, "threads": 1})

    async with ProcessCluster(config, on_line=lines.append) as cluster:
        children = [child.pid for child in cluster.children.values()]
        result = await cluster.train()

    assert [epoch.images for epoch in result.epochs] == [1437, 1437]
    assert len({node.pid for node in result.statistics.values()}) == 5
    assert lines == []
    assert all(command_line(pid or 0) == "" for pid in children)


async def test_a_program_hears_that_a_child_cannot_start() -> None:
    lines: list[str] = []
    config = make_config({"data": "/no/such/folder"})

    with pytest.raises(RoleDied, match="data-0 died: /no/such/folder does not exist"):
        async with ProcessCluster(config, on_line=lines.append):
            pass

    assert lines[-1] == "data-0 died: ended with exit code 3"


async def test_the_error_of_a_slow_start_names_the_option_for_a_longer_wait() -> None:
    waits = Waits(prepare_s=0.01)
    claim = r"controller to report its address; .* raise prepare_s under \[waits\]"
    with pytest.raises(DeadlineExceeded, match=claim):
        async with ProcessCluster(make_config({"data": "digits", "waits": waits})):
            pass


def test_children_end_when_their_parent_is_killed() -> None:
    with Command(*TRAIN, "--epochs", "1000") as command:
        command.wait_for("epoch 1/1000")
        pids = list(children_of(command.pid))
        assert len(pids) == 6
        with watched(pids) as all_end:
            command.signal(signal.SIGKILL)
            all_end(PATIENCE_S)


def test_a_role_that_cannot_start_ends_the_command_with_its_own_code(tmp_path: Path) -> None:
    file = tmp_path / "damaged.npz"
    file.write_bytes(b"damaged")
    output = run("train", "--processes", "--data", str(file), code=3)
    assert f"adam-async: data-0 died: {file} is not an .npz archive" in output
    assert "Traceback" not in output


def test_an_error_that_only_training_finds_leaves_no_children() -> None:
    output = run(*TRAIN, "--model", "mnist-adam", code=2)
    assert "adam-async: model 'mnist-adam' takes images of (1, 28, 28)" in output


def test_children_slowed_on_purpose_train() -> None:
    output = run(*TRAIN, "--epochs", "1", "--slow", "worker-1:0.2", "--slow", "worker-0~ps-0:5ms+1ms")
    assert output.count("slowed on purpose: worker-1 computes 0.2 of the time, messages") == 1
    assert "|" not in output, "no child had anything to complain about"


async def test_each_child_gets_its_own_slow_options() -> None:
    slow = ("worker-1:0.2", "worker-0~ps-0:5ms")
    options = {"data": "digits", "data_servers": 2, "epochs": 1, "replicas": 2, "processes": True}
    options["size"] = "8x8"
    config = make_config({**options, "slow": slow})
    async with ProcessCluster(config) as cluster:
        counts = {
            node: re.findall(r"--slow (\S+)", command_line(child.pid or 0))
            for node, child in cluster.children.items()
        }
        caches = {
            node: re.findall(r"--cache (\S+)", command_line(child.pid or 0))
            for node, child in cluster.children.items()
            if node.startswith("data-")
        }
        sizes = [
            re.findall(r"--size (\S+)", command_line(child.pid or 0)) for child in cluster.children.values()
        ]
        result = await cluster.train()
    paced = [result.statistics[f"worker-{number}"].pool.paced_s for number in range(2)]

    assert counts == {
        "controller": [],
        "data-0": [],
        "data-1": [],
        "ps-0": [slow[1]],
        "worker-0": [slow[1]],
        "worker-1": [slow[0]],
    }
    assert caches == {"data-0": ["auto/2"], "data-1": ["auto/2"]}
    assert sorted(sizes) == [[], [], [], [], ["8x8"], ["8x8"]]
    assert paced[0] == 0 < paced[1]


def test_a_straggler_that_is_not_there_ends_with_code_2() -> None:
    output = run(*TRAIN, "--slow", "worker-7:0.2", code=2)
    assert "slow: there is no worker 'worker-7' here; there are worker-0, worker-1" in output


OWN_LAYER = """
import numpy as np
from adam_async.model.layer import Layer

class Doubled(Layer):
    def forward(self, weights, slots):
        np.multiply(slots.inputs[0], 2, out=slots.output)

    def backward(self, weights, slots):
        np.multiply(slots.error, 2, out=slots.input_errors[0])
"""


async def test_a_data_set_of_the_caller_and_a_layer_named_by_its_module_reach_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_layer_of_a_test.py").write_text(OWN_LAYER)
    monkeypatch.syspath_prepend(tmp_path)
    layers = (
        LayerSpec.of("flat", "flatten"),
        LayerSpec.of("twice", "doubled"),
        LayerSpec.of("fc", "dense", outputs=10),
        LayerSpec.of("loss", "softmax_cross_entropy"),
    )
    config = make_config({"epochs": 2, "replicas": 2, "data_servers": 2, "images_per_group": 4})
    async with ProcessCluster(
        config,
        dataset=tiny_dataset(),
        spec=ModelSpec(name="own", input_shape=(1, 8, 8), layers=layers),
        layers={"doubled": "own_layer_of_a_test:Doubled"},
        environment={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as cluster:
        result = await cluster.train()
        assert sorted(cluster.children) == ["controller", "ps-0", "worker-0", "worker-1"]
    assert [epoch.images for epoch in result.epochs] == [60, 60]
    assert list(result.weights) == ["fc.weight", "fc.bias"]
