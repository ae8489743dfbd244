"""Every example runs, is short, and shows what it says it shows. So do the programs in the README."""

import asyncio
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from runpy import run_path
from types import ModuleType

import httpx
import numpy as np
import pytest

from adam_async import Config, LocalCluster
from tests.adam_async.store.servers import store_servers
from tests.processes.commands import Command, address_of, run

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
MOST_LINES = 60


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"example_{name.removesuffix('.py')}", ROOT / "examples" / name)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_short_and_run_here(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) < MOST_LINES
    assert f'load("{name}")' in Path(__file__).read_text()


def test_an_example_without_pytorch_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match=r"needs PyTorch: .*pip install .*\[torch\]"):
        load("torch_denoiser.py")


async def test_in_the_graph_the_second_tag_overtakes_the_first() -> None:
    assert await load("01_graph.py").main() == [(2, 43), (1, 21)]


def test_a_run_is_watched_by_a_callback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = asyncio.run(load("10_watch.py").main("print", epochs=2))
    written = capsys.readouterr().out
    assert f"2 accuracy/test {result.epochs[-1].test_accuracy}" in written
    assert written.splitlines()[0] == "RunBegins"
    assert written.splitlines()[-1] == "RunEnds"


@pytest.mark.parametrize(
    ("tool", "package", "pattern"),
    [("wandb", "wandb", "wandb/offline-run-*/run-*.wandb"), ("mlflow", "sqlalchemy", "mlflow.db")],
)
@pytest.mark.timeout(320)
def test_a_run_is_watched_offline_in_two_tools(tool: str, package: str, pattern: str, tmp_path: Path) -> None:
    for each in (tool, package):  # mlflow-skinny comes without the package for its database
        pytest.importorskip(each, reason=f"needs the package {tool}")
    command = [sys.executable, str(ROOT / "examples" / "10_watch.py"), tool, str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)  # the tools leave threads behind
    assert any(b"accuracy/test" in path.read_bytes() for path in tmp_path.glob(pattern))


SERIAL = {"threads": 1, "in_flight": 1, "rate": 0.1}
LOCKSTEP = {"replicas": 2, "servers": 2, "consistency": "bsp", "rate": 0.3}


@pytest.mark.parametrize("options", [SERIAL, LOCKSTEP])
async def test_the_step_in_numpy_learns_the_digits(options: dict[str, object]) -> None:
    step = load("numpy_step.py").mlp(hidden=64)
    async with LocalCluster(Config(data="digits", **options), step=step) as cluster:
        result = await cluster.train()

    assert result.test_accuracy > 0.85


@pytest.mark.processes
def test_the_step_in_numpy_learns_the_digits_by_its_own_command_with_processes() -> None:
    text = (ROOT / "examples" / "numpy_step.py").read_text()
    words = shlex.split(re.search(r"^    adam-async (train .*)$", text, re.MULTILINE)[1])
    output = run(*words, "--processes", "--replicas", "2", "--consistency", "bsp", "--rate", "0.3")
    assert float(re.search(r"test accuracy (\d+\.\d+)% after \d+ epochs", output)[1]) > 85


@pytest.mark.slow
@pytest.mark.parametrize("options", [SERIAL, {**LOCKSTEP, "rate": 0.1}])
async def test_the_step_with_pytorch_learns_the_digits(options: dict[str, object]) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")
    step = load("torch_step.py").cnn(width=8)
    async with LocalCluster(Config(data="digits", epochs=3, **options), step=step) as cluster:
        result = await cluster.train()

    assert result.test_accuracy > 0.85


@pytest.mark.processes
def test_the_step_with_pytorch_learns_the_digits_by_its_own_command() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")
    text = (ROOT / "examples" / "torch_step.py").read_text()
    words = shlex.split(re.search(r"^    adam-async (train .*)$", text, re.MULTILINE)[1])
    output = run(*words, "--epochs", "4")
    assert float(re.search(r"test accuracy (\d+\.\d+)% after 4 epochs", output)[1]) > 90


