"""The programs of the guide to vectors run as they are, and do what it says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/how-to/vectors-on-the-servers.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
PRINTED = ("-0.0372", "27.178", "")
"""Beginnings of what the programs print."""


@pytest.mark.parametrize(("program", "printed"), [*zip(PROGRAMS, PRINTED, strict=True)])
def test_a_program_of_the_guide_runs(program, printed, capsys):
    exec(compile(program, str(PAGE), "exec"), {"__name__": "guide"})
    assert capsys.readouterr().out.startswith(printed)
