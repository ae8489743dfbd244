"""All data servers of a run are killed, one after the other: the next ones go on with the same images."""

import signal
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from adam_async.report.report import Report
from tests.processes.commands import Command, accuracy_of, address_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]

IMAGES, EPOCHS = 1437, 30
LONG_S = 120.0


@pytest.mark.parametrize("mode", ["asp", "ssp:2", "bsp"])
def test_a_run_outlives_all_its_data_servers_and_trains_each_image_once_an_epoch(
    mode: str, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    with ExitStack() as stack:
        controller = stack.enter_context(Command("controller", "--bind", "tcp://127.0.0.1:0"))
        where = ("--controller", address_of(controller))

        def start(*words: str) -> Command:
            role = stack.enter_context(Command(*words, *where))
            address_of(role)
            return role

        def start_data(number: int) -> Command:
            return start("data", "--data", "digits", "--id", f"data-{number}")

        start("ps")
        servers = [start_data(number) for number in range(3)]
        for _ in range(2):
            start("worker", "--threads", "1")
        options = ("--replicas", "2", "--consistency", mode, "--epoch-fraction", "1")
        train = stack.enter_context(
            Command("train", *options, "--epochs", str(EPOCHS), "--report", str(file), *where)
        )
        for number, epoch in ((0, 2), (1, 4)):
            train.wait_for(f"epoch {epoch}/{EPOCHS}")
            servers[number].signal(signal.SIGKILL)
            controller.wait_for(f"data-{number} is lost")
        train.wait_for("epoch 8/")
        servers[2].signal(signal.SIGKILL)
        controller.wait_for("waits for a data server, because data-2 is lost")
        start_data(3)
        controller.wait_for("goes on with data server data-3")
        train.ends(0, seconds=LONG_S)

    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert [epoch.images for epoch in report.epochs] == [IMAGES] * EPOCHS
    assert accuracy_of(train.output) > 90
    assert "Traceback" not in train.output