async def test_lbfgs_on_three_servers_finds_the_minimum_of_the_regression() -> None:
    async with store_servers(3) as servers:
        value = await load("store_lbfgs.py").main(servers.address)

    assert value == pytest.approx(await load("store_lbfgs.py").main(), rel=1e-9)


def needs_torch() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)").set_num_threads(1)


def test_the_character_model_of_pytorch_learns_through_a_store() -> None:
    needs_torch()
    losses = load("torch_char_lm.py").train(steps=20)
    assert losses[0] > 4.0 > 3.5 > losses[-1]


def test_the_denoiser_of_pytorch_learns_with_shared_weights_and_statistics() -> None:
    needs_torch()
    losses = load("torch_denoiser.py").train(epochs=2)
    assert losses[-1] < losses[0] / 5


@pytest.mark.processes
async def test_the_residual_network_of_pytorch_survives_kills_of_a_worker_and_of_a_server() -> None:
    needs_torch()
    result = await load("torch_resnet.py").main(kill=True)

    assert [epoch.images for epoch in result.epochs] == [1200] * 4
    events = [event["event"] for event in result.events]
    assert any("worker-0 died" in event for event in events)
    assert any("ps-1 died" in event for event in events)
    assert result.test_accuracy > 0.8


async def test_the_tensor_comes_back_as_it_went() -> None:
    assert await load("02_tensor_echo.py").main(size=300_000, rounds=2) == 0.0


async def test_training_in_one_process_counts_every_image(capsys: pytest.CaptureFixture[str]) -> None:
    result = await load("03_train_one_process.py").main("digits", epochs=1)

    assert [epoch.images for epoch in result.epochs] == [1437]
    assert "epoch 1: loss" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.slow
async def test_training_across_processes_survives_the_death_of_a_worker() -> None:
    result = await load("04_train_processes.py").main(epochs=3, kill=True)

    assert [epoch.images for epoch in result.epochs] == [1437, 1437, 1437]
    assert any("worker-0 died" in event["event"] for event in result.events)


@pytest.mark.thorough
async def test_the_web_application_answers_while_it_trains() -> None:
    app = load("05_web_app.py").make_app(Config(epochs=1_000_000, threads=1))
    transport = httpx.ASGITransport(app=app)
    answers = []

    async with (
        asyncio.timeout(30),
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        while not answers or len(answers[-1]["epochs"]) < 2:
            answers.append((await client.get("/")).json())
            await asyncio.sleep(0)

    assert len(answers) > 100
    assert {answer["phase"] for answer in answers} >= {"training", "evaluating"}
    assert app.state.training.cancelled()


@pytest.mark.thorough
async def test_a_layer_of_the_user_is_checked_and_trained() -> None:
    assert await load("06_own_layer.py").main(epochs=8) > 0.8


async def test_a_cut_replica_trains_and_says_what_crosses(capsys: pytest.CaptureFixture[str]) -> None:
    result = await load("07_partitioned.py").main(epochs=1)

    assert [epoch.images for epoch in result.epochs] == [1437]
    printed = capsys.readouterr().out
    assert "worker 0 -> worker 1: gradient of conv1, 160 values" in printed


@pytest.mark.thorough
async def test_the_halves_of_a_cut_model_talk_over_tcp(capsys: pytest.CaptureFixture[str]) -> None:
    result = await load("08_partitioned_tcp.py").main(epochs=1)

    assert [epoch.images for epoch in result.epochs] == [1437]
    printed = capsys.readouterr().out
    assert "worker-0 -> worker-1: " in printed
    assert f"worker-1 has {90 * 6} tensors from worker-0" in printed


@pytest.mark.thorough
async def test_over_a_slow_cable_groups_overtake_each_other(tmp_path: Path) -> None:
    file = tmp_path / "run.json"

    assert await load("09_overtaking.py").main(str(file))

    drawn = run_path(str(ROOT / "docs" / "images" / "draw_overtaking.py"))["picture"](
        json.loads(file.read_text())["traceEvents"]
    )
    assert "began later, and was done earlier" in drawn


def output_of(program: str) -> str:
    """Run a program of the README, and return its output."""
    with redirect_stdout(io.StringIO()) as output:
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def test_the_programs_in_the_readme_run_as_they_are_printed() -> None:
    store, cluster = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    assert output_of(store) == "[-0.1 -0.2 -0.3]\n"
    assert len(store.split("\n")) - store.count("\n\n") <= 9  # 8 lines with code, and the end of the last one
    accuracies = re.findall(r"test accuracy ([\d.]+)%", output_of(cluster))
    assert float(accuracies[-1]) > 90
    assert len(cluster.splitlines()) <= 12


async def test_a_store_alone_trains_a_logistic_regression(capsys: pytest.CaptureFixture[str]) -> None:
    assert len((ROOT / "examples" / "store_logistic.py").read_text().splitlines()) < 40
    assert await load("store_logistic.py").main(steps=200) > 0.9
    assert "test accuracy 9" in capsys.readouterr().out


async def test_a_store_applies_a_rule_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert await load("store_own_rule.py").main() < 0.01
    assert "largest distance to the wanted weights: 0.0" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["Lion", "SignSgd"])
