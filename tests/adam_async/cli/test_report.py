"""The command `report` reads what `train --report` wrote, and says what is wrong with anything else."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from adam_async.cli.report import name_runs, read_report, run_report
from adam_async.cli.terminal import Terminal
from adam_async.errors import ConfigError
from adam_async.report.report import to_json
from adam_async.runtime.disk import Disk
from tests.adam_async.reports import real_report


async def written(folder: Path, *names: str) -> tuple[Path, ...]:
    """Files with the reports of runs of 1, 2, ... epochs."""
    files = tuple(folder / name for name in names)
    for epochs, file in enumerate(files, 1):
        file.write_bytes(to_json(await real_report(epochs=epochs)))
    return files


def terminal_into(stream: io.StringIO) -> Terminal:
    terminal = Terminal()
    terminal.out = Console(file=stream, soft_wrap=True, highlight=False, markup=False)
    return terminal


async def test_reports_are_shown_side_by_side_whole_where_no_terminal_is_too_narrow(tmp_path: Path) -> None:
    names = [f"a-run-with-a-rather-long-name-{number}.json" for number in range(4)]
    files = await written(tmp_path, *names)
    stream = io.StringIO()

    code = await run_report(files, terminal_into(stream))

    lines = stream.getvalue().splitlines()
    assert code == 0
    assert lines[0].split() == [Path(name).stem for name in names]
    assert next(line for line in lines if line.startswith("epochs")).split() == ["epochs", *"1234"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"more": ' + b"[" * 99999, "is no report of this version"),
        (b"{", "is no report of this version"),
        (b"\xff", "is no report of this version"),
        (b'{"command": []}', "missing required field"),
    ],
)
async def test_a_file_that_is_no_report_is_named(tmp_path: Path, text: bytes, said: str) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(text)

    async with Disk() as disk:
        with pytest.raises(ConfigError, match=said):
            await read_report(file, disk)
        with pytest.raises(ConfigError, match=r"gone\.json cannot be read: No such file"):
            await read_report(tmp_path / "gone.json", disk)


@pytest.mark.parametrize("number", [b"0", b"9"])
@pytest.mark.parametrize("field", [b"", b',"epochs":7'])
async def test_a_report_of_another_format_is_named_with_a_cure(
    tmp_path: Path, number: bytes, field: bytes
) -> None:
    (file,) = await written(tmp_path, "one.json")
    text = file.read_bytes().replace(b"adam-async/report/3", b"adam-async/report/" + number)
    file.write_bytes(text.rstrip()[:-1] + field + b"}")

    async with Disk() as disk:
        with pytest.raises(
            ConfigError,
            match=r"one\.json has the format 'adam-async/report/\d'; this version reads .*: read it with the",
        ):
            await read_report(file, disk)


async def test_a_report_whose_config_lacks_options_is_named_with_them(tmp_path: Path) -> None:
    (file,) = await written(tmp_path, "one.json")
    file.write_bytes(file.read_bytes().replace(b'"partitions"', b'"parts"'))

    async with Disk() as disk:
        with pytest.raises(
            ConfigError, match=r"one\.json is no report of this .* its config lacks partitions"
        ):
            await read_report(file, disk)


@pytest.mark.parametrize(
    ("name", "value"), [("rate", "fast"), ("rate", 10**400), ("warm_up", []), ("lag", {}), ("model", 7)]
)
async def test_a_report_with_an_option_of_another_type_is_named_with_it(
    tmp_path: Path, name: str, value: object
) -> None:
    (file,) = await written(tmp_path, "a.json")
    report = json.loads(file.read_bytes())
    report["config"][name] = value
    file.write_text(json.dumps(report))
    async with Disk() as disk:
        with pytest.raises(ConfigError, match=f"is no report of this version .*: {name} must be"):
            await read_report(file, disk)


def test_runs_are_named_by_their_files_as_shortly_as_they_differ() -> None:
    short = (Path("a/one.json"), Path("b/two.json"))
    same = (Path("a/one.json"), Path("b/one.json"))

    assert list(name_runs(short)) == ["one", "two"]
    assert list(name_runs(same)) == ["a/one.json", "b/one.json"]
    with pytest.raises(ConfigError, match=r"a/one\.json is named twice"):
        name_runs((short[0], short[0]))
    with pytest.raises(ConfigError, match="name one report or several"):
        name_runs(())
