"""Every example runs, is short, and shows what it says it shows. So does the program in the README."""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from runpy import run_path
from types import ModuleType

import httpx
import pytest

from adam_async import Config, LocalCluster
from tests.processes.commands import run

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


async def test_in_the_graph_the_second_tag_overtakes_the_first() -> None:
    assert await load("01_graph.py").main() == [(2, 43), (1, 21)]


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
    code, output = run(*words, "--processes", "--replicas", "2", "--consistency", "bsp", "--rate", "0.3")

    assert code == 0, output
    assert float(re.search(r"test accuracy (\d+\.\d+)% after 12 epochs", output)[1]) > 85


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
    assert "worker-0 trained both parts" in printed


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


def test_the_program_in_the_readme_runs_as_it_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})

    accuracies = re.findall(r"test accuracy ([\d.]+)%", capsys.readouterr().out)
    assert float(accuracies[-1]) > 90
    assert len(program.splitlines()) <= 12


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