async def test_a_network_learns_with_each_rule_of_the_example(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert getattr(load("own_rules.py"), name)().rate == 0.001
    async with LocalCluster(Config(data="digits", rule=f"own_rules:{name}", epochs=3)) as cluster:
        result = await cluster.train()
    assert result.test_accuracy > 0.8


async def test_two_clients_factorise_a_matrix_with_few_steps_between_them() -> None:
    errors = await load("store_matrix_factorisation.py").main()

    assert len(errors) == 2
    assert max(errors) < 0.01


def test_branches_of_a_pin_begin_with_the_same_values_and_momentum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("store_branch.py")
    errors = example.main(str(tmp_path / "first"))
    assert errors == example.main(str(tmp_path / "second"))
    assert len({*errors.values()}) == 3
    assert capsys.readouterr().out.count("after 30 steps at rate") == 6


@contextmanager
def started(example: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run an example as a process; its output can be read."""
    command = [sys.executable, str(ROOT / "examples" / example), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
def test_one_program_trains_a_store_and_another_serves_it_after_the_first_has_ended() -> None:
    digits = np.load(ROOT / "adam_async" / "data_server" / "sources" / "digits.npz")
    images, labels = digits["x_test"][:100], digits["y_test"][:100]
    assert {"train", "serve"} <= set(vars(load("store_shared.py")))
    without = subprocess.run([sys.executable, ROOT / "examples" / "store_shared.py"], capture_output=True)
    assert without.returncode == 2
    assert b"store_shared.py train tcp://" in without.stderr
    with (
        Command("controller", "--bind", "tcp://127.0.0.1:0") as controller,
        Command("ps", "--controller", where := address_of(controller)) as server,
    ):
        address_of(server)
        with started("store_shared.py", "train", where) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline().startswith("trains in <ParameterStore 'digits'")
            with started("store_shared.py", "serve", where, "0") as serving:
                assert serving.stdout is not None
                port = int(serving.stdout.readline().removeprefix("serves at port "))
                assert trainer.wait(timeout=60) == 0
                with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                    lines = [" ".join(map(str, image.ravel())) + "\n" for image in images]
                    connection.sendall("".join(lines).encode())
                    with connection.makefile() as answers:
                        found = np.array([int(answers.readline()) for _ in images])
    assert np.mean(found == labels) > 0.9


@pytest.mark.thorough
async def test_the_sample_data_are_written_in_every_format(tmp_path: Path) -> None:
    await load("make_sample_data.py").main(str(tmp_path))

    written = set(os.listdir(tmp_path))
    assert written >= {"folders", "shards", "csv", "csv-paths", "npy", "npz", "parquet", "idx"}


@pytest.mark.parametrize("words", [[], ["--help"], ["a", "b"]])
def test_the_sample_data_explain_themselves_without_a_folder(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "make_sample_data.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=50)

    assert done.returncode == 1
    assert done.stderr.startswith("Write the digits of the package in every format")
    assert list(tmp_path.iterdir()) == []
