"""Roles started by their own commands: they serve run after run, and refuse foreign clients."""

import json
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from adam_async.run.token_file import derived_text
from tests.processes.commands import ROOT, Command, address_of, run, started_by_hand

pytestmark = pytest.mark.processes

TOKEN = "a token that nobody guesses"


def test_roles_started_by_hand_serve_run_after_run(tmp_path: Path) -> None:
    def keys(role: str) -> tuple[str, str]:
        """Each role has the keys of its own pairs alone."""
        file = tmp_path / f"{role}.keys"
        file.write_text(f"{derived_text(TOKEN, role)}\n")
        file.chmod(0o600)
        return ("--token-file", str(file))

    with ExitStack() as stack:
        meet = ("controller", "--bind", "tcp://127.0.0.1:0", *keys("controller"))
        controller = stack.enter_context(Command(*meet))
        where = ("--controller", address_of(controller))
        join = (*where, *keys("driver"))
        roles = [
            stack.enter_context(Command(*words, *where, *keys(words[0])))
            for words in (
                ("ps", "--checksum", "on"),
                ("data", "--data", "digits"),
                ("worker", "--threads", "1"),
            )
        ]
        for role in roles:
            assert address_of(role).startswith("tcp://127.0.0.1:")
        for seed in ("1", "2"):
            output = run("train", "--epochs", "2", "--seed", seed, *join)
            assert "after 2 epochs" in output
        for role in (*roles, controller):
            role.signal(signal.SIGINT)
            assert role.finish() == 130
        for role in roles:
            assert role.output.count("\n") == 1, role.output
        assert controller.output.count(" is training\n") == 2
        finished = re.findall(
            r" has finished with (\d+\.\d+)% of the test images correct\n", controller.output
        )
        assert len(finished) == 2


def test_a_killed_worker_and_a_run_that_diverges_are_lines_at_once_on_train_and_controller() -> None:
    with ExitStack() as stack:
        controller = stack.enter_context(Command("controller", "--bind", "tcp://127.0.0.1:0"))
        where = ("--controller", address_of(controller))
        for words in (
            ("ps",),
            ("data", "--data", "digits"),
            ("worker", "--id", "w-0"),
            ("worker", "--id", "w-1"),
        ):
            address_of(role := stack.enter_context(Command(*words, *where)))
        options = ("--replicas", "2", "--epochs", "100000", "--quiet", *where)
        with Command("train", *options) as train:
            controller.wait_for(" is training")
            role.signal(signal.SIGKILL)
            train.wait_for("w-1 died")
            controller.wait_for("w-1 is lost")
            train.signal(signal.SIGINT)
            assert train.finish() == 130
            assert "kept: nothing (--out keeps" in train.output
        output = run("train", "--rate", "1e12", "--epochs", "9", *where, code=9)
        assert "try a lower rate (--rate 1e+11" in output
        controller.wait_for("failed: training diverges")


