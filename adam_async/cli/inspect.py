"""The commands `evaluate` and `doctor`."""

from collections.abc import Mapping
from pathlib import Path

from adam_async.checkpoint.trained_model import Model
from adam_async.cli.data import cache_folder, data_folder, load_data
from adam_async.cli.files import read_model_file
from adam_async.cli.terminal import Terminal
from adam_async.data_server.dataset import Policy
from adam_async.model import ModelSpec, named_model
from adam_async.report.doctor import examine, exit_code
from adam_async.report.evaluate import evaluate, table
from adam_async.run.model_selection import image_size
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import usable_cores


async def run_evaluation(
    model: Path, data: str, damaged: Policy, threads: int, environment: Mapping[str, str], terminal: Terminal
) -> int:
    """Print the accuracy of a saved model.

    Raises:
        ConfigError: The file is not a model, or does not fit the data.
        DataError: The data are missing or damaged.
    """
    async with Disk() as disk:
        trained = await disk.run(Model.load, model)
        size = image_size("", "", spec=trained.network.spec)
        dataset = await load_data(data, disk, environment, damaged=damaged, size=size)
    trained.network.use_ready()
    evaluation = await evaluate(
        trained.network,
        trained.weights,
        dataset,
        threads=threads or usable_cores(),
        class_names=trained.trained_names,
    )
    for line in table(evaluation):
        terminal.print(line)
    return 0


async def run_doctor(
    model: str, images_per_group: int, environment: Mapping[str, str], terminal: Terminal
) -> int:
    """Print the findings of `doctor`; the exit code is 1 if a finding is `broken`.

    Raises:
        ConfigError: The model cannot be found, read or built.
    """
    async with Disk() as disk:
        text = await read_model_file(model, disk)
        findings = await examine(
            disk=disk,
            entropy=system_entropy,
            data_dir=data_folder(environment),
            cache_dir=cache_folder(environment),
            spec=named_model(model) if text is None else ModelSpec.from_toml(text),
            images_per_group=images_per_group,
        )
    for finding in findings:
        terminal.print(str(finding))
    return exit_code(findings)
