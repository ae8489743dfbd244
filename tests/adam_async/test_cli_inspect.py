"""The commands that look and change nothing take a model by name or as a file, and refuse what is neither."""

from pathlib import Path

import pytest

from adam_async.cli_inspect import run_doctor
from adam_async.cli_terminal import Terminal
from adam_async.errors import ConfigError

SPEC = """
name = "little"
input = [2]

[[layers]]
name = "fc1"
kind = "dense"
outputs = 3

[[layers]]
name = "loss"
kind = "softmax_cross_entropy"
"""


async def test_the_doctor_looks_at_a_model_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "little.toml").write_text(SPEC)
    code = await run_doctor(str(tmp_path / "little.toml"), 5, {"HOME": str(tmp_path)}, Terminal())

    told = capsys.readouterr().out
    assert code == 0
    assert "of little at 5 images per group" in told
    assert "fc1 to loss: " in told


@pytest.mark.parametrize(
    ("model", "images", "claim"),
    [
        ("nix", 16, "no model is named 'nix'"),
        ("/gone/nix.toml", 16, "/gone/nix.toml"),
        ("digits", 0, "--images-per-group must be within 1 and 65536, not 0"),
        ("digits", 10**9, "--images-per-group must be within 1 and 65536, not 1000000000"),
    ],
)
async def test_the_doctor_refuses_what_is_no_model_and_no_group(model: str, images: int, claim: str) -> None:
    with pytest.raises(ConfigError, match=claim):
        await run_doctor(model, images, {}, Terminal())
