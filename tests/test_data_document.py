"""docs/reference/data.md describes the transforms correctly, and its picture is that of its command."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from adam_async.cli.commands import app
from adam_async.cli.data_inspect import run_inspection
from adam_async.cli.options import InspectOptions
from adam_async.cli.terminal import Terminal
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.data_server.transforms.steps import KINDS, REQUIRED, read_steps

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "reference" / "data.md").read_text()
PICTURE = ROOT / "docs" / "images" / "contact_sheet.png"
MNIST = os.environ.get("ADAM_DATA_DIR", "")


def test_every_kind_of_step_is_in_the_table_with_its_options_and_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", TEXT.split("## Transforms")[1], re.MULTILINE))

    assert set(rows) == set(KINDS)
    for kind, options in KINDS.items():
        named = re.findall(r"`(\w+)`(?: ([\w.]+))?", rows[kind])
        assert {name for name, _ in named} == set(options)
        for name, default in named:
            value = options[name].default
            if name == "edge" or value is None or value is REQUIRED:
                assert default == ""
            else:
                assert default == (str(value).lower() if isinstance(value, bool) else str(value))


def test_the_file_and_the_program_can_be_used_as_they_stand() -> None:
    (file,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, np.ndarray] = {}

    Recipe.of(read_steps(file, "docs/reference/data.md"), (1, 28, 28))
    exec(compile(program, "docs/reference/data.md", "exec"), names)

    assert names["changed"].shape == (8, 1, 28, 28)
    assert {0, 255} == set(names["changed"].flat)


def test_the_picture_is_small() -> None:
    assert PICTURE.stat().st_size <= 200 * 1024


@pytest.mark.thorough
@pytest.mark.skipif(not MNIST, reason="ADAM_DATA_DIR names no folder with MNIST")
async def test_the_picture_is_what_its_command_draws(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="files are compared pixel by pixel with Pillow")
    (words,) = re.findall(r"^    adam-async (data inspect .* docs/images/.*)$", TEXT, re.MULTILINE)
    _, bound, _ = app.parse_args(words.split(), exit_on_error=False, print_error=False)
    asked = bound.arguments["options"]
    options = InspectOptions(png=tmp_path / "drawn.png", augment=asked.augment)
    assert ROOT / asked.png == PICTURE

    await run_inspection(bound.arguments["source"], options, {"ADAM_DATA_DIR": MNIST}, Terminal(quiet=True))

    with image.open(options.png) as drawn, image.open(PICTURE) as committed:
        assert np.array_equal(np.asarray(drawn), np.asarray(committed))
