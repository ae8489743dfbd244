"""The programs of docs/how-to/models.md run unchanged, with the results of the page."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "how-to" / "models.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
IN_TORCH, CONVERSION = re.findall(r"```python torch\n(.*?)```", TEXT, re.DOTALL)
TRAINING, OWN_LAYER, IN_NUMPY = PROGRAMS


def run(*programs: str) -> dict[str, Any]:
    """Run programs one after the other with the names of those before."""
    names: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, "docs/how-to/models.md", "exec"), names)
    return names


def test_arrays_of_the_user_train_a_network_of_the_user_that_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    names = run(TRAINING, IN_NUMPY)

    assert names["found"].names[:3] == ["blue", "red", "green"]
    assert "100% of the test images named rightly" in capsys.readouterr().out
    assert names["tensors"]["conv1.weight"].shape == (4, 3, 3, 3)
    assert names["tensors"]["fc1.weight"].shape == (3, 140)


def test_a_network_with_a_layer_of_the_user_is_trained_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    run(TRAINING, OWN_LAYER)

    assert capsys.readouterr().out.splitlines()[-1] == "['red', 'green']"


def test_pytorch_gives_the_same_probabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.chdir(tmp_path)

    names = run(TRAINING, IN_TORCH)

    np.testing.assert_allclose(names["shares"], names["found"].probabilities, atol=1e-4)


def test_a_module_is_trained_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.chdir(tmp_path)

    names = run(TRAINING, IN_TORCH, CONVERSION)

    assert type(names["trained"]) is type(names["own"])
    classes = names["trained"](names["pixels"]).argmax(dim=1).numpy()
    assert (classes == names["labels"][500:]).mean() > 0.9