def test_roles_start_in_any_order_on_every_interface(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    ours = ("--token-file", str(token))
    with Command("controller", "--bind", "tcp://127.0.0.1:0") as found:
        meet = address_of(found)
    everywhere = ("--bind", "tcp://0.0.0.0:0", "--advertise", "tcp://127.0.0.1:0")
    with ExitStack() as stack:

        def start(*words: str) -> Command:
            return stack.enter_context(Command(*words, *ours))

        training = start("train", "--epochs", "2", "--controller", meet)
        worker = start("worker", "--threads", "1", "--join", meet, *everywhere)
        start("data", "--data", "digits", "--controller", meet, *everywhere)
        server = start("ps", "--id", "ps-7", "--log-format", "json", "--controller", meet)
        line = json.loads(server.wait_for("waits for the controller"))
        assert (line["node"], line["level"]) == ("ps-7", "warning")
        assert re.fullmatch(
            r"\S+Z WARNING worker-\S+ waits for the controller, for \d+ s more; .*",
            worker.wait_for("waits for the controller"),
        )
        port = meet.rpartition(":")[2]
        start("controller", "--bind", f"tcp://0.0.0.0:{port}", "--advertise", meet)
        assert address_of(worker).startswith("tcp://127.0.0.1:")
        assert training.finish() == 0, training.output
    assert "after 2 epochs" in training.output


@pytest.mark.parametrize(
    ("ours", "claim"), [({"ADAM_TOKEN": "another secret, as long"}, "the tokens differ"), ({}, "has a token")]
)
def test_a_wrong_or_missing_token_is_refused_with_code_6(ours: dict[str, str], claim: str) -> None:
    with Command(
        "controller", "--bind", "tcp://127.0.0.1:0", environment={"ADAM_TOKEN": TOKEN}
    ) as controller:
        output = run("ps", "--controller", address_of(controller), code=6, environment=ours)
    assert claim in output
    assert "Traceback" not in output


def test_a_taken_port_ends_with_code_7() -> None:
    with Command("controller", "--bind", "tcp://127.0.0.1:0") as controller:
        address = address_of(controller)
        output = run("controller", "--bind", address, code=7)
    assert output.rstrip() == (
        f"adam-async: cannot listen on {address}: address already in use; choose another with --bind"
    )


def test_a_taken_or_wrong_address_for_probes_is_named_with_its_option() -> None:
    with Command("controller", "--bind", "tcp://127.0.0.1:0") as controller:
        address = address_of(controller)
        output = run("controller", "--bind", "tcp://127.0.0.1:0", "--health", address, code=7)
    assert output.rstrip() == (
        f"adam-async: cannot listen on {address}: address already in use; choose another with --health"
    )
    output = run("train", "--data", "digits", "--health", "127.0.0.1:80", code=2)
    assert "--health: address '127.0.0.1:80' is not of the form tcp://host:port" in output


def test_a_token_shorter_than_16_bytes_is_refused() -> None:
    output = run("controller", environment={"ADAM_TOKEN": "short"}, code=2)
    assert "token of 5 bytes can be guessed" in output


@pytest.mark.parametrize(
    ("words", "code", "claim"),
    [
        (("train", "--data", "digits", "--model", "mnist-adm"), 2, "unknown model 'mnist-adm'; known: auto"),
        (("train", "--data", "/no/such/folder"), 3, "/no/such/folder does not exist"),
        (
            ("controller", "--bind", "tcp://0.0.0.0:0", "--advertise", "tcp://192.0.2.1:7070"),
            7,
            "without a token",
        ),
        (("train", "--bogus"), 2, "Unknown option"),
    ],
)
def test_an_error_is_one_line(words: tuple[str, ...], code: int, claim: str) -> None:
    output = run(*words, code=code)
    assert claim in output
    assert output.startswith("adam-async: ")
    assert output.count("\n") == 1


STEP = ("--step", "tests.adam_async.steps:softmax", "--step-path", str(ROOT), "--epochs", "2")


def test_a_worker_refuses_a_step_that_it_does_not_allow_and_trains_the_next_run() -> None:
    with ExitStack() as stack:
        meet, start = started_by_hand(stack)
        start("ps", "--controller")
        start("data", "--data", "digits", "--controller")
        worker = start("worker", "--id", "w-0", "--threads", "1", "--join")
        output = run("train", *STEP, "--controller", meet, code=4)
        assert "w-0 cannot train the run: " in output
        assert "start the worker with --allow-step tests.adam_async.steps" in output
        worker.wait_for("w-0 refuses run")
        output = run("train", "--epochs", "1", "--controller", meet)


def test_a_worker_trains_a_step_that_its_command_line_allows() -> None:
    with ExitStack() as stack:
        meet, start = started_by_hand(stack)
        start("ps", "--controller")
        start("data", "--data", "digits", "--controller")
        allow = ("--allow-step", "tests.adam_async.steps", "--step-path", str(ROOT))
        worker = start("worker", "--threads", "1", *allow, "--join")
        assert f"imports also find modules in {ROOT}" in worker.output
        output = run("train", *STEP, "--controller", meet)
        assert "step   tests.adam_async.steps:softmax: 651 values in 3 arrays" in output


RULE = ("--rule", "tests.adam_async.rules:Means", "--step-path", str(ROOT), "--epochs", "1", "--rate", "0.01")


def test_a_server_applies_a_rule_that_its_command_line_allows_and_no_other() -> None:
    with ExitStack() as stack:
        meet, start = started_by_hand(stack)
        allow = ("--allow-rule", "tests.adam_async.rules:Means", "--step-path", str(ROOT))
        server = start("ps", *allow, "--controller")
        assert f"imports also find modules in {ROOT}" in server.output
        start("data", "--data", "digits", "--controller")
        start("worker", "--threads", "1", "--join")
        assert "after 1 epoch" in run("train", *RULE, "--controller", meet)
        other = ("--rule", "tests.adam_async.rules:Picky", *RULE[2:])
        output = run("train", *other, "--controller", meet, code=5)
        assert "does not allow rule tests.adam_async.rules:Picky" in output
        assert "--allow-rule tests.adam_async.rules:Picky" in output
        assert "after 1 epoch" in run("train", *RULE, "--controller", meet)


INVERT = "tests.adam_async.own_transform:invert"


@pytest.mark.timeout(180)
def test_a_data_server_refuses_a_function_that_it_does_not_allow_and_serves_the_next_run(
    tmp_path: Path,
) -> None:
    steps = tmp_path / "steps.toml"
    steps.write_text(f'[[transform]]\nkind = "{INVERT}"\n')
    invert = ("--augment", "--transforms", str(steps), "--step-path", str(ROOT), "--epochs", "1")
    with ExitStack() as stack:
        meet, start = started_by_hand(stack)
        start("ps", "--controller")
        data = start("data", "--id", "d-0", "--data", "digits", "--controller")
        start("worker", "--threads", "1", "--join")
        output = run("train", *invert, "--controller", meet, code=4)
        assert "the data server cannot serve the run: d-0: the transforms of the run name functions" in output
        assert f"start the data server with --allow-transform {INVERT}" in output
        data.wait_for("d-0 refuses run")
        output = run("train", "--epochs", "1", "--controller", meet)


@pytest.mark.timeout(180)
def test_a_data_server_calls_a_function_that_its_command_line_allows(tmp_path: Path) -> None:
    steps = tmp_path / "steps.toml"
    steps.write_text(f'[[transform]]\nkind = "{INVERT}"\n')
    invert = ("--augment", "--transforms", str(steps), "--step-path", str(ROOT), "--epochs", "1")
    with ExitStack() as stack:
        meet, start = started_by_hand(stack)
        start("ps", "--controller")
        allow = ("--allow-transform", INVERT, "--step-path", str(ROOT))
        data = start("data", "--data", "digits", *allow, "--controller")
        assert f"imports also find modules in {ROOT}" in data.output
        start("worker", "--threads", "1", "--join")
        output = run("train", *invert, "--controller", meet)
    output = run("train", "--processes", "--data", "digits", *invert)  # passes its own words on
    output = run("data", "--data", "digits", "--allow-transform", "nowhere:f", code=2)
    assert "--allow-transform (nowhere:f): there is no module 'nowhere'" in output


def test_one_command_begins_a_run_leaves_it_takes_it_over_and_continues_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        meet, start = started_by_hand(stack)
        start("ps", "--controller")
        start("data", "--data", "digits", "--controller")
        start("worker", "--threads", "1", "--join")
        folder = tmp_path / "run"
        command = ("train", "--attach", "--resume", str(folder), "--controller", meet, "--seed", "3")

        with Command(*command, "--epochs", "8") as driver:  # no run waits, and there is no folder yet
            driver.wait_for("epoch 2/8")
            driver.signal(signal.SIGTERM)
            assert driver.finish() == 143
        assert "a run in progress goes on, and waits for the next train --attach" in driver.output
        output = run(*command, "--epochs", "8")
        assert "took over run " in output
        assert "after 8 epochs" in output

        with Command(*command, "--epochs", "300") as driver:  # the run is over: its checkpoint goes on
            driver.wait_for("epoch 9/300")
            driver.signal(signal.SIGINT)  # ends the run
            assert driver.finish() == 130
        assert "resumed from " in driver.output


def test_an_unknown_layer_of_a_model_file_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model.toml"
    model.write_text('name = "x"\ninput = [1, 8, 8]\n[[layers]]\nkind = "convolve"\nname = "c"\n')

    output = run("train", "--data", "digits", "--model", str(model), code=2)
    assert "convolve" in output
    assert output.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("consistency", "epochs"), [("asp", 150), ("ssp:2", 50), ("bsp", 40)])
