"""docs/reference/data.md describes the transforms correctly."""

import re
from pathlib import Path

import numpy as np

from adam_async.data_server.transforms.recipe import Recipe
from adam_async.data_server.transforms.steps import KINDS, REQUIRED, read_steps

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "reference" / "data.md").read_text()


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
