"""The commands that look and change nothing: `evaluate` and `doctor`."""

from collections.abc import Mapping
from pathlib import Path

from adam_async.cli_data import cache_folder, data_folder, load_data
from adam_async.cli_terminal import Terminal
from adam_async.doctor import examine, exit_code
from adam_async.errors import ConfigError
from adam_async.evaluate import evaluate_file, table
from adam_async.machine import usable_cores
from adam_async.ports import Disk, system_entropy
from adam_async.saved_model import FILE_NAME


async def run_evaluation(
    model: Path, data: str, threads: int, environment: Mapping[str, str], terminal: Terminal
) -> int:
    """Print how well a saved model does.

    Raises:
        ConfigError: The file is no model, does not fit the data, or `threads` is negative.
        DataError: The data are missing or damaged.
    """
    if threads < 0:
        raise ConfigError(f"--threads must be at least 0, not {threads}")
    async with Disk() as disk:
        path = model / FILE_NAME if await disk.run(model.is_dir) else model
        dataset = await load_data(data, disk, environment)
        evaluation = await evaluate_file(path, dataset, disk=disk, threads=threads or usable_cores())
    for line in table(evaluation):
        terminal.say(line)
    return 0


async def run_doctor(environment: Mapping[str, str], terminal: Terminal) -> int:
    """Print what is here, what is slower without something, and what is broken; 1 if something is."""
    async with Disk() as disk:
        findings = await examine(
            disk=disk,
            entropy=system_entropy,
            data_dir=data_folder(environment),
            cache_dir=cache_folder(environment),
        )
    for finding in findings:
        terminal.say(str(finding))
    return exit_code(findings)