def test_a_worker_joins_a_training_and_another_leaves_it(
    consistency: str, epochs: int, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    with ExitStack() as stack:
        meet, start = started_by_hand(stack)
        start("ps", "--controller")
        start("data", "--data", "digits", "--controller")
        start("worker", "--id", "stayer", "--threads", "1", "--join")
        mode = ("--consistency", consistency, "--epochs", str(epochs), "--report", str(report))
        training = stack.enter_context(Command("train", *mode, "--controller", meet))
        training.wait_for(f"epoch 1/{epochs}")
        leaver = start("worker", "--id", "leaver", "--threads", "1", "--join")
        start("worker", "--id", "joiner", "--threads", "1", "--join")
        leaver.signal(signal.SIGINT)
        assert leaver.finish() == 130
        assert training.finish(seconds=90) == 0, training.output

    report_json = json.loads(report.read_text())
    assert [epoch["images"] for epoch in report_json["epochs"]] == [1437] * epochs
    assert [event["event"] for event in report_json["events"]] == ["leaver left"]
    groups = {worker["node"]: worker["data"]["groups"] for worker in report_json["workers"]}
    assert groups.keys() == {"stayer", "joiner"}
    assert groups["joiner"] > 0


def epochs_of(report: Path) -> list[dict[str, float]]:
    """The epochs of a report."""
    epochs: list[dict[str, float]] = json.loads(report.read_text())["epochs"]
    return epochs


def test_a_killed_driver_is_replaced_by_the_same_command_and_the_accuracy_stays(tmp_path: Path) -> None:
    with ExitStack() as stack:
        controller = stack.enter_context(Command("controller", "--bind", "tcp://127.0.0.1:0"))
        where = ("--controller", address_of(controller))
        for words in (("ps",), ("data", "--data", "digits"), ("worker", "--threads", "1")):
            address_of(stack.enter_context(Command(*words, *where)))
        options = ("--consistency", "bsp", "--epochs", "12", "--seed", "3", *where)
        undisturbed, attached = tmp_path / "undisturbed.json", tmp_path / "attached.json"
        output = run("train", *options, "--report", str(undisturbed))
        again = ("train", *options, "--attach", "--report", str(attached))
        with Command(*again) as lost:  # no run waits: it begins a new one
            lost.wait_for("epoch 3/12")
            lost.signal(signal.SIGKILL)
            assert lost.finish() == -signal.SIGKILL
        line = controller.wait_for(" waits for a driver, because driver is lost")
        waiting = line.partition("--attach ")[2].partition(" ")[0]
        output = run("train", *where, code=8)
        assert f"run {waiting} waits for a driver" in output
        output = run("train", *where, "--attach", waiting, "--epochs", "13", code=2)
        assert "epochs=13 (there 12)" in output
        output = run(*again)
        assert f"took over run {waiting} from driver, which was lost" in output
        controller.wait_for(f"run {waiting} goes on with driver driver")
        output = run("train", *where, "--attach", waiting, code=8)
        assert f"run {waiting} is over, it has finished" in output
    before, after = epochs_of(undisturbed), epochs_of(attached)
    assert [each["epoch"] for each in after] == list(range(1, 13))
    assert [each["test_accuracy"] for each in after] == [each["test_accuracy"] for each in before]


@pytest.mark.slow
def test_a_frozen_driver_loses_its_run_and_ends_with_the_name_of_its_successor() -> None:
    with ExitStack() as stack:
        controller = stack.enter_context(Command("controller", "--bind", "tcp://127.0.0.1:0"))
        where = ("--controller", address_of(controller))
        for words in (("ps",), ("data", "--data", "digits"), ("worker", "--threads", "1")):
            address_of(stack.enter_context(Command(*words, *where)))
        frozen = stack.enter_context(Command("train", "--epochs", "100000", *where))
        frozen.wait_for("epoch 3/100000")
        frozen.signal(signal.SIGSTOP)
        controller.wait_for(" waits for a driver, because driver is lost")
        successor = stack.enter_context(Command("train", "--attach", *where))
        controller.wait_for(" goes on with driver driver")
        frozen.signal(signal.SIGCONT)
        assert frozen.finish() == 8, frozen.output
        assert "was taken over by another driver, driver, after the loss of this one" in frozen.output
        successor.wait_for("epoch 9")
        successor.signal(signal.SIGINT)
        assert successor.finish() == 130, successor.output


def test_attach_needs_a_cluster_that_outlives_train() -> None:
    output = run("train", "--attach", code=2)
    assert "--attach is for a cluster whose roles outlive train: give its --controller" in output
